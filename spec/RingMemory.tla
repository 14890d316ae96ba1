----------------------------- MODULE RingMemory -----------------------------
(* The broadcast ring at the level of single loads and stores: which synchronisation does it need, where, on which CPU?

   Rings, as programs for the machine of MemoryModel, one writer and some readers, several rounds over the slots:

   "flags"       the ring as the field writes it (vllm 27858, 29389). A slot has a written flag and a flag a reader.
                 Writer: look at the readers' flags, take the mark away, fill, reset the flags, mark.
                 Reader: look at its flag, look at the mark, copy, set its flag.
                 A fence may stand at each of eleven positions; `Mechanism` says what a fence is made of.
   "semaphores"  ours. Each reader has three process-shared semaphores: messages, written entries passed by, and notices
                 that slots were let go. `post` releases, `wait` acquires; a position is one of these calls, and a
                 position that is left out is the same call without ordering.
   "doorbell"    the semaphore that wakes our writer: rung after a notice, taken before the writer looks for notices.

   Rule
     F1  whoever reads a word of the protocol finds what the round owes it: payload, entry and notice of this round, and
       after the bell as many notices as it has rung.

   A loop that waits is its last, successful, turn. One payload word stands for all of them: no other access depends on
   which word it is, so a torn read is a read of one wrong word. A thread's first access finds the words as laid out.

   Not modelled: see MemoryModel; processes that die, leases, bodies: BroadcastRing.

   To see it fail: Positions = {} on "arm", or any of the faults in models/manifest.toml.                              *)
EXTENDS MemoryModel

CONSTANTS
    Model,          \* "sc", "tso" or "arm"
    Ring,           \* "flags", "semaphores" or "doorbell"
    Mechanism,      \* what stands at a position: "full_fence", "lock", "lock_aarch64", "system_call", "load_fence", "store_fence"
    Control,        \* does a branch on a loaded value hold back later stores? (aarch64.cat: yes; C11: no)
    Readers,        \* number of readers
    Slots,          \* number of slots
    Window,         \* number of entries ("semaphores")
    Held,           \* messages that a reader opens before it looks at the first and lets it go ("semaphores": leases)
    Rounds,         \* messages
    PositionSets    \* the sets of positions to try; one run checks them all

WriterFences == {"before_look", "before_unmark", "before_fill", "before_reset", "before_mark", "after_mark"}
ReaderFences == {"before_flag", "before_check", "before_copy", "before_done", "after_done"}
WriterCalls  == {"room_wait", "hear_wait", "announce_post"}
ReaderCalls  == {"open_wait", "pass_post", "release_post"}

\* The calls of our ring are the labels that its code carries, as `# SYNC(open.wait)`. So are the doorbell's, and one that
\* is outside the model: what a socket orders, whose queue the kernel locks on both sides.
DoorbellCalls == {"doorbell_wait", "doorbell_post"}
Outside       == {"admit_send"}

WriterPositions == CASE Ring = "flags"      -> WriterFences
                     [] Ring = "semaphores" -> WriterCalls
                     [] Ring = "doorbell"   -> DoorbellCalls \cap {"doorbell_wait"}
ReaderPositions == CASE Ring = "flags"      -> ReaderFences
                     [] Ring = "semaphores" -> ReaderCalls
                     [] Ring = "doorbell"   -> DoorbellCalls \cap {"doorbell_post"}
Candidates      == WriterPositions \cup ReaderPositions

\* The fences that the ring of flags has in the field: vllm 29819, and the one of vllm-ascend 3988.
Field == {"before_look", "before_mark", "after_mark", "before_flag", "after_done"}

\* A fault "without_x" is position x left out.
Dropped == IF Fault = "field_fences" THEN Candidates \ Field ELSE {x \in Candidates : Fault = "without_" \o x}

ReaderIds == 1..Readers
Threads   == 1..(Readers + 1)       \* 1 writes, 1 + r is reader r

SlotOf(k)       == ((k - 1) % Slots) + 1
Word(name, n)   == name \o ToString(n)
Of(name, n, r)  == name \o ToString(n) \o "_" \o ToString(r)

------------------------------------------------------------------------------------------------------------------------
(* The ring of flags.                                                                                                 *)

\* What stands at position x.
At(fences, x) ==
    IF x \notin fences THEN << >>
    ELSE CASE Fault = "lock_for_fence"     -> LockPair("acquire")
           [] Mechanism = "full_fence"   -> << Fence("full") >>
           [] Mechanism = "load_fence"   -> << Fence("load") >>
           [] Mechanism = "store_fence"  -> << Fence("store") >>
           [] Mechanism = "system_call"  -> << Fence("context") >>
           [] Mechanism = "lock"         -> LockPair("acquire_pc")
           [] Mechanism = "lock_aarch64" -> LockPair("acquire")

If(distances) == IF Control THEN << Branch(distances) >> ELSE << >>

FlagWriterRound(f, k) ==
    LET s == SlotOf(k) IN
       At(f, "before_look")
    \o [r \in ReaderIds |-> Await(Of("read", s, r), IF k > Slots THEN {1} ELSE {})] \o If(ReaderIds)
    \o At(f, "before_unmark") \o << Store(Word("written", s), 0) >>
    \o At(f, "before_fill")   \o << Store(Word("payload", s), k) >>
    \o At(f, "before_reset")  \o [r \in ReaderIds |-> Store(Of("read", s, r), 0)]
    \o At(f, "before_mark")   \o << Store(Word("written", s), 1) >>
    \o At(f, "after_mark")

FlagReaderRound(f, k, r) ==
    LET s == SlotOf(k)
        check == At(f, "before_check") \o << Await(Word("written", s), {1}) >>
    IN At(f, "before_flag")  \o << Await(Of("read", s, r), {0}) >>
    \o check                 \o If({1, 1 + Len(check)})
    \o At(f, "before_copy")  \o << Find(Word("payload", s), k) >>
    \o At(f, "before_done")  \o << Store(Of("read", s, r), 1) >>
    \o At(f, "after_done")

------------------------------------------------------------------------------------------------------------------------
(* The ring of semaphores.                                                                                            *)

Wait(calls, x, word) ==
    LET take == TakeWhen(word, 1..Rounds) IN
    << IF x \in calls THEN AcquirePC(take) ELSE take, Put(word, -1) >> \o If({2})
Post(calls, x, word) ==
    << Take(word), IF x \in calls THEN Release(Put(word, 1)) ELSE Put(word, 1) >>

Entry(k)     == Word("entry", k % Window)
Notice(k, r) == Of("notice", k % (Slots + 1), r)

\* One after the other. (An operator that takes operators would keep TLC from evaluating the programs once only.)
All(ps) == LET upto[i \in 0..Len(ps)] == IF i = 0 THEN << >> ELSE upto[i - 1] \o ps[i] IN upto[Len(ps)]

SemaphoreWriterRound(c, k) ==
    LET room(r) == IF k > Window THEN Wait(c, "room_wait", Word("passed", r)) ELSE << >>
        hear(r) == IF k > Slots
                   THEN Wait(c, "hear_wait", Word("notices", r)) \o << Find(Notice(k - Slots, r), k - Slots) >> \o If({1})
                   ELSE << >>
        tell(r) == Post(c, "announce_post", Word("messages", r))
    IN All([r \in ReaderIds |-> room(r)]) \o All([r \in ReaderIds |-> hear(r)])
       \o << Store(Word("payload", SlotOf(k)), k), Store(Entry(k), k) >> \o All([r \in ReaderIds |-> tell(r)])

\* Open message k: from here on its entry may be overwritten.
SemaphoreOpen(c, k, r) ==
    Wait(c, "open_wait", Word("messages", r)) \o << Find(Entry(k), k) >> \o Post(c, "pass_post", Word("passed", r))

\* Look at message k and let its slot go.
SemaphoreRelease(c, k, r) ==
    << Find(Word("payload", SlotOf(k)), k), Store(Notice(k, r), k) >> \o Post(c, "release_post", Word("notices", r))

\* After the last round, everything that is still held.
SemaphoreReaderRound(c, k, r) ==
    LET rest(i) == IF k - Held - 1 + i > 0 THEN SemaphoreRelease(c, k - Held - 1 + i, r) ELSE << >>
    IN SemaphoreOpen(c, k, r) \o All([i \in 1..(IF k = Rounds THEN Held + 1 ELSE 1) |-> rest(i)])

------------------------------------------------------------------------------------------------------------------------
(* The doorbell, one reader: a notice that was rung for must not be overlooked, or the writer sleeps over it (WakeUp). *)

DoorbellWriterRound(c, k) ==
    Wait(c, "doorbell_wait", "doorbell") \o << [Load("notices1") EXCEPT !.must = k..Rounds] >>

DoorbellReaderRound(c, k) ==
    << Take("notices1"), Put("notices1", 1) >> \o Post(c, "doorbell_post", "doorbell")

------------------------------------------------------------------------------------------------------------------------
Program(chosen, t) ==
    LET round(k) ==
            CASE Ring = "flags" /\ t = 1      -> FlagWriterRound(chosen, k)
              [] Ring = "flags"               -> FlagReaderRound(chosen, k, t - 1)
              [] Ring = "semaphores" /\ t = 1 -> SemaphoreWriterRound(chosen, k)
              [] Ring = "semaphores"          -> SemaphoreReaderRound(chosen, k, t - 1)
              [] Ring = "doorbell" /\ t = 1   -> DoorbellWriterRound(chosen, k)
              [] Ring = "doorbell"            -> DoorbellReaderRound(chosen, k)
    IN All([k \in 1..Rounds |-> round(k)])

Own(t) == (IF t = 1 THEN WriterPositions ELSE ReaderPositions) \ Dropped

\* A thread's program depends only on the positions in its own part.
RingPrograms == [t \in Threads |-> [own \in {f \cap Own(t) : f \in PositionSets} |-> Program(own, t)]]
RingOrders   == [t \in Threads |-> [own \in DOMAIN RingPrograms[t] |-> Before(Model, RingPrograms[t][own])]]

\* TLC works these out once, being constants. But it counts coverage inside whatever definition a behaviour refers to, and
\* runs out of memory over programs: so behaviours refer to constants, which the configurations bind to these names.
ThePrograms == RingPrograms
TheOrders   == RingOrders

CONSTANTS ProgramOf,    \* for each thread and set of its own positions, its program
          OrderOf       \* for each of these, what each instruction waits for

WordsOf(p) == {p[i].loc : i \in SharedAccesses(p)}
Words     == UNION {UNION {WordsOf(ProgramOf[t][own]) : own \in DOMAIN ProgramOf[t]} : t \in Threads}

VARIABLE positions  \* where this run synchronises
PositionsTypeInv == positions \in SUBSET Candidates

VARIABLE done       \* accesses performed, for each thread
DoneTypeInv == \A t \in Threads : done[t] \subseteq DOMAIN ProgramOf[t][positions \cap Own(t)]

VARIABLE mem        \* the store that memory holds in each word
MemTypeInv == DOMAIN mem = Words

VARIABLE got        \* the stores that loads took, as long as it matters for what may still be performed
GotTypeInv == \A t \in Threads : DOMAIN got[t] \subseteq done[t]

VARIABLE misread    \* loads that found what they must not find: <<thread, word, owed, found>>
MisreadTypeInv == \A x \in misread : x[1] \in Threads /\ x[2] \in Words

TypeOK == PositionsTypeInv /\ DoneTypeInv /\ MemTypeInv /\ GotTypeInv /\ MisreadTypeInv

vars    == <<positions, done, mem, got, misread>>
machine == [done |-> done, mem |-> mem, got |-> got]

programs == [t \in Threads |-> ProgramOf[t][positions \cap Own(t)]]
before   == [t \in Threads |-> OrderOf[t][positions \cap Own(t)]]

Init ==
    /\ positions \in PositionSets
    /\ done = [t \in Threads |-> {}]
    /\ mem = [x \in Words |-> [by |-> 0, at |-> 0, val |-> 0]]
    /\ got = [t \in Threads |-> << >>]
    /\ misread = {}

\* A load's source still matters while an earlier load of the word is outstanding (M4), or its store half (M5).
Matters(p, finished, i) ==
    \/ p[i].op = "take" /\ i + 1 \notin finished
    \/ \E k \in SharedAccesses(p) \ finished : k < i /\ Reads(p[k]) /\ p[k].loc = p[i].loc

Become(t, m) ==
    /\ done' = m.done
    /\ mem' = m.mem
    /\ got' = [m.got EXCEPT ![t] = LET g == @ IN
                [i \in {k \in DOMAIN g : Matters(programs[t], m.done[t], k)} |-> g[i]]]
    /\ UNCHANGED positions

NoExecution == TakenBack(programs, machine)

PerformLoad(t, i) ==
    LET p == programs[t] IN
    /\ i \in DOMAIN p /\ i \notin done[t] /\ Reads(p[i]) /\ IsShared(p[i])
    /\ ~NoExecution
    /\ CanPerform(programs, before, machine, t, i)
    /\ Become(t, Perform(programs, machine, t, i))
    /\ misread' = LET v == Source(machine, p, t, i).val IN
                  IF p[i].must = {} \/ v \in p[i].must THEN misread
                  ELSE misread \cup {<<t, p[i].loc, CHOOSE w \in p[i].must : TRUE, v>>}

PerformStore(t, i) ==
    LET p == programs[t] IN
    /\ i \in DOMAIN p /\ i \notin done[t] /\ Writes(p[i]) /\ IsShared(p[i])
    /\ ~NoExecution
    /\ CanPerform(programs, before, machine, t, i)
    /\ Become(t, Perform(programs, machine, t, i))
    /\ UNCHANGED misread

AllDone == Finished(programs, machine)
Done == (AllDone \/ NoExecution) /\ UNCHANGED vars

Next ==
    \/ \E t \in Threads : \E i \in DOMAIN programs[t] : PerformLoad(t, i)
    \/ \E t \in Threads : \E i \in DOMAIN programs[t] : PerformStore(t, i)
    \/ Done

Spec == Init /\ [][Next]_vars

\* F1
NobodyMisreads == misread = {}

THEOREM Spec => []NobodyMisreads
=============================================================================
