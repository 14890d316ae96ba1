------------------------------ MODULE MCForeign ------------------------------
(* PayloadReuse with the shapes of messages that code from elsewhere sends. *)
EXTENDS MCPayloadReuse

\* An array in the payload buffer, large or small, and a small header: before it, or behind it.
HeaderFirst == {<<Payload(FALSE), Payload(x)>> : x \in BOOLEAN}
ArrayFirst == {<<Payload(x), Payload(FALSE)>> : x \in BOOLEAN}

\* A structure encoded into the payload buffer, and perhaps a tensor that stays where it is.
Encoded == {<<Payload(x)>> : x \in BOOLEAN} \union {<<Payload(x), Lent(y)>> : x, y \in BOOLEAN}

\* The same without tensors.
Alone == {<<Payload(x)>> : x \in BOOLEAN}

\* The shape of the public report, and no other.
SmallTensorBehind == {<<Payload(TRUE), Lent(FALSE)>>}
=============================================================================
