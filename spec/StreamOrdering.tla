--------------------------- MODULE StreamOrdering ---------------------------
(***************************************************************************)
(* The environment of device memory: who runs when, and who sees what.     *)
(*                                                                         *)
(* The host enqueues work on streams and goes on. Rules:                   *)
(*   S1  a stream runs its work in order, one item after the other,        *)
(*       whenever it pleases;                                              *)
(*   S2  streams know nothing of one another, nor of the host;             *)
(*   S3  a point is a place in a stream, taken when it is asked for: an    *)
(*       event recorded, or the handle of a collective. It is reached once *)
(*       all work before it has finished. A wait captures the point, so    *)
(*       that recording the event again does not move the wait;            *)
(*   S4  a stream that waits for a point holds back its later work only;   *)
(*       a host that waits for a point does not return before it;          *)
(*   S5  a transfer between two ranks runs when the send is first in its   *)
(*       stream and the receive first in its own: a rendezvous;            *)
(*   S6  the allocator hands out a freed block at once, because it is used *)
(*       next on the stream it belongs to; only streams named by           *)
(*       record_stream before it was freed are waited for.                 *)
(*                                                                         *)
(* A block holds a version. An item of work that writes leaves it Torn     *)
(* until it ends, so that overlap is a state; an item that found another   *)
(* version than its program meant becomes Wrong and writes Wrong.          *)
(*                                                                         *)
(* Not modelled: bytes within a block (the simulated backend has them),    *)
(* work that runs concurrently within a stream, priorities, failed work,   *)
(* device memory order below events, stream capture.                       *)
(*                                                                         *)
(* AccessOrder runs every short program in this environment; StageHandoff  *)
(* and HostStaging are protocols in it.                                    *)
(*                                                                         *)
(* To see it fail: the faults of AccessOrder are wrong beliefs about this  *)
(* environment, for example Fault = "late_capture" against S3.             *)
(***************************************************************************)
EXTENDS Integers, Sequences, FiniteSets

CONSTANTS
    Streams,    \* queues of device work, one after the other within each
    Events,     \* markers a program may record and wait for
    Blocks,     \* pieces of device or pinned memory
    Fault       \* "none", or the named fault switched on

Torn == 0       \* what a block holds before it is first written, and while it is being written
Wrong == -1     \* what is made of another version than the program meant

VARIABLE queue      \* the items of each stream that have not finished; the first may be running
QueueTypeInv ==
    \A s \in Streams : \A i \in 1..Len(queue[s]) :
        LET item == queue[s][i] IN
        IF item.kind = "wait"
        THEN item.point.stream \in Streams
        ELSE item.kind \in {"work", "send", "recv"} /\ item.from \subseteq Blocks /\ item.to \subseteq Blocks

VARIABLE ran        \* how many items of each stream have finished
RanTypeInv == ran \in [Streams -> Nat]

VARIABLE busy       \* streams whose first item is running
BusyTypeInv == busy \subseteq Streams

VARIABLE event      \* the point that each event captured; count 0 if it was never recorded
EventTypeInv == \A e \in Events : event[e].stream \in Streams /\ event[e].count \in Nat

VARIABLE memory     \* the version that each block holds
MemoryTypeInv == \A b \in Blocks : memory[b] \in Nat \union {Wrong}

VARIABLE block      \* the allocator's view of each block: in use, recorded streams, points to reach before reuse
BlockTypeInv ==
    \A b \in Blocks : block[b].live \in BOOLEAN /\ block[b].users \subseteq Streams

streamVars == <<queue, ran, busy, event, memory, block>>

StreamTypeOK == QueueTypeInv /\ RanTypeInv /\ BusyTypeInv /\ EventTypeInv /\ MemoryTypeInv /\ BlockTypeInv

StreamInit(live) ==
    /\ queue = [s \in Streams |-> <<>>]
    /\ ran = [s \in Streams |-> 0]
    /\ busy = {}
    /\ event = [e \in Events |-> [stream |-> CHOOSE s \in Streams : TRUE, count |-> 0]]
    /\ memory = [b \in Blocks |-> Torn]
    /\ block = [b \in Blocks |-> [live |-> b \in live, users |-> {}, hold |-> {}]]

-----------------------------------------------------------------------------
\* What the host enqueues, as values: a protocol says queue' = Put(queue, s, items).
Put(q, s, items) == [q EXCEPT ![s] = @ \o items]

Wait(p) == [kind |-> "wait", point |-> p]
Work(from, to, v) == [kind |-> "work", from |-> from, to |-> to, version |-> v]
Send(b, v, peer) == [kind |-> "send", from |-> {b}, to |-> {}, version |-> v, peer |-> peer]
Recv(b, v, peer) == [kind |-> "recv", from |-> {}, to |-> {b}, version |-> v, peer |-> peer]

\* S3: the point behind all that is enqueued on s now and the next n items.
Behind(s, n) == [stream |-> s, count |-> ran[s] + Len(queue[s]) + n]
Reached(p) == ran[p.stream] >= p.count

\* S6
Freed(blk, b) == [blk EXCEPT ![b] = [live |-> FALSE, users |-> {}, hold |-> {Behind(s, 0) : s \in @.users}]]
Allocated(blk, b) == [blk EXCEPT ![b] = [live |-> TRUE, users |-> {}, hold |-> {}]]
Recorded(blk, b, s) == [blk EXCEPT ![b].users = @ \union {s}]
Reusable(b) == ~block[b].live /\ \A p \in block[b].hold : Reached(p)

First(s) == queue[s][1]
IsFirst(s, kind) == queue[s] # <<>> /\ First(s).kind = kind
IsWork(s) == queue[s] # <<>> /\ First(s).kind # "wait"

\* The version an item makes: what it was meant to, if it found what it was meant to.
Found(item) == IF \A b \in item.from : memory[b] = item.version THEN item.version ELSE Wrong

Written(blocks, v) == [b \in Blocks |-> IF b \in blocks THEN v ELSE memory[b]]

-----------------------------------------------------------------------------
\* S1, S4: a wait whose point is reached lets the next item through.
StreamPasses(s) ==
    /\ IsFirst(s, "wait")
    /\ Reached(First(s).point)
    /\ queue' = [queue EXCEPT ![s] = SubSeq(@, 2, Len(@))]
    /\ ran' = [ran EXCEPT ![s] = @ + 1]
    /\ UNCHANGED <<busy, event, memory, block>>

\* S1, S2
StreamBegins(s) ==
    /\ IsFirst(s, "work")
    /\ s \notin busy
    /\ busy' = busy \union {s}
    /\ queue' = [queue EXCEPT ![s][1].version = Found(First(s))]
    /\ memory' = Written(First(s).to, Torn)
    /\ UNCHANGED <<ran, event, block>>

StreamEnds(s) ==
    /\ IsFirst(s, "work")
    /\ s \in busy
    /\ busy' = busy \ {s}
    /\ memory' = Written(First(s).to, First(s).version)
    /\ queue' = [queue EXCEPT ![s] = SubSeq(@, 2, Len(@))]
    /\ ran' = [ran EXCEPT ![s] = @ + 1]
    /\ UNCHANGED <<event, block>>

\* S5
TransferBegins(s) ==
    /\ IsFirst(s, "send")
    /\ s \notin busy
    /\ LET t == First(s).peer IN
        /\ IsFirst(t, "recv") /\ First(t).peer = s
        /\ busy' = busy \union {s, t}
        /\ queue' = [queue EXCEPT ![s][1].version = Found(First(s))]
        /\ memory' = Written(First(t).to, Torn)
    /\ UNCHANGED <<ran, event, block>>

TransferEnds(s) ==
    /\ IsFirst(s, "send")
    /\ s \in busy
    /\ LET t == First(s).peer IN
        /\ busy' = busy \ {s, t}
        /\ memory' = Written(First(t).to, Found(First(s)))
        /\ queue' = [queue EXCEPT ![s] = SubSeq(@, 2, Len(@)), ![t] = SubSeq(@, 2, Len(@))]
        /\ ran' = [ran EXCEPT ![s] = @ + 1, ![t] = @ + 1]
    /\ UNCHANGED <<event, block>>

-----------------------------------------------------------------------------
\* The reads that may be going on: those of the first item of each stream. A loan, to BufferLifecycle.
ReadsNow == UNION {{[stream |-> s, block |-> b] : b \in First(s).from} : s \in {t \in Streams : IsWork(t)}}

\* The blocks that are being written.
WritesNow == UNION {First(s).to : s \in busy}
=============================================================================
