"""Recording: what is written can be read back, whoever dies, forks, or runs out of disk in the middle."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from model_tests.traces.runs import Kill, Process, recorded

from quiesce.errors import QuiesceError
from quiesce.events import action, observe
from quiesce.model.errors import ModelError
from quiesce.model.traces import Event, Trace, chrome, read
from quiesce.recording import FIELDS, SCHEMA, VARIABLE, Header, Record, record

PAGE = Path(__file__).resolve().parents[2] / "docs" / "traces.md"


class Machine:
    @action("Work", lambda machine, result, amount: {"amount": amount})
    def work(self, amount: int) -> int:
        if amount < 0:
            raise ZeroDivisionError
        return 2 * amount

    @action("Contain")
    def contain(self, amount: int) -> None:
        self.work(amount)


def told(trace: Trace) -> list[tuple[str, str]]:
    return [(event.action, event.outcome) for event in trace.events]


def test_actions_are_read_back_with_their_parameters_and_in_their_order(tmp_path: Path) -> None:
    machine, other = Machine(), Machine()
    with record(tmp_path):
        machine.work(3)
        with pytest.raises(ZeroDivisionError):
            other.work(-1)
        machine.contain(5)
    trace = read(tmp_path)
    assert told(trace) == [("Work", "end"), ("Work", "error"), ("Contain", "end"), ("Work", "end")]
    assert [event.fields for event in trace.events] == [
        {"amount": 3},
        {"error": "ZeroDivisionError"},
        {},
        {"amount": 5},
    ]
    first, second, outer, inner = trace.events
    assert first.subject == outer.subject != second.subject
    assert outer.begin <= inner.begin <= inner.end <= outer.end  # type: ignore[operator]
    assert {event.cls for event in trace.events} == {"Machine"}
    assert not trace.torn


def test_nothing_is_added_to_an_action_that_is_not_recorded(tmp_path: Path) -> None:
    """The cost of a call site is none: its method is the function that was written."""
    written = vars(Machine)["work"]
    with record(tmp_path):
        assert vars(Machine)["work"] is not written
    assert vars(Machine)["work"] is written
    assert written.__code__.co_name == "work"


def test_threads_write_whole_lines_into_one_file(tmp_path: Path) -> None:
    with record(tmp_path):
        threads = [
            threading.Thread(target=lambda: [Machine().work(number) for number in range(200)], daemon=True)
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
    trace = read(tmp_path)
    assert len(trace.events) == 800
    assert len({event.thread for event in trace.events}) == 4
    assert len(trace.headers) == 1


def test_a_forked_child_writes_a_file_of_its_own(tmp_path: Path) -> None:
    """Also when the fork happens in the middle of an action, whose end the child must not claim."""
    script = (
        "import os, sys\n"
        "from quiesce.events import action\n"
        "from quiesce.recording import record\n"
        "class Forks:\n"
        "    @action('Fork')\n"
        "    def fork(self): return os.fork()\n"
        "    @action('Work')\n"
        "    def work(self): pass\n"
        "with record(sys.argv[1]):\n"
        "    forks = Forks()\n"
        "    child = forks.fork()\n"
        "    forks.work()\n"
        "    if child: os.waitpid(child, 0)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, timeout=60)
    trace = read(tmp_path)
    assert len(trace.headers) == 2
    assert sorted(told(trace)) == [("Fork", "end"), ("Work", "end"), ("Work", "end")]
    assert len({event.process for event in trace.events}) == 2


def _worked(say: Any, directory: Path, kill: Kill) -> None:
    with recorded(directory, kill):
        for amount in range(10):
            Machine().work(amount)


@pytest.mark.parametrize(("phase", "last"), [("begin", "open"), ("end", "end")])
def test_a_killed_process_leaves_every_record_it_wrote(tmp_path: Path, phase: str, last: str) -> None:
    process = Process(_worked, tmp_path, Kill("Work", phase, 4))
    assert not process.ends()
    assert told(read(tmp_path)) == [("Work", "end")] * 3 + [("Work", last)]


def test_a_full_disk_ends_the_recording_and_not_the_protocol(tmp_path: Path) -> None:
    def limited() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, 2_000))

    script = (
        "import sys\n"
        "from quiesce.recording import record\n"
        "from quiesce.lifecycle import BufferPool\n"
        "with record(sys.argv[1]):\n"
        "    pool = BufferPool(bytearray)\n"
        "    for _ in range(100): pool.lend(pool.take(), []); pool.settle()\n"
        "print('through')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        preexec_fn=limited,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "through\n"
    assert "recording into" in done.stderr
    assert 0 < len(read(tmp_path).events) < 100


def test_a_directory_that_cannot_be_made_is_an_error_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(QuiesceError, match="cannot record into"), record(tmp_path / "file"):
        pass


def test_the_environment_variable_records_from_the_import_on(tmp_path: Path) -> None:
    """Of classes that do not exist yet, too, and with further observers that come and go."""
    script = (
        "from quiesce.events import observe\n"
        "from quiesce.lifecycle import BufferPool\n"
        "seen = []\n"
        "with observe(seen.append): BufferPool(bytearray).take()\n"
        "BufferPool(bytearray).take()\n"
        "assert len(seen) == 2, seen\n"
    )
    subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, VARIABLE: str(tmp_path)}, check=True, timeout=60
    )
    assert told(read(tmp_path)) == [("Take", "end")] * 2


def test_a_recording_and_other_observers_see_the_same(tmp_path: Path) -> None:
    seen: list[Any] = []
    with record(tmp_path), observe(seen.append):
        Machine().contain(1)
    assert [(event.action, event.phase) for event in seen] == [
        *(("Contain", "begin"), ("Work", "begin"), ("Work", "end"), ("Contain", "end")),
    ]
    assert told(read(tmp_path)) == [("Contain", "end"), ("Work", "end")]


names = st.sampled_from(["Take", "Encode", "Fill"])
fields = st.dictionaries(
    st.text(min_size=1, max_size=5),
    st.integers(-(2**63), 2**63) | st.text(max_size=5) | st.none() | st.lists(st.booleans()),
    max_size=3,
)


@st.composite
def recordings(draw: st.DrawFn) -> list[Record]:
    """Actions that begin and end in any order that threads may give them."""
    records: list[Record] = []
    begun: list[Record] = []
    for number in range(1, draw(st.integers(0, 12)) + 1):
        if begun and draw(st.booleans()):
            begin = begun.pop(draw(st.integers(0, len(begun) - 1)))
            phase = draw(st.sampled_from("EX"))
            records.append(Record(number, 100 + number, phase, begin.a, begin.th, f=draw(fields), of=begin.n))
        else:
            begun.append(
                Record(number, 100 + number, "B", draw(names), draw(st.integers(1, 3)), "Machine", 1)
            )
            records.append(begun[-1])
    return records


@given(recordings(), st.data())
def test_what_is_written_is_read_back_wherever_the_last_record_is_torn(
    tmp_path_factory: pytest.TempPathFactory, records: list[Record], data: st.DataObject
) -> None:
    lines = [msgspec.json.encode(line) for line in (Header(SCHEMA, 1, "boot", 0, 0), *records)]
    file = tmp_path_factory.mktemp("torn") / "1-0.jsonl"
    whole = b"".join(line + b"\n" for line in lines)
    kept = data.draw(st.integers(0, len(whole)), label="bytes that were written")
    file.write_bytes(whole[:kept])
    survived = records[: max(0, whole[:kept].count(b"\n") - 1)]
    trace = read(file)
    assert bool(trace.torn) == (kept > 0 and whole[kept - 1 : kept] != b"\n")
    ends = {record.of: record for record in survived if record.ph != "B"}
    expected = [
        (begin.a, begin.t, end.t, "end" if end.ph == "E" else "error", end.f)
        if (end := ends.get(begin.n))
        else (begin.a, begin.t, None, "open", {})
        for begin in survived
        if begin.ph == "B"
    ]
    assert [(e.action, e.begin, e.end, e.outcome, e.fields) for e in trace.events] == expected


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        (["{}"], "has format None"),
        (['{"quiesce":99}'], "reads format 1"),
        (["nonsense"], "line 1"),
        (["HEADER", "nonsense"], ":2 is no record"),
        (
            ["HEADER", '{"n":1,"t":1,"ph":"E","a":"Take","th":1,"of":7}'],
            ":2 ends what no line before it begins",
        ),
        (["HEADER", '{"n":1,"t":1,"ph":"B","a":"Take","th":1,"zz":7}'], "zz"),
    ],
)
def test_what_is_no_recording_is_an_error_with_its_place(
    tmp_path: Path, lines: list[str], complaint: str
) -> None:
    header = msgspec.json.encode(Header(SCHEMA, 1, "boot", 0, 0)).decode()
    file = tmp_path / "x.jsonl"
    file.write_text("\n".join(line.replace("HEADER", header) for line in lines) + "\n")
    with pytest.raises(ModelError, match=complaint):
        read(file)


def test_a_directory_without_recordings_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has no recordings"):
        read(tmp_path)


def test_the_timeline_has_what_perfetto_needs(tmp_path: Path) -> None:
    with record(tmp_path):
        Machine().contain(1)
    document = json.loads(json.dumps(chrome(read(tmp_path))))
    outer, inner = (entry for entry in document["traceEvents"] if entry["ph"] == "X")
    for entry in (outer, inner):
        assert entry["cat"] == "quiesce"
        assert entry["pid"] == os.getpid()
        assert isinstance(entry["tid"], int)
        assert entry["dur"] >= 0
    assert outer["ts"] <= inner["ts"] <= inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + 1e-3
    assert inner["args"]["amount"] == 1


def test_the_timeline_stands_beside_a_profile_of_torch(tmp_path: Path) -> None:
    """An action that ran between two operators of torch stands between them."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiler, record(tmp_path / "trace"):
        torch.ones(7).cumsum(0)
        Machine().work(1)
        torch.ones(7).cumprod(0)
    profiler.export_chrome_trace(str(tmp_path / "profile.json"))
    document = chrome(read(tmp_path / "trace"), tmp_path / "profile.json")
    at = {entry["name"]: entry["ts"] for entry in document["traceEvents"] if entry.get("ph") == "X"}
    # torch takes its own clock to the time of day, which may be some hundred microseconds off.
    assert at["aten::cumsum"] - 5_000 < at["Work"] < at["aten::cumprod"] + 5_000


def test_a_profile_that_is_none_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "profile.json").write_text("[]")
    with pytest.raises(ModelError, match=r"is not what torch\.profiler exports"):
        chrome(Trace(tmp_path, (), {}), tmp_path / "profile.json")


def test_the_page_has_every_field_of_the_format() -> None:
    assert set(FIELDS) == {*Header.__struct_fields__, *Record.__struct_fields__}
    page = PAGE.read_text()
    for name, meaning in FIELDS.items():
        assert f"| `{name}` | {meaning} |" in page
    assert f"version {SCHEMA}" in page


def test_events_say_where_they_are() -> None:
    event = Event(Path("f"), 3, "p", 1, "C", 1, "Take", 0, 1, "end", {"buffer": 2})
    assert (event.place, str(event)) == ("f:3", "Take(buffer = 2)")
