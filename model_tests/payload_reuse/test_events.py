"""Observing: who is told what, for how long, and that nothing is left of it afterwards."""

from __future__ import annotations

import pytest

from quiesce.events import Event, action, actions, observe


class Machine:
    @action("Work", lambda machine, result, amount: {"amount": amount, "result": result})
    def work(self, amount: int) -> int:
        if amount < 0:
            raise KeyboardInterrupt
        return 2 * amount

    @action("Rest")
    def rest(self) -> None:
        """Do nothing, observably."""


class Special(Machine):
    @action("Shine")
    def shine(self) -> None:
        """Do something of its own."""


def told(events: list[Event]) -> list[tuple[str, str]]:
    return [(event.action, event.phase) for event in events]


def test_the_begin_and_the_end_of_an_action_are_told_with_its_parameters() -> None:
    machine, events = Machine(), list[Event]()
    with observe(events.append):
        assert machine.work(3) == 6
        machine.rest()
    assert told(events) == [("Work", "begin"), ("Work", "end"), ("Rest", "begin"), ("Rest", "end")]
    assert [event.fields for event in events] == [{}, {"amount": 3, "result": 6}, {}, {}]
    assert all(event.subject is machine for event in events)


def test_an_error_of_any_class_is_told_and_raised() -> None:
    events = list[Event]()
    with observe(events.append), pytest.raises(KeyboardInterrupt) as raised:
        Machine().work(-1)
    assert told(events) == [("Work", "begin"), ("Work", "error")]
    assert events[-1].fields == {"error": raised.value}


def test_observers_come_and_go_without_disturbing_each_other() -> None:
    machine, outer, inner = Machine(), list[Event](), list[Event]()
    with observe(outer.append):
        machine.rest()
        with observe(inner.append):
            machine.rest()
        machine.rest()
    assert told(inner) == [("Rest", "begin"), ("Rest", "end")]
    assert told(outer) == 3 * told(inner)


def test_an_unobserved_method_runs_exactly_as_written() -> None:
    """Also after an error in the block."""
    written = vars(Machine)["work"]

    def observed() -> None:
        with observe(lambda event: None):
            assert vars(Machine)["work"] is not written
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        observed()
    assert vars(Machine)["work"] is written


def test_what_an_observer_raises_reaches_the_caller() -> None:
    def fault(event: Event) -> None:
        if event.phase == "end":
            raise ConnectionError

    with observe(fault), pytest.raises(ConnectionError):
        Machine().rest()


def test_the_actions_of_a_class_are_also_those_it_inherits() -> None:
    assert actions(Special) == {"Work": "work", "Rest": "rest", "Shine": "shine"}
