------------------------- MODULE MCBroadcastRingLive -------------------------
(* The ring's progress: smaller models, since liveness costs more. *)
EXTENDS BroadcastRing
=============================================================================
