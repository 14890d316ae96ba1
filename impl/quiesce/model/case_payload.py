"""What a recorded `PayloadSender` means in `spec/PayloadReuse.tla`.

Seen are the sender's own actions. Hidden are the peer, the I/O thread, the trackers and an exception between two parts:
a trace does not say when a frame was read, so that it shows a buffer recycled too early only by which trackers were
asked. Judged are senders over any transport that do not lend more than one tensor at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from quiesce.model.case import Case, Told, named, ordered, rounded
from quiesce.model.traces import Event
from quiesce.model.validation import Condition, Observation, never
from quiesce.model.values import Function, ModelValue, State, Value, freeze

POOL = ("Take", "Remember", "Recycle", "DropSurplus")
SENDER = ("Encode", "SendPart", "SendTimesOut", "PartRefused", "Abort", "Touch", "Close")
HIDDEN = {
    "BeginOverwrite": "\\E t \\in Tensors : BeginOverwrite(t)",
    "EndOverwrite": "\\E t \\in Tensors : EndOverwrite(t)",
    "Interrupt": "Interrupt",
    "PeerTake": "PeerTake",
    "BeginRead": "BeginRead",
    "EndRead": "EndRead",
    "PeerDrop": "PeerDrop",
    "TrackerFires": "\\E m \\in Messages, i \\in Parts : TrackerFires(m, i)",
    "Notice": "Notice",
    "PeerDies": "PeerDies",
    "PeerReturns": "PeerReturns",
    "Reap": "Reap",
}
NEVER = {
    "BeginOverwrite": ("Tensors", "{}"),
    "EndOverwrite": ("Tensors", "{}"),
    "Interrupt": ("MayInterrupt", "FALSE"),
    "PeerDrop": ("Transport", '"stream"'),
    "Notice": ("PeerMayDie", "FALSE"),
    "PeerDies": ("PeerMayDie", "FALSE"),
    "PeerReturns": ("PeerMayDie", "FALSE"),
}
CONDITIONS = """
HandIs(b) == hand = {b}
PartIs(i, large) == Len(parts) + 1 = i /\\ i <= Len(shape) /\\ shape[i].large = large
MessageIsEncodedOne == FALSE
AskedAre(b, asked) ==
    hand = {b} /\\ \\E p \\in pending' : p.buffer = b /\\ {f.part : f \\in p.asked} = asked
"""
TENSOR = ModelValue("t1")


def cases(events: Sequence[Event]) -> list[Case]:
    """One case for each sender; pools that belong to none are not this protocol's."""
    senders: dict[tuple[str, int], list[Event]] = {}
    owner: dict[tuple[str, int], tuple[str, int]] = {}
    taken: dict[tuple[str, int], Event] = {}
    for event in ordered([event for event in events if event.action in ("Take", "Encode")]):
        where, thread = (event.process, event.subject), (event.process, event.thread)
        if event.action == "Take":
            taken[thread] = event
        elif thread in taken:
            senders[where] = []
            owner[where] = owner[event.process, taken[thread].subject] = where
    for event in ordered([event for event in events if event.action in POOL + SENDER]):
        where = (event.process, event.subject)
        if where in owner:
            senders[owner[where]].append(event)
    return [_Sender(found).case() for found in senders.values()]


class _Sender:
    """Puts the case of one sender together, event by event."""

    def __init__(self, events: list[Event]) -> None:
        self.events = events
        self.told = Told(frozenset({"SendTimesOut", "PartRefused"}))
        self.names: dict[int, ModelValue] = {}
        self.most = self.number = self.spread = 0
        self.pending: dict[ModelValue, int] = {}
        self.message: object = None
        self.trackers: dict[int, int] = {}
        self.heading = 0
        self.shape: tuple[Value, ...] = ()
        self.shapes: set[Value] = set()
        self.limit = 0

    def case(self) -> Case:
        parts = {
            event.fields["message"]: event.fields["of"]
            for event in self.events
            if event.action == "SendPart" and "of" in event.fields
        }
        for event in self.events:
            self._tell(event, parts)
        closed = any(event.action == "Close" for event in self.events)
        start, notes = self._start()
        if not closed:
            notes.append("the sender was not closed: this is judged as the beginning of its run")
        seen = {event.action for event in self.events}
        lent = any(part["lent"] for shape in self.shapes for part in shape)
        lents = "FALSE, TRUE" if lent else "FALSE"
        base = {
            "Buffers": named("b", self._buffers()),
            "Tensors": named("t", 1) if lent else "{}",
            "MaxMessage": rounded(max(self.spread + 3, 16)),
            "MaxParts": rounded(max(4, *map(len, self.shapes))),
            "Shapes": "<- TracedShapes",
            "Transport": '"stream"',
            "HighWater": "1",
            "FreeLimit": str(min(self.limit, self._buffers())),
            "PeerMayDie": "FALSE",
            "MayInterrupt": "TRUE" if "Abort" in seen else "FALSE",
        }
        dying = {**base, "PeerMayDie": "TRUE"}
        first = self.events[0]
        return Case(
            "payload_reuse",
            f"sender {first.process}",
            "payload_reuse_stream",
            tuple(self.told.events),
            tuple(self.told.spans),
            (base, {**dying, "Side": '"bind"'}, {**dying, "Side": '"connect"'}),
            {"MaxMessage": str(max(1, self.number if closed else self.number + 1))},
            f"TracedShapes == UNION {{[1..n -> [large : BOOLEAN, lent : {{{lents}}}]] : n \\in Parts}}\n{CONDITIONS}",
            HIDDEN,
            canonical,
            frozenset({"BeginRead", "EndRead", "TrackerFires"}),
            never=NEVER,
            notes=tuple(notes),
            start=start,
            unjudged="a message could not be encoded, which the specification does not know"
            if any(event.action == "Encode" and event.outcome == "error" for event in self.events)
            else "",
        )

    def _start(self) -> tuple[dict[str, Value], list[str]]:
        """Where the recording begins: with the sender, or in the middle, with buffers whose past is not known."""
        number = min((e.fields["message"] for e in self.events if "message" in e.fields), default=1)
        if number == 1:
            return {}, []
        first: dict[ModelValue, str] = {}
        for event, span in zip(self.told.events, self.told.spans, strict=True):
            if event.action in POOL and event.fields and span.steps:
                name = span.steps[0].parameters.get("b")
                first.setdefault(name, event.action)  # type: ignore[arg-type]
        pending = [name for name, action in first.items() if action in ("Recycle", "DropSurplus")]
        free = frozenset(name for name, action in first.items() if action == "Take")
        start = {
            "free": free,
            "pending": frozenset(Function(buffer=name, asked=frozenset(), message=1) for name in pending),
        }
        return start, [
            f"recorded from message {number} on: {len(free)} buffers are taken to have been free then, and "
            f"{len(pending)} settled"
        ]

    def _tell(self, event: Event, parts: Mapping[object, int]) -> None:
        fields, action = event.fields, event.action
        steps: tuple[Observation, ...] = ()
        if action == "Take" and event.outcome == "end":
            self.limit = fields["free_limit"]
            self.number += 1
            steps = (Observation(action, {"b": self._name(fields["buffer"])}),)
        elif action == "Encode" and event.outcome == "end":
            self._encoded(fields, parts)
            hand = self._hand(fields["buffer"])
            steps = (Observation("BeginEncode", where=hand), Observation("EndEncode", {"s": self.shape}))
        elif action == "Encode":
            steps = (Observation("BeginEncode"),)
        elif action == "SendPart" and event.outcome == "end":
            if not fields["sent"]:
                return
            if fields["tracker"] is not None:
                self.trackers[fields["tracker"]] = fields["part"]
            steps = (Observation(action, where=self._part(fields)),)
        elif action == "SendPart":
            steps = (Observation(action),)
        elif action == "Remember" and event.outcome == "end":
            name = self._name(fields["buffer"])
            asked = frozenset(self.trackers[t] for t in fields["asked"] if t in self.trackers)
            self.pending[name] = self.number
            steps = (Observation(action, where=self._asked(name, asked)),)
        elif action in ("Recycle", "DropSurplus") and event.outcome == "end":
            name = self._name(fields["buffer"])
            self.pending.pop(name, None)
            if action == "DropSurplus":
                # Its address may come again, for another buffer.
                del self.names[fields["buffer"]]
            steps = (Observation(action, {"b": name}),)
        elif action == "Touch":
            steps = (Observation(action, optional=True),)
        elif action == "Close":
            # After the last message, which the model takes to be number MaxMessage.
            steps = (Observation(action, rebase=lambda state: State({**state, "number": 1 << 16})),)
        elif action not in POOL:
            steps = (Observation(action),)
        self.spread = max(self.spread, self.number - min(self.pending.values(), default=self.number))
        self.told.add(event, *steps)

    def _encoded(self, fields: Mapping[str, Any], parts: Mapping[object, int]) -> None:
        self.message, self.trackers = fields["message"], {}
        shape = [Function(large=large, lent=lent) for large, lent in fields["shape"]]
        # Frames in front, such as a routing id, are put there after encoding, and are copied.
        heading = parts.get(self.message, len(shape)) - len(shape)
        self.shape = tuple([Function(large=False, lent=False)] * heading + shape)
        self.shapes.add(self.shape)

    def _buffers(self) -> int:
        return int(rounded(max(8, self.most)))

    def _name(self, key: int) -> ModelValue:
        if key not in self.names:
            used = set(self.names.values())
            free = (ModelValue(f"b{number}") for number in range(1, len(used) + 2))
            self.names[key] = next(name for name in free if name not in used)
            self.most = max(self.most, len(self.names))
        return self.names[key]

    def _hand(self, key: int) -> Condition:
        name = self._name(key)
        return Condition("HandIs", (name,), lambda before, _: before["hand"] == {name})

    def _part(self, fields: Mapping[str, Any]) -> Condition:
        part, large = fields["part"], fields["tracker"] is not None
        if fields["message"] != self.message:
            return never("MessageIsEncodedOne")
        return Condition(
            "PartIs",
            (part, large),
            lambda before, _: (
                len(before["parts"]) + 1 == part
                and part <= len(before["shape"])
                and before["shape"][part - 1]["large"] == large
            ),
        )

    @staticmethod
    def _asked(name: ModelValue, asked: frozenset[int]) -> Condition:
        def holds(before: State, after: State) -> bool:
            mine = [entry["asked"] for entry in after["pending"] if entry["buffer"] == name]
            return before["hand"] == {name} and any({f["part"] for f in frames} == asked for frames in mine)

        return Condition("AskedAre", (name, asked), holds)


def canonical(state: State) -> State:
    """The same state without what no action looks at, and with the oldest message that matters as number 1.

    Forgotten are what was delivered, accepted and excused, and the versions of bytes.
    """
    # The reader is through with what it took, and trackers that can fire have fired: that disables nothing.
    alive = state["alive"] - frozenset(state["holding"])
    undone = (state["undone"] - state["refused"]) & (alive | state["leaked"])
    pending = [(entry["buffer"], entry["asked"] & undone) for entry in state["pending"]]
    # A function over no tensors at all is the empty sequence.
    loan = {tensor: state["loan"][tensor] & undone for tensor in state["loan"]}
    lists = [state["partial"], state["parts"], *state["pipe"]]
    sets = [alive, undone, state["stale"], state["leaked"]]
    numbers = [frame["msg"] for frames in (*lists, *sets) for frame in frames]
    number = state["number"]
    behind = min([*numbers, number]) - 1

    def moved(frames: Iterable[Value]) -> list[Value]:
        return [Function({**frame, "msg": frame["msg"] - behind, "version": 0}) for frame in frames]

    return State(
        {
            **state,
            "content": Function(
                {
                    x: number - behind if x == TENSOR and version == number else 0
                    for x, version in state["content"].items()
                }
            ),
            "partial": tuple(moved(state["partial"])),
            "excused": frozenset(),
            "pipe": tuple(tuple(moved(message)) for message in state["pipe"]),
            "holding": (),
            "glimpse": (),
            "seen": (),
            "delivered": (),
            "alive": frozenset(moved(alive)),
            "undone": frozenset(moved(undone)),
            "stale": frozenset(moved(state["stale"])),
            "leaked": frozenset(moved(state["leaked"] & undone)),
            "refused": frozenset(),
            "number": number - behind,
            "parts": tuple(moved(state["parts"])),
            "pending": frozenset(
                Function(buffer=buffer, asked=frozenset(moved(asked)), message=1) for buffer, asked in pending
            ),
            "loan": freeze({tensor: frozenset(moved(frames)) for tensor, frames in loan.items()}),
            "accepted": (),
        }
    )
