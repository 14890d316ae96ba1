-------------------------------- MODULE Sole --------------------------------
(* Actions that come from an instance only. *)
EXTENDS Integers
CONSTANT Fault
VARIABLE n
Counter == INSTANCE Cell WITH Top <- 5
Init == n = 0
Next == Counter!Step
=============================================================================
