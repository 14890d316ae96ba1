----------------------------- MODULE Outcomes -----------------------------
\* Every outcome of some programs, printed: the values of all loads in the order of the program, then the final words.
EXTENDS MemoryModel

CONSTANTS Cases,    \* sequence of [model |-> name, programs |-> one a thread]
          Ordered   \* for each of them, what each instruction waits for

VARIABLES case, now

Words == {"x", "y", "z"}
Zero  == [w \in Words |-> 0]
P     == Cases[case].programs

Init == case \in DOMAIN Cases /\ now = {Start(P, Zero)}

Choices(m) == Performable(P, Ordered[case], m)
Over == \A m \in now : Choices(m) = {}

PerformAny ==
    /\ ~Over
    /\ now' = UNION { {Perform(P, m, c[1], c[2]) : c \in Choices(m)} : m \in now }
    /\ UNCHANGED case

Spec == Init /\ [][PerformAny]_<<case, now>>

Loads(t) == SelectSeq([i \in 1..Len(P[t]) |-> i], LAMBDA i : P[t][i].op = "load")
Values(m) ==
    LET of(t) == [k \in 1..Len(Loads(t)) |-> m.got[t][Loads(t)[k]].val]
        upto[t \in 0..Len(P)] == IF t = 0 THEN << >> ELSE upto[t - 1] \o of(t)
    IN upto[Len(P)] \o << m.mem["x"].val, m.mem["y"].val, m.mem["z"].val >>

Report == Over => \A m \in now : PrintT(<<"outcome", case, Values(m)>>)
=============================================================================
