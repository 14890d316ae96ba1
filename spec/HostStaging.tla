---------------------------- MODULE HostStaging -----------------------------
(***************************************************************************)
(* Device output goes to the host through a pool of pinned buffers.        *)
(*                                                                         *)
(* Forward writes a block fresh from the allocator; a copy on a stream of  *)
(* its own brings it into a pinned buffer; the host encodes from there,    *)
(* and the transport reads the buffer until its tracker is done. Rules:    *)
(*   P1  the copy is ordered behind the work that produced its source;     *)
(*   P2  the source is recorded on the copy's stream before the host lets  *)
(*       go of it;                                                         *)
(*   P3  an event is recorded behind the copy, and the host reads the      *)
(*       pinned buffer only once it is reached: a copy that does not block *)
(*       has not happened when it returns;                                 *)
(*   P4  a pinned buffer is taken again only when its copy is settled and  *)
(*       its readers are done.                                             *)
(*                                                                         *)
(* Not modelled: pageable memory (see AccessOrder), what is encoded, the   *)
(* bound on the pool, failures.                                            *)
(*                                                                         *)
(* To see it fail: Fault = "read_before_copy" breaks NoTornRead (vllm      *)
(* 36013), "no_record_stream" breaks StagesWhatWasProduced (sglang 34076). *)
(***************************************************************************)
EXTENDS StreamOrdering

CONSTANTS
    Device,     \* blocks of the allocator, which belong to the compute stream
    Pinned,     \* buffers of the pool
    Steps       \* versions 1..Steps

ASSUME Blocks = Device \union Pinned /\ Streams = {"compute", "copy"}

VARIABLE made       \* the last version that was produced and not staged yet: which, and where; 0 if none
MadeTypeInv == made.version \in 0..Steps /\ made.block \in Device

VARIABLE step       \* how many versions have been produced
StepTypeInv == step \in 0..Steps

VARIABLE pinned     \* each pinned buffer: free, copying, settled or lent; for which version, behind which point
PinnedTypeInv ==
    \A p \in Pinned :
        /\ pinned[p].state \in {"free", "copying", "settled", "lent"}
        /\ pinned[p].version \in 0..Steps

VARIABLE loans      \* buffers that the transport may be reading, and the version that it was promised
LoansTypeInv == \A l \in loans : l.buffer \in Pinned /\ l.version \in 1..Steps

hostVars == <<made, step, pinned, loans>>
vars == <<streamVars, hostVars>>

TypeOK == StreamTypeOK /\ MadeTypeInv /\ StepTypeInv /\ PinnedTypeInv /\ LoansTypeInv

Init ==
    /\ StreamInit(Pinned)
    /\ made = [version |-> 0, block |-> CHOOSE d \in Device : TRUE]
    /\ step = 0
    /\ pinned = [p \in Pinned |-> [state |-> "free", version |-> 0, point |-> Behind("copy", 0)]]
    /\ loans = {}

-----------------------------------------------------------------------------
\* Forward enqueues its work on a block that the allocator hands out.
Produce(d) ==
    /\ made.version = 0 /\ step < Steps
    /\ Reusable(d)
    /\ queue' = Put(queue, "compute", <<Work({}, {d}, step + 1)>>)
    /\ block' = Allocated(block, d)
    /\ step' = step + 1
    /\ made' = [version |-> step + 1, block |-> d]
    /\ UNCHANGED <<ran, busy, event, memory, pinned, loans>>

\* P1, P2, P3: take a buffer, enqueue the copy, record an event behind it, let go of the source.
Stage(p) ==
    /\ made.version # 0
    /\ pinned[p].state = "free"
    /\ LET before == IF Fault = "copy_unordered" THEN <<>> ELSE <<Wait(Behind("compute", 0))>>
           behind == Len(before) + (IF Fault = "event_before_copy" THEN 0 ELSE 1)
           end == Behind("copy", Len(before) + 1)
       IN /\ queue' = Put(queue, "copy", before \o <<Work({made.block}, {p}, made.version)>>)
          /\ pinned' = [pinned EXCEPT ![p] =
                [state |-> "copying", version |-> made.version, point |-> Behind("copy", behind)]]
          /\ block' = [block EXCEPT ![made.block] =
                [live |-> FALSE, users |-> {}, hold |-> IF Fault = "no_record_stream" THEN {} ELSE {end}]]
    /\ made' = [made EXCEPT !.version = 0]
    /\ UNCHANGED <<ran, busy, event, memory, step, loans>>

\* P3
Settle(p) ==
    /\ pinned[p].state = "copying"
    /\ Reached(pinned[p].point) \/ Fault = "read_before_copy"
    /\ pinned' = [pinned EXCEPT ![p].state = "settled"]
    /\ UNCHANGED <<streamVars, made, step, loans>>

\* The host encodes, and the transport may read from now on.
Lend(p) ==
    /\ pinned[p].state = "settled"
    /\ pinned' = [pinned EXCEPT ![p].state = "lent"]
    /\ loans' = loans \union {[buffer |-> p, version |-> pinned[p].version]}
    /\ UNCHANGED <<streamVars, made, step>>

\* The tracker of the transport is done.
EndLoan(p) ==
    /\ \E l \in loans : l.buffer = p
    /\ loans' = {l \in loans : l.buffer # p}
    /\ UNCHANGED <<streamVars, made, step, pinned>>

\* P4
Recycle(p) ==
    /\ pinned[p].state = "lent"
    /\ (\A l \in loans : l.buffer # p) \/ Fault = "pinned_recycled_early"
    /\ Fault # "pinned_never_recycled"
    /\ pinned' = [pinned EXCEPT ![p].state = "free"]
    /\ UNCHANGED <<streamVars, made, step, loans>>

\* The environment: streams run by themselves.
Pass(s) == StreamPasses(s) /\ UNCHANGED hostVars
BeginWork(s) == StreamBegins(s) /\ UNCHANGED hostVars
EndWork(s) == StreamEnds(s) /\ UNCHANGED hostVars

\* All versions went out; stutters.
Done ==
    /\ step = Steps /\ made.version = 0
    /\ loans = {} /\ \A p \in Pinned : pinned[p].state = "free"
    /\ UNCHANGED vars

Next ==
    \/ \E d \in Device : Produce(d)
    \/ \E p \in Pinned : Stage(p)
    \/ \E p \in Pinned : Settle(p)
    \/ \E p \in Pinned : Lend(p)
    \/ \E p \in Pinned : EndLoan(p)
    \/ \E p \in Pinned : Recycle(p)
    \/ \E s \in Streams : Pass(s)
    \/ \E s \in Streams : BeginWork(s)
    \/ \E s \in Streams : EndWork(s)
    \/ Done

Spec == Init /\ [][Next]_vars /\ WF_vars(Next)

-----------------------------------------------------------------------------
\* P1, P2: each copy finds what was produced for it.
StagesWhatWasProduced == \A s \in busy : First(s).version # Wrong

\* Every version goes out, and every buffer comes back.
Finishes == <>(step = Steps /\ made.version = 0 /\ \A p \in Pinned : pinned[p].state = "free")

-----------------------------------------------------------------------------
\* The law, for the pinned buffers: written by the copy, read by the transport.
Lifecycle == INSTANCE BufferLifecycle WITH
    Buffers <- Pinned,
    Holders <- {"host"},
    Readers <- {"transport"},
    Versions <- 1..Steps,
    FreeLimit <- Cardinality(Pinned),
    Fault <- "none",
    phase <- [p \in Pinned |->
        IF p \in WritesNow THEN "Writing"
        ELSE CASE pinned[p].state = "free" -> "Free"
               [] pinned[p].state \in {"copying", "settled"} -> "Held"
               [] OTHER -> "Lent"],
    hands <- [p \in Pinned |-> IF pinned[p].state \in {"copying", "settled"} THEN {"host"} ELSE {}],
    content <- [p \in Pinned |-> memory[p]],
    loans <- {[buffer |-> l.buffer, reader |-> "transport", version |-> l.version] : l \in loans}

NoTornRead == Lifecycle!NoTornRead
RefinesBufferLifecycle == Lifecycle!Safety

THEOREM Spec => [](TypeOK /\ StagesWhatWasProduced /\ NoTornRead)
THEOREM Spec => Finishes /\ RefinesBufferLifecycle
=============================================================================
