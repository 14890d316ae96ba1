--------------------------- MODULE MCBroadcastRing ---------------------------
(* The ring, small; each model of the manifest switches on another part of it. *)
EXTENDS BroadcastRing
=============================================================================
