------------------------------- MODULE WakeUp -------------------------------
(* Going to sleep and being woken, without a clock.

   The problem: a message and the news of it travel by two ways. A reader that looks, finds nothing and goes to sleep can
   miss the news of what came in between; a writer that waits for slots to come back can, too. A recheck every few
   seconds hides that, and costs seconds (vllm 45224).

   One slot, so that each side waits for the other in every round.
   Rules
     U1  the news of a message is a post on the reader's own semaphore, given after the message is there;
     U2  a reader takes one post a message; it sleeps only where no post is (one atomic step of sem_wait);
     U3  a reader lets a slot go by a notice, and rings the writer's doorbell after it;
     U4  the writer hears all notices there are; it sleeps only where the doorbell has not rung since.

   Not modelled: what is in the slot (BroadcastRing), the order of memory (RingMemory: post releases, wait acquires),
   processes that die; a wait that runs out and is begun again is no step.

   To see it fail: Fault = "news_not_kept" loses a wake-up; Fault = "recheck_masks" loses it and sleeps on until the
   next recheck.                                                                                                      *)
EXTENDS Integers, FiniteSets

CONSTANTS Readers, Messages, Fault

VARIABLE published  \* messages that are there
PublishedTypeInv == published \in 0..Messages

VARIABLE untold     \* readers that have yet to be told of the last one
UntoldTypeInv == untold \subseteq Readers

VARIABLE posts      \* the value of each reader's semaphore
PostsTypeInv == posts \in [Readers -> 0..Messages]

VARIABLE read       \* messages each reader has read
ReadTypeInv == read \in [Readers -> 0..Messages]

VARIABLE reader     \* "going": found nothing, about to sleep; "releasing": has read, slot not let go
ReaderTypeInv == reader \in [Readers -> {"awake", "going", "asleep", "releasing", "ringing"}]

VARIABLE notices    \* slots let go, each reader, not yet heard of
NoticesTypeInv == notices \in [Readers -> 0..Messages]

VARIABLE doorbell   \* the value of the writer's semaphore
DoorbellTypeInv == doorbell \in 0..(Messages * Cardinality(Readers))

VARIABLE heard      \* notices the writer has heard, of each reader
HeardTypeInv == heard \in [Readers -> 0..Messages]

VARIABLE writer
WriterTypeInv == writer \in {"awake", "going", "asleep"}

vars == <<published, untold, posts, read, reader, notices, doorbell, heard, writer>>

TypeOK ==
    /\ PublishedTypeInv /\ UntoldTypeInv /\ PostsTypeInv /\ ReadTypeInv /\ ReaderTypeInv
    /\ NoticesTypeInv /\ DoorbellTypeInv /\ HeardTypeInv /\ WriterTypeInv

Init ==
    /\ published = 0 /\ untold = {} /\ doorbell = 0 /\ writer = "awake"
    /\ posts = [r \in Readers |-> 0] /\ read = [r \in Readers |-> 0] /\ reader = [r \in Readers |-> "awake"]
    /\ notices = [r \in Readers |-> 0] /\ heard = [r \in Readers |-> 0]

\* News that only a sleeper gets is looked for in the message itself.
NewsNotKept == Fault \in {"news_not_kept", "recheck_masks"}
HasNews(r)  == IF NewsNotKept THEN published > read[r] ELSE posts[r] > 0

-----------------------------------------------------------------------------
\* U1
Publish ==
    /\ writer = "awake" /\ untold = {} /\ published < Messages
    /\ \A r \in Readers : heard[r] = published
    /\ published' = published + 1
    /\ untold' = Readers
    /\ UNCHANGED <<posts, read, reader, notices, doorbell, heard, writer>>

Tell(r) ==
    /\ writer = "awake" /\ r \in untold
    /\ untold' = untold \ {r}
    /\ IF NewsNotKept
       THEN /\ reader' = [reader EXCEPT ![r] = IF @ = "asleep" THEN "awake" ELSE @]
            /\ UNCHANGED posts
       ELSE /\ posts' = [posts EXCEPT ![IF Fault = "one_post_for_all" THEN CHOOSE q \in Readers : TRUE ELSE r] =
                            IF Fault = "post_dropped_when_idle" /\ reader[r] = "asleep" THEN @
                            ELSE IF Fault = "one_post_for_all" /\ @ > 0 THEN @ ELSE @ + 1]
            /\ UNCHANGED reader
    /\ UNCHANGED <<published, read, notices, doorbell, heard, writer>>

\* U4
Hear(r) ==
    /\ writer = "awake" /\ notices[r] > 0
    /\ notices' = [notices EXCEPT ![r] = @ - 1]
    /\ heard' = [heard EXCEPT ![r] = @ + 1]
    /\ UNCHANGED <<published, untold, posts, read, reader, doorbell, writer>>

WriterFindsNothing ==
    /\ writer = "awake" /\ untold = {} /\ published < Messages
    /\ \E r \in Readers : heard[r] < published
    /\ \A r \in Readers : notices[r] = 0
    /\ writer' = "going"
    /\ UNCHANGED <<published, untold, posts, read, reader, notices, doorbell, heard>>

WriterSleeps ==
    /\ writer = "going"
    /\ writer' = "asleep"
    /\ doorbell' = IF Fault = "doorbell_cleared_before_sleep" THEN 0 ELSE doorbell
    /\ UNCHANGED <<published, untold, posts, read, reader, notices, heard>>

\* sem_wait returns, at once if the bell has rung already.
WriterWakes ==
    /\ writer = "asleep" /\ doorbell > 0
    /\ doorbell' = doorbell - 1
    /\ writer' = "awake"
    /\ UNCHANGED <<published, untold, posts, read, reader, notices, heard>>

-----------------------------------------------------------------------------
\* U2
Read(r) ==
    /\ reader[r] = "awake" /\ HasNews(r)
    /\ posts' = [posts EXCEPT ![r] = IF NewsNotKept THEN @ ELSE @ - 1]
    /\ read' = [read EXCEPT ![r] = @ + 1]
    /\ reader' = [reader EXCEPT ![r] = IF Fault = "doorbell_before_notice" THEN "ringing" ELSE "releasing"]
    /\ UNCHANGED <<published, untold, notices, doorbell, heard, writer>>

FindNothing(r) ==
    /\ reader[r] = "awake" /\ read[r] < Messages /\ ~HasNews(r)
    /\ reader' = [reader EXCEPT ![r] = "going"]
    /\ UNCHANGED <<published, untold, posts, read, notices, doorbell, heard, writer>>

Sleep(r) ==
    /\ reader[r] = "going"
    /\ reader' = [reader EXCEPT ![r] = "asleep"]
    /\ UNCHANGED <<published, untold, posts, read, notices, doorbell, heard, writer>>

\* sem_wait returns, at once if a post is there already.
Wake(r) ==
    /\ reader[r] = "asleep" /\ posts[r] > 0
    /\ reader' = [reader EXCEPT ![r] = "awake"]
    /\ UNCHANGED <<published, untold, posts, read, notices, doorbell, heard, writer>>

Recheck(r) ==
    /\ Fault = "recheck_masks" /\ reader[r] = "asleep"
    /\ reader' = [reader EXCEPT ![r] = "awake"]
    /\ UNCHANGED <<published, untold, posts, read, notices, doorbell, heard, writer>>

\* U3
Release(r) ==
    /\ reader[r] = "releasing"
    /\ notices' = [notices EXCEPT ![r] = @ + 1]
    /\ reader' = [reader EXCEPT ![r] = IF Fault = "doorbell_before_notice" THEN "awake" ELSE "ringing"]
    /\ UNCHANGED <<published, untold, posts, read, doorbell, heard, writer>>

Ring(r) ==
    /\ reader[r] = "ringing"
    /\ doorbell' = doorbell + 1
    /\ reader' = [reader EXCEPT ![r] = IF Fault = "doorbell_before_notice" THEN "releasing" ELSE "awake"]
    /\ UNCHANGED <<published, untold, posts, read, notices, heard, writer>>

-----------------------------------------------------------------------------
AllRead == \A r \in Readers : read[r] = Messages /\ reader[r] = "awake"
Done == AllRead /\ UNCHANGED vars

Next ==
    \/ Publish
    \/ \E r \in Readers : Tell(r)
    \/ \E r \in Readers : Hear(r)
    \/ WriterFindsNothing
    \/ WriterSleeps
    \/ WriterWakes
    \/ \E r \in Readers : Read(r)
    \/ \E r \in Readers : FindNothing(r)
    \/ \E r \in Readers : Sleep(r)
    \/ \E r \in Readers : Wake(r)
    \/ \E r \in Readers : Recheck(r)
    \/ \E r \in Readers : Release(r)
    \/ \E r \in Readers : Ring(r)
    \/ Done

\* Whoever is not asleep goes on, and a semaphore with a post lets its sleeper go: nothing here waits for a clock.
Fairness ==
    /\ WF_vars(Publish) /\ WF_vars(WriterFindsNothing) /\ WF_vars(WriterSleeps) /\ WF_vars(WriterWakes)
    /\ \A r \in Readers :
        /\ WF_vars(Tell(r)) /\ WF_vars(Hear(r))
        /\ WF_vars(Read(r)) /\ WF_vars(FindNothing(r)) /\ WF_vars(Sleep(r)) /\ WF_vars(Wake(r))
        /\ WF_vars(Recheck(r)) /\ WF_vars(Release(r)) /\ WF_vars(Ring(r))

Spec == Init /\ [][Next]_vars /\ Fairness

-----------------------------------------------------------------------------
\* U1, U2: a reader that sleeps while a message is there is about to be woken, or still to be told.
NobodySleepsOverAMessage ==
    \A r \in Readers : reader[r] = "asleep" /\ published > read[r] => posts[r] > 0 \/ r \in untold

\* U3, U4
WriterDoesNotSleepOverANotice ==
    writer = "asleep" /\ (\E r \in Readers : notices[r] > 0)
        => doorbell > 0 \/ \E r \in Readers : reader[r] = "ringing"

EveryMessageRead == <>AllRead

THEOREM Spec => [](NobodySleepsOverAMessage /\ WriterDoesNotSleepOverANotice) /\ EveryMessageRead
=============================================================================
