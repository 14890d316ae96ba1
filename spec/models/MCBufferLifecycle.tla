-------------------------- MODULE MCBufferLifecycle --------------------------
(* Two buffers, two holders, two readers: enough for every interplay of two. *)
EXTENDS BufferLifecycle
=============================================================================
