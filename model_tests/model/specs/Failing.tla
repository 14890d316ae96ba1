------------------------------- MODULE Failing -------------------------------
(* One way to fail for each value of Fault; "none" holds, with a vacuous action. *)
EXTENDS Integers, Sequences
CONSTANT Fault
VARIABLES n, mode
vars == <<n, mode>>

ASSUME FaultIsKnown == Fault # "assumption"

Init == n = 0 /\ mode = "run"

Count == /\ mode = "run"
         /\ n < 3
         /\ n' = n + 1
         /\ mode' = IF Fault = "evaluation" /\ n = 2 THEN Head(<<>>) ELSE mode

Wrap == /\ mode = "run"
        /\ n = 3
        /\ Fault # "deadlock"
        /\ n' = IF Fault = "invariant" THEN 4 ELSE 0
        /\ UNCHANGED mode

Rest == /\ Fault = "stutter"
        /\ mode = "run"
        /\ n = 1
        /\ mode' = "rest"
        /\ UNCHANGED n

Skip == /\ Fault = "lasso"
        /\ n = 2
        /\ n' = 1
        /\ UNCHANGED mode

Never == n > 7 /\ n' = 7 /\ UNCHANGED mode

Idle == mode = "rest" /\ UNCHANGED vars

Next == Count \/ Wrap \/ Rest \/ Skip \/ Never \/ Idle
Spec == Init /\ [][Next]_vars /\ WF_vars(Next)

Small == n <= 3
Wrong == n > 0
Returns == []<>(n = 0)
Climbs == [][n' # n => (n' = n + 1 \/ n' = 0)]_n
=============================================================================
