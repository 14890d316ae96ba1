---------------------------- MODULE BroadcastRing ----------------------------
(***************************************************************************)
(* One writer, many readers, messages in slots of shared memory.           *)
(*                                                                         *)
(* The problem: a slot may be filled again only when every reader that was *)
(* promised its message has copied it out, or let its lease go, or is      *)
(* gone; and every reader must see exactly the published sequence, although *)
(* some messages travel beside the slots, waits run out, and processes die. *)
(*                                                                         *)
(* A message n is announced by an entry (n modulo Window) that names its   *)
(* slot, or says that its body comes over a socket. Rules:                 *)
(*   R1  a slot is filled only while the writer holds it;                  *)
(*   R2  fill, then write the entry, then post every admitted reader;      *)
(*   R3  an entry is overwritten only when every reader has passed it;     *)
(*   R4  a reader releases a slot when its copy has ended, or when the last *)
(*       view of its lease is gone; the notices of one reader stay in order;*)
(*   R5  the writer forgets a reader only when its process has ended, or   *)
(*       has said up to where it opened; and forgets its notices with it;  *)
(*   R6  a body carries its sequence number and its own copy of the bytes; *)
(*   R7  a reader whose wait ran out stays where it was;                   *)
(*   R8  a loan is the writer's until published, and nobody's to write     *)
(*       afterwards; its slot is not reused while the writer's tensor lives;*)
(*   R9  a reader sleeps only if no post is there (one atomic step of the  *)
(*       semaphore), so that no post is slept through.                     *)
(*                                                                         *)
(* Remote readers have no shared memory: every message is a body for them, *)
(* and what they have received comes back as their cursor, and their only  *)
(* notice is their goodbye. When the writer is killed, bodies that are     *)
(* still in its process are lost, the last ones first.                     *)
(*                                                                         *)
(* Modelled: copying and leasing readers, leases with several views, writer   *)
(* loans, bodies, late readers, readers that leave, a process that is being *)
(* killed but still runs (dying), a rank taken again, a writer that dies or *)
(* closes. Abstracted: the semaphores by which cursors and notices travel  *)
(* neither lose nor reorder (their order on weakly ordered CPUs is what    *)
(* RingMemory is about); serialisation; the writer's own sleep; the        *)
(* messages of the greeting, by which the writer alone gives out ranks,    *)
(* and whose answer may be lost with a writer that is killed; a            *)
(* publication that fails before Publish, whose slot is as if never taken; *)
(* that the writer waits for a narrower window before Overflow, to bound   *)
(* the memory of bodies: it may always wait longer than Room asks.         *)
(*                                                                         *)
(* To see it fail: Fault = "ignore_one_reader" breaks NoTornRead; the      *)
(* manifest lists the others.                                              *)
(***************************************************************************)
EXTENDS Integers, Sequences, FiniteSets

CONSTANTS
    Slots,        \* pieces of shared memory, each holds one message
    Readers,      \* ranks
    Remote,       \* readers without shared memory
    Late,         \* readers that are not there at first
    Leavers,      \* readers that may leave
    Mortal,       \* readers that may be killed
    Keepers,      \* readers that may keep a lease for ever
    Sleepers,     \* readers whose going to sleep is spelled out
    Window,       \* entries, hence how far a reader may be behind
    Messages,     \* how many messages are published
    Loans,        \* may the writer publish loans?
    Bodies,       \* may a message travel beside the slots?
    Views,        \* how many views of a lease live; 0: readers always copy
    WriterMortal, \* may the writer be killed?
    Writer, NoSlot, Fault

Local == Readers \ Remote
Versions == 1..Messages
Torn == 0
Entry == [kind : {"slot", "body", "close"}, seq : 0..Messages + 1, slot : Slots \union {NoSlot}]
Nothing == [kind |-> "close", seq |-> 0, slot |-> NoSlot]
Blank == [kind |-> "body", seq |-> 0, slot |-> NoSlot]

VARIABLE writer     \* the writer's process
WriterTypeInv == writer \in {"up", "dead", "closed"}

VARIABLE step       \* where the writer is in a publication
StepTypeInv == step \in {"idle", "taken", "filling", "filled", "posting"}

VARIABLE current    \* the slot of the publication under way
CurrentTypeInv == current \in Slots \union {NoSlot}

VARIABLE sequence   \* messages whose entry was written, so far
SequenceTypeInv == sequence \in 0..Messages + 1

VARIABLE unsent     \* readers that have yet to be sent the body of the current message
UnsentTypeInv == unsent \subseteq Readers

VARIABLE unposted   \* local readers that have yet to be told of it
UnpostedTypeInv == unposted \subseteq Local

VARIABLE slot       \* where each slot is on its way round, as the writer knows it
SlotTypeInv == slot \in [Slots -> {"free", "held", "writing", "lent"}]

VARIABLE loaned     \* slots in which a tensor of the writer lives
LoanedTypeInv == loaned \subseteq Slots

VARIABLE holders    \* who holds each slot, as the writer knows it
HoldersTypeInv == holders \in [Slots -> SUBSET Local]

VARIABLE admitted   \* readers that the next message is for
AdmittedTypeInv == admitted \subseteq Readers

VARIABLE content    \* the message that lies in each slot as a whole
ContentTypeInv == content \in [Slots -> Versions \union {Torn}]

VARIABLE entries    \* the announcements in shared memory
EntriesTypeInv == entries \in [0..Window - 1 -> Entry]

VARIABLE posts      \* the value of each local reader's semaphore
PostsTypeInv == posts \in [Local -> 0..Window + 1]

VARIABLE notices    \* what each reader told the writer and the writer has not yet heard
NoticesTypeInv ==
    \A r \in Readers : \A i \in DOMAIN notices[r] :
        notices[r][i] \in [kind : {"release", "leave"}, slot : Slots \union {NoSlot}, at : 0..Messages]

VARIABLE bodies     \* bodies on their way to each reader
BodiesTypeInv == \A r \in Readers : \A i \in DOMAIN bodies[r] : bodies[r][i] \in 1..Messages + 1

VARIABLE life       \* the process behind each rank
LifeTypeInv == life \in [Readers -> {"out", "joining", "in", "left", "dying", "dead"}]

VARIABLE sleep      \* whether a reader sleeps on its semaphore
SleepTypeInv == sleep \in [Local -> {"awake", "checking", "asleep"}]

VARIABLE cursor     \* entries each reader has passed or opened
CursorTypeInv == cursor \in [Readers -> 0..Messages + 1]

VARIABLE opened     \* the entry each local reader is busy with
OpenedTypeInv == opened \in [Local -> Entry]

VARIABLE copying    \* the message that lay in the slot when the copy began
CopyingTypeInv == copying \in [Local -> {-1} \union 0..Messages]

VARIABLE grip       \* 0: slot not held; 1: to be released; 1 + n: n views may still be read
GripTypeInv == grip \in [Local -> [Slots -> 0..3]]

VARIABLE got        \* the last message each reader received
GotTypeInv == got \in [Readers -> 0..Messages]

VARIABLE loans      \* which reader was promised which message in which slot (for the law only)
LoansTypeInv == loans \subseteq [buffer : Slots, reader : Local, version : Versions]

writerVars == <<writer, step, current, sequence, unsent, unposted, slot, loaned, holders, admitted>>
sharedVars == <<content, entries, posts, notices, bodies>>
readerVars == <<life, sleep, cursor, opened, copying, grip, got>>
vars == <<writerVars, sharedVars, readerVars, loans>>

TypeOK ==
    /\ WriterTypeInv /\ StepTypeInv /\ CurrentTypeInv /\ SequenceTypeInv /\ UnsentTypeInv /\ UnpostedTypeInv
    /\ SlotTypeInv /\ LoanedTypeInv /\ HoldersTypeInv /\ AdmittedTypeInv /\ ContentTypeInv /\ EntriesTypeInv
    /\ PostsTypeInv /\ NoticesTypeInv /\ BodiesTypeInv /\ LifeTypeInv /\ SleepTypeInv /\ CursorTypeInv
    /\ OpenedTypeInv /\ CopyingTypeInv /\ GripTypeInv /\ GotTypeInv /\ LoansTypeInv

Init ==
    /\ writer = "up" /\ step = "idle" /\ current = NoSlot /\ sequence = 0 /\ unsent = {} /\ unposted = {}
    /\ slot = [s \in Slots |-> "free"] /\ loaned = {} /\ holders = [s \in Slots |-> {}]
    /\ admitted = Readers \ Late
    /\ content = [s \in Slots |-> Torn]
    /\ entries = [i \in 0..Window - 1 |-> Blank]
    /\ posts = [r \in Local |-> 0] /\ notices = [r \in Readers |-> <<>>] /\ bodies = [r \in Readers |-> <<>>]
    /\ life = [r \in Readers |-> IF r \in Late THEN "out" ELSE "in"]
    /\ sleep = [r \in Local |-> "awake"]
    /\ cursor = [r \in Readers |-> 0] /\ got = [r \in Readers |-> 0]
    /\ opened = [r \in Local |-> Nothing] /\ copying = [r \in Local |-> -1]
    /\ grip = [r \in Local |-> [s \in Slots |-> 0]]
    /\ loans = {}

-----------------------------------------------------------------------------
\* The writer.

Next_ == sequence + 1

\* R3: one entry is kept back, so that Close never waits for a reader.
Room == \A r \in admitted : sequence - cursor[r] < Window - 1 \/ Fault = "lap_reader"

CanPublish == writer = "up" /\ sequence < Messages /\ Room

\* `empty`: the writer takes a slot to build a tensor in.
Loan(s) ==
    /\ Loans /\ step = "idle"
    /\ writer = "up" \/ (Fault = "loan_after_close" /\ writer = "closed")
    /\ slot[s] = "free"
    /\ slot' = [slot EXCEPT ![s] = "held"]
    /\ loaned' = loaned \union {s}
    /\ UNCHANGED <<writer, step, current, sequence, unsent, unposted, holders, admitted, sharedVars, readerVars, loans>>

\* The writer's tensor in a slot is gone, published or not.
DropLoan(s) ==
    /\ writer = "up" /\ s \in loaned /\ current # s
    /\ loaned' = loaned \ {s}
    /\ UNCHANGED <<writer, step, current, sequence, unsent, unposted, slot, holders, admitted, sharedVars, readerVars, loans>>

\* `publish` begins: with a free slot to copy into, or with a loan.
Take(s) ==
    /\ CanPublish /\ step = "idle"
    /\ \/ slot[s] = "free"
       \/ slot[s] = "held" /\ s \in loaned
       \/ slot[s] = "lent" /\ s \in loaned /\ Fault = "loan_written_after_publish"  \* R8
    /\ slot' = [slot EXCEPT ![s] = IF @ = "free" THEN "held" ELSE @]
    /\ step' = "taken" /\ current' = s
    /\ UNCHANGED <<writer, sequence, unsent, unposted, loaned, holders, admitted, sharedVars, readerVars, loans>>

\* R1
BeginFill(s) ==
    /\ writer = "up" /\ step = "taken" /\ current = s
    /\ slot' = [slot EXCEPT ![s] = "writing"]
    /\ content' = [content EXCEPT ![s] = Torn]
    /\ step' = "filling"
    /\ unposted' = IF Fault = "notify_before_publish" THEN admitted \ Remote ELSE {}
    /\ UNCHANGED <<writer, current, sequence, unsent, loaned, holders, admitted, entries, posts, notices, bodies, readerVars, loans>>

EndFill(s) ==
    /\ writer = "up" /\ step = "filling" /\ current = s
    /\ slot' = [slot EXCEPT ![s] = "held"]
    /\ content' = [content EXCEPT ![s] = Next_]
    /\ step' = "filled"
    /\ UNCHANGED <<writer, current, sequence, unsent, unposted, loaned, holders, admitted, entries, posts, notices, bodies, readerVars, loans>>

Announce(kind, s) ==
    /\ entries' = [entries EXCEPT ![Next_ % Window] = [kind |-> kind, seq |-> Next_, slot |-> s]]
    /\ sequence' = Next_
    /\ step' = "posting"
    /\ unposted' = IF Fault = "notify_before_publish" THEN unposted ELSE admitted \ Remote

\* The reader has not left, whether or not the writer has heard of it.
Stays(r) == life[r] \in {"in", "dying"} /\ \A i \in DOMAIN notices[r] : notices[r][i].kind # "leave"

\* R2: lend the slot to every admitted local reader and write the entry.
Publish(s) ==
    /\ writer = "up" /\ step = "filled" /\ current = s
    /\ Announce("slot", s)
    /\ unsent' = admitted \intersect Remote
    /\ slot' = [slot EXCEPT ![s] = "lent"]
    /\ holders' = [holders EXCEPT ![s] = IF Fault = "holders_after_posts" THEN {} ELSE admitted \ Remote]
    /\ loans' = loans \union {[buffer |-> s, reader |-> r, version |-> Next_] :
                              r \in {q \in admitted \ Remote : Stays(q)}}
    /\ UNCHANGED <<writer, current, loaned, admitted, content, posts, notices, bodies, readerVars>>

\* R6: the message is too long for a slot, or none came free in time.
Overflow ==
    /\ Bodies /\ CanPublish /\ step = "idle"
    /\ Announce("body", NoSlot)
    /\ unsent' = admitted
    /\ UNCHANGED <<writer, current, slot, loaned, holders, admitted, content, posts, notices, bodies, readerVars, loans>>

SendBody(r) ==
    /\ writer = "up" /\ step = "posting" /\ r \in unsent
    /\ bodies' = [bodies EXCEPT ![r] = Append(@, sequence)]
    /\ unsent' = unsent \ {r}
    /\ UNCHANGED <<writer, step, current, sequence, unposted, slot, loaned, holders, admitted,
                   content, entries, posts, notices, readerVars, loans>>

Post(r) ==
    /\ writer = "up" /\ r \in unposted
    /\ step = "posting" \/ Fault = "notify_before_publish"
    /\ unposted' = unposted \ {r}
    /\ posts' = [posts EXCEPT ![r] = @ + 1]
    /\ sleep' = [sleep EXCEPT ![r] = IF @ = "asleep" THEN "awake" ELSE @]
    /\ UNCHANGED <<writer, step, current, sequence, unsent, slot, loaned, holders, admitted,
                   content, entries, notices, bodies, life, cursor, opened, copying, grip, got, loans>>

\* `publish` returns; from here on the caller may write its memory.
Return ==
    /\ writer = "up" /\ step = "posting" /\ unsent = {} /\ unposted = {}
    /\ step' = "idle" /\ current' = NoSlot
    /\ writer' = IF sequence > Messages THEN "closed" ELSE writer
    /\ holders' = IF Fault = "holders_after_posts" /\ current # NoSlot
                  THEN [holders EXCEPT ![current] = admitted \ Remote] ELSE holders
    /\ UNCHANGED <<sequence, unsent, unposted, slot, loaned, admitted, sharedVars, readerVars, loans>>

\* `close`: the last entry; the one that Room keeps back.
Close ==
    /\ writer = "up" /\ step = "idle" /\ sequence = Messages
    /\ Announce("close", NoSlot)
    /\ unsent' = admitted \intersect Remote
    /\ UNCHANGED <<writer, current, slot, loaned, holders, admitted, content, posts, notices, bodies, readerVars, loans>>

\* The writer hears the oldest notice of a reader.
Heard(r, kind) ==
    /\ writer = "up" /\ life[r] \notin {"out", "joining"} /\ notices[r] # <<>> /\ Head(notices[r]).kind = kind
    /\ notices' = [notices EXCEPT ![r] = Tail(@)]

\* A reader comes in between two messages, and the next one is its first. R5: nothing is left of who had the rank before.
Admit(r) ==
    /\ writer = "up" /\ step = "idle" /\ life[r] = "joining"
    /\ admitted' = admitted \union {r}
    /\ life' = [life EXCEPT ![r] = "in"]
    /\ cursor' = [cursor EXCEPT ![r] = sequence]
    /\ got' = [got EXCEPT ![r] = sequence]
    /\ bodies' = [bodies EXCEPT ![r] = <<>>]
    /\ notices' = [notices EXCEPT ![r] = IF Fault = "stale_notices" THEN @ ELSE <<>>]
    /\ posts' = IF r \in Remote \/ Fault = "counted_twice" THEN posts ELSE [posts EXCEPT ![r] = 0]
    /\ UNCHANGED <<writer, step, current, sequence, unsent, unposted, slot, loaned, holders,
                   content, entries, sleep, opened, copying, grip, loans>>

\* R4
HearRelease(r) ==
    /\ Heard(r, "release")
    /\ holders' = [holders EXCEPT ![Head(notices[r]).slot] = @ \ {r}]
    /\ UNCHANGED <<writer, step, current, sequence, unsent, unposted, slot, loaned, admitted,
                   content, entries, posts, bodies, readerVars, loans>>

\* R5: what it never opened it does not hold; what it opened it releases one by one.
HearLeave(r) ==
    /\ step = "idle"
    /\ Heard(r, "leave")
    /\ admitted' = admitted \ {r}
    /\ holders' = [s \in Slots |->
                     IF content[s] > Head(notices[r]).at \/ Fault = "leave_drops_leases"
                     THEN holders[s] \ {r} ELSE holders[s]]
    /\ UNCHANGED <<writer, step, current, sequence, unsent, unposted, slot, loaned,
                   content, entries, posts, bodies, readerVars, loans>>

\* R5: the process behind the rank has ended; the rank is empty again. Of a remote reader the writer sees only that
\* the connection is gone, which it is too when the reader has closed.
Exclude(r) ==
    /\ writer = "up" /\ step = "idle"
    /\ \/ life[r] = "dead"
       \/ life[r] = "left" /\ r \in Remote
       \/ life[r] = "dying" /\ Fault = "exclude_while_dying"
    /\ admitted' = admitted \ {r}
    /\ life' = [life EXCEPT ![r] = IF @ = "dying" THEN @ ELSE "out"]
    /\ holders' = [s \in Slots |-> holders[s] \ {r}]
    /\ UNCHANGED <<writer, step, current, sequence, unsent, unposted, slot, loaned,
                   sharedVars, sleep, cursor, opened, copying, grip, got, loans>>

\* A reader that left has let everything go; the rank is empty again.
Vacate(r) ==
    /\ writer = "up" /\ step = "idle"
    /\ life[r] \in {"left", "dying", "dead"} /\ r \notin admitted /\ \A s \in Slots : r \notin holders[s]
    /\ life' = [life EXCEPT ![r] = "out"]
    /\ UNCHANGED <<writerVars, sharedVars, sleep, cursor, opened, copying, grip, got, loans>>

\* R4, R8
Recycle(s) ==
    /\ writer = "up"
    /\ slot[s] \in {"held", "lent"} /\ current # s
    /\ s \notin loaned \/ Fault = "loan_recycled"
    /\ holders[s] = {} \/ (Fault = "ignore_one_reader" /\ Cardinality(holders[s]) = 1)
    /\ slot' = [slot EXCEPT ![s] = "free"]
    /\ UNCHANGED <<writer, step, current, sequence, unsent, unposted, loaned, holders, admitted, sharedVars, readerVars, loans>>

KillWriter ==
    /\ WriterMortal /\ writer = "up"
    /\ writer' = "dead"
    /\ UNCHANGED <<step, current, sequence, unsent, unposted, slot, loaned, holders, admitted, sharedVars, readerVars, loans>>

\* A body that the dead writer's process had not yet given to the kernel is lost, and what followed it.
LoseBody(r) ==
    /\ writer = "dead" /\ bodies[r] # <<>>
    /\ bodies' = [bodies EXCEPT ![r] = SubSeq(@, 1, Len(@) - 1)]
    /\ UNCHANGED <<writerVars, content, entries, posts, notices, readerVars, loans>>

-----------------------------------------------------------------------------
\* The readers.

Runs(r) == life[r] \in {"in", "dying"}
Alive(r) == life[r] \in {"in", "left", "dying"}
Idle(r) == opened[r] = Nothing
Tell(r, kind, s) ==
    notices' = [notices EXCEPT ![r] =
        Append(@, [kind |-> kind, slot |-> s, at |-> IF kind = "leave" THEN cursor[r] ELSE 0])]

Join(r) ==
    /\ life[r] = "out" /\ writer = "up"
    /\ life' = [life EXCEPT ![r] = "joining"]
    /\ UNCHANGED <<writerVars, sharedVars, sleep, cursor, opened, copying, grip, got, loans>>

\* R9: a reader that finds no post goes to sleep; the semaphore looks once more as it does so.
BeginSleep(r) ==
    /\ r \in Sleepers /\ life[r] = "in" /\ Idle(r) /\ sleep[r] = "awake" /\ posts[r] = 0
    /\ sleep' = [sleep EXCEPT ![r] = "checking"]
    /\ UNCHANGED <<writerVars, sharedVars, life, cursor, opened, copying, grip, got, loans>>

EndSleep(r) ==
    /\ sleep[r] = "checking"
    /\ sleep' = [sleep EXCEPT ![r] = IF posts[r] = 0 \/ Fault = "sleep_after_check" THEN "asleep" ELSE "awake"]
    /\ UNCHANGED <<writerVars, sharedVars, life, cursor, opened, copying, grip, got, loans>>

\* Take one post and read the entry it stands for.
Open(r) ==
    /\ life[r] = "in" /\ Idle(r) /\ sleep[r] = "awake" /\ posts[r] > 0
    /\ posts' = [posts EXCEPT ![r] = @ - 1]
    /\ LET e == entries[(cursor[r] + 1) % Window] IN
       /\ cursor' = [cursor EXCEPT ![r] = @ + 1]
       /\ opened' = [opened EXCEPT ![r] = IF e.kind = "close" THEN Nothing ELSE e]
       /\ life' = [life EXCEPT ![r] = IF e.kind = "close" THEN "left" ELSE @]
       /\ grip' = IF e.kind = "slot" THEN [grip EXCEPT ![r][e.slot] = 2] ELSE grip
    /\ UNCHANGED <<writerVars, content, entries, notices, bodies, sleep, copying, got, loans>>

\* Copy out. R4: release only when the copy has ended.
BeginCopy(r) ==
    /\ Runs(r) /\ opened[r].kind = "slot" /\ copying[r] = -1
    /\ copying' = [copying EXCEPT ![r] = content[opened[r].slot]]
    /\ IF Fault = "release_before_copy" THEN Tell(r, "release", opened[r].slot) ELSE UNCHANGED notices
    /\ UNCHANGED <<writerVars, content, entries, posts, bodies, life, sleep, cursor, opened, grip, got, loans>>

EndCopy(r) ==
    /\ Runs(r) /\ copying[r] # -1
    /\ LET s == opened[r].slot IN
       /\ got' = [got EXCEPT ![r] = IF content[s] = copying[r] THEN content[s] ELSE Torn]
       /\ grip' = [grip EXCEPT ![r][s] = IF Fault = "release_before_copy" THEN 0 ELSE 1]
       /\ loans' = IF Fault = "release_before_copy" THEN {l \in loans : <<l.reader, l.buffer>> # <<r, s>>} ELSE loans
    /\ copying' = [copying EXCEPT ![r] = -1]
    /\ opened' = [opened EXCEPT ![r] = Nothing]
    /\ UNCHANGED <<writerVars, sharedVars, life, sleep, cursor>>

\* Receive without copying: views of the slot live on.
Lease(r) ==
    /\ Views > 0 /\ Runs(r) /\ opened[r].kind = "slot" /\ copying[r] = -1
    /\ got' = [got EXCEPT ![r] = content[opened[r].slot]]
    /\ grip' = [grip EXCEPT ![r][opened[r].slot] = 1 + Views]
    /\ opened' = [opened EXCEPT ![r] = Nothing]
    /\ IF Fault = "lease_not_honoured" THEN Tell(r, "release", opened[r].slot) ELSE UNCHANGED notices
    /\ UNCHANGED <<writerVars, content, entries, posts, bodies, life, sleep, cursor, copying, loans>>

\* One view of the lease is gone.
Drop(r, s) ==
    /\ Alive(r)
    /\ grip[r][s] > 1 /\ opened[r].slot # s
    /\ grip' = [grip EXCEPT ![r][s] = @ - 1]
    /\ IF Fault = "release_with_a_view" /\ grip[r][s] > 2 THEN Tell(r, "release", s) ELSE UNCHANGED notices
    /\ UNCHANGED <<writerVars, content, entries, posts, bodies, life, sleep, cursor, opened, copying, got, loans>>

\* R4: tell the writer; from here on the reader cannot look any more.
Release(r, s) ==
    /\ life[r] \in {"in", "left"}
    /\ grip[r][s] = 1
    /\ Tell(r, "release", s)
    /\ grip' = [grip EXCEPT ![r][s] = 0]
    /\ loans' = {l \in loans : <<l.reader, l.buffer>> # <<r, s>>}
    /\ UNCHANGED <<writerVars, content, entries, posts, bodies, life, sleep, cursor, opened, copying, got>>

\* R6: bodies arrive in order; one that nobody waits for any more is dropped by its number.
TakeBody(r) ==
    /\ Runs(r) /\ bodies[r] # <<>>
    /\ LET n == Head(bodies[r]) IN
       /\ r \in Local => opened[r].kind = "body" /\ n = opened[r].seq
       \* Sent without copying, the bytes are what the caller's memory holds now.
       /\ \E v \in IF Fault = "body_not_copied" /\ (sequence > n \/ step = "idle") THEN {n, Torn} ELSE {n} :
            got' = [got EXCEPT ![r] = IF n > Messages THEN @ ELSE v]
       /\ life' = [life EXCEPT ![r] = IF n > Messages THEN "left" ELSE @]
    /\ bodies' = [bodies EXCEPT ![r] = Tail(@)]
    /\ IF r \in Local THEN opened' = [opened EXCEPT ![r] = Nothing] /\ UNCHANGED cursor
       ELSE cursor' = [cursor EXCEPT ![r] = @ + 1] /\ UNCHANGED opened
    /\ UNCHANGED <<writerVars, content, entries, posts, notices, sleep, copying, grip, loans>>

\* R7: the wait for a body runs out; the reader still waits for that body when it comes back.
TimeOut(r) ==
    /\ life[r] = "in" /\ opened[r].kind = "body"
    /\ opened' = [opened EXCEPT ![r] = IF Fault = "forget_pending_body" THEN Nothing ELSE @]
    /\ UNCHANGED <<writerVars, sharedVars, life, sleep, cursor, copying, grip, got, loans>>

\* `close` of a reader; leases live on. One that closes while it joins has sent its greeting, and is let in first.
Leave(r) ==
    /\ r \in Leavers /\ life[r] = "in" /\ (r \in Local => Idle(r) /\ sleep[r] = "awake")
    /\ life' = [life EXCEPT ![r] = "left"]
    /\ Tell(r, "leave", NoSlot)
    /\ loans' = {l \in loans : ~(l.reader = r /\ l.version > cursor[r])}
    /\ UNCHANGED <<writerVars, content, entries, posts, bodies, sleep, cursor, opened, copying, grip, got>>

\* The writer is gone and nothing is left to receive: what comes after a body that was lost is not received either.
FindWriterDead(r) ==
    /\ writer = "dead"
    /\ \/ life[r] = "joining" /\ Fault # "joiner_waits_for_the_dead"
       \/ life[r] = "in" /\ IF r \in Remote THEN bodies[r] = <<>>
                            ELSE IF Idle(r) THEN posts[r] = 0 /\ sleep[r] # "checking"
                            ELSE opened[r].kind = "body" /\ bodies[r] = <<>>
    /\ IF Fault = "skip_lost_body" /\ r \in Local /\ ~Idle(r)
       THEN opened' = [opened EXCEPT ![r] = Nothing] /\ UNCHANGED life
       ELSE life' = [life EXCEPT ![r] = "left"] /\ UNCHANGED opened
    /\ UNCHANGED <<writerVars, sharedVars, sleep, cursor, copying, grip, got, loans>>

\* A kill has been sent; the process may still be in the middle of a read. One that is killed while it joins has sent
\* its greeting, and is let in and found dead like any other.
Kill(r) ==
    /\ r \in Mortal /\ life[r] \in {"in", "left"}
    /\ life' = [life EXCEPT ![r] = "dying"]
    /\ UNCHANGED <<writerVars, sharedVars, sleep, cursor, opened, copying, grip, got, loans>>

\* The kernel has taken the process's memory away; this is what the pidfd tells.
Exit(r) ==
    /\ life[r] = "dying"
    /\ life' = [life EXCEPT ![r] = "dead"]
    /\ IF r \in Remote THEN UNCHANGED <<opened, copying, grip, loans, sleep>> ELSE
       /\ opened' = [opened EXCEPT ![r] = Nothing]
       /\ copying' = [copying EXCEPT ![r] = -1]
       /\ grip' = [grip EXCEPT ![r] = [s \in Slots |-> 0]]
       /\ sleep' = [sleep EXCEPT ![r] = "awake"]
       /\ loans' = {l \in loans : l.reader # r}
    /\ UNCHANGED <<writerVars, sharedVars, cursor, got>>

\* Nothing is left to do.
Done ==
    /\ writer # "up"
    /\ \A r \in Readers : life[r] \in {"out", "joining", "left", "dead"}
    /\ UNCHANGED vars

-----------------------------------------------------------------------------
WriterNext ==
    \/ \E s \in Slots : Loan(s)
    \/ \E s \in Slots : DropLoan(s)
    \/ \E s \in Slots : Take(s)
    \/ \E s \in Slots : BeginFill(s)
    \/ \E s \in Slots : EndFill(s)
    \/ \E s \in Slots : Publish(s)
    \/ Overflow
    \/ \E r \in Readers : SendBody(r)
    \/ \E r \in Local : Post(r)
    \/ Return
    \/ Close
    \/ \E r \in Readers : Admit(r)
    \/ \E r \in Local : HearRelease(r)
    \/ \E r \in Readers : HearLeave(r)
    \/ \E r \in Readers : Exclude(r)
    \/ \E r \in Readers : Vacate(r)
    \/ \E s \in Slots : Recycle(s)
    \/ KillWriter

Next ==
    \/ WriterNext
    \/ \E r \in Readers : LoseBody(r)
    \/ \E r \in Readers : Join(r)
    \/ \E r \in Local : BeginSleep(r)
    \/ \E r \in Local : EndSleep(r)
    \/ \E r \in Local : Open(r)
    \/ \E r \in Local : BeginCopy(r)
    \/ \E r \in Local : EndCopy(r)
    \/ \E r \in Local : Lease(r)
    \/ \E r \in Local, s \in Slots : Drop(r, s)
    \/ \E r \in Local, s \in Slots : Release(r, s)
    \/ \E r \in Readers : TakeBody(r)
    \/ \E r \in Local : TimeOut(r)
    \/ \E r \in Readers : Leave(r)
    \/ \E r \in Readers : FindWriterDead(r)
    \/ \E r \in Readers : Kill(r)
    \/ \E r \in Readers : Exit(r)
    \/ Done

Safety == Init /\ [][Next]_vars

\* Whoever can go on does; kills, leaving, joining, lending out and slow sockets need not happen.
Fairness ==
    /\ \A s \in Slots : WF_vars(Take(s)) /\ WF_vars(BeginFill(s)) /\ WF_vars(EndFill(s))
                      /\ WF_vars(Publish(s)) /\ WF_vars(Recycle(s)) /\ WF_vars(DropLoan(s))
    /\ Fault # "no_overflow" => WF_vars(Overflow)
    /\ WF_vars(Return) /\ WF_vars(Close)
    /\ \A r \in Readers : WF_vars(SendBody(r)) /\ WF_vars(TakeBody(r)) /\ WF_vars(Admit(r))
                        /\ WF_vars(Exit(r)) /\ (Fault # "writer_death_unnoticed" => WF_vars(FindWriterDead(r)))
                        /\ (Fault # "death_unnoticed" => WF_vars(Exclude(r)))
                        /\ WF_vars(HearLeave(r))
    /\ \A r \in Local : WF_vars(Post(r)) /\ WF_vars(HearRelease(r))
                      /\ WF_vars(EndSleep(r)) /\ WF_vars(Open(r)) /\ WF_vars(EndCopy(r))
                      /\ WF_vars(BeginCopy(r) \/ Lease(r))
                      /\ \A s \in Slots : WF_vars(Release(r, s)) /\ (r \notin Keepers => WF_vars(Drop(r, s)))

Spec == Safety /\ Fairness

-----------------------------------------------------------------------------
\* R1, R4, R5, R8: whoever was promised a message in a slot finds it there, whenever it looks.
NoTornRead == \A l \in loans : content[l.buffer] = l.version

\* R8: a slot is not reused while a tensor of the writer lives in it.
LoansAreKept == \A s \in loaned : slot[s] # "free"

\* R2, R3: the entry a reader opens is the next one.
EntryIsDue == \A r \in Local : Idle(r) \/ opened[r].seq = cursor[r]

\* R6, R7: what was received last is whole, and is what the reader had to receive next: none skipped, none doubled.
InSequence ==
    \A r \in Readers : life[r] = "in" =>
        got[r] = IF r \in Remote \/ Idle(r) THEN cursor[r] ELSE cursor[r] - 1

\* Who has ended does nothing more: neither a writer that has closed or died, nor a reader whose process is gone.
OnlyTheLivingAct ==
    [][/\ writer # "up" => UNCHANGED <<writerVars, content, entries>>
       /\ \A r \in Readers :
            /\ writer # "up" /\ life'[r] = "out" => life[r] = "out"
            /\ life[r] \in {"out", "dead"} =>
                 /\ life'[r] \in {life[r], "out", "joining"}
                 /\ cursor'[r] = cursor[r] /\ got'[r] = got[r] /\ Len(notices'[r]) <= Len(notices[r])
                 /\ r \in Local => grip'[r] = grip[r] /\ opened'[r] = opened[r] /\ copying'[r] = copying[r]
      ]_vars

\* Every message reaches every reader that stays, and so every publication completes.
EveryMessageArrives ==
    \A r \in Readers : (life[r] = "in") ~> (got[r] = Messages \/ life[r] # "in" \/ writer = "dead")

\* Whatever readers keep or die, the writer gets to its end.
WriterFinishes == <>(writer # "up")

\* A dead reader is forgotten in bounded time, unless the writer has gone itself.
DeathIsNoticed == \A r \in Readers : (life[r] = "dead") ~> (life[r] # "dead" \/ writer # "up" \/ sequence >= Messages)

\* No reader waits for a writer that has gone. (One that greets a writer that has closed hears no answer.)
NobodyWaitsForTheDead ==
    \A r \in Readers : (writer # "up") ~> (life[r] # "in" /\ (life[r] = "joining" => writer = "closed"))

Lifecycle == INSTANCE BufferLifecycle WITH
    Buffers <- Slots, Holders <- {Writer}, Readers <- Local, Versions <- Versions, Torn <- Torn,
    FreeLimit <- Cardinality(Slots), Fault <- "none",
    phase <- [s \in Slots |->
        CASE slot[s] = "free" -> "Free" [] slot[s] = "held" -> "Held" [] slot[s] = "writing" -> "Writing"
          [] slot[s] = "lent" -> IF s \in loaned THEN "Held" ELSE "Lent"],
    hands <- [s \in Slots |->
        IF slot[s] \in {"held", "writing"} \/ (slot[s] = "lent" /\ s \in loaned) THEN {Writer} ELSE {}]

RefinesBufferLifecycle == Lifecycle!Safety

THEOREM Safety => [](TypeOK /\ NoTornRead /\ LoansAreKept /\ EntryIsDue /\ InSequence)
THEOREM Safety => OnlyTheLivingAct /\ RefinesBufferLifecycle
THEOREM Spec => EveryMessageArrives /\ WriterFinishes /\ DeathIsNoticed /\ NobodyWaitsForTheDead
=============================================================================
