-------------------------------- MODULE Doors --------------------------------
(* Next-state relations of many shapes over one pair of cells, to hold the    *)
(* walk through them to TLC.                                                  *)
EXTENDS Integers, TLC
CONSTANTS Top, Fault
VARIABLES left, right, open
vars == <<left, right, open>>

Left     == INSTANCE Cell WITH n <- left
Right(t) == INSTANCE Cell WITH n <- right, Top <- t

Init == left = 0 /\ right \in 0..1 /\ open = TRUE

Shut        == open /\ left = right /\ open' = FALSE /\ UNCHANGED <<left, right>>
Open        == ~open /\ open' = TRUE /\ UNCHANGED <<left, right>>
MoveLeft    == Left!Step /\ UNCHANGED <<right, open>>
MoveRight   == Right(Top)!Step /\ UNCHANGED <<left, open>>
Swap(a, b)  == left = a /\ right = b /\ left' = b /\ right' = a /\ UNCHANGED open
Pick(x)     == open /\ right' \in {x, x + 1} /\ right' <= Top /\ UNCHANGED <<left, open>>
Jump        == \E by \in 1..Top : left + by <= Top /\ left' = left + by /\ UNCHANGED <<right, open>>
Twice(A(_)) == \E x \in {0} : A(x)

Cells == {<<a, b>> \in (0..Top) \X (0..Top) : a < b}

NextIf    == IF open THEN MoveLeft \/ Shut ELSE Open
NextCase  == CASE ~open -> Open
               [] left < right -> MoveLeft
               [] OTHER -> MoveRight \/ Shut
NextGuard == left + right <= Top /\ (MoveLeft \/ MoveRight)
NextTuple == MoveLeft \/ \E <<a, b>> \in Cells : Swap(a, b)
NextLet   == LET both == {left, right} IN \E x \in both : Pick(x)
NextDeep  == Jump \/ (\E x, y \in 0..1 : x # y /\ Pick(x)) \/ MoveRight
NextHigh  == Twice(Pick) \/ MoveLeft
NextTwice == Jump \/ (\E by \in {left} : Pick(by))
NextPlain == \/ MoveLeft
             \/ left > 0 /\ left' = left - 1 /\ UNCHANGED <<right, open>>

LowEnough == left < 2
Same == left' # right
=============================================================================
