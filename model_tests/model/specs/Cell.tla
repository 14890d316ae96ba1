-------------------------------- MODULE Cell --------------------------------
(* A counter to be instantiated. *)
EXTENDS Integers
CONSTANT Top
VARIABLE n
Up(k) == n + k <= Top /\ n' = n + k
Reset == n = Top /\ n' = 0
Step == (\E k \in 1..2 : Up(k)) \/ Reset
=============================================================================
