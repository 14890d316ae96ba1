--------------------------- MODULE MCPayloadReuse ---------------------------
(* The shapes of messages that the models of PayloadReuse use, and their fairness. *)
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

\* A large tensor lent, behind a large payload.
TensorLast == {<<Payload(TRUE), Lent(TRUE)>>}

\* All of them.
LockstepShapes == TwoParts \union WithTensor \union ThreeParts \union TensorWithin
AnyShape == TwoParts \union WithTensor \union ThreeParts

\* Every behaviour of these models ends (EndsAnyway holds without any fairness). One that has ended is fair if no fair
\* action is left, whether each has a condition of its own or all have one; TLC is twice as fast with one.
FairStep ==
    \/ PeerWorks \/ TrackersFire \/ SenderGoesOn \/ OverwritingEnds \/ SenderSettles
    \/ Touch \/ Close \/ Reap
BoundedSpec == Init /\ [][Next]_vars /\ WF_vars(FairStep)
UnfairSpec == Init /\ [][Next]_vars
EndsAnyway == <>[][FALSE]_vars
=============================================================================
