-------------------------- MODULE MCStreamOrdering --------------------------
(* All short programs over two streams; the manifest chooses, by Calls, what they are about. *)
EXTENDS AccessOrder
=============================================================================
