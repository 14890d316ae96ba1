------------------------------- MODULE Endless -------------------------------
(* No end of states, for runs that must be stopped. *)
EXTENDS Integers, Sequences
CONSTANT Fault
VARIABLES n, log
Init == n = 0 /\ log = <<>>
Count == n' = n + 1 /\ UNCHANGED log
Note == log' = Append(log, n) /\ UNCHANGED n
Double == log' = log \o <<n>> \o log /\ UNCHANGED n
Next == Count \/ Note
=============================================================================
