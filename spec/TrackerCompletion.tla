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
(*       for whoever comes back. Otherwise the pipe is gone, but the       *)
(*       socket notices only when the sender touches it (libzmq looks at   *)
(*       its commands about once a millisecond of use). Until then it      *)
(*       takes messages for the dead pipe. When it notices, it lets go of  *)
(*       everything in that pipe. Of a message begun there it refuses the  *)
(*       next part (EAGAIN), or swallows it. Either way it then swallows   *)
(*       all parts up to the next one without SNDMORE, whichever message   *)
(*       that is of; only after the refusal of a last part does it count   *)
(*       the next part as the start of a message.                          *)
(*   E9  The parts of an unfinished message are not readable yet. What was *)
(*       begun in a pipe that dies is leaked: nobody reads it, and its     *)
(*       trackers never fire. Only a refusal tells the sender.             *)
(*   E6  At the high-water mark a first part is refused, or the message is *)
(*       dropped and its trackers fire, by socket type.                    *)
(*   E7  Closing with a bounded linger lets go of everything in the end,   *)
(*       but not at once. Over inproc the receiver keeps what it holds and *)
(*       can still take what was queued. That says nothing about delivery  *)
(*       either: over ipc a receiver at its high-water mark never reads    *)
(*       what the kernel still holds when the sender has closed.           *)
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

VARIABLE gone       \* a pipe is dead and the socket has not noticed
GoneTypeInv == gone \in BOOLEAN

VARIABLE mode       \* where the next part goes: as usual, to a pipe that is dead, or nowhere
ModeTypeInv == mode \in {"usual", "doomed", "swallowing"}

VARIABLE excused    \* messages that may be lost, because the peer died (for NothingLost)
ExcusedTypeInv == excused \subseteq Messages

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

VARIABLE stale      \* aliasing frames in a dead pipe, until the socket notices
StaleTypeInv == stale \subseteq Frame

VARIABLE leaked     \* aliasing frames that nobody can read and whose tracker will never fire
LeakedTypeInv == leaked \subseteq Frame

VARIABLE refused    \* the same, of messages whose sender was told
RefusedTypeInv == refused \subseteq Frame

VARIABLE peer       \* whether the other side is there
PeerTypeInv == peer \in {"up", "down", "returned"}

VARIABLE socket     \* the sender's socket
SocketTypeInv == socket \in {"open", "closed", "reaped"}

envVars == <<content, partial, gone, mode, excused, pipe, holding, glimpse, seen, delivered, alive, undone, stale, leaked, refused, peer, socket>>

EnvTypeOK ==
    /\ ContentTypeInv /\ PartialTypeInv /\ GoneTypeInv /\ ModeTypeInv /\ ExcusedTypeInv /\ PipeTypeInv /\ HoldingTypeInv /\ GlimpseTypeInv /\ SeenTypeInv
    /\ DeliveredTypeInv /\ AliveTypeInv /\ UndoneTypeInv /\ StaleTypeInv /\ LeakedTypeInv /\ RefusedTypeInv /\ PeerTypeInv /\ SocketTypeInv

EnvInit ==
    /\ content = [x \in Memory |-> Torn]
    /\ partial = <<>> /\ gone = FALSE /\ mode = "usual" /\ excused = {} /\ pipe = <<>>
    /\ holding = <<>> /\ glimpse = <<>> /\ seen = <<>> /\ delivered = <<>>
    /\ alive = {} /\ undone = {} /\ stale = {} /\ leaked = {} /\ refused = {}
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
Accepts == mode = "swallowing" \/ gone \/ HasRoom \/ WhenFull = "drops"

\* E5: the socket swallows frame f; nobody will read it.
SwallowFrame(f, more) ==
    /\ mode' = IF more THEN "swallowing" ELSE "usual"
    /\ partial' = <<>>
    /\ UNCHANGED <<pipe, stale, alive, excused>>

\* E1, E4, E5, E6: frame f goes to a pipe: to the dead one as long as nobody noticed, or to a live one.
PipeFrame(f, more) ==
    \E dead \in BOOLEAN :
        /\ IF partial # <<>> THEN dead = (mode = "doomed")
           ELSE (dead => gone) /\ (~dead => HasRoom \/ WhenFull = "drops")
        /\ dead => gone
        /\ LET message == Append(partial, f)
               frames  == Aliasing(Range(message))
               dropped == ~more /\ ~dead /\ ~HasRoom
           IN  /\ partial' = IF more THEN message ELSE <<>>
               /\ mode' = IF more /\ dead THEN "doomed" ELSE "usual"
               /\ excused' = IF dead THEN excused \union {f.msg} ELSE excused
               /\ pipe' = IF more \/ dead \/ dropped THEN pipe ELSE Append(pipe, message)
               /\ stale' = IF ~more /\ dead THEN stale \union frames ELSE stale
               /\ alive' = IF dropped THEN alive \ frames ELSE alive \union Aliasing({f})

\* What happens to the environment when frame f is sent. `more` is SNDMORE.
QueueFrame(f, more) ==
    /\ socket = "open"
    /\ IF mode = "swallowing" THEN SwallowFrame(f, more) ELSE PipeFrame(f, more)
    /\ undone' = undone \union Aliasing({f})
    /\ UNCHANGED <<content, gone, holding, glimpse, seen, delivered, leaked, refused, peer, socket>>

\* E5, E9: the pipe went away below an unfinished message, and its next part is refused.
RefuseFrame(more) ==
    /\ socket = "open"
    /\ mode = "doomed"
    /\ mode' = IF more THEN "swallowing" ELSE "usual"
    /\ gone' = TRUE
    /\ partial' = <<>>
    /\ alive' = alive \ Range(partial)
    /\ leaked' = leaked \ Range(partial)
    /\ refused' = refused \union Aliasing(Range(partial))
    /\ UNCHANGED <<content, excused, pipe, holding, glimpse, seen, delivered, undone, stale, peer, socket>>

\* E2: the reader turns to the next message.
EnvPeerTake ==
    /\ socket # "reaped" \/ Transport = "inproc"
    /\ peer # "down" /\ holding = <<>> /\ pipe # <<>>
    /\ holding' = Head(pipe)
    /\ pipe' = Tail(pipe)
    /\ UNCHANGED <<content, partial, gone, mode, excused, glimpse, seen, delivered, alive, undone, stale, leaked, refused, peer, socket>>

\* E2: it looks at the bytes of a frame; whatever happens to them before it is through, it has seen a mixture.
EnvBeginRead ==
    /\ glimpse = <<>> /\ Len(seen) < Len(holding)
    /\ glimpse' = <<Bytes(holding[Len(seen) + 1])>>
    /\ UNCHANGED <<content, partial, gone, mode, excused, pipe, holding, seen, delivered, alive, undone, stale, leaked, refused, peer, socket>>

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
    /\ UNCHANGED <<content, partial, gone, mode, excused, pipe, undone, stale, leaked, refused, peer, socket>>

\* E2: the receiver of an inproc message drops its frames.
EnvPeerDrop ==
    /\ Transport = "inproc"
    /\ holding # <<>> /\ Len(seen) = Len(holding)
    /\ alive' = alive \ Range(holding)
    /\ holding' = <<>> /\ seen' = <<>>
    /\ UNCHANGED <<content, partial, gone, mode, excused, pipe, glimpse, delivered, undone, stale, leaked, refused, peer, socket>>

\* E3
EnvTrackerFires(m, i) ==
    /\ \E f \in undone :
        /\ f.msg = m /\ f.part = i
        /\ f \notin leaked \union refused
        /\ f \notin alive \/ (Fault = "tracker_before_drop" /\ f \in Range(holding))
        /\ undone' = undone \ {f}
    /\ UNCHANGED <<content, partial, gone, mode, excused, pipe, holding, glimpse, seen, delivered, alive, stale, leaked, refused, peer, socket>>

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
       THEN UNCHANGED <<pipe, stale, gone, mode>>
       ELSE /\ pipe' = <<>>
            /\ stale' = Aliasing(FramesIn(pipe))
            /\ gone' = TRUE
            /\ mode' = IF partial # <<>> THEN "doomed" ELSE mode
    /\ excused' = {f.msg : f \in FramesIn(pipe) \union Range(holding) \union Range(partial)}
    /\ UNCHANGED <<content, partial, delivered, undone, leaked, refused, socket>>

EnvPeerReturns ==
    /\ peer = "down" /\ socket = "open"
    /\ peer' = "returned"
    /\ UNCHANGED <<content, partial, gone, mode, excused, pipe, holding, glimpse, seen, delivered, alive, undone, stale, leaked, refused, socket>>

\* E5: the socket processes its commands, which asking it for its events makes sure of.
EnvNotice ==
    /\ gone /\ socket = "open"
    /\ gone' = FALSE
    /\ stale' = {}
    /\ IF mode = "doomed"
       THEN /\ alive' = alive \ (stale \union Range(partial))
            /\ leaked' = leaked \union Aliasing(Range(partial))
            /\ \/ mode' = "swallowing" /\ partial' = <<>>
               \/ UNCHANGED <<mode, partial>>
       ELSE /\ alive' = alive \ stale
            /\ UNCHANGED <<mode, partial, leaked>>
    /\ UNCHANGED <<content, refused, excused, pipe, holding, glimpse, seen, delivered, undone, peer, socket>>

\* E7: the sender closes; the I/O thread lets go a little later.
EnvCloseSocket ==
    /\ socket = "open"
    /\ socket' = "closed"
    /\ UNCHANGED <<content, partial, gone, mode, excused, pipe, holding, glimpse, seen, delivered, alive, undone, stale, leaked, refused, peer>>

EnvReap ==
    /\ socket = "closed"
    /\ Fault = "close_lingers" => peer # "down"
    /\ socket' = "reaped"
    /\ partial' = <<>> /\ gone' = FALSE /\ mode' = "usual" /\ stale' = {}
    /\ IF Transport = "stream"
       THEN alive' = {} /\ pipe' = <<>> /\ holding' = <<>> /\ seen' = <<>> /\ glimpse' = <<>>
       ELSE /\ alive' = alive \intersect (Range(holding) \union FramesIn(pipe))
            /\ UNCHANGED <<pipe, holding, seen, glimpse>>
    /\ UNCHANGED <<content, excused, delivered, undone, leaked, refused, peer>>

-----------------------------------------------------------------------------
\* E3: a finished tracker means that nobody reads that frame any more.
DoneMeansUnread == alive \subseteq undone
=============================================================================
