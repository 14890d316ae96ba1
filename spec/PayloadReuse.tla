---------------------------- MODULE PayloadReuse ----------------------------
(***************************************************************************)
(* A sender encodes one message after another into payload buffers that it *)
(* takes from a free list, sends each message as several frames, and may   *)
(* encode into a buffer again when the frames over it are settled. Some    *)
(* frames lie in the payload buffer, some in a tensor that the caller      *)
(* lends; the caller overwrites its tensor for the next message.           *)
(*                                                                         *)
(* The bug it is about: the tracker asked was that of the last frame. That *)
(* frame was small, hence copied, hence done at once, while libzmq was     *)
(* still reading the large frame over the payload buffer.                  *)
(*                                                                         *)
(* Rules:                                                                  *)
(*   P1  encode only into a buffer taken from the free list, or a new one; *)
(*   P2  a first part that is refused leaves nothing behind;               *)
(*   P3  a message that is begun is completed, or ended by an abort mark,  *)
(*       also when the peer died below it;                                 *)
(*   P4  remember the tracker of every frame over the buffer, also after a *)
(*       send that failed halfway, but not of parts that were refused: no  *)
(*       reader ever sees those, and their trackers never fire;            *)
(*   P5  a buffer is free when all those trackers are done, and the socket *)
(*       must be touched, or they never are after a peer died;             *)
(*   P6  keep FreeLimit free buffers, drop the surplus;                    *)
(*   P7  the caller writes its tensor when its loan is done;               *)
(*   P8  close with a bounded linger, then wait until all is settled.      *)
(*                                                                         *)
(* Not modelled: several senders on one socket (the implementation locks), *)
(* what the codec writes, memory order (a tracker is a lock-protected      *)
(* event).                                                                 *)
(*                                                                         *)
(* Refines BufferLifecycle.                                                *)
(*                                                                         *)
(* To see it fail: Fault = "last_frame_tracker" breaks NoTornRead and      *)
(* Intact; the manifest lists the others.                                  *)
(***************************************************************************)
EXTENDS TrackerCompletion

CONSTANTS
    Shapes,        \* the shapes of messages: sequences of [large : BOOLEAN, lent : BOOLEAN]
    FreeLimit,     \* how many free buffers are kept
    MayInterrupt   \* whether an exception may hit between two parts

VARIABLE step       \* what the sender is at
StepTypeInv == step \in {"idle", "taken", "encoding", "sending", "cut", "aborted", "sent", "closed"}

VARIABLE number     \* the message it works on, or will next
NumberTypeInv == number \in 1..(MaxMessage + 1)

VARIABLE shape      \* the shape of that message
ShapeTypeInv == shape \in Shapes \union {<<>>}

VARIABLE parts      \* the frames of it sent so far
PartsTypeInv == parts \in Seq(Frame)

VARIABLE hand       \* the buffer in hand, if any
HandTypeInv == hand \subseteq Buffers /\ Cardinality(hand) <= 1

VARIABLE free       \* buffers on the free list
FreeTypeInv == free \subseteq Buffers

VARIABLE pending    \* buffers waiting to be settled, with the trackers that are asked
PendingTypeInv == pending \subseteq [buffer : Buffers, asked : SUBSET Frame, message : Messages]

VARIABLE overwriting  \* tensors that the caller is writing
OverwritingTypeInv == overwriting \subseteq Tensors

VARIABLE loan       \* the frames that the caller was told to wait for, by tensor
LoanTypeInv == loan \in [Tensors -> SUBSET Frame]

VARIABLE accepted   \* messages whose send returned without an error, in order
AcceptedTypeInv == accepted \in Seq(Messages)

senderVars == <<step, number, shape, parts, hand, free, pending, overwriting, loan, accepted>>
vars == <<envVars, senderVars>>

TypeOK ==
    /\ EnvTypeOK /\ StepTypeInv /\ NumberTypeInv /\ ShapeTypeInv /\ PartsTypeInv /\ HandTypeInv /\ FreeTypeInv
    /\ PendingTypeInv /\ OverwritingTypeInv /\ LoanTypeInv /\ AcceptedTypeInv

Init ==
    /\ EnvInit
    /\ step = "idle" /\ number = 1 /\ shape = <<>> /\ parts = <<>>
    /\ hand = {} /\ free = {} /\ pending = {}
    /\ overwriting = {} /\ loan = [t \in Tensors |-> {}]
    /\ accepted = <<>>

-----------------------------------------------------------------------------
PendingBuffers == {p.buffer : p \in pending}
Leaky == {p.buffer : p \in {q \in pending : q.asked \intersect leaked # {}}}
Fired(frames) == frames \intersect undone = {}

\* P7: the caller computes the next message's tensor in place.
BeginOverwrite(t) ==
    /\ step = "idle" /\ number <= MaxMessage /\ overwriting = {} /\ content[t] # number
    /\ Fired(loan[t]) \/ Fault = "caller_told_at_once"
    /\ overwriting' = {t}
    /\ loan' = [loan EXCEPT ![t] = {}]
    /\ content' = [content EXCEPT ![t] = Torn]
    /\ UNCHANGED <<partial, gone, mode, excused, pipe, holding, glimpse, seen, delivered, alive, undone, stale, leaked, refused, peer, socket>>
    /\ UNCHANGED <<step, number, shape, parts, hand, free, pending, accepted>>

EndOverwrite(t) ==
    /\ t \in overwriting
    /\ overwriting' = {}
    /\ content' = [content EXCEPT ![t] = number]
    /\ UNCHANGED <<partial, gone, mode, excused, pipe, holding, glimpse, seen, delivered, alive, undone, stale, leaked, refused, peer, socket>>
    /\ UNCHANGED <<step, number, shape, parts, hand, free, pending, loan, accepted>>

\* P1: the free list, else new.
Take(b) ==
    /\ step = "idle" /\ number <= MaxMessage /\ socket = "open"
    /\ \A t \in Tensors : content[t] = number
    /\ IF free # {} THEN b \in free ELSE b \notin PendingBuffers
    /\ hand' = {b}
    /\ free' = free \ {b}
    /\ step' = "taken"
    /\ UNCHANGED <<envVars, number, shape, parts, pending, overwriting, loan, accepted>>

BeginEncode ==
    /\ step = "taken"
    /\ step' = "encoding"
    /\ content' = [x \in Memory |-> IF x \in hand THEN Torn ELSE content[x]]
    /\ UNCHANGED <<partial, gone, mode, excused, pipe, holding, glimpse, seen, delivered, alive, undone, stale, leaked, refused, peer, socket>>
    /\ UNCHANGED <<number, shape, parts, hand, free, pending, overwriting, loan, accepted>>

EndEncode(s) ==
    /\ step = "encoding"
    /\ step' = "sending"
    /\ shape' = s
    /\ content' = [x \in Memory |-> IF x \in hand THEN number ELSE content[x]]
    /\ UNCHANGED <<partial, gone, mode, excused, pipe, holding, glimpse, seen, delivered, alive, undone, stale, leaked, refused, peer, socket>>
    /\ UNCHANGED <<number, parts, hand, free, pending, overwriting, loan, accepted>>

\* P3: part by part; only the first can be refused for want of room.
SendPart ==
    /\ step = "sending"
    /\ parts = <<>> => Accepts
    /\ LET i    == Len(parts) + 1
           home == IF shape[i].lent THEN Tensors ELSE hand
           f    == [msg |-> number, part |-> i, of |-> Len(shape),
                    memory |-> IF shape[i].large THEN home ELSE {},
                    version |-> content[CHOOSE x \in home : TRUE]]
           last == i = Len(shape)
       IN  /\ QueueFrame(f, ~last)
           /\ parts' = Append(parts, f)
           /\ loan' = [t \in Tensors |-> IF t \in f.memory THEN loan[t] \union {f} ELSE loan[t]]
           /\ step' = IF last THEN "sent" ELSE "sending"
           /\ accepted' = IF last THEN Append(accepted, number) ELSE accepted
    /\ UNCHANGED <<number, shape, hand, free, pending, overwriting>>

\* P2: the first part found no room in time; the message was not sent and the buffer goes back.
SendTimesOut ==
    /\ step = "sending" /\ parts = <<>> /\ ~Accepts
    /\ step' = "idle"
    /\ number' = number + 1
    /\ shape' = <<>>
    /\ hand' = {}
    /\ free' = free \union hand
    /\ accepted' = IF Fault = "timeout_ignored" THEN Append(accepted, number) ELSE accepted
    /\ UNCHANGED <<envVars, parts, pending, overwriting, loan>>

\* P4: what was begun can be read by nobody.
ForgetParts ==
    IF Fault = "refused_parts_kept"
    THEN UNCHANGED <<parts, loan>>
    ELSE parts' = <<>> /\ loan' = [t \in Tensors |-> loan[t] \ Range(parts)]

\* P3: the pipe went away below the message, and the rest of it must not follow.
PartRefused ==
    /\ step = "sending" /\ parts # <<>>
    /\ RefuseFrame(Len(parts) + 1 < Len(shape))
    /\ IF Fault = "refused_part_retried"
       THEN UNCHANGED <<step, parts, loan>>
       ELSE step' = (IF Fault = "refusal_not_ended" THEN "aborted" ELSE "cut") /\ ForgetParts
    /\ UNCHANGED <<number, shape, hand, free, pending, overwriting, accepted>>

\* A signal handler or another exception between two parts, or after the last.
Interrupt ==
    /\ MayInterrupt
    /\ step \in {"sending", "sent"} /\ parts # <<>>
    /\ IF Fault = "resent_when_complete" /\ step = "sent"
       THEN step' = "sending" /\ parts' = <<>>
       ELSE step' = (IF Fault = "orphan_part" THEN "aborted" ELSE "cut") /\ UNCHANGED parts
    /\ UNCHANGED <<envVars, number, shape, hand, free, pending, overwriting, loan, accepted>>

\* P3: an empty last frame ends the message that was cut; the receiver refuses it by its number of frames. The sender
\* need not know how far it came: alone, the empty frame is passed over, and it does not matter whether it was taken.
Abort ==
    /\ step = "cut"
    /\ \/ /\ partial = <<>> => Accepts
          /\ QueueFrame(AbortMark(number, Len(shape)), FALSE)
          /\ UNCHANGED <<parts, loan>>
       \/ RefuseFrame(FALSE) /\ ForgetParts
       \/ partial = <<>> /\ mode = "usual" /\ UNCHANGED <<envVars, parts, loan>>
    /\ step' = "aborted"
    /\ UNCHANGED <<number, shape, hand, free, pending, overwriting, accepted>>

\* P4: which trackers to ask about the buffer in hand.
Asked ==
    LET over == {f \in Range(parts) : f.memory = hand}
    IN  CASE parts = <<>> \/ Fault = "no_tracker" -> {}
          [] Fault = "last_frame_tracker" -> {parts[Len(parts)]}
          [] Fault = "copied_frame_tracker" -> {CHOOSE f \in Range(parts) : f.memory = {} \/ Range(parts) = over}
          [] Fault = "failed_send_forgotten" /\ Len(parts) < Len(shape) -> {}
          [] OTHER -> over

Remember ==
    /\ step \in {"sent", "aborted"}
    /\ step' = "idle"
    /\ number' = number + 1
    /\ shape' = <<>> /\ parts' = <<>> /\ hand' = {}
    /\ IF Fault = "recycled_at_send"
       THEN free' = free \union hand /\ UNCHANGED pending
       ELSE /\ pending' = pending \union {[buffer |-> b, asked |-> Asked, message |-> number] : b \in hand}
            /\ UNCHANGED free
    /\ UNCHANGED <<envVars, overwriting, loan, accepted>>

\* P5: all trackers done.
Settled(p) ==
    \/ Fired(p.asked) /\ (Fault = "failed_send_leaked" => p.message \in Range(accepted))
    \/ Fault = "recycled_at_receive" /\ p.message \notin {f.msg : f \in FramesIn(pipe)}
    \/ Fault = "pending_forgotten" /\ peer # "up"

Recycle(b) ==
    /\ step = "idle"
    /\ Cardinality(free) < FreeLimit \/ Fault = "free_list_unbounded"
    /\ \E p \in pending :
        /\ p.buffer = b /\ Settled(p)
        /\ pending' = IF Fault = "recycled_twice" THEN pending ELSE pending \ {p}
    /\ free' = free \union {b}
    /\ UNCHANGED <<envVars, step, number, shape, parts, hand, overwriting, loan, accepted>>

\* P6, and after closing.
DropSurplus(b) ==
    /\ step \in {"idle", "closed"}
    /\ step = "closed" \/ (Cardinality(free) >= FreeLimit /\ Fault # "free_list_unbounded")
    /\ \E p \in pending :
        /\ p.buffer = b /\ Settled(p)
        /\ pending' = pending \ {p}
    /\ UNCHANGED <<envVars, step, number, shape, parts, hand, free, overwriting, loan, accepted>>

\* P5
Touch ==
    /\ step = "idle"
    /\ Fault # "never_touched"
    /\ EnvNotice
    /\ UNCHANGED senderVars

\* P8
Close ==
    /\ step = "idle" /\ overwriting = {}
    /\ number > MaxMessage \/ peer = "down" \/ \E t \in Tensors : loan[t] \intersect leaked # {}
    /\ EnvCloseSocket
    /\ step' = "closed"
    /\ free' = {}
    /\ UNCHANGED <<number, shape, parts, hand, pending, overwriting, loan, accepted>>

Done ==
    /\ socket = "reaped" /\ holding = <<>>
    /\ PendingBuffers \subseteq Leaky /\ undone \subseteq leaked \union refused
    /\ UNCHANGED vars

-----------------------------------------------------------------------------
\* The environment leaves the sender's variables alone.
PeerTake == EnvPeerTake /\ UNCHANGED senderVars
BeginRead == EnvBeginRead /\ UNCHANGED senderVars
EndRead == EnvEndRead /\ UNCHANGED senderVars
PeerDrop == EnvPeerDrop /\ UNCHANGED senderVars
TrackerFires(m, i) == EnvTrackerFires(m, i) /\ UNCHANGED senderVars
Notice == EnvNotice /\ UNCHANGED senderVars
PeerDies == EnvPeerDies /\ UNCHANGED senderVars
PeerReturns == EnvPeerReturns /\ UNCHANGED senderVars
Reap == EnvReap /\ UNCHANGED senderVars

Next ==
    \/ \E t \in Tensors : BeginOverwrite(t)
    \/ \E t \in Tensors : EndOverwrite(t)
    \/ \E b \in Buffers : Take(b)
    \/ BeginEncode
    \/ \E s \in Shapes : EndEncode(s)
    \/ SendPart
    \/ SendTimesOut
    \/ PartRefused
    \/ Interrupt
    \/ Abort
    \/ Remember
    \/ \E b \in Buffers : Recycle(b)
    \/ \E b \in Buffers : DropSurplus(b)
    \/ Touch
    \/ Close
    \/ Done
    \/ PeerTake
    \/ BeginRead
    \/ EndRead
    \/ PeerDrop
    \/ \E m \in Messages, i \in Parts : TrackerFires(m, i)
    \/ Notice
    \/ PeerDies
    \/ PeerReturns
    \/ Reap

\* The sender goes on with a message it began, settles what it can, and closes when it is through or left alone;
\* the environment works. The peer need not return, and the socket notices that only if touched.
SenderGoesOn == BeginEncode \/ (\E s \in Shapes : EndEncode(s)) \/ SendPart \/ SendTimesOut \/ PartRefused \/ Abort \/ Remember
OverwritingEnds == \E t \in Tensors : EndOverwrite(t)
SenderSettles == \E b \in Buffers : Recycle(b) \/ DropSurplus(b)
PeerWorks == PeerTake \/ BeginRead \/ EndRead \/ PeerDrop
TrackersFire == \E m \in Messages, i \in Parts : TrackerFires(m, i)

\* Each group is finite, so that weak fairness of the group is enough.
Fairness ==
    /\ WF_vars(SenderGoesOn)
    /\ WF_vars(OverwritingEnds)
    /\ WF_vars(SenderSettles)
    /\ WF_vars(Touch)
    /\ WF_vars(Close)
    /\ WF_vars(PeerWorks)
    /\ WF_vars(Reap)
    /\ WF_vars(TrackersFire)

Spec == Init /\ [][Next]_vars /\ Fairness

-----------------------------------------------------------------------------
\* The law: while anybody may still read a frame, the bytes it was sent with are there.
NoTornRead == \A f \in alive : Bytes(f) = f.version

\* What arrives is what was sent: each frame carries its own message's bytes.
Intact == \A k \in DOMAIN delivered : \A i \in DOMAIN delivered[k] : delivered[k][i].version = delivered[k][i].msg

\* P3: a message arrives whole, or ends with an abort mark; no part is glued to another message.
WasCut(d) == d[Len(d)].part = 0
NoOrphanPart ==
    \A k \in DOMAIN delivered :
        LET d == delivered[k]
            n == IF WasCut(d) THEN Len(d) - 1 ELSE d[1].of
        IN  Len(d) >= n /\ \A i \in 1..Len(d) : d[i].msg = d[1].msg /\ d[i].part = IF i <= n THEN i ELSE 0

Arrived == SelectSeq(delivered, LAMBDA d : ~WasCut(d))

\* In order and at most once.
NothingDoubled == \A j, k \in DOMAIN Arrived : j < k => Arrived[j][1].msg < Arrived[k][1].msg

\* What was accepted has arrived or is on its way, but for what the peer's death excuses and what drops by design.
OnItsWay == {f.msg : f \in FramesIn(pipe) \union Range(holding) \union Range(partial)}
NothingLost ==
    (socket = "open" /\ WhenFull = "blocks")
        => \A k \in DOMAIN accepted :
            accepted[k] \in OnItsWay \union excused \union {Arrived[j][1].msg : j \in DOMAIN Arrived}

\* P1: a buffer is in hand, or free, or pending, or nowhere.
OneHand ==
    /\ hand \intersect free = {} /\ hand \intersect PendingBuffers = {} /\ free \intersect PendingBuffers = {}
    /\ Cardinality(PendingBuffers) = Cardinality(pending)

\* P6
FreeListBounded == Cardinality(free) <= FreeLimit

\* P5, P8: whatever was sent is settled in the end, but for what libzmq leaked unnoticed (E9).
EveryBufferSettles == \A b \in Buffers : (b \in PendingBuffers) ~> (b \notin PendingBuffers \/ b \in Leaky)

\* P7: the caller's loan ends, but for what libzmq leaked unnoticed (E9).
EveryLoanEnds == \A t \in Tensors : (loan[t] # {}) ~> (Fired(loan[t]) \/ loan[t] \intersect leaked # {})

\* P8: after closing no buffer is held, but for what libzmq leaked unnoticed (E9).
NothingHeldAfterClose == (step = "closed") ~> (hand = {} /\ free = {} /\ PendingBuffers \subseteq Leaky)

-----------------------------------------------------------------------------
\* Payload buffers go round as the law says; a tensor is always in the caller's hand.
PhaseOf(x) ==
    IF x \in Tensors THEN (IF x \in overwriting THEN "Writing" ELSE "Held")
    ELSE IF x \in hand THEN (IF step = "encoding" THEN "Writing" ELSE "Held")
    ELSE IF x \in PendingBuffers THEN "Lent"
    ELSE IF x \in free THEN "Free"
    ELSE "Absent"

Lifecycle ==
    INSTANCE BufferLifecycle WITH
        Buffers <- Memory,
        Holders <- {"sender", "caller"},
        Readers <- Parts,
        Versions <- Messages,
        phase <- [x \in Memory |-> PhaseOf(x)],
        hands <- [x \in Memory |-> IF PhaseOf(x) \in {"Held", "Writing"}
                                   THEN {IF x \in Tensors THEN "caller" ELSE "sender"} ELSE {}],
        loans <- {[buffer |-> CHOOSE x \in f.memory : TRUE, reader |-> f.part, version |-> f.version] : f \in alive}

\* The law's own Safety, with the steps that leave the law's variables alone first: TLC then looks no further.
RefinesBufferLifecycle == Lifecycle!Init /\ [][UNCHANGED Lifecycle!vars \/ Lifecycle!Next]_(Lifecycle!vars)

THEOREM Spec => [](TypeOK /\ NoTornRead /\ Intact /\ NoOrphanPart /\ NothingDoubled /\ NothingLost /\ OneHand /\ FreeListBounded)
THEOREM Spec => EveryBufferSettles /\ EveryLoanEnds /\ NothingHeldAfterClose
THEOREM Spec => RefinesBufferLifecycle
=============================================================================
