"""What a recorded pipeline of `StageLink` means in `spec/StageHandoff.tla`, with handles that block the host (gloo).

Seen are the calls of the links. Hidden are forward, which is the caller's, and the transfers. Rank `n` of the transport
is rank `n + 1` of the specification. A trace is of one pipeline without tensor parallelism, from its making on. That
the first rank takes the last answers when it has sent everything is outside the specification and not judged.

The specification settles the previous step behind the receive, and its last rank answers. A rank that settles first
is judged as if it did so behind the receive, in which nothing of what it sent is written; and a last rank that answers
nobody as if it did, since nobody takes that answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, takewhile
from typing import Any

from quiesce.model.case import Case, Told, ordered
from quiesce.model.traces import Event
from quiesce.model.validation import Observation, never
from quiesce.model.values import Function, State, Value

ACTIONS = (
    *(
        "ReceiveMetadata",
        "PostReceive",
        "AwaitReceive",
        "AllGather",
        "BeforeForward",
        "SendMetadata",
        "SendTensors",
    ),
    "ReapMetadata",
)
RECEIVE = ("ReceiveMetadata", "PostReceive", "AwaitReceive", "AllGather")
HIDDEN = {
    "Forward": "\\E r \\in Ranks, b \\in Blocks : Forward(r, b)",
    "Pass": "\\E s \\in Streams : Pass(s)",
    "BeginWork": "\\E s \\in Streams : BeginWork(s)",
    "EndWork": "\\E s \\in Streams : EndWork(s)",
    "BeginTransfer": "\\E s \\in Streams : BeginTransfer(s)",
    "EndTransfer": "\\E s \\in Streams : EndTransfer(s)",
}


def cases(events: Sequence[Event]) -> list[Case]:
    """At most one: all links belong to one pipeline."""
    mine = ordered([event for event in events if event.action in ACTIONS])
    return [_case(mine)] if mine else []


def _case(events: list[Event]) -> Case:
    rank_of = {(e.process, e.subject): e.fields["r"] for e in events if "r" in e.fields}
    told = Told()
    counted: dict[tuple[str, int, str], int] = {}
    acting = [event for event in events if (event.process, event.subject) in rank_of]
    answered = _without_the_last_answers(acting, rank_of)
    judged = _settling_behind_the_receive(answered, rank_of)
    # Of its neighbours a rank tells even if they never got as far as telling anything.
    named = [e.fields.get(name) for e in events for name in ("r", "source", "to")]
    ranks = 1 + max([1, *(rank for rank in named if rank is not None)])
    silent = ranks if _answers_nobody(judged, rank_of, ranks - 1) else 0
    forward = False  # whether the silent rank has an answer to give
    for event in judged:
        rank = rank_of[event.process, event.subject] + 1
        step = Observation(event.action, {"r": rank})
        before: tuple[Observation, ...] = ()
        if rank == silent and event.action in ("ReceiveMetadata", "BeforeForward"):
            if event.action == "ReceiveMetadata" and forward:
                before = (Observation("SendMetadata", {"r": rank}),)
            forward = event.action == "BeforeForward"
        if "message" in event.fields:
            key = event.process, event.subject, event.action
            if event.fields["message"] != counted.setdefault(key, 0):
                step = replace(step, where=never("MessageIsNext"))
            counted[key] = event.fields["message"] + 1
        told.add(event, *before, step)
    ahead, steps, dicts = _shape(judged, rank_of)
    most = max((e.fields["max_pending"] for e in events if "max_pending" in e.fields), default=64)
    world = {
        "LastRank": str(ranks),
        "Steps": str(4 * ahead + 12),
        "InFlight": str(ahead),
        "MaxPending": str(max(most, ahead)),
        "Flavour": '"gloo"',
        "Fresh": "FALSE",
        "Gather": "FALSE",
        "Extra": "TRUE" if dicts > 1 else "FALSE",
        "WaitTwice": "FALSE",
    }
    dropped = len(acting) - len(answered)
    return Case(
        "stage_handoff",
        f"pipeline of {ranks} ranks",
        "stage_handoff_gloo",
        tuple(told.events),
        tuple(told.spans),
        (world,),
        {"Steps": str(steps + 2)},
        "MessageIsNext == FALSE",
        HIDDEN,
        lambda state: canonical(state, ahead),
        urgent=frozenset(HIDDEN),
        unjudged=_unjudged(events),
        notes=(f"{dropped} answers that the first rank took after its last send are not judged",)
        if dropped
        else (),
    )


def _unjudged(events: Sequence[Event]) -> str:
    devices = {event.fields["device"] for event in events if "device" in event.fields}
    if devices - {"CpuBackend"}:
        return (
            f"with {', '.join(sorted(devices))} the streams, which are not recorded, decide what happens when"
        )
    if any(event.action == "AllGather" for event in events):
        return "tensor parallel ranks are several to one rank of the specification"
    return ""


def _without_the_last_answers(events: Sequence[Event], rank_of: Mapping[tuple[str, int], int]) -> list[Event]:
    first = [event for event in events if rank_of[event.process, event.subject] == 0]
    sent = max((n for n, event in enumerate(first) if event.action == "SendMetadata"), default=len(first))
    after = [event for event in first[sent:] if event.action in ("ReceiveMetadata", "BeforeForward")]
    last = [event for before, event in pairwise(after) if before.action == event.action == "ReceiveMetadata"]
    return [event for event in events if event not in last]


def _settling_behind_the_receive(
    events: Sequence[Event], rank_of: Mapping[tuple[str, int], int]
) -> list[Event]:
    """The events with `before_forward` behind the receive of its step, for ranks that call it in front of that.

    Without the last one of a rank, if nothing shows that its receive came to an end.
    """
    moved: dict[int, Event | None] = {}
    for link in dict.fromkeys((event.process, event.subject) for event in events):
        own = [e for e in events if (e.process, e.subject) == link and e.action != "ReapMetadata"]
        pairs = [(event.action, behind.action) for event, behind in pairwise(own)]
        sends = any(event.action == "SendMetadata" for event in own)
        if not (
            (rank_of[link] > 0 and own[0].action == "BeforeForward")
            or (sends and ("BeforeForward", "ReceiveMetadata") in pairs)
        ):
            continue
        for number, event in enumerate(own):
            if event.action == "BeforeForward":
                rest = own[number + 1 :]
                receive = list(takewhile(lambda e: e.action in RECEIVE, rest))
                if len(receive) == len(rest):
                    moved[id(event)] = None
                elif receive:
                    end = receive[-1].end
                    moved[id(event)] = replace(event, begin=end, end=end + 1) if end is not None else None
    kept = (moved.get(id(event), event) for event in events)
    return ordered([event for event in kept if event is not None])


def _answers_nobody(events: Sequence[Event], rank_of: Mapping[tuple[str, int], int], last: int) -> bool:
    """Whether the last rank sends nothing, and the first receives nothing."""
    told = {(rank_of[event.process, event.subject], event.action) for event in events}
    return not told & {(0, "ReceiveMetadata"), (last, "SendMetadata")}


def _shape(events: Sequence[Event], rank_of: Mapping[tuple[str, int], int]) -> tuple[int, int, int]:
    """How many steps the first rank starts before it needs an answer, how many it began, and dicts a step."""
    first = [e.action for e in events if rank_of[e.process, e.subject] == 0 and e.outcome == "end"]
    answered = first.index("ReceiveMetadata") if "ReceiveMetadata" in first else len(first)
    begun = first.count("BeforeForward")
    sent = first.count("SendMetadata")
    return max(1, first[:answered].count("BeforeForward")), begun, round(sent / begun) if begun else 1


def canonical(state: State, ahead: int) -> State:
    """The same state with its steps moved back, each stream's count from what has run, and reached points alike."""
    behind = max(0, min(state["step"]) - (ahead + 2))
    ran = state["ran"]

    def point(value: Mapping[str, Value]) -> Value:
        return Function(stream=value["stream"], count=max(value["count"] - ran[value["stream"]], 0))

    def version(value: int) -> int:
        return max(value - behind, 0) if value > 0 else value

    def item(value: Mapping[str, Any]) -> Value:
        if value["kind"] == "wait":
            return Function({**value, "point": point(value["point"])})
        return Function({**value, "version": version(value["version"])})

    def each(function: Any, change: Any) -> Value:
        if isinstance(function, tuple):
            return tuple(map(change, function))
        return Function({key: change(value) for key, value in function.items()})

    return State(
        {
            **state,
            "queue": each(state["queue"], lambda items: tuple(map(item, items))),
            "ran": each(ran, lambda _: 0),
            "event": each(state["event"], point),
            "memory": each(state["memory"], version),
            "block": each(
                state["block"], lambda b: Function({**b, "hold": frozenset(map(point, b["hold"]))})
            ),
            "step": tuple(step - behind for step in state["step"]),
            "handles": each(state["handles"], lambda points: frozenset(map(point, points))),
            "receiving": each(state["receiving"], lambda points: frozenset(map(point, points))),
            "metadata": each(
                state["metadata"],
                lambda m: Function(sent=m["sent"] - m["reaped"], taken=m["taken"] - m["reaped"], reaped=0),
            ),
        }
    )
