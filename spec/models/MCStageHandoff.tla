--------------------------- MODULE MCStageHandoff ---------------------------
(* Two ranks, two steps in flight; the manifest sets the flavour, the kind of buffers and the size. *)
EXTENDS StageHandoff
=============================================================================
