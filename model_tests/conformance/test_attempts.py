"""Guards are put to the test: what is forbidden is asked for, and an implementation that does it is found."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import Phase, settings

from quiesce.model import ModelValue, State, Step
from quiesce.model.adapter import Adapter, Divergence, Run, does, lets
from quiesce.model.errors import Disabled, ModelError
from quiesce.model.lockstep import lockstep
from quiesce.model.schedule import find, read, replay, shrink
from quiesce.model.values import Function

PAGE = Path(__file__).parents[2] / "docs" / "conformance.md"
B1 = ModelValue("b1")


@pytest.mark.parametrize(
    ("guard", "action"), [("if not self.readers:", "Recycle"), ("if self.buffer is not None:", "Take")]
)
def test_the_adapter_of_the_page_fails_without_a_guard(guard: str, action: str) -> None:
    """That it passes with both is tested where all blocks of pages are."""
    (block,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    assert block.count(guard) == 1
    broken = block.replace(guard, "if True:" if action == "Recycle" else "if False:")
    with pytest.raises(Divergence, match="did what the specification forbids") as caught:
        exec(compile(broken, "<documentation>", "exec"), {"__name__": "__main__"})
    assert caught.value.forbidden is not None
    assert caught.value.forbidden.action == action
    assert f"{action}(b = b1" in str(caught.value)
    assert "was asked for although it is forbidden (`attempts`)" in str(caught.value)


class Pool(Adapter):
    """One buffer: `guarded`, or recycled whoever reads; it `tells` a refusal in one of several ways."""

    model = "buffer_lifecycle"
    constants: ClassVar[Mapping[str, str]] = {
        "Buffers": "{b1}",
        "Holders": "{h1}",
        "Readers": "{r1}",
        "Versions": "{1}",
    }
    guarded, tells = True, "nothing"

    @does("Take", "BeginWrite", "EndWrite", "EndLoans", "Discard")
    def others(self, **parameters: Any) -> None:
        """What the surroundings do; the state that is shown is the one that was hoped for."""

    @lets("Lend", "Recycle")
    def go_on(self, wanted: Step) -> None:
        if not self.allows(wanted):
            if self.guarded and self.tells == "nothing":
                return
            if self.tells == "an exception":
                raise RuntimeError("busy")
        self.happened(wanted.action, where=lambda state: state == wanted.state, **wanted.parameters)

    def can(self, step: Step) -> bool:
        return step.action != "Lend" or self.allows(step)

    def allows(self, step: Step) -> bool:
        return any(step in self.oracle.successors(state) for state in self.states)

    def view(self) -> Mapping[str, Any]:
        return {}

    def facts(self, state: State) -> Mapping[str, Any]:
        return {}


class Careless(Pool):
    guarded = False


class Overstating(Pool):
    tells = "what it was asked for"


class Raising(Pool):
    tells = "an exception"


def test_what_is_the_implementations_own_is_attempted_where_it_is_forbidden() -> None:
    run = Run(Pool(Pool.load()))
    for asked in read("Take(b = b1, h = h1)\nBeginWrite(b = b1)", run.oracle):
        run.ask(find(run, asked))
    attempts = run.adapter.attempts()
    assert [(step.action, step.parameters) for step in attempts] == [("Recycle", Function({"b": B1}))]
    behaviour = run.behaviour()
    assert not run.ask(attempts[0])
    assert run.behaviour() == behaviour
    assert run.asked[-1].action == "Recycle"


def test_lockstep_tells_of_what_it_attempts_and_a_refusal_is_no_failure() -> None:
    attempted: list[Step] = []
    lockstep(Pool, examples=8, on_attempt=attempted.append, options=settings(database=None, derandomize=True))
    assert {step.action for step in attempted} == {"Recycle"}


@pytest.mark.parametrize("adapter", [Careless, Overstating, Raising])
def test_any_other_answer_is_one_and_says_how_a_refusal_is_told(adapter: type[Pool]) -> None:
    with pytest.raises(Divergence) as caught:
        lockstep(adapter, examples=8, options=settings(database=None, derandomize=True))
    assert "`go_on` then reports nothing and raises nothing" in caught.value.hint
    assert "let `can` say so" in str(caught.value)


def test_a_schedule_may_have_what_was_attempted_and_nothing_else_that_is_forbidden() -> None:
    with pytest.raises(Divergence) as caught:
        lockstep(Careless, examples=8, options=settings(database=None, derandomize=True))
    schedule = "\n".join(map(str, caught.value.asked))
    with pytest.raises(Divergence, match=r"forbids: Recycle"):
        replay(Careless, schedule)
    replay(Pool, schedule)
    with pytest.raises(Disabled):
        replay(Pool, "EndWrite(b = b1, v = 1)")


def test_what_a_failure_does_not_need_is_left_out() -> None:
    unshrunk = settings(database=None, derandomize=True, phases=[Phase.generate])
    with pytest.raises(Divergence) as caught:
        lockstep(Careless, examples=8, steps=60, options=unshrunk)
    long = caught.value
    short = shrink(long)
    assert len(short.asked) <= 5
    assert short.forbidden is not None
    assert short.message == long.message
    assert shrink(short) is short


def test_what_cannot_be_had_again_is_left_as_it_was() -> None:
    with pytest.raises(Divergence) as caught:
        lockstep(Careless, examples=8, options=settings(database=None, derandomize=True))
    divergence = caught.value
    divergence.adapter = Pool
    assert shrink(divergence) is divergence


class Unseen(Adapter):
    model = "buffer_lifecycle"

    def facts(self, state: State) -> Mapping[str, Any]:
        return {}


class Unsaid(Adapter):
    model = "buffer_lifecycle"

    def view(self) -> Mapping[str, Any]:
        return {}


class Unnamed(Pool):
    model = ""


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        (Unseen, "Unseen has no method `view`; it must return what the implementation shows"),
        (Unsaid, "Unsaid has no method `facts`; it must return what a state shows of it"),
        (Unnamed, "Unnamed says no `model`"),
    ],
)
def test_what_an_adapter_lacks_is_named(adapter: type[Adapter], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        lockstep(adapter, examples=4)
