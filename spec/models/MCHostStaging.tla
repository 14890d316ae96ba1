--------------------------- MODULE MCHostStaging ---------------------------
(* Two blocks, two pinned buffers and a few steps: each is used again. *)
EXTENDS HostStaging
=============================================================================
