"""How counterexamples of each specification are drawn: who acts, what memory there is, and who was promised it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from quiesce.model.output import TraceStep
from quiesce.model.values import Function, State, show

Constants = Mapping[str, str]


@dataclass(frozen=True)
class Promise:
    """Somebody may read this version in this memory; `wrong` if it has begun to read something else."""

    memory: str
    reader: str
    version: Any
    wrong: bool = False


def name(value: Any) -> str:
    """A value as a short name: `<<1, "out">>` is "1 out"."""
    if isinstance(value, tuple):
        return " ".join(map(name, value))
    return value if isinstance(value, str) else show(value)


def short_label(step: TraceStep, before: State, lane: str) -> str:
    """An action with its parameters as far as they are short, and not the lane's: names by themselves, numbers not."""
    texts = []
    for parameter, value in step.parameters.items():
        if lane.endswith(f" {name(value)}"):
            continue
        text = name(value) if not isinstance(value, int) else f"{parameter} = {show(value)}"
        if isinstance(value, frozenset | Function):
            text = f"{parameter} {show(value)}"
        if len(text) <= 16:
            texts.append(text)
    return f"{step.action} {', '.join(texts)}".strip()


@dataclass(frozen=True)
class View:
    """What to draw of one specification.

    `lane(step, constants)` says who takes a step, `promises` who may read what in a state, `content` which version
    lies where; `noun` is what a version is called. Lanes stand in the order of `order`, which holds their beginnings.
    `label(step, before, lane)` is the text of a step, `finding` what the last state shows, where that says more.
    """

    lane: Callable[[TraceStep, Constants], str]
    promises: Callable[[State, Constants], Iterator[Promise]] = lambda state, constants: iter(())
    content: Callable[[State], Mapping[str, Any]] = lambda state: {}
    noun: str = "version"
    order: tuple[str, ...] = ()
    label: Callable[[TraceStep, State, str], str] = short_label
    finding: Callable[[State], str] = lambda state: ""


def _by_action(lanes: Mapping[str, str], otherwise: str) -> Callable[[TraceStep, Constants], str]:
    return lambda step, constants: lanes.get(step.action, otherwise)


def _content(variable: str) -> Callable[[State], Mapping[str, Any]]:
    return lambda state: {name(key): item for key, item in _items(state[variable])}


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    yield from value.items() if isinstance(value, Mapping) else enumerate(value, 1)


def _loans(reader: str = "") -> Callable[[State, Constants], Iterator[Promise]]:
    def promises(state: State, constants: Constants) -> Iterator[Promise]:
        for loan in state["loans"]:
            yield Promise(name(loan["buffer"]), reader or f"reader {name(loan['reader'])}", loan["version"])

    return promises


# ------------------------------------------------------------------------------------- payload reuse, and libzmq

_CALLER = dict.fromkeys(("BeginOverwrite", "EndOverwrite"), "caller")
_READING = ("PeerTake", "BeginRead", "EndRead", "PeerDrop")
_LIBZMQ = dict.fromkeys(("TrackerFires", "Notice", "Reap"), "libzmq")
_PEER = dict.fromkeys(("PeerDies", "PeerReturns"), "peer")


def _frame_reader(constants: Constants) -> str:
    return "receiver" if "inproc" in constants.get("Transport", "") else "I/O thread"


def _payload_lane(step: TraceStep, constants: Constants) -> str:
    if step.action in _READING:
        return _frame_reader(constants)
    return {**_CALLER, **_LIBZMQ, **_PEER}.get(step.action, "sender")


def _frames(state: State, constants: Constants) -> Iterator[Promise]:
    for frame in state["alive"]:
        for memory in frame["memory"]:
            yield Promise(name(memory), _frame_reader(constants), frame["version"])


_PAYLOAD = View(
    _payload_lane,
    _frames,
    _content("content"),
    "message",
    ("caller", "sender", "libzmq", "I/O thread", "receiver", "peer"),
)

# ------------------------------------------------------------------------------------------------ broadcast ring

_WRITER = (
    *("SendBody", "Post", "Admit", "HearRelease", "HearLeave", "Exclude", "Vacate"),
    *("Loan", "DropLoan", "Take", "BeginFill", "EndFill", "Publish", "Recycle"),
)


def _ring_lane(step: TraceStep, constants: Constants) -> str:
    if step.action in _WRITER or "r" not in step.parameters:
        return "writer"
    return f"reader {name(step.parameters['r'])}"


_RING = View(_ring_lane, _loans(), _content("content"), "message", ("writer", "reader"))

# ------------------------------------------------------------------------------------- streams, and what they run

_STREAM_STEPS = ("Pass", "BeginWork", "EndWork", "BeginTransfer", "EndTransfer")


def _stream_lane(step: TraceStep, constants: Constants) -> str:
    if step.action in _STREAM_STEPS:
        return f"stream {name(step.parameters['s'])}"
    if step.action == "EndLoan":
        return "transport"
    return f"host {name(step.parameters['r'])}" if "r" in step.parameters else "host"


def _queued(state: State, constants: Constants) -> Iterator[Promise]:
    """Whatever is enqueued was promised its sources until it has run."""
    for stream, items in _items(state["queue"]):
        for index, item in enumerate(items):
            running = index == 0 and stream in state["busy"]
            for memory in item.get("from", ()):
                wrong = running and item["version"] == -1
                yield Promise(name(memory), f"stream {name(stream)}", item["version"], wrong)


def _staging(state: State, constants: Constants) -> Iterator[Promise]:
    yield from _queued(state, constants)
    for loan in state["loans"]:
        memory = name(loan["buffer"])
        yield Promise(memory, "transport", loan["version"], wrong=state["memory"][memory] != loan["version"])


_STREAMS = View(_stream_lane, _queued, _content("memory"), "version", ("host", "stream", "transport"))

# ------------------------------------------------------------------------------------------------- memory order


def _thread(step: TraceStep, constants: Constants) -> str:
    thread = step.parameters.get("t", 1)
    return "writer" if thread == 1 else f"reader {int(thread) - 1}"


def _access(step: TraceStep, before: State, lane: str) -> str:
    """A store by the word it changes, a load by the word where that shows."""
    if "i" not in step.parameters:
        return short_label(step, before, lane)
    old, new = before["mem"], step.state["mem"]
    at = f"(instruction {step.parameters['i']})"
    for word in new:
        if old[word] != new[word]:
            return f"{word} := {new[word]['val']} {at}"
    for _, word, _, found in step.state["misread"] - before["misread"]:
        return f"reads {word}: {found} {at}"
    return f"loads {at}"


def _misread(state: State) -> str:
    return "; ".join(
        f"{word} holds {found}, where {owed} is due"
        for _, word, owed, found in sorted(state["misread"], key=show)
    )


def _litmus(state: State) -> str:
    model, strength, shape = state["row"]
    return f"the litmus test {shape} ({strength}) under {model} comes out otherwise than the literature says"


_WAKE_UP = View(
    lambda step, constants: (
        "writer" if step.action in ("Tell", "Hear") or "r" not in step.parameters else _reader(step)
    ),
    noun="message",
    order=("writer", "reader"),
)


def _reader(step: TraceStep) -> str:
    return f"reader {name(step.parameters['r'])}"


VIEWS: Mapping[str, View] = {
    "MCBufferLifecycle": View(
        _by_action({"EndLoans": "readers", "Recycle": "pool", "Discard": "pool"}, "holder"),
        _loans(),
        _content("content"),
        order=("holder", "readers", "pool"),
    ),
    "MCTrackerCompletion": _PAYLOAD,
    "MCPayloadReuse": _PAYLOAD,
    "MCBroadcastRing": _RING,
    "MCBroadcastRingLive": _RING,
    "MCStreamOrdering": _STREAMS,
    "MCStageHandoff": View(
        _stream_lane,
        _queued,
        _content("memory"),
        "step",
        ("host 1", "stream 1", "host 2", "stream 2", "host", "stream"),
    ),
    "MCHostStaging": View(
        _stream_lane, _staging, _content("memory"), "version", ("host", "stream", "transport")
    ),
    "MCRingMemory": View(_thread, order=("writer", "reader"), label=_access, finding=_misread),
    "MCWakeUp": _WAKE_UP,
    "MCLitmus": View(_by_action({}, "all threads"), finding=_litmus),
}
"""By the module of the model; a module that is not here is drawn with one lane for each of its actions."""

OTHERWISE = View(lambda step, constants: step.action)


def changes(before: State | None, after: State, longest: int = 90) -> tuple[str, ...]:
    """What a step changed: the keys of functions, and what sets and sequences gained or lost."""
    if before is None:
        return ()
    found = []
    for variable, new in after.items():
        old = before[variable]
        if old != new:
            texts = list(_difference(variable, old, new))
            found += [text if len(text) <= longest else text[: longest - 1] + "…" for text in texts]
    return tuple(found)


def _difference(path: str, old: Any, new: Any) -> Iterator[str]:
    if isinstance(old, frozenset) and isinstance(new, frozenset):
        gained, lost = sorted(map(show, new - old)), sorted(map(show, old - new))
        yield f"{path}: " + ", ".join([*(f"+ {item}" for item in gained), *(f"- {item}" for item in lost)])
    elif isinstance(old, tuple) and isinstance(new, tuple) and len(old) != len(new):
        if new[: len(old)] == old:
            yield f"{path}: + {', '.join(map(show, new[len(old) :]))}"
        elif old[len(old) - len(new) :] == new:
            yield f"{path}: - {', '.join(map(show, old[: len(old) - len(new)]))}"
        else:
            yield f"{path}: {show(old)} → {show(new)}"
    elif isinstance(old, tuple | Function) and isinstance(new, tuple | Function):
        then = dict(_items(old))
        for key, item in _items(new):
            if key in then and then[key] != item:
                yield from _difference(f"{path}[{name(key)}]", then[key], item)
            elif key not in then:
                yield f"{path}[{name(key)}]: {show(item)}"
    else:
        yield f"{path}: {show(old)} → {show(new)}"
