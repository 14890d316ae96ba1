-------------------------- MODULE TrackerCompletion --------------------------
(***************************************************************************)
(* Environment: how libzmq and pyzmq send frames and complete trackers.    *)
(* One sending socket, one peer that may go and come back once.            *)
(*                                                                         *)
(*   E1  A frame below the copy threshold is copied when it is sent, and   *)
(*       its tracker is finished at once. A larger frame aliases the       *)
(*       sender's memory until its reader let go.                          *)
(*   E2  Over ipc and tcp ("stream") the reader is the I/O thread, and it  *)
(*       lets go of a frame once it wrote it to the kernel. Over inproc it *)
(*       is the receiver, and it lets go when it drops the whole message.  *)
(*   E3  A tracker fires some time after the last reader let go; it says   *)
(*       nothing about delivery.                                           *)
(*   E4  Frames sent with SNDMORE travel only with the rest. A message cut *)
(*       off in the middle stays, and is glued to the front of the next.   *)
(*   E5  When the peer goes, a connecting stream socket keeps its queue    *)
(*       for whoever comes back. Otherwise the pipe is gone: what was in   *)
(*       it is let go when the sender next touches the socket, and the     *)
(*       next part of an unfinished message is refused (EAGAIN), after     *)
(*       which libzmq counts a further part as the start of a new message. *)
(*   E6  At the high-water mark a first part is refused, or the message is *)
(*       dropped and its trackers fire, by socket type.                    *)
(*   E7  Closing with linger 0 lets go of everything that the receiver     *)
(*       does not hold itself, soon but not at once.                       *)
(*                                                                         *)
(* The operators Env... are the steps of the environment; the module that   *)
(* extends this one adds what its sender keeps and names them as actions.  *)
(*                                                                         *)
(* Not modelled: several peers at once (fan-out is one pipe each), the     *)
(* kernel's own buffers (a frame there is copied), loss in the network.    *)
(* For sockets that drop, the decision falls with the last part.           *)
(*                                                                         *)
(* Measured with pyzmq 27.3.0 and libzmq 4.3.5.                            *)
(*                                                                         *)
(* To see it fail: MCTrackerCompletion with Fault = "tracker_before_drop". *)
(***************************************************************************)
EXTENDS Naturals, Sequences, FiniteSets

CONSTANTS
    Buffers,     \* payload buffers of the sender
    Tensors,     \* memory of the caller, lent without a copy
    MaxMessage,  \* messages are numbered from 1
    MaxParts,    \* parts of a message, likewise
    Transport,   \* "stream" (ipc, tcp) or "inproc"
    Side,        \* "connect" or "bind": which end the sender is
    HighWater,   \* complete messages that the pipe takes
    WhenFull,    \* "blocks" (PUSH, DEALER) or "drops" (PUB)
    PeerMayDie,  \* whether the peer goes, once
    Fault        \* "none", or the named fault switched on

ASSUME Transport \in {"stream", "inproc"} /\ Side \in {"connect", "bind"} /\ WhenFull \in {"blocks", "drops"}

Memory == Buffers \union Tensors
Messages == 1..MaxMessage
Parts == 1..MaxParts

\* What lies in memory that is being written, or never was: versions are message numbers.
Torn == 0

\* Part 0 is the empty frame that ends a message cut off in the middle.
AbortMark(m, of) == [msg |-> m, part |-> 0, of |-> of, memory |-> {}, version |-> m]

\* A frame: a copied one lies in no memory of the sender; `version` is what lay there when it was sent.
Frame == [msg : Messages, part : 0..MaxParts, of : Parts, memory : SUBSET Memory, version : 0..MaxMessage]

\* What a reader made of a frame.
Seen == [msg : Messages, part : 0..MaxParts, of : Parts, version : 0..MaxMessage]

VARIABLE content    \* the version that lies in each piece of memory now
ContentTypeInv == content \in [Memory -> 0..MaxMessage]

VARIABLE partial    \* parts sent with SNDMORE whose message is not complete yet
PartialTypeInv == partial \in Seq(Frame)

VARIABLE broken     \* the pipe of `partial` is gone
BrokenTypeInv == broken \in BOOLEAN

VARIABLE pipe       \* complete messages on their way
PipeTypeInv == pipe \in Seq(Seq(Frame))

VARIABLE holding    \* the message that the reader works on
HoldingTypeInv == holding \in Seq(Frame)

VARIABLE glimpse    \* what the reader saw when it began with its current frame; empty between frames
GlimpseTypeInv == glimpse \in Seq(0..MaxMessage) /\ Len(glimpse) <= 1

VARIABLE seen       \* what the reader read of the message so far
SeenTypeInv == seen \in Seq(Seen)

VARIABLE delivered  \* messages as they arrived
DeliveredTypeInv == delivered \in Seq(Seq(Seen))

VARIABLE alive      \* aliasing frames that somebody may still read
AliveTypeInv == alive \subseteq Frame

VARIABLE undone     \* aliasing frames whose tracker has not fired
UndoneTypeInv == undone \subseteq Frame

VARIABLE stale      \* aliasing frames in a pipe that is gone, until the sender touches the socket
StaleTypeInv == stale \subseteq Frame

VARIABLE peer       \* whether the other side is there
PeerTypeInv == peer \in {"up", "down", "returned"}

VARIABLE socket     \* the sender's socket
SocketTypeInv == socket \in {"open", "closed", "reaped"}

envVars == <<content, partial, broken, pipe, holding, glimpse, seen, delivered, alive, undone, stale, peer, socket>>

EnvTypeOK ==
    /\ ContentTypeInv /\ PartialTypeInv /\ BrokenTypeInv /\ PipeTypeInv /\ HoldingTypeInv /\ GlimpseTypeInv /\ SeenTypeInv
    /\ DeliveredTypeInv /\ AliveTypeInv /\ UndoneTypeInv /\ StaleTypeInv /\ PeerTypeInv /\ SocketTypeInv

EnvInit ==
    /\ content = [x \in Memory |-> Torn]
    /\ partial = <<>> /\ broken = FALSE /\ pipe = <<>>
    /\ holding = <<>> /\ glimpse = <<>> /\ seen = <<>> /\ delivered = <<>>
    /\ alive = {} /\ undone = {} /\ stale = {}
    /\ peer = "up" /\ socket = "open"

-----------------------------------------------------------------------------
Range(s) == {s[i] : i \in DOMAIN s}
Aliasing(frames) == {f \in frames : f.memory # {}}
FramesIn(messages) == UNION {Range(messages[i]) : i \in DOMAIN messages}

\* The bytes of a frame as a reader would see them now.
Bytes(f) == IF f.memory = {} THEN f.version ELSE content[CHOOSE x \in f.memory : TRUE]

PipeSurvives == Transport = "stream" /\ Side = "connect"
HasPipe == PipeSurvives \/ peer # "down"
HasRoom == HasPipe /\ Len(pipe) < HighWater

\* Whether a first part is taken.
Accepts == HasRoom \/ WhenFull = "drops"

\* E1, E4, E6: what happens to the environment when frame f is sent. `more` is SNDMORE.
QueueFrame(f, more) ==
    /\ socket = "open"
    /\ ~broken
    /\ LET message == Append(partial, f)
           lost    == ~more /\ ~HasRoom /\ WhenFull = "drops"
       IN  /\ partial' = IF more THEN message ELSE <<>>
           /\ pipe' = IF more \/ lost THEN pipe ELSE Append(pipe, message)
           /\ alive' = IF lost THEN alive \ Range(message) ELSE alive \union Aliasing({f})
           /\ undone' = undone \union Aliasing({f})
    /\ UNCHANGED <<content, broken, holding, glimpse, seen, delivered, stale, peer, socket>>

\* E5: the pipe went away below an unfinished message.
RefuseFrame ==
    /\ socket = "open"
    /\ broken
    /\ broken' = FALSE
    /\ partial' = <<>>
    /\ alive' = alive \ Range(partial)
    /\ UNCHANGED <<content, pipe, holding, glimpse, seen, delivered, undone, stale, peer, socket>>

\* E2: the reader turns to the next message.
EnvPeerTake ==
    /\ socket # "reaped"
    /\ peer # "down" /\ holding = <<>> /\ pipe # <<>>
    /\ holding' = Head(pipe)
    /\ pipe' = Tail(pipe)
    /\ UNCHANGED <<content, partial, broken, glimpse, seen, delivered, alive, undone, stale, peer, socket>>

\* E2: it looks at the bytes of a frame; whatever happens to them before it is through, it has seen a mixture.
EnvBeginRead ==
    /\ glimpse = <<>> /\ Len(seen) < Len(holding)
    /\ glimpse' = <<Bytes(holding[Len(seen) + 1])>>
    /\ UNCHANGED <<content, partial, broken, pipe, holding, seen, delivered, alive, undone, stale, peer, socket>>

EnvEndRead ==
    /\ glimpse # <<>>
    /\ LET f      == holding[Len(seen) + 1]
           saw    == IF Bytes(f) = glimpse[1] THEN glimpse[1] ELSE Torn
           all    == Append(seen, [msg |-> f.msg, part |-> f.part, of |-> f.of, version |-> saw])
           last   == Len(all) = Len(holding)
           stream == Transport = "stream"
       IN  /\ delivered' = IF last THEN Append(delivered, all) ELSE delivered
           /\ seen' = IF last /\ stream THEN <<>> ELSE all
           /\ holding' = IF last /\ stream THEN <<>> ELSE holding
           /\ alive' = IF stream THEN alive \ {f} ELSE alive
    /\ glimpse' = <<>>
    /\ UNCHANGED <<content, partial, broken, pipe, undone, stale, peer, socket>>

\* E2: the receiver of an inproc message drops its frames.
EnvPeerDrop ==
    /\ Transport = "inproc"
    /\ holding # <<>> /\ Len(seen) = Len(holding)
    /\ alive' = alive \ Range(holding)
    /\ holding' = <<>> /\ seen' = <<>>
    /\ UNCHANGED <<content, partial, broken, pipe, glimpse, delivered, undone, stale, peer, socket>>

\* E3
EnvTrackerFires(m, i) ==
    /\ \E f \in undone :
        /\ f.msg = m /\ f.part = i
        /\ f \notin alive \/ (Fault = "tracker_before_drop" /\ f \in Range(holding))
        /\ undone' = undone \ {f}
    /\ UNCHANGED <<content, partial, broken, pipe, holding, glimpse, seen, delivered, alive, stale, peer, socket>>

\* E5: the receiving socket goes. What a stream's I/O thread was writing is given up; an inproc receiver keeps what it holds.
EnvPeerDies ==
    /\ PeerMayDie /\ peer = "up" /\ socket = "open"
    /\ peer' = "down"
    /\ LET givenUp == IF Transport = "stream" THEN Range(holding) ELSE {}
       IN  alive' = alive \ givenUp
    /\ IF Transport = "stream"
       THEN holding' = <<>> /\ seen' = <<>> /\ glimpse' = <<>>
       ELSE UNCHANGED <<holding, seen, glimpse>>
    /\ IF PipeSurvives
       THEN UNCHANGED <<pipe, stale, broken>>
       ELSE /\ pipe' = <<>>
            /\ stale' = Aliasing(FramesIn(pipe))
            /\ broken' = (partial # <<>>)
    /\ UNCHANGED <<content, partial, delivered, undone, socket>>

EnvPeerReturns ==
    /\ peer = "down" /\ socket = "open"
    /\ peer' = "returned"
    /\ UNCHANGED <<content, partial, broken, pipe, holding, glimpse, seen, delivered, alive, undone, stale, socket>>

\* E5: what the sender does by asking the socket for its events.
EnvTouchSocket ==
    /\ stale # {} /\ socket = "open"
    /\ alive' = alive \ stale
    /\ stale' = {}
    /\ UNCHANGED <<content, partial, broken, pipe, holding, glimpse, seen, delivered, undone, peer, socket>>

\* E7: the sender closes; the I/O thread lets go a little later.
EnvCloseSocket ==
    /\ socket = "open"
    /\ socket' = "closed"
    /\ UNCHANGED <<content, partial, broken, pipe, holding, glimpse, seen, delivered, alive, undone, stale, peer>>

EnvReap ==
    /\ socket = "closed"
    /\ Fault = "close_lingers" => peer # "down"
    /\ socket' = "reaped"
    /\ partial' = <<>> /\ broken' = FALSE /\ pipe' = <<>> /\ stale' = {}
    /\ IF Transport = "stream"
       THEN alive' = {} /\ holding' = <<>> /\ seen' = <<>> /\ glimpse' = <<>>
       ELSE alive' = alive \intersect Range(holding) /\ UNCHANGED <<holding, seen, glimpse>>
    /\ UNCHANGED <<content, delivered, undone, peer>>

-----------------------------------------------------------------------------
\* E3: a finished tracker means that nobody reads that frame any more.
DoneMeansUnread == alive \subseteq undone
=============================================================================
