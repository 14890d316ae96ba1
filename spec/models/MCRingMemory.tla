--------------------------- MODULE MCRingMemory ---------------------------
EXTENDS RingMemory

NoPositions  == {{}}
AllPositions == {Candidates}

\* The smallest sets of fences that keep the ring of flags safe on ARM, and all fences.
EnoughFences == { {"before_reset", "before_mark", "before_copy", "before_done"},
                  {"before_fill", "before_mark", "before_check", "before_copy", "before_done"},
                  Candidates }
=============================================================================
