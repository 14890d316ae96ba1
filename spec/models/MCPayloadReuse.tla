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

\* Three parts, so that one that is not the last can be refused.
ThreeParts == {<<Payload(TRUE), Payload(FALSE), Payload(FALSE)>>}

\* A large tensor lent, behind a payload that is copied; not last, so that it can be begun in a pipe that dies.
TensorWithin == {<<Payload(FALSE), Lent(TRUE), Payload(FALSE)>>}

\* All of them.
LockstepShapes == TwoParts \union WithTensor \union ThreeParts \union TensorWithin
AnyShape == TwoParts \union WithTensor \union ThreeParts
=============================================================================
