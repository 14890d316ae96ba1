------------------------------ MODULE Litmus ------------------------------
(* The memory models of MemoryModel against the literature: the published litmus shapes, each with no ordering, with
   acquire and release, with sequentially consistent atomics, with full fences, and with what Python offers instead of a
   fence, on SC, TSO and ARM.

   A row is a shape, a strength and a model. Its behaviours are explored as sets: `now` holds every machine that some
   interleaving reaches after as many accesses, so that "allowed" and "forbidden" are both facts about one state, and a
   wrong verdict of either kind violates `AgreesWithLiterature`.

   Sources: x86-TSO: Owens, Sarkar, Sewell (TPHOLs 2009). ARMv8: aarch64.cat and Pulte, Flur, Deacon et al. (POPL 2018).
   Shapes and their names: Alglave, Maranget, Tautschnig, "Herding cats" (TOPLAS 2014). ARMv8 is multi-copy atomic:
   IRIW and WRC with dependencies are forbidden, which the older, non-atomic ARM and POWER models allow.

   Not modelled: see MemoryModel.

   To see it fail: Fault = "acquire_ignored" (models/manifest.toml names the others).                                *)
EXTENDS MemoryModel

CONSTANTS Models,       \* memory models to check, a subset of {"sc", "tso", "arm"}
          Strengths     \* strengths to check, a subset of DOMAIN Allowed["sc"]

------------------------------------------------------------------------------------------------------------------------
(* The nine shapes: two accesses a thread, `s` says what strengthens them.                                            *)

Marked(s, i) ==
    CASE s = "acquire_release" -> IF Reads(i) THEN AcquirePC(i) ELSE Release(i)
      [] s = "sc_atomics"      -> IF Reads(i) THEN Acquire(i) ELSE Release(i)
      [] OTHER                 -> i

Between(s) ==
    CASE s = "full_fence"      -> << Fence("full") >>
      [] s = "lock"            -> LockPair("acquire_pc")    \* what C11 promises of a lock
      [] s = "lock_aarch64"    -> LockPair("acquire")      \* what LDAXR, STLR give
      [] s = "system_call"     -> << Fence("context") >>    \* exception entry and return synchronise context
      [] OTHER                 -> << >>

Two(s, a, b) == << Marked(s, a) >> \o Between(s) \o << Marked(s, b) >>
One(s, a)    == << Marked(s, a) >>

W(x, v) == Store(x, v)
R(x)    == Load(x)
Zero    == [x \in {"x", "y", "z"} |-> 0]

\* A condition: `regs` values of loads as <<thread, position, value>>, position 0 the thread's last; `mem` final words.
Shape(ps, regs, mem) == [programs |-> ps, regs |-> regs, mem |-> mem]

Shapes(s) ==
    [ MP   |-> Shape(<< Two(s, W("x", 1), W("y", 1)), Two(s, R("y"), R("x")) >>, {<<2, 1, 1>>, <<2, 0, 0>>}, {}),
      SB   |-> Shape(<< Two(s, W("x", 1), R("y")), Two(s, W("y", 1), R("x")) >>, {<<1, 0, 0>>, <<2, 0, 0>>}, {}),
      LB   |-> Shape(<< Two(s, R("x"), W("y", 1)), Two(s, R("y"), W("x", 1)) >>, {<<1, 1, 1>>, <<2, 1, 1>>}, {}),
      S    |-> Shape(<< Two(s, W("x", 2), W("y", 1)), Two(s, R("y"), W("x", 1)) >>, {<<2, 1, 1>>}, {<<"x", 2>>}),
      R    |-> Shape(<< Two(s, W("x", 1), W("y", 1)), Two(s, W("y", 2), R("x")) >>, {<<2, 0, 0>>}, {<<"y", 2>>}),
      _2_2W |-> Shape(<< Two(s, W("x", 1), W("y", 2)), Two(s, W("y", 1), W("x", 2)) >>, {}, {<<"x", 1>>, <<"y", 1>>}),
      IRIW |-> Shape(<< One(s, W("x", 1)), One(s, W("y", 1)), Two(s, R("x"), R("y")), Two(s, R("y"), R("x")) >>,
                     {<<3, 1, 1>>, <<3, 0, 0>>, <<4, 1, 1>>, <<4, 0, 0>>}, {}),
      CoRR |-> Shape(<< One(s, W("x", 1)), Two(s, R("x"), R("x")) >>, {<<2, 1, 1>>, <<2, 0, 0>>}, {}),
      WRC  |-> Shape(<< One(s, W("x", 1)), Two(s, R("x"), W("y", 1)), Two(s, R("y"), R("x")) >>,
                     {<<2, 1, 1>>, <<3, 1, 1>>, <<3, 0, 0>>}, {}) ]

ShapeNames == {"MP", "SB", "LB", "S", "R", "_2_2W", "IRIW", "CoRR", "WRC"}
Relaxed    == ShapeNames \ {"CoRR"}

\* The literature: which shapes show their relaxed outcome. TSO lets a store wait past a later load and nothing else;
\* acquire and release there are plain moves. On ARM a pair of acquire and release still lets them cross (SB, R), while
\* LDAR after STLR does not. One lock pair orders no two accesses around it.
Allowed ==
    [ sc  |-> [s \in {"none", "acquire_release", "sc_atomics", "full_fence", "lock", "lock_aarch64", "system_call"} |-> {}],
      tso |-> [ none |-> {"SB", "R"}, acquire_release |-> {"SB", "R"}, sc_atomics |-> {}, full_fence |-> {},
                lock |-> {}, lock_aarch64 |-> {}, system_call |-> {"SB", "R"} ],
      arm |-> [ none |-> Relaxed, acquire_release |-> {"SB", "R"}, sc_atomics |-> {}, full_fence |-> {},
                lock |-> Relaxed, lock_aarch64 |-> Relaxed, system_call |-> Relaxed ] ]

------------------------------------------------------------------------------------------------------------------------
(* Single tests: dependencies, one-way fences, forwarding, coherence, atomicity, locks back to back.                  *)

On(i, deps)  == [i EXCEPT !.addr = deps]
By(i, deps)  == [i EXCEPT !.data = deps]
Full         == << Fence("full") >>
Writer(f)    == << W("x", 1) >> \o f \o << W("y", 1) >>       \* of MP
Message(ps)  == Shape(ps, {<<2, 1, 1>>, <<2, 0, 0>>}, {})
LoadBuffer(a, b) == Shape(<< a, b >>, {<<1, 1, 1>>, <<2, 1, 1>>}, {})

Single ==
    [ MP_dmb_addr        |-> Message(<< Writer(Full), << R("y"), On(R("x"), {1}) >> >>),
      MP_dmb_po          |-> Message(<< Writer(Full), << R("y"), R("x") >> >>),
      MP_po_dmb          |-> Message(<< Writer(<< >>), << R("y"), Fence("full"), R("x") >> >>),
      MP_dmb_ctrl        |-> Message(<< Writer(Full), << R("y"), Branch({1}), R("x") >> >>),
      MP_dmb_isb         |-> Message(<< Writer(Full), << R("y"), Fence("context"), R("x") >> >>),
      MP_dmb_ctrlisb     |-> Message(<< Writer(Full), << R("y"), Branch({1}), Fence("context"), R("x") >> >>),
      MP_dmbst_dmbld     |-> Message(<< Writer(<< Fence("store") >>), << R("y"), Fence("load"), R("x") >> >>),
      MP_dmbld_dmbld     |-> Message(<< Writer(<< Fence("load") >>), << R("y"), Fence("load"), R("x") >> >>),
      MP_dmbst_dmbst     |-> Message(<< Writer(<< Fence("store") >>), << R("y"), Fence("store"), R("x") >> >>),
      MP_rel_acq         |-> Message(<< << W("x", 1), Release(W("y", 1)) >>, << AcquirePC(R("y")), R("x") >> >>),
      MP_rel_po          |-> Message(<< << W("x", 1), Release(W("y", 1)) >>, << R("y"), R("x") >> >>),
      MP_dmb_addrpo      |-> Message(<< Writer(Full), << R("y"), On(R("z"), {1}), R("x") >> >>),
      LB_datas           |-> LoadBuffer(<< R("x"), By(W("y", 1), {1}) >>, << R("y"), By(W("x", 1), {1}) >>),
      LB_ctrls           |-> LoadBuffer(<< R("x"), Branch({1}), W("y", 1) >>, << R("y"), Branch({1}), W("x", 1) >>),
      LB_addrs           |-> LoadBuffer(<< R("x"), On(W("y", 1), {1}) >>, << R("y"), On(W("x", 1), {1}) >>),
      LB_data_po         |-> LoadBuffer(<< R("x"), By(W("y", 1), {1}) >>, << R("y"), W("x", 1) >>),
      LB_acq_po          |-> LoadBuffer(<< AcquirePC(R("x")), W("y", 1) >>, << AcquirePC(R("y")), W("x", 1) >>),
      S_dmb_data         |-> Shape(<< << W("x", 2), Fence("full"), W("y", 1) >>, << R("y"), By(W("x", 1), {1}) >> >>, {<<2, 1, 1>>}, {<<"x", 2>>}),
      S_dmb_ctrl         |-> Shape(<< << W("x", 2), Fence("full"), W("y", 1) >>, << R("y"), Branch({1}), W("x", 1) >> >>, {<<2, 1, 1>>}, {<<"x", 2>>}),
      S_dmb_addrpo       |-> Shape(<< << W("x", 2), Fence("full"), W("y", 1) >>, << R("y"), On(R("z"), {1}), W("x", 1) >> >>, {<<2, 1, 1>>}, {<<"x", 2>>}),
      S_dmb_po           |-> Shape(<< << W("x", 2), Fence("full"), W("y", 1) >>, << R("y"), W("x", 1) >> >>, {<<2, 1, 1>>}, {<<"x", 2>>}),
      WRC_data_addr      |-> Shape(<< << W("x", 1) >>, << R("x"), By(W("y", 1), {1}) >>, << R("y"), On(R("x"), {1}) >> >>,
                                   {<<2, 1, 1>>, <<3, 1, 1>>, <<3, 0, 0>>}, {}),
      IRIW_addrs         |-> Shape(<< << W("x", 1) >>, << W("y", 1) >>, << R("x"), On(R("y"), {1}) >>, << R("y"), On(R("x"), {1}) >> >>,
                                   {<<3, 1, 1>>, <<3, 0, 0>>, <<4, 1, 1>>, <<4, 0, 0>>}, {}),
      SB_rfis            |-> Shape(<< << W("x", 1), R("x"), R("y") >>, << W("y", 1), R("y"), R("x") >> >>,
                                   {<<1, 2, 1>>, <<1, 0, 0>>, <<2, 2, 1>>, <<2, 0, 0>>}, {}),
      SB_rmws            |-> Shape(<< << Acquire(Take("x")), Release(Put("x", 1)), R("y") >>,
                                      << Acquire(Take("y")), Release(Put("y", 1)), R("x") >> >>, {<<1, 0, 0>>, <<2, 0, 0>>}, {}),
      PPOCA              |-> Message(<< Writer(Full), << R("y"), Branch({1}), W("z", 1), R("z"), On(R("x"), {1}) >> >>),
      PPODA              |-> Message(<< Writer(Full), << R("y"), By(W("z", 1), {1}), R("z"), On(R("x"), {1}) >> >>),
      PPOAA              |-> Message(<< Writer(Full), << R("y"), On(W("z", 1), {1}), R("z"), On(R("x"), {1}) >> >>),
      RSW                |-> Message(<< Writer(Full), << R("y"), On(R("z"), {1}), R("z"), On(R("x"), {1}) >> >>),
      RDW                |-> Shape(<< Writer(Full), << R("y"), On(R("z"), {1}), R("z"), On(R("x"), {1}) >>, << W("z", 1) >> >>,
                                   {<<2, 1, 1>>, <<2, 2, 0>>, <<2, 3, 1>>, <<2, 0, 0>>}, {}),
      CoWW               |-> Shape(<< << W("x", 1), W("x", 2) >> >>, {}, {<<"x", 1>>}),
      CoRW1              |-> Shape(<< << R("x"), W("x", 1) >> >>, {<<1, 1, 1>>}, {}),
      CoRW2              |-> Shape(<< << R("x"), W("x", 1) >>, << W("x", 2) >> >>, {<<1, 1, 2>>}, {<<"x", 2>>}),
      CoWR               |-> Shape(<< << W("x", 1), R("x") >>, << W("x", 2) >> >>, {<<1, 0, 2>>}, {<<"x", 1>>}),
      LostUpdate         |-> Shape(<< << Take("x"), Put("x", 1) >>, << Take("x"), Put("x", 1) >> >>, {}, {<<"x", 1>>}),
      MP_locks2          |-> Message(<< << W("x", 1) >> \o LockPair("acquire") \o LockPair("acquire") \o << W("y", 1) >>,
                                        << R("y") >> \o LockPair("acquire") \o LockPair("acquire") \o << R("x") >> >>),
      MP_locks2_c11      |-> Message(<< << W("x", 1) >> \o LockPair("acquire_pc") \o LockPair("acquire_pc") \o << W("y", 1) >>,
                                        << R("y") >> \o LockPair("acquire_pc") \o LockPair("acquire_pc") \o << R("x") >> >>) ]

SingleAllowed ==
    [ sc  |-> {},
      tso |-> {"SB_rfis"},
      arm |-> { "MP_dmb_po", "MP_po_dmb", "MP_dmb_ctrl", "MP_dmb_isb", "MP_dmbld_dmbld", "MP_dmbst_dmbst", "MP_rel_po",
                "MP_dmb_addrpo", "LB_data_po", "S_dmb_po", "SB_rfis", "SB_rmws", "PPOCA", "RSW", "MP_locks2_c11" } ]

------------------------------------------------------------------------------------------------------------------------
Rows == (Models \X Strengths \X ShapeNames) \cup (Models \X {"single"} \X DOMAIN Single)

Test(r)     == IF r[2] = "single" THEN Single[r[3]] ELSE Shapes(r[2])[r[3]]
Expected(r) == r[3] \in IF r[2] = "single" THEN SingleAllowed[r[1]] ELSE Allowed[r[1]][r[2]]

\* The test of each row, its verdict, what each of its instructions waits for.
AllTests    == [r \in Rows |-> Test(r)]
AllVerdicts == [r \in Rows |-> Expected(r)]
AllOrders   == [r \in Rows |-> [t \in DOMAIN AllTests[r].programs |-> Before(r[1], AllTests[r].programs[t])]]

\* TLC works these out once, being constants. But it counts coverage inside whatever definition a behaviour refers to: so
\* behaviours refer to constants, which the configuration binds to these names.
TheTests    == AllTests
TheVerdicts == AllVerdicts
TheOrders   == AllOrders

CONSTANTS Tests, Verdicts, Ordered

VARIABLE row            \* the test under way: <<model, strength, shape>>
RowTypeInv == row \in Rows

VARIABLE now            \* every machine reached after the same number of accesses
NowTypeInv == \A m \in now : DOMAIN m = {"done", "mem", "got"}

TypeOK == RowTypeInv /\ NowTypeInv

Init == row \in Rows /\ now = {Start(Tests[row].programs, Zero)}

Choices(m) == Performable(Tests[row].programs, Ordered[row], m)
Over == \A m \in now : Choices(m) = {}

\* One more access, in every possible way.
PerformAny ==
    /\ ~Over
    /\ now' = UNION { {Perform(Tests[row].programs, m, c[1], c[2]) : c \in Choices(m)} : m \in now }
    /\ UNCHANGED row

Done == Over /\ UNCHANGED <<row, now>>

Next == PerformAny \/ Done
Spec == Init /\ [][Next]_<<row, now>>

Last(t) == Latest(SharedAccesses(Tests[row].programs[t]))
Shows(m, test) ==
    /\ \A c \in test.regs : m.got[c[1]][IF c[2] = 0 THEN Last(c[1]) ELSE c[2]].val = c[3]
    /\ \A c \in test.mem : m.mem[c[1]].val = c[2]

RelaxedOutcome == \E m \in now : Finished(Tests[row].programs, m) /\ Shows(m, Tests[row])

AgreesWithLiterature ==
    Over => /\ \E m \in now : Finished(Tests[row].programs, m)
            /\ RelaxedOutcome <=> Verdicts[row]
=============================================================================
