--------------------------- MODULE MCFenceTable ---------------------------
(* Every set of positions in one run, for `make fence-table`. What is found is printed, one line a fact; a set is done with
   as soon as it, or a set with more positions, is found out: an execution that more synchronisation permits, less
   permits too. TLC's register 1 holds the largest sets found out so far (one worker only).                          *)
EXTENDS RingMemory

EverySet == SUBSET Candidates

ASSUME TLCSet(1, {})

FoundOut == \E s \in TLCGet(1) : positions \subseteq s
Report(verdict) == PrintT(<<verdict, positions>>)
Stuck == ~AllDone /\ ~NoExecution /\ Performable(programs, before, machine) = {}

\* CONSTRAINT: TRUE where the search goes on.
Explore ==
    /\ ~FoundOut
    /\ IF misread # {} \/ Stuck
       THEN /\ Report("violated")
            /\ TLCSet(1, {s \in TLCGet(1) : ~(s \subseteq positions)} \cup {positions})
            /\ FALSE
       ELSE AllDone => Report("completes")
=============================================================================
