-------------------------------- MODULE Post --------------------------------
(* A small post office, to try the tools on: records, functions, sequences,   *)
(* sets, model values, LET, IF, CASE, a quantifier over a set that depends    *)
(* on the state, and (in PostOffice) EXTENDS and INSTANCE.                    *)
(* To see it fail: Fault = "lose" violates NothingLost.                       *)
EXTENDS Integers, Sequences, FiniteSets
CONSTANTS People,   \* who writes and reads letters
          Nobody,   \* a model value
          Limit,    \* letters in the box at most
          Fault     \* "none", or the mutant switched on

VARIABLES box,      \* the letters under way, oldest first
          sent,     \* how many letters a person has sent
          desk,     \* the letter on a person's desk, or Nobody
          seen      \* the set of <<from, to>> pairs delivered

vars == <<box, sent, desk, seen>>

Letter == [from : People, to : People, kind : {"plain", "urgent"}]

BoxTypeInv  == box \in Seq(Letter) /\ Len(box) <= Limit
SentTypeInv == sent \in [People -> 0..2]
DeskTypeInv == desk \in [People -> Letter \cup {Nobody}]
SeenTypeInv == seen \subseteq People \X People
TypeOK == BoxTypeInv /\ SentTypeInv /\ DeskTypeInv /\ SeenTypeInv

Init == /\ box = <<>>
        /\ sent = [p \in People |-> 0]
        /\ desk = [p \in People |-> Nobody]
        /\ seen = {}

Kind(n) == CASE n = 0 -> "plain"
             [] OTHER -> "urgent"

Send(p, q) ==
    LET letter == [from |-> p, to |-> q, kind |-> Kind(sent[p])]
    IN  /\ p # q
        /\ sent[p] < 2
        /\ Len(box) < Limit
        /\ sent' = [sent EXCEPT ![p] = @ + 1]
        /\ box' = IF letter.kind = "urgent" THEN <<letter>> \o box ELSE Append(box, letter)
        /\ UNCHANGED <<desk, seen>>

Deliver(letter) ==
    /\ box # <<>>
    /\ Head(box) = letter
    /\ desk[letter.to] = Nobody
    /\ box' = Tail(box)
    /\ desk' = [desk EXCEPT ![letter.to] = letter]
    /\ UNCHANGED <<sent, seen>>

Read(p) ==
    /\ desk[p] # Nobody
    /\ seen' = IF Fault = "lose" /\ desk[p].kind = "plain" THEN seen
               ELSE seen \cup {<<desk[p].from, p>>}
    /\ desk' = [desk EXCEPT ![p] = Nobody]
    /\ UNCHANGED <<box, sent>>

Done == box = <<>> /\ (\A p \in People : sent[p] = 2 /\ desk[p] = Nobody) /\ UNCHANGED vars

Clerk(p) == \/ Read(p)
            \/ \E q \in People : Send(p, q)

Next == \/ \E p \in People : Clerk(p)
        \/ \E letter \in {box[i] : i \in DOMAIN box} : Deliver(letter)
        \/ Done

Spec == Init /\ [][Next]_vars /\ WF_vars(Next)

UnderWay == {<<box[i].from, box[i].to>> : i \in DOMAIN box}
            \cup {<<desk[p].from, p>> : p \in {q \in People : desk[q] # Nobody}}
NothingLost == \A p \in People : sent[p] > 0 =>
                 \E q \in People : <<p, q>> \in seen \cup UnderWay
InBox(p) == Cardinality({i \in DOMAIN box : box[i].to = p})
EverythingRead == <>[](box = <<>>)
=============================================================================
