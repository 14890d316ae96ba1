---------------------------- MODULE AccessOrder -----------------------------
(***************************************************************************)
(* Every short program in the environment of StreamOrdering, and a checker *)
(* that watches it: when is an access ordered behind the last one that     *)
(* conflicts?                                                              *)
(*                                                                         *)
(* The host makes any Calls it likes, up to MaxCalls. The checker keeps a  *)
(* clock for the host and for each stream: how much of every stream is     *)
(* known to have finished before the next thing done there. Launching      *)
(* work, recording, waiting and synchronising move the clocks; an access   *)
(* whose clock does not cover the last conflicting one is a race. The      *)
(* theorem: a program without a race computes what it would have computed  *)
(* had each call finished before the next, whatever the streams do.        *)
(*                                                                         *)
(* This is the checker of the simulated backend. Rules, besides S1 to S6:  *)
(*   A1  an event carries the clock of its stream; a wait takes it over;   *)
(*   A2  an event never recorded orders nothing, and nothing waits for it; *)
(*   A3  a collective runs on its own stream, behind the current stream;   *)
(*       its handle is waited for by a stream (nccl) or the host (gloo);   *)
(*   A4  a copy from pageable memory reads it before the call returns; one *)
(*       from pinned memory reads it when the stream gets there;           *)
(*   A5  a block handed out again carries what record_stream waited for.   *)
(*                                                                         *)
(* Not modelled: false alarms (a race that no schedule turns into a wrong  *)
(* value), bytes within a block.                                           *)
(*                                                                         *)
(* To see it fail: Fault = "late_capture", a wait that looks at its event  *)
(* only when it runs, breaks RaceFreeIsSynchronous; so do all other faults *)
(* of the environment and of the checker that the manifest lists.          *)
(***************************************************************************)
EXTENDS StreamOrdering

CONSTANTS
    HostBlocks,     \* pinned blocks, which the host reads and writes too
    CommStream,     \* the stream of collectives
    Calls,          \* the kinds of calls that programs are made of
    MaxCalls        \* how many calls a program makes

VARIABLE calls      \* how many calls have been made; names the version that a call writes
CallsTypeInv == calls \in 0..MaxCalls

VARIABLE meant      \* the version each block would hold, had each call finished before the next
MeantTypeInv == \A b \in Blocks : meant[b] \in 0..MaxCalls

VARIABLE clock      \* for each stream and the host: how much of each stream is known to have finished
ClockTypeInv == \A c \in DOMAIN clock : clock[c] \in [Streams -> Nat]

VARIABLE stamp      \* the clock that each event carries
StampTypeInv == \A e \in Events : stamp[e] \in [Streams -> Nat]

VARIABLE accesses   \* of each block: those that a later access must be ordered behind
AccessesTypeInv == \A b \in Blocks : \A a \in accesses[b] : a.stream \in Streams /\ a.count \in Nat

VARIABLE race       \* whether the checker has flagged an access
RaceTypeInv == race \in BOOLEAN

VARIABLE misread    \* whether the host read another version than it meant to
MisreadTypeInv == misread \in BOOLEAN

hostVars == <<calls, meant, clock, stamp, accesses, race, misread>>
vars == <<streamVars, hostVars>>

TypeOK ==
    StreamTypeOK /\ CallsTypeInv /\ MeantTypeInv /\ ClockTypeInv /\ StampTypeInv /\ AccessesTypeInv
    /\ RaceTypeInv /\ MisreadTypeInv

Nothing == [s \in Streams |-> 0]
Host == "host"
Max(m, n) == IF m > n THEN m ELSE n
Join(c, d) == [s \in Streams |-> Max(c[s], d[s])]

Init ==
    /\ StreamInit(Blocks)
    /\ calls = 0
    /\ meant = [b \in Blocks |-> Torn]
    /\ clock = [c \in Streams \union {Host} |-> Nothing]
    /\ stamp = [e \in Events |-> Nothing]
    /\ accesses = [b \in Blocks |-> {}]
    /\ race = FALSE
    /\ misread = FALSE

-----------------------------------------------------------------------------
\* A program that has raced is of no more interest.
Ended == calls = MaxCalls \/ race
MayCall(kind) == kind \in Calls /\ ~Ended /\ calls' = calls + 1

\* Does an access by someone with clock c race with those before it?
Conflicts(b, c, writes) ==
    \E a \in accesses[b] :
        /\ a.writes \/ (writes /\ Fault # "reads_forgotten")
        /\ c[a.stream] < a.count

\* A write that is ordered behind all before it stands for them; reads add up.
Noted(acc, from, to, s, n) == [b \in Blocks |->
    IF b \in to THEN {[stream |-> s, count |-> n, writes |-> TRUE]}
    ELSE IF b \in from THEN acc[b] \union {[stream |-> s, count |-> n, writes |-> FALSE]}
    ELSE acc[b]]

\* Enqueue work on s: a kernel that reads, one that writes, or a copy from one block to another.
Enqueues(s, before, from, to, c) ==
    LET n == Behind(s, Len(before) + 1).count
        v == IF from # {} THEN meant[CHOOSE b \in from : TRUE] ELSE calls + 1
        mine == [c EXCEPT ![s] = n]
    IN /\ queue' = Put(queue, s, before \o <<Work(from, to, v)>>)
       /\ clock' = [clock EXCEPT ![s] = mine]
       /\ race' = (race \/ (\E b \in from : Conflicts(b, c, FALSE)) \/ (\E b \in to : Conflicts(b, c, TRUE)))
       /\ accesses' = Noted(accesses, from, to, s, n)
       /\ meant' = [b \in Blocks |-> IF b \in to THEN v ELSE meant[b]]

Some == {{b} : b \in Blocks}
Shapes == {<<{}, w>> : w \in Some} \union {<<r, {}>> : r \in Some} \union
          {x \in Some \X Some : x[1] # x[2]}

\* A block that is read was written; a freed block is not used.
Sensible(from, to) == \A b \in from \union to : block[b].live /\ (b \in from => meant[b] # Torn)

Launch(s, from, to) ==
    /\ MayCall("launch")
    /\ Sensible(from, to)
    /\ Enqueues(s, <<>>, from, to, Join(clock[s], clock[Host]))
    /\ UNCHANGED <<ran, busy, event, memory, block, stamp, misread>>

\* A3: the handle is an event, recorded behind the work.
Collective(s, from, to, e) ==
    /\ MayCall("collective")
    /\ s # CommStream
    /\ Sensible(from, to)
    /\ LET c == Join(Join(clock[s], clock[Host]), clock[CommStream]) IN
        /\ Enqueues(CommStream, <<Wait(Behind(s, 0))>>, from, to, c)
        /\ event' = [event EXCEPT ![e] = Behind(CommStream, 2)]
        /\ stamp' = [stamp EXCEPT ![e] = [c EXCEPT ![CommStream] = Behind(CommStream, 2).count]]
    /\ UNCHANGED <<ran, busy, memory, block, misread>>

\* S3, A1
Record(e, s) ==
    /\ MayCall("record")
    /\ event' = [event EXCEPT ![e] = IF Fault = "captures_what_ran" THEN [stream |-> s, count |-> ran[s]] ELSE Behind(s, 0)]
    /\ stamp' = [stamp EXCEPT ![e] = Join(clock[s], clock[Host])]
    /\ UNCHANGED <<queue, ran, busy, memory, block, meant, clock, accesses, race, misread>>

\* A1, A2. In the fault "late_capture" the item names the event, and is passed when the event is reached then.
WaitEvent(s, e) ==
    /\ MayCall("wait_event")
    /\ queue' = Put(queue, s, <<
            IF Fault = "late_capture" THEN [kind |-> "wait", point |-> event[e], of |-> e]
            ELSE IF Fault = "unrecorded_blocks" /\ event[e].count = 0 THEN Wait([stream |-> s, count |-> MaxCalls + 1])
            ELSE Wait(event[e])>>)
    /\ clock' = [clock EXCEPT ![s] = Join(@, stamp[e])]
    /\ UNCHANGED <<ran, busy, event, memory, block, meant, stamp, accesses, race, misread>>

\* S4
SyncEvent(e) ==
    /\ MayCall("sync_event")
    /\ Reached(event[e]) \/ Fault = "wait_returns_early"
    /\ clock' = [clock EXCEPT ![Host] = Join(@, stamp[e])]
    /\ UNCHANGED <<streamVars, meant, stamp, accesses, race, misread>>

SyncStream(s) ==
    /\ MayCall("sync_stream")
    /\ queue[s] = <<>>
    /\ clock' = [clock EXCEPT ![Host] = Join(@, clock[s])]
    /\ UNCHANGED <<streamVars, meant, stamp, accesses, race, misread>>

SyncDevice ==
    /\ MayCall("sync_device")
    /\ \A s \in Streams : queue[s] = <<>>
    /\ clock' = [clock EXCEPT ![Host] = [s \in Streams |-> ran[s]]]
    /\ UNCHANGED <<streamVars, meant, stamp, accesses, race, misread>>

HostRead(p) ==
    /\ MayCall("host_read")
    /\ p \in HostBlocks /\ meant[p] # Torn
    /\ race' = (race \/ Conflicts(p, clock[Host], FALSE))
    /\ misread' = (misread \/ memory[p] # meant[p])
    /\ UNCHANGED <<streamVars, meant, clock, stamp, accesses>>

\* What the host did before a call is done, so that its accesses need not be noted.
HostWrite(p) ==
    /\ MayCall("host_write")
    /\ p \in HostBlocks
    /\ race' = (race \/ Conflicts(p, clock[Host], TRUE))
    /\ memory' = Written({p}, calls + 1)
    /\ meant' = [meant EXCEPT ![p] = calls + 1]
    /\ UNCHANGED <<queue, ran, busy, event, block, clock, stamp, accesses, misread>>

\* A4: from pageable memory, to device memory. The host may write p again at once.
CopyPageable(s, p, d) ==
    /\ MayCall("copy_pageable")
    /\ p \in HostBlocks /\ d \in Blocks \ HostBlocks
    /\ Sensible({p}, {d})
    /\ LET from == IF Fault = "pageable_read_late" THEN {p} ELSE {}
           n == Behind(s, 1).count
           c == Join(clock[s], clock[Host])
       IN /\ queue' = Put(queue, s, <<Work(from, {d}, meant[p])>>)
          /\ clock' = [clock EXCEPT ![s] = [c EXCEPT ![s] = n]]
          /\ race' = (race \/ Conflicts(p, clock[Host], FALSE) \/ Conflicts(d, c, TRUE))
          /\ accesses' = Noted(accesses, {}, {d}, s, n)
          /\ meant' = [meant EXCEPT ![d] = meant[p]]
    /\ UNCHANGED <<ran, busy, event, memory, block, stamp, misread>>

\* S6
RecordStream(b, s) ==
    /\ MayCall("record_stream")
    /\ b \notin HostBlocks /\ block[b].live
    /\ block' = Recorded(block, b, s)
    /\ UNCHANGED <<queue, ran, busy, event, memory, meant, clock, stamp, accesses, race, misread>>

Free(b) ==
    /\ MayCall("free")
    /\ b \notin HostBlocks /\ block[b].live
    /\ block' = Freed(block, b)
    /\ UNCHANGED <<queue, ran, busy, event, memory, meant, clock, stamp, accesses, race, misread>>

\* A5: whoever gets the block knows that what was recorded has finished.
Allocate(b) ==
    /\ MayCall("allocate")
    /\ IF Fault = "record_stream_ignored" THEN ~block[b].live ELSE Reusable(b)
    /\ block' = Allocated(block, b)
    /\ clock' = [clock EXCEPT ![Host] = [s \in Streams |->
            LET counts == {p.count : p \in {q \in block[b].hold : q.stream = s}}
            IN IF counts = {} THEN @[s] ELSE Max(@[s], CHOOSE n \in counts : TRUE)]]
    /\ meant' = [meant EXCEPT ![b] = Torn]
    /\ UNCHANGED <<queue, ran, busy, event, memory, stamp, accesses, race, misread>>

\* The environment: streams run by themselves.
Pass(s) ==
    /\ IF Fault = "late_capture" /\ IsFirst(s, "wait")
       THEN /\ Reached(event[First(s).of])
            /\ queue' = [queue EXCEPT ![s] = SubSeq(@, 2, Len(@))]
            /\ ran' = [ran EXCEPT ![s] = @ + 1]
            /\ UNCHANGED <<busy, event, memory, block>>
       ELSE StreamPasses(s)
    /\ UNCHANGED hostVars
BeginWork(s) == StreamBegins(s) /\ UNCHANGED hostVars
EndWork(s) == StreamEnds(s) /\ UNCHANGED hostVars

\* The program has ended and its work is done; stutters.
Done ==
    /\ Ended
    /\ \A s \in Streams : queue[s] = <<>>
    /\ UNCHANGED vars

Next ==
    \/ \E s \in Streams, shape \in Shapes : Launch(s, shape[1], shape[2])
    \/ \E s \in Streams, shape \in Shapes, e \in Events : Collective(s, shape[1], shape[2], e)
    \/ \E e \in Events, s \in Streams : Record(e, s)
    \/ \E s \in Streams, e \in Events : WaitEvent(s, e)
    \/ \E e \in Events : SyncEvent(e)
    \/ \E s \in Streams : SyncStream(s)
    \/ SyncDevice
    \/ \E p \in HostBlocks : HostRead(p)
    \/ \E p \in HostBlocks : HostWrite(p)
    \/ \E s \in Streams, p \in HostBlocks, d \in Blocks \ HostBlocks : CopyPageable(s, p, d)
    \/ \E b \in Blocks, s \in Streams : RecordStream(b, s)
    \/ \E b \in Blocks : Free(b)
    \/ \E b \in Blocks : Allocate(b)
    \/ \E s \in Streams : Pass(s)
    \/ \E s \in Streams : BeginWork(s)
    \/ \E s \in Streams : EndWork(s)
    \/ Done

Spec == Init /\ [][Next]_vars

-----------------------------------------------------------------------------
\* What a program without a race reads is what it would have read, had each call finished before the next.
Misreads == misread \/ \E s \in Streams : IsWork(s) /\ First(s).version = Wrong
RaceFreeIsSynchronous == Misreads => race

\* What lies in memory at the end, too.
EndsAsMeant ==
    ~race /\ (\A s \in Streams : queue[s] = <<>>) => \A b \in Blocks : meant[b] # Torn => memory[b] = meant[b]

THEOREM Spec => [](TypeOK /\ RaceFreeIsSynchronous /\ EndsAsMeant)
=============================================================================
