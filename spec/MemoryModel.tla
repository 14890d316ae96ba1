---------------------------- MODULE MemoryModel ----------------------------
(* What a CPU may do to the loads and stores of a straight-line program, under three memory models:

     "sc"    sequential consistency: each thread performs its accesses in program order.
     "tso"   x86-TSO: a store may wait in the thread's store buffer while later loads go ahead; loads look into the
             own buffer first (Owens, Sarkar, Sewell, TPHOLs 2009). Locked read-modify-writes drain the buffer.
     "arm"   ARMv8, multi-copy atomic: accesses are performed in any order that coherence, dependencies, acquire,
             release and fences permit (aarch64.cat; Pulte, Flur, Deacon et al., POPL 2018).

   An access is *performed* once, at one instant for all other threads: a store when it reaches memory, a load when
   it takes its value. A program is a sequence of instructions, one per thread. `Orders` says which pairs keep program
   order; its transitive closure through fences, branches and private locks is `Before`; everything else may be
   performed in any order. A store that later loads overtook is, by that, a store that sits in the store buffer.

   Rules
     M1  An access is performed only after all accesses that the model orders before it.
     M2  A load whose latest earlier store by the same thread to the same word is not yet performed takes the value of
         that store, once the store's own inputs are known (forwarding from the store buffer).
     M3  Any other load takes the value that memory holds.
     M4  Loads of one word by one thread are coherent: if a later one was performed first, the earlier one must find
         the same store (ARM lets them swap only then).
     M5  Between the two halves of a read-modify-write nobody else writes the word, or takes it. Where nothing but the
         store half waits for the load half, the load half is performed when the store half can follow: it would read
         the same at any earlier time.

   Not modelled: mixed-size accesses, speculation past the dependencies above, non-temporal and device memory, page
   faults, instruction fetch, SVE, several shareability domains; an exclusive load never forwards from its own store
   buffer; a failed store-exclusive is the absence of the attempt; an awaited load is its last, successful, iteration.

   To see it fail: switch on a fault of models/manifest.toml in models/MCLitmus.tla, for example
   Fault = "acquire_ignored", and MP with acquire and release is allowed on ARM.                                     *)
EXTENDS Integers, Sequences, FiniteSets, TLC

CONSTANT Fault      \* "none", or the clause of the memory model that is left out

------------------------------------------------------------------------------------------------------------------------
(* Instructions. `loc` is a shared word, `order` the strength, `value` what is stored (for "put": what is added to the
   value that its "take" read); `want` the values that an awaited load waits for, `must` those that a correct program
   would find, {} if any will do; `addr`, `data`, `ctrl` how many instructions back the loads are that address, value
   or condition depend on.                                                                                            *)

Private == "private"    \* a word that no other thread touches: its accesses matter only for the order they impose

Plain(op, x, v) == [ op |-> op, loc |-> x, order |-> "plain", value |-> v, want |-> {}, must |-> {},
                     addr |-> {}, data |-> {}, ctrl |-> {} ]
Load(x)         == Plain("load", x, 0)
Store(x, v)     == Plain("store", x, v)
Await(x, vs)    == [Load(x) EXCEPT !.want = vs]
Find(x, v)      == [Load(x) EXCEPT !.must = {v}]
Acquire(i)      == [i EXCEPT !.order = "acquire"]       \* ARM LDAR, CASA: also ordered after earlier releases (RCsc)
AcquirePC(i)    == [i EXCEPT !.order = "acquire_pc"]    \* ARM LDAPR; what a C11 acquire promises (RCpc)
Release(i)      == [i EXCEPT !.order = "release"]       \* ARM STLR, or the store half of a releasing read-modify-write
Branch(deps)    == [Plain("branch", Private, 0) EXCEPT !.ctrl = deps]
Fence(kind)     == [Plain("fence", Private, 0) EXCEPT !.order = kind]  \* "full", "load", "store" (DMB ISH, ISHLD, ISHST), "context" (ISB)

\* A read-modify-write is two instructions: take the value, put value + delta.
TakeWhen(x, vs)  == [Plain("take", x, 0) EXCEPT !.want = vs]
Take(x)          == TakeWhen(x, {})
Put(x, delta)    == [Plain("put", x, delta) EXCEPT !.data = {1}]

\* Taking and giving back a lock that nobody else wants: an acquiring read-modify-write, then a releasing store. What lies
\* before may sink in, what lies after may rise in ("roach motel").
LockPair(order) == << [Take(Private) EXCEPT !.order = order], Put(Private, 1), Release(Store(Private, 0)) >>

Back(j, distances) == {j - d : d \in distances}

Reads(i)      == i.op \in {"load", "take"}
Writes(i)     == i.op \in {"store", "put"}
Accesses(i)   == Reads(i) \/ Writes(i)
IsShared(i)   == Accesses(i) /\ i.loc # Private
IsAcquire(i)  == Reads(i) /\ i.order \in {"acquire", "acquire_pc"} /\ Fault # "acquire_ignored"
IsRelease(i)  == Writes(i) /\ i.order = "release" /\ Fault # "release_ignored"
IsFence(i, k) == i.op = "fence" /\ i.order = k /\ ~(Fault = "fence_ignored" /\ k = "full")

------------------------------------------------------------------------------------------------------------------------
(* M1: which instructions i < j of program p keep their order. *)

OrdersSC(p, i, j) == Accesses(p[i]) /\ Accesses(p[j])

OrdersTSO(p, i, j) ==
    \/ Accesses(p[i]) /\ Accesses(p[j]) /\ (p[i].op = "store" /\ p[j].op = "load" => Fault = "no_store_buffer")
    \/ Accesses(p[i]) /\ IsFence(p[j], "full")
    \/ IsFence(p[i], "full") /\ Accesses(p[j])
    \/ IsRelease(p[i]) /\ p[j].order = "acquire" /\ Reads(p[j])     \* sequentially consistent atomics: XCHG

OrdersARM(p, i, j) ==
    \* same word, and the later one writes
    \/ Accesses(p[i]) /\ Writes(p[j]) /\ p[i].loc = p[j].loc /\ Fault # "coherence_ignored"
    \* dependencies; an address dependency also holds back the stores after the dependent access
    \/ /\ Fault # "dependencies_ignored"
       /\ \/ i \in Back(j, p[j].addr \cup p[j].data \cup p[j].ctrl)
          \/ p[i].op = "branch" /\ (Writes(p[j]) \/ IsFence(p[j], "context"))
          \/ (Writes(p[j]) \/ IsFence(p[j], "context")) /\ \E k \in (i + 1)..(j - 1) : i \in Back(k, p[k].addr)
          \/ IsFence(p[i], "context") /\ Reads(p[j])
    \* fences
    \/ Accesses(p[i]) /\ IsFence(p[j], "full")
    \/ IsFence(p[i], "full") /\ Accesses(p[j])
    \/ Reads(p[i]) /\ IsFence(p[j], "load")
    \/ IsFence(p[i], "load") /\ Accesses(p[j])
    \/ Writes(p[i]) /\ IsFence(p[j], "store")
    \/ IsFence(p[i], "store") /\ Writes(p[j])
    \* acquire, release
    \/ IsAcquire(p[i]) /\ Accesses(p[j])
    \/ Accesses(p[i]) /\ IsRelease(p[j])
    \/ IsRelease(p[i]) /\ IsAcquire(p[j]) /\ (p[j].order = "acquire" \/ Fault = "acquire_always_sc")

Orders(model, p, i, j) ==
    CASE Fault = "all_ordered" -> OrdersSC(p, i, j)
      [] Fault = "none_ordered" -> p[j].op = "put" /\ i = j - 1
      [] model = "sc" -> OrdersSC(p, i, j)
      [] model = "tso" -> OrdersTSO(p, i, j)
      [] model = "arm" -> OrdersARM(p, i, j)

\* For each instruction of p, the shared accesses that must be performed first.
Before(model, p) ==
    LET \* the sequence of what instructions 1 to n must wait for
        closure[n \in 0..Len(p)] ==
            IF n = 0 THEN << >>
            ELSE LET c == closure[n - 1] IN
                 Append(c, UNION { {i} \cup c[i] : i \in {k \in 1..(n - 1) : Orders(model, p, k, n)} })
        all == closure[Len(p)]
    IN [j \in 1..Len(p) |-> {i \in all[j] : IsShared(p[i])}]

SharedAccesses(p) == {i \in 1..Len(p) : IsShared(p[i])}

------------------------------------------------------------------------------------------------------------------------
(* The machine: `done[t]` the accesses of thread t that were performed, `mem[x]` the store that memory holds in word x
   (by thread, at position, value), `got[t]` the stores that performed loads of thread t took.                         *)

Start(programs, initial) ==
    [ done |-> [t \in DOMAIN programs |-> {}],
      mem  |-> [x \in DOMAIN initial |-> [by |-> 0, at |-> 0, val |-> initial[x]]],
      got  |-> [t \in DOMAIN programs |-> <<>>] ]

Finished(programs, m) == \A t \in DOMAIN programs : m.done[t] = SharedAccesses(programs[t])

Latest(S) == IF S = {} THEN 0 ELSE CHOOSE i \in S : \A k \in S : k <= i

\* The own store from which load j of p would be served, 0 if there is none.
OwnStore(p, j) == Latest({i \in 1..(j - 1) : Writes(p[i]) /\ p[i].loc = p[j].loc})

StoredValue(m, p, t, i) == p[i].value + (IF p[i].op = "put" THEN m.got[t][i - 1].val ELSE 0)

Forwards(m, p, t, j) == LET s == OwnStore(p, j) IN s # 0 /\ s \notin m.done[t] /\ Fault # "none_ordered"

\* M2, M3: the store that load j of thread t takes.
Source(m, p, t, j) ==
    IF Forwards(m, p, t, j)
    THEN LET s == OwnStore(p, j) IN [by |-> t, at |-> s, val |-> StoredValue(m, p, t, s)]
    ELSE m.mem[p[j].loc]

CanForward(m, p, t, j) ==
    LET s == OwnStore(p, j) IN
    /\ Fault # "no_forwarding"
    /\ p[j].op = "load"
    /\ p[s].op = "put" => ~IsAcquire(p[j])
    /\ Back(s, p[s].addr \cup p[s].data) \subseteq m.done[t]

\* M4
Coherent(m, p, t, j) ==
    \A k \in DOMAIN m.got[t] :
        (k > j /\ p[k].loc = p[j].loc /\ OwnStore(p, k) < j) => m.got[t][k] = Source(m, p, t, j)

\* What the processor takes back: a load was performed early, and memory has changed before an earlier load of the word.
\* No execution goes on from here.
TakenBack(programs, m) ==
    \E t \in DOMAIN programs : \E k \in DOMAIN m.got[t] :
        LET p == programs[t] IN
        \E i \in SharedAccesses(p) \ m.done[t] :
            /\ i < k /\ Reads(p[i]) /\ p[i].loc = p[k].loc /\ OwnStore(p, k) < i
            /\ m.got[t][k] # Source(m, p, t, i)

\* M5
Undisturbed(programs, m, t, x) ==
    Fault = "none_ordered" \/ \A u \in DOMAIN programs \ {t} : \A i \in m.done[u] :
        (programs[u][i].op = "take" /\ programs[u][i].loc = x) => i + 1 \in m.done[u]

CanFollow(p, b, finished, j) ==
    (\A k \in DOMAIN p : j \in b[k] => k = j + 1 \/ j + 1 \in b[k]) => b[j + 1] \ {j} \subseteq finished

CanPerform(programs, before, m, t, j) ==
    LET p == programs[t] IN
    /\ before[t][j] \subseteq m.done[t]
    /\ Reads(p[j]) => /\ Forwards(m, p, t, j) => CanForward(m, p, t, j)
                      /\ Coherent(m, p, t, j) \/ Fault \in {"coherence_ignored", "none_ordered"}
                      /\ p[j].want # {} => Source(m, p, t, j).val \in p[j].want
    /\ Writes(p[j]) \/ p[j].op = "take" => Undisturbed(programs, m, t, p[j].loc)
    /\ p[j].op = "take" => CanFollow(p, before[t], m.done[t], j)

\* The machine after access j of thread t.
Perform(programs, m, t, j) ==
    LET p == programs[t] IN
    IF Reads(p[j])
    THEN [m EXCEPT !.done[t] = @ \cup {j}, !.got[t] = (j :> Source(m, p, t, j)) @@ @]
    ELSE [m EXCEPT !.done[t] = @ \cup {j},
                   !.mem[p[j].loc] = [by |-> t, at |-> j, val |-> StoredValue(m, p, t, j)]]

\* The accesses that may be performed next, as pairs of thread and position.
Performable(programs, before, m) ==
    { tj \in UNION {{t} \X (SharedAccesses(programs[t]) \ m.done[t]) : t \in DOMAIN programs} :
        CanPerform(programs, before, m, tj[1], tj[2]) }
=============================================================================
