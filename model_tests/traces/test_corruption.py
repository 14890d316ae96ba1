"""A recording that was tampered with is rejected, at the event that gives it away; TLC's command line agrees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from model_tests.traces import runs

from quiesce.model.judging import Verdict, beginning, cases, judge, outcome_of
from quiesce.model.second_opinion import accepts
from quiesce.model.traces import Event, Trace, read

Events = list[Event]
Corruption = Callable[[Events], tuple[Events, Event]]
"""Gives the corrupted events, and the one to be blamed."""


@pytest.fixture(scope="session")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trace]:
    """A sound recording of each protocol, and one of a pipeline that settles first and in which nobody answers."""
    folder = tmp_path_factory.mktemp("recordings")
    runs.payload(folder / "payload", runs.Payload(messages=8, seed=3))
    runs.ring(folder / "ring", runs.Ring(messages=6, seed=3))
    runs.stage([folder / "stage"], runs.Stage(steps=5))
    runs.stage([folder / "one way"], runs.Stage(steps=5, settles_first=True, answers=False))
    return {name: read(folder / name) for name in ("payload", "ring", "stage", "one way")}


def nth(events: Sequence[Event], action: str, number: int, **fields: object) -> Event:
    found = [e for e in events if e.action == action and fields.items() <= dict(e.fields).items()]
    return found[number]


def following(events: Sequence[Event], event: Event) -> Event:
    """The next event of the same thread, other than those within this one."""
    assert event.end is not None
    own = [e for e in events if (e.process, e.thread) == (event.process, event.thread)]
    return next(e for e in own if e.begin >= event.end)


def missing(action: str, number: int = 2) -> Corruption:
    """The next of the same thread cannot come yet."""

    def corrupt(events: Events) -> tuple[Events, Event]:
        gone = nth(events, action, number)
        return [e for e in events if e is not gone], following(events, gone)

    return corrupt


def doubled(action: str, number: int = 2) -> Corruption:
    def corrupt(events: Events) -> tuple[Events, Event]:
        first = nth(events, action, number)
        assert first.end is not None
        again = replace(first, begin=first.end + 1, end=first.end + 2)
        return [*events, again], again

    return corrupt


def swapped(action: str, number: int = 2, **fields: object) -> Corruption:
    """The one that should have come second is the first to be wrong."""

    def corrupt(events: Events) -> tuple[Events, Event]:
        first = nth(events, action, number, **fields)
        second = following(events, first)
        early = replace(second, begin=first.begin, end=first.end)
        late = replace(first, begin=second.begin, end=second.end)
        return [late if e is first else early if e is second else e for e in events], early

    return corrupt


def changed(action: str, number: int = 2, **fields: object) -> Corruption:
    def corrupt(events: Events) -> tuple[Events, Event]:
        was = nth(events, action, number)
        now = replace(was, fields={**was.fields, **fields})
        return [now if e is was else e for e in events], now

    return corrupt


def another_buffer(action: str) -> Corruption:
    """A buffer that was taken before, and that this is not about; one that never was, if one was enough."""

    def corrupt(events: Events) -> tuple[Events, Event]:
        was = nth(events, action, 3).fields["buffer"]
        taken = [e.fields["buffer"] for e in events if e.action == "Take"]
        other = next((buffer for buffer in taken if buffer != was), 1)
        return changed(action, 3, buffer=other)(events)

    return corrupt


def another_rank(events: Events) -> tuple[Events, Event]:
    """The last rank never sends tensors."""
    was = nth(events, "SendTensors", 1)
    there = nth(events, "BeforeForward", 0, r=1)
    now = replace(was, process=there.process, thread=there.thread, subject=there.subject, fields={"r": 1})
    return [now if e is was else e for e in events], now


def another_reader(events: Events) -> tuple[Events, Event]:
    """Who greets is not who is let in."""
    was = nth(events, "Join", 0, r=0)
    return [replace(e, fields={"r": 1}) if e is was else e for e in events], nth(events, "Admit", 0, r=0)


def another_sender(events: Events) -> tuple[Events, Event]:
    """A part that another process is said to have sent was not sent by this one."""
    was = nth(events, "SendPart", 4)
    return [replace(e, process="other") if e is was else e for e in events], following(events, was)


def settled_in_front_of_the_receive(events: Events) -> tuple[Events, Event]:
    """A rank that settles first is held to it behind the receive, which has not ended where its end is missing."""
    gone = nth(events, "AwaitReceive", 2)
    before = [e for e in events if e.process == gone.process and e.begin < gone.begin]
    settled, posted = (nth(before, action, -1) for action in ("BeforeForward", "PostReceive"))
    assert posted.end is not None
    return [e for e in events if e is not gone], replace(settled, begin=posted.end)


CORRUPTED: dict[str, dict[str, Corruption]] = {
    "payload": {
        "missing": missing("Encode"),
        "doubled": doubled("Take"),
        "swapped": swapped("Take"),
        "wrong buffer": another_buffer("Encode"),
        "wrong buffer recycled": changed("Recycle", 0, buffer=1),
        "wrong trackers": changed("Remember", 2, asked=[1]),
        "wrong part": changed("SendPart", 2, part=9),
        "wrong message": changed("SendPart", 2, message=9),
        "wrong process": another_sender,
    },
    "ring": {
        "missing": missing("Open"),
        "doubled": doubled("Open"),
        "swapped": swapped("Fill"),
        "wrong buffer": changed("Publish", 2, s=7),
        "wrong buffer heard of": changed("HearRelease", 1, s=7),
        "wrong message": changed("Open", 2, message=99),
        "wrong process": another_reader,
    },
    "stage": {
        "missing": missing("AwaitReceive"),
        "doubled": doubled("BeforeForward"),
        "swapped": swapped("SendMetadata", r=0),
        "wrong message": changed("ReceiveMetadata", 1, message=99),
        "wrong process": another_rank,
    },
    "one way": {
        "missing": settled_in_front_of_the_receive,
        "doubled": doubled("PostReceive"),
        "swapped": swapped("SendMetadata", r=0),
        "wrong message": changed("ReceiveMetadata", 1, message=99),
    },
}


def judged(trace: Trace, events: Sequence[Event]) -> Verdict:
    (case,) = cases(replace(trace, events=tuple(events)))
    return judge(case)


@pytest.mark.parametrize(
    ("protocol", "kind"), [(p, kind) for p, kinds in CORRUPTED.items() for kind in kinds]
)
def test_a_corrupted_recording_is_rejected_at_the_right_event(
    protocol: str, kind: str, recordings: dict[str, Trace]
) -> None:
    trace = recordings[protocol]
    events, guilty = CORRUPTED[protocol][kind](list(trace.events))
    verdict = judged(trace, events)
    assert verdict.outcome == "rejected"
    assert verdict.event is not None
    if (protocol, kind) == ("ring", "wrong message"):
        # A reader that attached late may have begun anywhere: then the next message does not follow.
        assert verdict.event.process == guilty.process
        assert verdict.event.begin >= guilty.begin
    else:
        assert (verdict.event.place, verdict.event.begin) == (guilty.place, guilty.begin), (
            verdict.explanation.message
        )
    assert verdict.prefix[-1] == verdict.event
    assert verdict.explanation.states
    assert verdict.explanation.enabled
    assert verdict.event.place in verdict.explanation.message


@pytest.mark.parametrize("protocol", list(CORRUPTED))
def test_a_sound_recording_is_accepted(protocol: str, recordings: dict[str, Trace]) -> None:
    assert judged(recordings[protocol], recordings[protocol].events).outcome == "accepted"


@pytest.mark.parametrize("protocol", list(CORRUPTED))
def test_the_command_line_of_tlc_agrees(protocol: str, recordings: dict[str, Trace]) -> None:
    """On sound and on corrupted recordings, and on what is the shortest part that is rejected."""
    trace = recordings[protocol]
    verdicts = [judged(trace, trace.events)]
    verdicts += [judged(trace, corrupt(list(trace.events))[0]) for corrupt in CORRUPTED[protocol].values()]
    asked = [(verdict.case, verdict.explanation.accepted) for verdict in verdicts]
    for verdict in verdicts[1:]:
        asked.append((beginning(verdict.case, verdict.explanation.at), True))
        asked.append((beginning(verdict.case, verdict.explanation.at + 1), False))
    answers = accepts([case for case, _ in asked])
    assert answers == [expected for _, expected in asked]


@pytest.mark.parametrize("protocol", list(CORRUPTED))
def test_a_truncated_recording_is_the_beginning_of_a_behaviour(
    protocol: str, recordings: dict[str, Trace], tmp_path: Path
) -> None:
    """Of one process at a time, as if it had been killed there; what others did afterwards may need what is lost."""
    trace = recordings[protocol]
    for share in (0.3, 0.55, 0.9):
        now = int(trace.events[0].begin + share * (trace.events[-1].begin - trace.events[0].begin))
        folder = tmp_path / str(share)
        folder.mkdir()
        for file in trace.headers:
            header, *lines = file.read_bytes().splitlines(keepends=True)
            kept = [line for line in lines if int(line.split(b'"t":')[1].split(b",")[0]) <= now]
            torn = lines[len(kept)][:-3] if len(kept) < len(lines) else b""
            (folder / file.name).write_bytes(b"".join([header, *kept, torn]))
        cut = read(folder)
        assert cut.torn
        verdicts = [judge(case) for case in cases(cut)]
        assert outcome_of(verdicts) == "accepted", [verdict.explanation.message for verdict in verdicts]


@pytest.mark.parametrize("protocol", list(CORRUPTED))
def test_an_empty_recording_is_undetermined(
    protocol: str, recordings: dict[str, Trace], tmp_path: Path
) -> None:
    for file in recordings[protocol].headers:
        (tmp_path / file.name).write_bytes(file.read_bytes().split(b"\n")[0] + b"\n")
    assert outcome_of([judge(case) for case in cases(read(tmp_path))]) == "undetermined"


def test_too_many_states_are_undetermined_and_never_a_pass(recordings: dict[str, Trace]) -> None:
    trace = recordings["payload"]
    events, _ = CORRUPTED["payload"]["swapped"](list(trace.events))
    (case,) = cases(replace(trace, events=tuple(events)))
    assert judge(case, bound=1).outcome == "undetermined"
