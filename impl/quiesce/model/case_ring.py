"""What a recorded broadcast ring means in `spec/BroadcastRing.tla`.

Seen are the actions of the writer and of the readers; hidden are the death of processes and a view that is let go of.
Going to sleep and a wait that runs out change nothing and are passed over. A trace is of one ring, from its making on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from quiesce.model.case import Case, Told, named, ordered, rounded
from quiesce.model.traces import Event
from quiesce.model.validation import Condition, Observation, Span, never
from quiesce.model.values import Function, ModelValue, State, Value
from quiesce.ring_wire import MODULUS

SLOT_ONLY = ("Loan", "DropLoan", "Take", "Publish", "Recycle")
READER_ONLY = (
    *("SendBody", "Post", "Admit", "HearRelease", "HearLeave", "Exclude", "Vacate", "Join", "Open", "Lease"),
    *("TakeBody", "Leave", "FindWriterDead", "Release"),
)
PLAIN = ("Overflow", "Return", "Close")
PAIRS = ("Fill", "Copy")
PASSED_OVER = ("Sleep", "TimeOut")
SHARED = ("Take", "Recycle", "Close")
"""Actions that other protocols have too: whoever did one is of a ring if it did another of a ring's as well."""
HIDDEN = {
    "Drop": "\\E r \\in Local, s \\in Slots : Drop(r, s)",
    "Kill": "\\E r \\in Readers : Kill(r)",
    "Exit": "\\E r \\in Readers : Exit(r)",
    "KillWriter": "KillWriter",
    "LoseBody": "\\E r \\in Readers : LoseBody(r)",
}
CONDITIONS = """
OpenedSlot(r, s) == opened[r].kind = "slot" /\\ opened[r].slot = s
MessageIsNext == FALSE
HeardOf(r, s) == Head(notices[r]).slot = s
"""


def cases(events: Sequence[Event]) -> list[Case]:
    """At most one: all of them belong to one ring."""
    known = {*SLOT_ONLY, *READER_ONLY, *PLAIN, *PAIRS}
    members = {(event.process, event.subject) for event in events if event.action in known.difference(SHARED)}
    mine = [e for e in events if e.action in known and (e.process, e.subject) in members]
    return [_case(ordered(mine))] if mine else []


def _case(events: list[Event]) -> Case:
    told = Told()
    slots: set[int] = set()
    ranks: set[int] = set()
    window, published = 64, 0
    before: dict[tuple[str, int], str] = {}
    numbers: dict[tuple[str, int], int] = {}
    for event in events:
        fields = event.fields
        window = fields.get("window", window)
        published += event.action in ("Publish", "Overflow") and event.outcome == "end"
        slots |= {fields["s"]} if "s" in fields else set()
        ranks |= {fields["r"]} if "r" in fields else set()
        steps = _steps(event)
        who = event.process, event.subject
        if event.action == "Join" or (event.action == "FindWriterDead" and before.get(who) == "Join"):
            # A greeting may come to a writer that has closed, and its answer may be lost with one that is killed, both
            # of which the specification leaves out.
            steps = tuple(replace(step, optional=True) for step in steps)
        if event.action in ("Publish", "Overflow", "Close", "Open") and "message" in fields:
            if (
                numbers.setdefault(who, (fields["message"] - 1) % MODULUS)
                != (fields["message"] - 1) % MODULUS
            ):
                steps = tuple(replace(step, where=never("MessageIsNext")) for step in steps)
            numbers[who] = fields["message"]
        before[who] = event.action
        told.add(event, *steps, lasting=event.action == "Join")
    seen = {event.action for event in events if event.outcome == "end"}
    remote = {e.fields["r"] for e in events if e.action == "Join" and e.fields and e.cls == "RemoteReader"}
    # Counters go round the window a few times, and are moved back by whole windows.
    messages = 4 * window
    spans = tuple(
        _closing(span, messages) if event.action == "Close" else span
        for event, span in zip(told.events, told.spans, strict=True)
    )
    readers = named("r", int(rounded(max([3, *ranks]) + 1)))
    world = {
        "Slots": named("s", int(rounded(max([3, *slots]) + 1))),
        "Readers": readers,
        "Remote": "{" + ", ".join(f"r{rank + 1}" for rank in sorted(remote)) + "}",
        "Late": readers,
        "Leavers": readers,
        # Who was never found to have ended may as well live on and do nothing.
        "Mortal": readers if seen & {"Exclude", "Vacate"} else "{}",
        "Keepers": "{}",
        "Sleepers": "{}",
        "Window": str(window),
        "Messages": str(messages),
        "Loans": "TRUE",
        "Bodies": "TRUE",
        "Views": "1",
        "WriterMortal": "TRUE" if "FindWriterDead" in seen else "FALSE",
    }
    closed = any(event.action == "Close" for event in events)
    return Case(
        "broadcast_ring",
        f"ring of {len(ranks)} readers",
        "ring_slots",
        tuple(told.events),
        spans,
        (world,),
        {"Messages": str(max(1, published if closed else published + 1))},
        CONDITIONS,
        HIDDEN,
        lambda state: canonical(state, messages, window),
        frozenset({"Drop"}),
        never={
            "Kill": ("Mortal", "{}"),
            "Exit": ("Mortal", "{}"),
            "KillWriter": ("WriterMortal", "FALSE"),
            "LoseBody": ("WriterMortal", "FALSE"),
        },
        # So that the last message is the last of a window, as number `messages` is.
        offset={"sequence": -published % window} if closed else {},
        unjudged=""
        if any(event.action == "Admit" for event in events) or "Open" not in seen
        else "the ring was not recorded from its making on",
        notes=() if closed else ("the ring was not closed: this is judged as the beginning of its run",),
    )


def _closing(span: Span, messages: int) -> Span:
    return replace(
        span,
        steps=tuple(replace(step, rebase=lambda state: at_the_end(state, messages)) for step in span.steps),
    )


def _steps(event: Event) -> tuple[Observation, ...]:
    parameters: dict[str, Any] = {}
    if "r" in event.fields:
        parameters["r"] = reader = ModelValue(f"r{event.fields['r'] + 1}")
    if "s" in event.fields:
        parameters["s"] = slot = ModelValue(f"s{event.fields['s'] + 1}")
    action = event.action
    by_reader = {"r": parameters["r"]} if "r" in parameters else {}
    if action in ("Copy", "Lease") and event.outcome == "end":
        where = Condition(
            "OpenedSlot",
            (reader, slot),
            lambda before, _: (
                before["opened"][reader]["kind"] == "slot" and before["opened"][reader]["slot"] == slot
            ),
        )
        if action == "Lease":
            return (Observation(action, by_reader, where=where),)
        return Observation("BeginCopy", by_reader, where=where), Observation("EndCopy", by_reader)
    if action == "HearRelease" and event.outcome == "end":
        heard = Condition(
            "HeardOf", (reader, slot), lambda before, _: before["notices"][reader][0]["slot"] == slot
        )
        return (Observation(action, by_reader, where=heard),)
    if action in PAIRS:
        return Observation(f"Begin{action}", parameters), Observation(f"End{action}", parameters)
    return (Observation(action, by_reader if action in READER_ONLY and action != "Release" else parameters),)


def canonical(state: State, messages: int, window: int) -> State:
    """The same state without what no action looks at, with its counters moved back by whole windows.

    Forgotten are what was received and promised, entries that all have passed, and the counters of readers that are
    not there. A view that nobody misses is dropped: that disables nothing.
    """
    admitted, life = state["admitted"], state["life"]
    there = [r for r in life if life[r] == "in" or r in admitted]
    cursors = [state["cursor"][r] for r in there]
    leaving = [notice["at"] for r in life for notice in state["notices"][r] if notice["kind"] == "leave"]
    oldest = min([state["sequence"], *cursors, *leaving])
    moved = _moved(state, -(oldest // window) * window if state["sequence"] < messages else 0)
    passed = min([moved["sequence"], *(moved["cursor"][r] for r in there)])
    nothing = Function(kind="body", seq=0, slot=ModelValue("none"))
    alive = {r for r in life if life[r] in ("in", "left", "dying")}
    return State(
        {
            **moved,
            "entries": Function(
                {i: e if e["seq"] > passed else nothing for i, e in moved["entries"].items()}
            ),
            "cursor": Function({r: moved["cursor"][r] if r in there else 0 for r in life}),
            "got": Function(dict.fromkeys(life, 0)),
            "copying": _each(moved["copying"], lambda version: min(version, 0)),
            "content": Function(
                {s: v if moved["slot"][s] != "free" else 0 for s, v in moved["content"].items()}
            ),
            "grip": Function(
                {
                    r: Function(
                        {
                            s: 1 if hold > 1 and r in alive and moved["opened"][r]["slot"] != s else hold
                            for s, hold in slots.items()
                        }
                    )
                    for r, slots in moved["grip"].items()
                }
            ),
            "loans": frozenset(),
        }
    )


def at_the_end(state: State, messages: int) -> State:
    """The same state with the counters moved up to where the last message was published."""
    return _moved(state, messages - state["sequence"])


def _moved(state: State, by: int) -> State:
    if not by:
        return state

    def moved(value: int) -> int:
        return max(value + by, 0) if value > 0 else value

    def entry(value: Mapping[str, Value]) -> Value:
        return Function({**value, "seq": moved(value["seq"])})

    return State(
        {
            **state,
            "sequence": state["sequence"] + by,
            "cursor": _each(state["cursor"], lambda value: max(value + by, 0)),
            "content": _each(state["content"], moved),
            "entries": _each(state["entries"], entry),
            "opened": _each(state["opened"], entry),
            "bodies": _each(state["bodies"], lambda numbers: tuple(map(moved, numbers))),
            "notices": _each(
                state["notices"],
                lambda notices: tuple(
                    Function({**n, "at": max(n["at"] + by, 0) if n["kind"] == "leave" else n["at"]})
                    for n in notices
                ),
            ),
        }
    )


def _each(function: Mapping[Any, Any], change: Any) -> Value:
    return Function({key: change(value) for key, value in function.items()})
