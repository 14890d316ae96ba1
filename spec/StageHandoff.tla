---------------------------- MODULE StageHandoff ----------------------------
(***************************************************************************)
(* A pipeline of ranks hands activations on, step after step.              *)
(*                                                                         *)
(* In a step a rank receives a dict of tensors, runs forward, and sends a  *)
(* dict: one metadata message from host to host, and a device message for  *)
(* each tensor. The last rank answers the first with a dict that has no    *)
(* tensors (the tokens it chose); the first rank starts InFlight steps     *)
(* before it needs an answer. Rules:                                       *)
(*   H1  before forward overwrites what the previous step sends, that      *)
(*       step's device handles are waited for, on the stream that forward  *)
(*       runs on (nccl) or by the host (gloo);                             *)
(*   H2  a device handle is the point behind the send, and is kept until   *)
(*       waited for: it may be all that keeps the tensor alive;            *)
(*   H3  sending metadata never waits for the peer, unless MaxPending      *)
(*       messages are on their way; MaxPending >= InFlight, so that it     *)
(*       never happens in a pipeline that works;                           *)
(*   H4  metadata handles are reaped later, once the message was taken;    *)
(*   H5  what is received is read only behind its handle, and what was     *)
(*       gathered from slices only behind the handle of the gather;        *)
(*   H6  a receive into memory is ordered behind the reads of what lay     *)
(*       there before;                                                     *)
(*   H7  the handles of several dicts sent in one step add up;             *)
(*   H8  a call that fails halfway ends the link, and so does a peer that  *)
(*       is gone: the messages on their way bear no names, so that a link  *)
(*       that went on would take those of one dict for those of another.   *)
(*                                                                         *)
(* Streams of a rank: forward runs on "compute", sends on "out", receives  *)
(* on "in", the all-gather on "gather". The other ranks of a tensor        *)
(* parallel group behave alike, so that their slices are not modelled; nor *)
(* are the contents of metadata, and close. A wait that runs out ends the  *)
(* link as an exception does (Interrupt); a stopped process takes its time,*)
(* as any may.                                                             *)
(*                                                                         *)
(* To see it fail: Fault = "handles_dropped" breaks DeliversForward (vllm  *)
(* 54962), Fault = "metadata_send_blocking" deadlocks with two steps in    *)
(* flight (vllm 49274); the manifest lists the others.                     *)
(***************************************************************************)
EXTENDS StreamOrdering

CONSTANTS
    LastRank,    \* ranks 1..LastRank
    Steps,       \* steps 1..Steps; also the versions of tensors
    InFlight,    \* steps the first rank may start ahead of the answers
    MaxPending,  \* metadata messages of a rank that may be on their way
    Flavour,     \* of handles: "nccl", wait orders the stream; "gloo", wait blocks the host, which computes itself
    Fresh,       \* forward writes a block fresh from the allocator, rather than a static one
    Gather,      \* tensors arrive as slices and are gathered
    Extra,       \* a second dict, without tensors, is sent in each step
    WaitTwice,   \* every receive handle is waited for twice
    Mortal,      \* ranks whose process may be killed
    MayInterrupt \* whether an exception may end a call of a host halfway

ASSUME MaxPending >= InFlight
\* The kernel tells the peers of a process that died; NCCL, which has no such peer, waits for ever or aborts.
ASSUME Mortal # {} => Flavour = "gloo"

Ranks == 1..LastRank
Senders == 1..(LastRank - 1)
Receivers == 2..LastRank

\* What the ranks have; a cfg puts these in place of Streams and Blocks.
StageStreams ==
    {<<r, "compute">> : r \in Ranks} \union {<<r, "out">> : r \in Senders} \union {<<r, "in">> : r \in Receivers}
    \union {<<r, "gather">> : r \in IF Gather THEN Receivers ELSE {}}
Outputs(r) == {<<r, n>> : n \in IF Fresh /\ r \in Senders THEN {"out", "spare"} ELSE {"out"}}
StageBlocks ==
    UNION {Outputs(r) : r \in Ranks} \union {<<r, "in">> : r \in Receivers}
    \union {<<r, "whole">> : r \in IF Gather THEN Receivers ELSE {}}

VARIABLE at         \* where the host of each rank is in its step
AtTypeInv == at \in [Ranks ->
    {"receive", "post", "await", "again", "gather", "extra", "settle", "forward",
     "metadata", "tensors", "more", "stuck", "done", "failed", "dead"}]

VARIABLE step       \* the step each rank is in
StepTypeInv == step \in [Ranks -> 1..(Steps + 1)]

VARIABLE output     \* the block that forward of the current step writes
OutputTypeInv == \A r \in Ranks : output[r] \in Blocks

VARIABLE handles    \* device handles of sends, not waited for yet
HandlesTypeInv == \A r \in Ranks : \A p \in handles[r] : p.stream \in Streams

VARIABLE receiving  \* the handles of the receive of the current step
ReceivingTypeInv == \A r \in Ranks : \A p \in receiving[r] : p.stream \in Streams

VARIABLE metadata   \* messages of each rank: sent, of these taken by the peer, of these reaped
MetadataTypeInv == \A r \in Ranks : metadata[r].reaped <= metadata[r].taken /\ metadata[r].taken <= metadata[r].sent

hostVars == <<at, step, output, handles, receiving, metadata>>
vars == <<streamVars, hostVars>>

TypeOK ==
    StreamTypeOK /\ AtTypeInv /\ StepTypeInv /\ OutputTypeInv /\ HandlesTypeInv /\ ReceivingTypeInv
    /\ MetadataTypeInv

Compute(r) == <<r, "compute">>
Out(r) == <<r, "out">>
In(r) == <<r, "in">>
Prev(r) == IF r = 1 THEN LastRank ELSE r - 1
Gone(r) == at[r] \in {"failed", "dead"}
Ended(r) == at[r] = "done" \/ Gone(r)
OnItsWay(r) == metadata[r].sent - metadata[r].reaped

\* The host of r is where it is, and is not held up by what it called before.
HostAt(r, where) ==
    /\ at[r] = where
    /\ Flavour = "gloo" => queue[Compute(r)] = <<>>
    /\ Fault = "metadata_send_blocking" => metadata[r].taken = metadata[r].sent

Begins(r, k) == IF k > Steps THEN "done" ELSE IF r = 1 /\ k <= InFlight THEN "settle" ELSE "receive"

Init ==
    /\ StreamInit(IF Fresh THEN Blocks \ UNION {Outputs(r) : r \in Senders} ELSE Blocks)
    /\ at = [r \in Ranks |-> Begins(r, 1)]
    /\ step = [r \in Ranks |-> 1]
    /\ output = [r \in Ranks |-> <<r, "out">>]
    /\ handles = [r \in Ranks |-> {}]
    /\ receiving = [r \in Ranks |-> {}]
    /\ metadata = [r \in Ranks |-> [sent |-> 0, taken |-> 0, reaped |-> 0]]

Waits(points) == LET RECURSIVE Listed(_)
                     Listed(ps) == IF ps = {} THEN <<>>
                                   ELSE LET p == CHOOSE q \in ps : TRUE IN <<Wait(p)>> \o Listed(ps \ {p})
                 IN Listed(points)

\* Waiting for points: what is enqueued on the stream, and what the host may not go on without.
Ordered(q, s, points) == IF Flavour = "nccl" THEN Put(q, s, Waits(points)) ELSE q
Blocked(points) == Flavour = "gloo" /\ \E p \in points : ~Reached(p)

-----------------------------------------------------------------------------
\* The metadata of a dict; a dict without tensors is complete with it.
ReceiveMetadata(r) ==
    /\ HostAt(r, "receive") \/ HostAt(r, "extra")
    /\ metadata[Prev(r)].taken < metadata[Prev(r)].sent
    /\ metadata' = [metadata EXCEPT ![Prev(r)].taken = @ + 1]
    /\ at' = [at EXCEPT ![r] = IF @ = "receive" /\ Prev(r) \in Senders THEN "post" ELSE "settle"]
    /\ UNCHANGED <<streamVars, step, output, handles, receiving>>

\* H6: nccl orders a receive behind what is enqueued on the current stream.
PostReceive(r) ==
    /\ HostAt(r, "post")
    /\ LET before == IF Flavour = "nccl" /\ Fault # "receive_unordered" THEN <<Wait(Behind(Compute(r), 0))>> ELSE <<>> IN
        /\ queue' = Put(queue, In(r), before \o <<Recv(<<r, "in">>, step[r], Out(Prev(r)))>>)
        /\ receiving' = [receiving EXCEPT ![r] = {Behind(In(r), Len(before) + 1)}]
    /\ at' = [at EXCEPT ![r] = "await"]
    /\ UNCHANGED <<ran, busy, event, memory, block, step, output, handles, metadata>>

\* H5. Waiting again, as callers do, changes nothing.
AwaitReceive(r) ==
    /\ HostAt(r, "await") \/ HostAt(r, "again")
    /\ Fault # "receive_read_early" => ~Blocked(receiving[r])
    /\ IF Fault = "receive_read_early" THEN UNCHANGED queue
       ELSE queue' = Ordered(queue, Compute(r), receiving[r])
    /\ at' = [at EXCEPT ![r] =
            IF WaitTwice /\ @ = "await" THEN "again"
            ELSE IF @ = "again" /\ Fault = "second_wait_blocks" THEN "stuck"
            ELSE IF Gather THEN "gather" ELSE IF Extra THEN "extra" ELSE "settle"]
    /\ UNCHANGED <<ran, busy, event, memory, block, step, output, handles, receiving, metadata>>

\* H5: the gather is a collective on a stream of its own, ordered behind the current stream, with a handle.
AllGather(r) ==
    /\ HostAt(r, "gather")
    /\ LET s == <<r, "gather">>
           work == <<Wait(Behind(Compute(r), 0)), Work({<<r, "in">>}, {<<r, "whole">>}, step[r])>>
           q == Put(queue, s, work)
       IN queue' = IF Fault = "gather_read_early" THEN q ELSE Put(q, Compute(r), <<Wait(Behind(s, 2))>>)
    /\ at' = [at EXCEPT ![r] = IF Extra THEN "extra" ELSE "settle"]
    /\ UNCHANGED <<ran, busy, event, memory, block, step, output, handles, receiving, metadata>>

\* H1: the one place that settles the previous step. What the handles kept alive is free again (S6).
BeforeForward(r) ==
    /\ HostAt(r, "settle")
    /\ LET unwaited == Fault \in {"handles_dropped", "only_metadata_waited", "waited_after_forward"}
           s == IF Fault = "waited_on_wrong_stream" /\ r \in Senders THEN Out(r) ELSE Compute(r)
       IN /\ unwaited \/ ~Blocked(handles[r])
          /\ Fault = "only_metadata_waited" => metadata[r].taken = metadata[r].sent
          /\ queue' = IF unwaited THEN queue ELSE Ordered(queue, s, handles[r])
    /\ handles' = IF Fault = "waited_after_forward" THEN handles ELSE [handles EXCEPT ![r] = {}]
    /\ block' = IF Fresh /\ r \in Senders /\ block[output[r]].live THEN Freed(block, output[r]) ELSE block
    /\ at' = [at EXCEPT ![r] = "forward"]
    /\ UNCHANGED <<ran, busy, event, memory, step, output, receiving, metadata>>

Forward(r, b) ==
    /\ HostAt(r, "forward")
    /\ b \in Outputs(r)
    /\ Fresh /\ r \in Senders => Reusable(b)
    /\ LET from == IF r = 1 THEN {} ELSE IF Gather THEN {<<r, "whole">>} ELSE {<<r, "in">>}
           q == Put(queue, Compute(r), <<Work(from, {b}, step[r])>>)
       IN queue' = IF Fault = "waited_after_forward" THEN Ordered(q, Compute(r), handles[r]) ELSE q
    /\ handles' = IF Fault = "waited_after_forward" THEN [handles EXCEPT ![r] = {}] ELSE handles
    /\ output' = [output EXCEPT ![r] = b]
    /\ block' = IF Fresh /\ r \in Senders THEN Allocated(block, b) ELSE block
    /\ at' = [at EXCEPT ![r] = "metadata"]
    /\ UNCHANGED <<ran, busy, event, memory, step, receiving, metadata>>

Ends(r) ==
    /\ step' = [step EXCEPT ![r] = @ + 1]
    /\ at' = [at EXCEPT ![r] = Begins(r, step[r] + 1)]

\* H3. The second dict of a step has no tensors; H7: the handles of the first remain.
SendMetadata(r) ==
    /\ HostAt(r, "metadata") \/ HostAt(r, "more")
    /\ OnItsWay(r) < MaxPending \/ Fault = "pending_unbounded"
    /\ IF Fault = "empty_dict_not_sent" /\ r \notin Senders THEN UNCHANGED metadata
       ELSE metadata' = [metadata EXCEPT ![r].sent = @ + 1]
    /\ IF at[r] = "metadata" /\ r \in Senders THEN at' = [at EXCEPT ![r] = "tensors"] /\ UNCHANGED step ELSE Ends(r)
    /\ handles' = IF Fault = "handles_overwritten" /\ at[r] = "more" THEN [handles EXCEPT ![r] = {}] ELSE handles
    /\ UNCHANGED <<streamVars, output, receiving>>

\* H2. nccl orders a send behind what is enqueued on the current stream.
SendTensors(r) ==
    /\ HostAt(r, "tensors")
    /\ LET before == IF Flavour = "nccl" THEN <<Wait(Behind(Compute(r), 0))>> ELSE <<>>
           behind == Len(before) + (IF Fault = "event_before_send" THEN 0 ELSE 1)
       IN /\ queue' = Put(queue, Out(r), before \o <<Send(output[r], step[r], In(r + 1))>>)
          /\ handles' = [handles EXCEPT ![r] =
                IF Fault = "handles_dropped" THEN {} ELSE @ \union {Behind(Out(r), behind)}]
    /\ block' = IF Fresh /\ Fault \in {"handles_dropped", "tensor_not_kept"} THEN Freed(block, output[r]) ELSE block
    /\ IF Extra THEN at' = [at EXCEPT ![r] = "more"] /\ UNCHANGED step ELSE Ends(r)
    /\ UNCHANGED <<ran, busy, event, memory, output, receiving, metadata>>

\* H4
ReapMetadata(r) ==
    /\ metadata[r].reaped < metadata[r].taken
    /\ metadata' = [metadata EXCEPT ![r].reaped = @ + 1]
    /\ UNCHANGED <<streamVars, at, step, output, handles, receiving>>

\* H8: an exception, or a wait that ran out; what was enqueued goes on.
Interrupt(r) ==
    /\ MayInterrupt /\ ~Ended(r)
    /\ IF Fault = "goes_on_halfway" /\ at[r] \in {"post", "tensors"}
       THEN Ends(r)
       ELSE at' = [at EXCEPT ![r] = "failed"] /\ UNCHANGED step
    /\ UNCHANGED <<streamVars, output, handles, receiving, metadata>>

\* H8: the connection to a rank that is gone is closed; found by whatever waits for it next, or when it is posted.
FindPeerGone(r) ==
    /\ Fault # "peer_death_unnoticed"
    /\ ~Ended(r) /\ \E p \in Ranks : Gone(p) /\ (p = Prev(r) \/ r = Prev(p))
    /\ at' = [at EXCEPT ![r] = "failed"]
    /\ UNCHANGED <<streamVars, step, output, handles, receiving, metadata>>

\* The process of a rank is gone, with its streams; transfers to and from it stay where they are.
Kill(r) ==
    /\ r \in Mortal /\ ~Ended(r)
    /\ at' = [at EXCEPT ![r] = "dead"]
    /\ queue' = [s \in Streams |-> IF s[1] = r THEN <<>> ELSE queue[s]]
    /\ busy' = {s \in busy : s[1] # r /\ (First(s).kind # "work" => First(s).peer[1] # r)}
    /\ UNCHANGED <<ran, event, memory, block, step, output, handles, receiving, metadata>>

\* The environment: streams run by themselves.
Pass(s) == StreamPasses(s) /\ UNCHANGED hostVars
BeginWork(s) == StreamBegins(s) /\ UNCHANGED hostVars
EndWork(s) == StreamEnds(s) /\ UNCHANGED hostVars
BeginTransfer(s) == TransferBegins(s) /\ UNCHANGED hostVars
EndTransfer(s) == TransferEnds(s) /\ UNCHANGED hostVars

\* The pipeline has run dry, or has ended where it was; stutters.
Done ==
    /\ \A r \in Ranks : Ended(r)
    /\ (\A r \in Ranks : ~Gone(r)) => \A s \in Streams : queue[s] = <<>>
    /\ UNCHANGED vars

Going ==
    \/ \E r \in Ranks : ReceiveMetadata(r)
    \/ \E r \in Ranks : PostReceive(r)
    \/ \E r \in Ranks : AwaitReceive(r)
    \/ \E r \in Ranks : AllGather(r)
    \/ \E r \in Ranks : BeforeForward(r)
    \/ \E r \in Ranks, b \in Blocks : Forward(r, b)
    \/ \E r \in Ranks : SendMetadata(r)
    \/ \E r \in Ranks : SendTensors(r)
    \/ \E r \in Ranks : ReapMetadata(r)
    \/ \E r \in Ranks : FindPeerGone(r)
    \/ \E s \in Streams : Pass(s)
    \/ \E s \in Streams : BeginWork(s)
    \/ \E s \in Streams : EndWork(s)
    \/ \E s \in Streams : BeginTransfer(s)
    \/ \E s \in Streams : EndTransfer(s)
    \/ Done

Next ==
    \/ Going
    \/ \E r \in Ranks : Interrupt(r)
    \/ \E r \in Ranks : Kill(r)

\* Whoever can go on does; faults need not happen.
Spec == Init /\ [][Next]_vars /\ WF_vars(Going)

-----------------------------------------------------------------------------
\* What a peer receives for step k is what forward k produced.
DeliversForward ==
    \A s \in busy : First(s).kind = "send" => First(s).version # Wrong /\ Found(First(s)) # Wrong

\* Nothing received or gathered is read before its handle is settled.
NothingReadEarly == \A s \in busy : First(s).kind = "work" => First(s).version # Wrong

\* A block is free only if the stream it is used on next is behind all sends of it.
NotFreedUnderSend ==
    \A r \in Senders : \A i \in 1..Len(queue[Out(r)]) : \A b \in Outputs(r) :
        LET item == queue[Out(r)][i]
            end == [stream |-> Out(r), count |-> ran[Out(r)] + i]
        IN item.kind = "send" /\ b \in item.from /\ ~block[b].live
            => \E j \in 1..Len(queue[Compute(r)]) :
                /\ queue[Compute(r)][j].kind = "wait"
                /\ queue[Compute(r)][j].point = end

\* H3, H4
HandlesBounded == \A r \in Ranks : Cardinality(handles[r]) <= 1 /\ OnItsWay(r) <= MaxPending

\* Every rank gets through every step.
Finishes == <>(\A r \in Ranks : at[r] = "done")

\* H8: nobody waits for ever for a rank that is gone.
EndsTogether == <>(\A r \in Ranks : Ended(r))

-----------------------------------------------------------------------------
\* The law. The holder of a rank's output blocks is the stream it computes on; a transfer running or next to run is a loan.
SentBlocks == UNION {Outputs(r) : r \in Senders}
Lifecycle == INSTANCE BufferLifecycle WITH
    Buffers <- SentBlocks,
    Holders <- {Compute(r) : r \in Senders},
    Readers <- {Out(r) : r \in Senders},
    Versions <- 1..Steps,
    FreeLimit <- 2 * LastRank,
    Fault <- "none",
    phase <- [b \in SentBlocks |-> IF b \in WritesNow THEN "Writing" ELSE "Held"],
    hands <- [b \in SentBlocks |-> {Compute(b[1])}],
    content <- [b \in SentBlocks |-> memory[b]],
    loans <- {[buffer |-> l.block, reader |-> l.stream, version |-> First(l.stream).version] :
                l \in {m \in ReadsNow : m.block \in SentBlocks}}

NoTornRead == Lifecycle!NoTornRead
RefinesBufferLifecycle == Lifecycle!Safety

THEOREM Spec => [](TypeOK /\ DeliversForward /\ NothingReadEarly /\ NotFreedUnderSend /\ HandlesBounded)
THEOREM Spec => EndsTogether /\ RefinesBufferLifecycle
THEOREM Spec /\ Mortal = {} /\ ~MayInterrupt => Finishes
=============================================================================
