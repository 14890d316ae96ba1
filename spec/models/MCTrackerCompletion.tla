------------------------- MODULE MCTrackerCompletion -------------------------
(* The environment alone, under a sender that sends any frames whatever: two parts a message, large or small.   *)
EXTENDS TrackerCompletion

VARIABLE next       \* the message and the part to send next
NextTypeInv == next \in (1..(MaxMessage + 1)) \X Parts

vars == <<envVars, next>>

TypeOK == EnvTypeOK /\ NextTypeInv

Init == EnvInit /\ next = <<1, 1>>

SendPart(large, b) ==
    /\ next[1] <= MaxMessage
    /\ next[2] = 1 => Accepts
    /\ QueueFrame([msg |-> next[1], part |-> next[2], of |-> MaxParts,
                   memory |-> IF large THEN {b} ELSE {}, version |-> content[b]], next[2] < MaxParts)
    /\ next' = IF next[2] < MaxParts THEN <<next[1], next[2] + 1>> ELSE <<next[1] + 1, 1>>

\* After a refusal the rest of the message must not be sent.
PartRefused ==
    /\ RefuseFrame(next[2] < MaxParts)
    /\ next' = IF Fault = "part_retried" THEN next ELSE <<next[1] + 1, 1>>

Touch == Fault # "socket_untouched" /\ EnvNotice /\ UNCHANGED next
Close == EnvCloseSocket /\ UNCHANGED next

PeerTake == EnvPeerTake /\ UNCHANGED next
BeginRead == EnvBeginRead /\ UNCHANGED next
EndRead == EnvEndRead /\ UNCHANGED next
PeerDrop == EnvPeerDrop /\ UNCHANGED next
TrackerFires(m, i) == EnvTrackerFires(m, i) /\ UNCHANGED next
Notice == EnvNotice /\ UNCHANGED next
PeerDies == EnvPeerDies /\ UNCHANGED next
PeerReturns == EnvPeerReturns /\ UNCHANGED next
Reap == EnvReap /\ UNCHANGED next

Done == socket = "reaped" /\ undone \subseteq leaked \union refused /\ holding = <<>> /\ UNCHANGED vars

Next ==
    \/ \E large \in BOOLEAN, b \in Buffers : SendPart(large, b)
    \/ PartRefused \/ Touch \/ Close
    \/ PeerTake \/ BeginRead \/ EndRead \/ PeerDrop
    \/ \E m \in Messages, i \in Parts : TrackerFires(m, i)
    \/ Notice \/ PeerDies \/ PeerReturns \/ Reap
    \/ Done

\* The reader reads and drops, libzmq works, the sender touches its socket, and closes it if the peer stays away.
Spec ==
    /\ Init /\ [][Next]_vars
    /\ WF_vars(PeerTake) /\ WF_vars(BeginRead) /\ WF_vars(EndRead) /\ WF_vars(PeerDrop) /\ WF_vars(Reap)
    /\ \A m \in Messages, i \in Parts : WF_vars(TrackerFires(m, i))
    /\ WF_vars(Touch) /\ WF_vars(PartRefused)
    /\ WF_vars(\E large \in BOOLEAN, b \in Buffers : next[2] > 1 /\ SendPart(large, b))
    /\ WF_vars(peer = "down" /\ Close)

\* E4: a message arrives whole or not at all, as long as the sender never cuts one.
WholeMessages ==
    \A k \in DOMAIN delivered :
        /\ Len(delivered[k]) = MaxParts
        /\ \A i \in DOMAIN delivered[k] : delivered[k][i].part = i /\ delivered[k][i].msg = delivered[k][1].msg

\* E3, but for E9.
EveryTrackerFires ==
    \A m \in Messages, i \in Parts :
        (\E f \in undone : f.msg = m /\ f.part = i) ~> ~(\E f \in undone \ (leaked \union refused) : f.msg = m /\ f.part = i)
=============================================================================
