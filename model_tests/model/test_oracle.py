"""The step oracle says exactly what TLC says."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from quiesce.model import tlc
from quiesce.model.config import Config
from quiesce.model.errors import Disabled, ModelError, SpecError, UnknownName
from quiesce.model.graph import Graph, read_dump
from quiesce.model.manifest import Manifest
from quiesce.model.oracle import Oracle, Step
from quiesce.model.values import Function, ModelValue, State

Doors = Callable[..., tuple[Config, Oracle]]
P1, P2, NOBODY = ModelValue("p1"), ModelValue("p2"), ModelValue("Nobody")


def assert_same_graph(module: Path, config: Config, oracle: Oracle, tmp_path: Path) -> tuple[Graph, Graph]:
    """The oracle's complete graph is the one that TLC dumps: initial states, states, edges."""
    dump = tmp_path / "graph"
    run = tlc.run(
        module,
        config.without(["property"]),
        deadlock=False,
        timeout=100,
        short=True,
        options=["-dump", "dot,actionlabels", str(dump)],
    )
    assert run.holds, run.message
    theirs, _ = read_dump(dump.with_suffix(".dot"))
    ours = Graph.explore(oracle)
    assert len(ours.states) == run.distinct
    assert set(ours.states) == set(theirs.states)
    assert {ours.states[i] for i in ours.initial} == {theirs.states[i] for i in theirs.initial}
    assert _pairs(ours) == _pairs(theirs)
    return ours, theirs


def _pairs(graph: Graph) -> set[tuple[State, State]]:
    return {(graph.states[edge.source], graph.states[edge.target]) for edge in graph.edges}


@pytest.fixture(scope="module")
def post(own_manifest: Manifest) -> Oracle:
    return Oracle.load("post", manifest=own_manifest)


def test_the_graph_is_tlcs(specs: Path, post: Oracle, tmp_path: Path) -> None:
    config = Config.parse((specs / "MCPost.cfg").read_text())
    ours, theirs = assert_same_graph(specs / "MCPost.tla", config, post, tmp_path)
    # TLC names what it can, and the oracle agrees; what TLC calls Next are the deliveries.
    named = {
        (ours.states[e.source], "Next" if e.action == "Deliver" else e.action, ours.states[e.target])
        for e in ours.edges
    }
    assert named == {(theirs.states[e.source], e.action, theirs.states[e.target]) for e in theirs.edges}


SHAPES = {
    "NextIf": {"MoveLeft", "Shut", "Open"},
    "NextCase": {"Open", "MoveLeft", "MoveRight", "Shut"},
    "NextGuard": {"MoveLeft", "MoveRight"},
    "NextTuple": {"MoveLeft", "Swap"},
    "NextLet": {"Pick"},
    "NextDeep": {"Jump", "Pick", "MoveRight"},
    "NextHigh": {"Pick", "MoveLeft"},
    "NextTwice": {"Jump", "Pick"},
    "NextPlain": {"MoveLeft", "NextPlain"},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_of_next_state_relation_gives_tlcs_graph(
    shape: str, doors: Doors, specs: Path, tmp_path: Path
) -> None:
    config, oracle = doors(shape)
    graph, _ = assert_same_graph(specs / "Doors.tla", config, oracle, tmp_path)
    assert set(oracle.actions) == SHAPES[shape]
    assert {edge.action for edge in graph.edges} <= SHAPES[shape]


@pytest.mark.parametrize("constraint", ["CONSTRAINT LowEnough", "ACTION_CONSTRAINT Same"])
def test_constraints_cut_the_graph_as_they_do_in_tlc(
    constraint: str, doors: Doors, specs: Path, tmp_path: Path
) -> None:
    config, oracle = doors("NextDeep", constraint)
    graph, _ = assert_same_graph(specs / "Doors.tla", config, oracle, tmp_path)
    free = Oracle(specs / "Doors.tla", config, constrained=False)
    assert len(Graph.explore(free).edges) > len(graph.edges)


def test_actions_of_an_instance_are_named(specs: Path, tmp_path: Path) -> None:
    config = Config.parse('INIT Init\nNEXT Next\nCONSTANT Fault = "none"')
    oracle = Oracle(specs / "Sole.tla", config)
    assert oracle.actions == {"Up": ("k",), "Reset": ()}
    assert_same_graph(specs / "Sole.tla", config, oracle, tmp_path)
    assert oracle.enabled(State(n=4)) == ("Up(k = 1)",)


def test_steps_have_names_parameters_and_states(post: Oracle) -> None:
    (start,) = post.initial()
    assert post.variables == ("box", "sent", "desk", "seen")
    assert post.actions == {"Read": ("p",), "Send": ("p", "q"), "Deliver": ("letter",), "Done": ()}
    first, second = post.successors(start)
    letter = Function({"from": P1, "to": P2, "kind": "plain"})
    expected = State(
        box=(letter,),
        sent=Function({P1: 1, P2: 0}),
        desk=Function({P1: NOBODY, P2: NOBODY}),
        seen=frozenset(),
    )
    assert first == Step("Send", Function(p=P1, q=P2), expected)
    assert second.parameters == {"p": P2, "q": P1}
    assert post.successors(expected)[-1].parameters == {"letter": letter}
    assert post.step(start, "Send", p=P1) == (expected,)


def test_a_state_can_be_made_of_plain_python_values(post: Oracle) -> None:
    (start,) = post.initial()
    (reached,) = post.step(start, "Send", p=P1)
    made = post.state(
        {
            "box": [{"from": P1, "to": P2, "kind": "plain"}],
            "sent": {P1: 1, P2: 0},
            "desk": {P1: NOBODY, P2: NOBODY},
            "seen": set(),
        }
    )
    assert made == reached
    assert post.successors(made) == post.successors(reached)


def test_every_state_survives_the_way_through_python(
    own_manifest: Manifest, post: Oracle, specs: Path
) -> None:
    fresh = Oracle(specs / "MCPost.tla", own_manifest.config(own_manifest.models["post"]))
    graph = Graph.explore(post)
    for number, state in enumerate(graph.states):
        leaving = {(graph.edges[i].action, graph.edges[i].target) for i in graph.leaving[number]}
        found = {(step.action, graph.numbers[step.state]) for step in fresh.successors(dict(state))}
        assert found == leaving


def test_a_disabled_action_names_its_first_false_conjunct(post: Oracle) -> None:
    (start,) = post.initial()
    with pytest.raises(Disabled, match=r"Read\(p = p1\) is disabled: desk\[p\] # Nobody is false") as caught:
        post.step(start, "Read", p=P1)
    assert (caught.value.action, caught.value.conjunct) == ("Read", "desk[p] # Nobody")
    assert caught.value.location.endswith("of Post")
    with pytest.raises(Disabled) as caught:
        post.step(start, "Done")
    assert caught.value.conjunct.startswith("\\A p \\in People")


def test_a_disabled_action_is_explained_inside_helpers_and_branches(doors: Doors) -> None:
    _, oracle = doors("NextDeep")
    with pytest.raises(Disabled) as caught:
        oracle.step({"left": 0, "right": 3, "open": False}, "Pick")
    assert caught.value.conjunct == "open"
    with pytest.raises(Disabled) as caught:
        oracle.step({"left": 0, "right": 3, "open": True}, "Jump", by=7)
    assert "there are Jump(by = 1), Jump(by = 2), Jump(by = 3)" in str(caught.value)
    with pytest.raises(Disabled) as caught:
        oracle.step({"left": 3, "right": 3, "open": True}, "Jump")
    assert caught.value.conjunct == "left + by <= Top"
    _, oracle = doors("NextIf")
    with pytest.raises(Disabled, match="there is none of that name"):
        oracle.step({"left": 0, "right": 3, "open": False}, "Shut")


def test_a_conjunct_that_fails_only_after_others_is_found(doors: Doors) -> None:
    _, oracle = doors("NextLet")
    with pytest.raises(Disabled) as caught:
        oracle.step({"left": 4, "right": 4, "open": True}, "Pick", x=4)
    assert caught.value.conjunct == "right' <= Top"


def test_forbidden_are_the_parameters_that_no_step_has(post: Oracle) -> None:
    (start,) = post.initial()
    alone = {Function({"p": p, "q": p}) for p in (P1, P2)}
    assert set(post.forbidden(start, "Send")) == alone
    assert post.forbidden(start, "Send") is post.forbidden(start, "Send")
    assert post.forbidden(start, "Deliver") == ()  # of no letter there is
    assert set(post.forbidden(start, "Read")) == {Function({"p": p}) for p in (P1, P2)}
    with pytest.raises(UnknownName):
        post.forbidden(start, "Sned")


def test_unknown_names_offer_the_nearest(post: Oracle, own_manifest: Manifest) -> None:
    (start,) = post.initial()
    with pytest.raises(UnknownName, match="no action is called 'Sned'; did you mean 'Send'"):
        post.step(start, "Sned")
    with pytest.raises(UnknownName, match="no parameter of Send is called 'to'; there are: p, q"):
        post.step(start, "Send", to=P1)
    with pytest.raises(
        UnknownName, match="no operator or constant is called 'UnderWey'; did you mean 'UnderWay'"
    ):
        post.evaluate("UnderWey", start)
    with pytest.raises(UnknownName, match="no model or mutant is called 'psot'; did you mean 'post'"):
        Oracle.load("psot", manifest=own_manifest)
    with pytest.raises(UnknownName, match="no mutant is called 'failing'"):
        Oracle.load("post", "failing", manifest=own_manifest)


def test_wrong_states_say_what_is_wrong_with_them(post: Oracle) -> None:
    (start,) = post.initial()
    with pytest.raises(ModelError, match="there is none for sent, desk, seen"):
        post.successors({"box": ()})
    with pytest.raises(UnknownName, match="no variable is called 'boks'; did you mean 'box'"):
        post.successors({"boks": ()})
    with pytest.raises(UnknownName, match="no model value is called 'p3'"):
        post.successors({**start, "seen": {(ModelValue("p3"), P1)}})
    with pytest.raises(ModelError, match="does not fit TLC's integers"):
        post.successors({**start, "sent": {P1: 2**31, P2: 0}})
    with pytest.raises(
        SpecError, match=r"cannot evaluate the successors of a state of MCPost.*should be a sequence"
    ):
        post.successors({**start, "box": 3})


def test_operators_and_constants_are_evaluated(post: Oracle) -> None:
    (start,) = post.initial()
    (sent,) = post.step(start, "Send", p=P1)
    assert post.evaluate("People") == {P1, P2}
    assert post.evaluate("Limit") == 2
    assert post.evaluate("UnderWay", sent) == {(P1, P2)}
    assert post.evaluate("InBox", sent, P2) == 1
    assert len(post.evaluate("Letter")) == 8
    assert post.evaluate("TypeOK", sent) is True
    with pytest.raises(SpecError, match="InBox takes 1 arguments, not 0"):
        post.evaluate("InBox", sent)


def test_a_fault_is_switched_on_and_seen_by_the_invariants(own_manifest: Manifest) -> None:
    faulty = Oracle.load("post", "lose", manifest=own_manifest)
    assert faulty is Oracle.load("lose", manifest=own_manifest)
    (start,) = faulty.initial()
    (sent,) = faulty.step(start, "Send", p=P1)
    (there,) = faulty.step(sent, "Deliver")
    (lost,) = faulty.step(there, "Read")
    assert [faulty.violated(state) for state in (start, sent, there, lost)] == [(), (), (), ("NothingLost",)]
    assert faulty.invariants == ("TypeOK", "NothingLost")


def test_a_specification_that_does_not_parse_says_so(specs: Path) -> None:
    with pytest.raises(SpecError, match=r"(?s)cannot load Broken.*line 5, column 1"):
        Oracle(specs / "Broken.tla", Config.parse("INIT Init\nNEXT Next"))


def test_an_action_that_leaves_a_variable_open_is_reported(specs: Path, tmp_path: Path) -> None:
    module = tmp_path / "Open.tla"
    module.write_text(
        "---- MODULE Open ----\nVARIABLES x, y\nInit == x = 0 /\\ y = 0\nNext == x' = 1\n====\n"
    )
    oracle = Oracle(module, Config.parse("INIT Init\nNEXT Next"))
    with pytest.raises(SpecError, match="Next leaves unassigned: y"):
        oracle.successors(oracle.initial()[0])


def test_threads_may_share_an_oracle(post: Oracle) -> None:
    expected = len(Graph.explore(post).edges)
    counts: list[int] = []
    threads = [
        threading.Thread(target=lambda: counts.append(len(Graph.explore(post).edges))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert counts == [expected] * 4


def test_nothing_is_printed(own_manifest: Manifest, specs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    oracle = Oracle(specs / "MCFailing.tla", own_manifest.config(own_manifest.models["failing"]))
    Graph.explore(oracle)
    sys.stdout.flush()
    assert capfd.readouterr() == ("", "")


def test_the_main_thread_keeps_its_stack() -> None:
    """By default the virtual machine guards the first MiB of it, and kills what recurses deeper in any language."""
    script = """
import json, sys
from quiesce.model import jvm
jvm.start()
sys.setrecursionlimit(1_000_000)
try:
    json.loads("[" * 12_000 + "]" * 12_000)
except RecursionError:
    pass  # CPython 3.12 counts its own depth
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_a_forked_child_collects_without_java() -> None:
    """It has none of the machine's threads, and JPype asks for a collection of its own."""
    script = """
import gc, os, signal
from quiesce.model import jvm
before = list(gc.callbacks)
jvm.start()
assert gc.callbacks != before
child = os.fork()
if not child:
    signal.alarm(30)
    os._exit(gc.callbacks != before)
assert os.waitpid(child, 0)[1] == 0
assert gc.callbacks != before
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
