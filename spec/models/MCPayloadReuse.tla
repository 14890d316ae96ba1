--------------------------- MODULE MCPayloadReuse ---------------------------
(* The shapes of messages that the models of PayloadReuse use. *)
EXTENDS PayloadReuse

Payload(isLarge) == [large |-> isLarge, lent |-> FALSE]
Lent(isLarge) == [large |-> isLarge, lent |-> TRUE]

\* The shape of the bug: a large payload, then a small frame that is copied.
LargeThenSmall == {<<Payload(TRUE), Payload(FALSE)>>}

\* Every message of two parts over the payload buffer.
TwoParts == {<<Payload(x), Payload(y)>> : x, y \in BOOLEAN}

\* A small payload that describes a tensor lent by the caller; and one that is all payload.
WithTensor == {<<Payload(FALSE), Lent(TRUE)>>, <<Payload(TRUE), Lent(FALSE)>>, <<Payload(TRUE), Lent(TRUE)>>}

NoTensor == {}
=============================================================================
