--------------------------- MODULE BufferLifecycle ---------------------------
(***************************************************************************)
(* The law, abstractly: a buffer may be overwritten only once nobody who   *)
(* was promised its old bytes can still read them.                         *)
(*                                                                         *)
(* A buffer goes round:                                                    *)
(*                                                                         *)
(*   Absent/Free --Take--> Held --BeginWrite, EndWrite--> Held             *)
(*        ^                  |                                             *)
(*        |                  +--Lend--> Held or Lent, with loans           *)
(*        +---- Recycle -----(no loan left)---------+                      *)
(*                                                                         *)
(* A loan is the interval in which one reader may look at the bytes at any *)
(* moment: Lend begins it, EndLoans ends it. A buffer is quiescent when no *)
(* loan on it is left. Rules:                                              *)
(*   R1  only its one holder writes a buffer, and only while quiescent;    *)
(*   R2  a reader is lent a whole version, and that version stays;         *)
(*   R3  a buffer leaves the holder's hand only to wait for its loans;     *)
(*   R4  a buffer is free again only when quiescent;                       *)
(*   R5  the free list is bounded, the surplus is dropped.                 *)
(*                                                                         *)
(* Not modelled: what the bytes mean, how a holder learns that a loan      *)
(* ended (that is what the protocols are about), memory order.             *)
(*                                                                         *)
(* Refined by PayloadReuse, BroadcastRing, StageHandoff and HostStaging.   *)
(*                                                                         *)
(* To see it fail: Fault = "write_while_lent" breaks NoTornRead in five    *)
(* steps; the manifest lists the others.                                   *)
(***************************************************************************)
EXTENDS Naturals, FiniteSets

CONSTANTS
    Buffers,    \* pieces of memory that are written again and again
    Holders,    \* those who may take and write them
    Readers,    \* those who may be lent one
    Versions,   \* what may lie in a buffer as a whole
    Torn,       \* what lies there while it is being written, and before
    FreeLimit,  \* how many buffers the free list keeps
    Fault       \* "none", or the named fault switched on

VARIABLE phase      \* where each buffer is on its way round
PhaseTypeInv == phase \in [Buffers -> {"Absent", "Free", "Held", "Writing", "Lent"}]

VARIABLE hands      \* who holds each buffer
HandsTypeInv == hands \in [Buffers -> SUBSET Holders]

VARIABLE content    \* the version that lies in each buffer now
ContentTypeInv == content \in [Buffers -> Versions \union {Torn}]

VARIABLE loans      \* which reader was promised which version of which buffer
LoansTypeInv == loans \subseteq [buffer : Buffers, reader : Readers, version : Versions]

vars == <<phase, hands, content, loans>>

TypeOK == PhaseTypeInv /\ HandsTypeInv /\ ContentTypeInv /\ LoansTypeInv

LoansOn(b) == {l \in loans : l.buffer = b}
Quiescent(b) == LoansOn(b) = {}
FreeBuffers == {b \in Buffers : phase[b] = "Free"}

Init ==
    /\ phase \in [Buffers -> {"Absent", "Free", "Held"}]
    /\ Cardinality(FreeBuffers) <= FreeLimit
    /\ hands \in [Buffers -> {{}} \union {{h} : h \in Holders}]
    /\ \A b \in Buffers : (hands[b] # {}) <=> (phase[b] = "Held")
    /\ content = [b \in Buffers |-> Torn]
    /\ loans = {}

\* R1: a buffer has one holder.
Take(b, h) ==
    /\ \/ phase[b] \in {"Absent", "Free"}
       \/ Fault = "take_held" /\ phase[b] = "Held"
    /\ phase' = [phase EXCEPT ![b] = "Held"]
    /\ hands' = [hands EXCEPT ![b] = @ \union {h}]
    /\ UNCHANGED <<content, loans>>

\* R1: the holder writes, and only a quiescent buffer.
BeginWrite(b) ==
    /\ phase[b] = "Held"
    /\ Quiescent(b) \/ Fault = "write_while_lent"
    /\ phase' = [phase EXCEPT ![b] = "Writing"]
    /\ content' = [content EXCEPT ![b] = Torn]
    /\ UNCHANGED <<hands, loans>>

EndWrite(b, v) ==
    /\ phase[b] = "Writing"
    /\ phase' = [phase EXCEPT ![b] = "Held"]
    /\ content' = [content EXCEPT ![b] = v]
    /\ UNCHANGED <<hands, loans>>

\* R2, R3: lend what lies there to some readers (none: only let go); keep it in hand to lend more, or let go.
Lend(b) ==
    /\ phase[b] = "Held"
    /\ \E rs \in SUBSET Readers, letGo \in BOOLEAN :
        /\ content[b] # Torn \/ rs = {}
        /\ rs # {} \/ letGo
        /\ loans' = loans \union {[buffer |-> b, reader |-> r, version |-> content[b]] : r \in rs}
        /\ phase' = [phase EXCEPT ![b] = IF letGo THEN "Lent" ELSE "Held"]
        /\ hands' = [hands EXCEPT ![b] = IF letGo THEN {} ELSE @]
    /\ UNCHANGED content

\* Readers end loans when they please, several at once if they go together.
EndLoans ==
    /\ loans' \in SUBSET loans
    /\ loans' # loans
    /\ UNCHANGED <<phase, hands, content>>

\* R4, R5: a quiescent buffer is reusable, or dropped if enough are free.
Recycle(b) ==
    /\ phase[b] \in {"Held", "Lent"}
    /\ Quiescent(b)
    /\ Fault # "never_recycled"
    /\ \/ /\ Cardinality(FreeBuffers) < FreeLimit \/ Fault = "free_list_grows"
          /\ phase' = [phase EXCEPT ![b] = "Free"]
       \/ phase' = [phase EXCEPT ![b] = "Absent"]
    /\ hands' = [hands EXCEPT ![b] = {}]
    /\ UNCHANGED <<content, loans>>

\* The pool is closed or shrinks.
Discard(bs) ==
    /\ bs # {}
    /\ \A b \in bs : phase[b] = "Free"
    /\ phase' = [b \in Buffers |-> IF b \in bs THEN "Absent" ELSE phase[b]]
    /\ UNCHANGED <<hands, content, loans>>

Next ==
    \/ \E b \in Buffers, h \in Holders : Take(b, h)
    \/ \E b \in Buffers : BeginWrite(b)
    \/ \E b \in Buffers, v \in Versions : EndWrite(b, v)
    \/ \E b \in Buffers : Lend(b)
    \/ EndLoans
    \/ \E b \in Buffers : Recycle(b)
    \/ \E bs \in SUBSET Buffers : Discard(bs)

Safety == Init /\ [][Next]_vars

\* Readers end their loans, and the owner looks again at what it lent.
Fairness ==
    /\ \A b \in Buffers, r \in Readers : Fault # "reader_keeps" => 
            WF_vars(EndLoans /\ \E l \in loans \ loans' : l.buffer = b /\ l.reader = r)
    /\ \A b \in Buffers : WF_vars(phase[b] = "Lent" /\ Recycle(b))

Spec == Safety /\ Fairness

-----------------------------------------------------------------------------
\* R2: whoever was lent version v reads v, whenever it looks.
NoTornRead == \A l \in loans : content[l.buffer] = l.version

\* R1: no buffer is in two hands, and none is free and held.
OneHand ==
    \A b \in Buffers :
        /\ Cardinality(hands[b]) <= 1
        /\ (hands[b] # {}) <=> (phase[b] \in {"Held", "Writing"})

\* R5
PoolBounded == Cardinality(FreeBuffers) <= FreeLimit

EveryLoanEnds ==
    \A b \in Buffers, r \in Readers :
        (\E l \in loans : l.buffer = b /\ l.reader = r)
            ~> ~(\E l \in loans : l.buffer = b /\ l.reader = r)

\* R4: what was lent comes back.
LentIsReusable == \A b \in Buffers : (phase[b] = "Lent") ~> (phase[b] \in {"Free", "Absent"})

THEOREM Safety => [](TypeOK /\ NoTornRead /\ OneHand /\ PoolBounded)
THEOREM Spec => EveryLoanEnds /\ LentIsReusable
=============================================================================
