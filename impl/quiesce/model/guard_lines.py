"""Where the guard stands that a fault leaves out: its lines in the specification, and the line of code that is it.

A fault is named in the specification at the guard or the effect that it breaks. The code that implements the action
around that line is the method marked with the action's name; `CODE` says which line of it, or which other line, where
the name alone does not lead there. A test keeps every entry valid.
"""

from __future__ import annotations

import ast
import re
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from quiesce.model import counterexamples, paths
from quiesce.model.manifest import Manifest, Mutant

PACKAGE = Path(__file__).resolve().parents[1]

ROOMS = {
    "buffer_lifecycle": ("lifecycle",),
    "tracker_completion": ("payload_reuse", "lifecycle"),
    "payload_reuse": ("payload_reuse", "lifecycle"),
    "stream_ordering": ("simulated", "access_order"),
    "stage_handoff": ("stage_handoff", "transport"),
    "host_staging": ("host_staging", "lifecycle"),
    "broadcast_ring": ("ring_writer", "ring_reader", "broadcast_ring"),
    "memory_order": ("ring_writer", "ring_reader"),
}
"""The modules that implement a protocol; those that come first are looked at first."""

_SETTLED = "lifecycle BufferPool._settled: all(tracker.done for tracker in trackers)"
_ROOM = "lifecycle BufferPool._has_room: len(self._free) < self.free_limit"
_ASKED = 'payload_reuse PayloadSender._asked: return message.over("buffer")'
_LENT = "payload_reuse PayloadSender: self.pool.lend(message.buffer, self._asked(message))"
_ABORT = "payload_reuse PayloadSender: self._abort(message)"
_REFUSED = "payload_reuse PayloadSender._send_parts: self._part_refused(message)"
_TOUCH = "payload_reuse PayloadSender._look: self._socket.get(zmq.EVENTS)"
_KEPT = "stage_handoff StageLink._send_tensors: self._unsettled.extend(handles)"
_BEFORE = "stage_handoff StageLink: self._unsettled[0].wait("
_POST = "ring_writer RingWriter._post: .posts.post()"
_SLEEP = "ring_reader RingReader._sleep: self._words.posts.wait(seconds)"
_MAPPING = "ring_reader RingReader._lease: self._releaser.leases[slot] = lease, borrowing"
_HOLDERS = "ring_writer RingWriter._recyclable: not self._holders[slot]"
_RESET = "ring_writer RingWriter._admit: self._memory.ranks[hello.rank].reset()"

CODE = {
    "write_while_lent": _SETTLED,
    "take_held": "lifecycle BufferPool.take: buffer = self._free.pop()",
    "free_list_grows": _ROOM,
    "reader_keeps": "lifecycle Loan.wait: if not _wait(",
    "never_recycled": "lifecycle BufferPool.settle: if self._settled(trackers)",
    "part_retried": _REFUSED,
    "socket_untouched": _TOUCH,
    "last_frame_tracker": _ASKED,
    "copied_frame_tracker": _ASKED,
    "no_tracker": "payload_reuse PayloadSender._send_part: data = zmq.Frame(data, track=True, copy=False)",
    "recycled_at_send": _LENT,
    "recycled_at_receive": _SETTLED,
    "free_list_unbounded": _ROOM,
    "orphan_part": _ABORT,
    "refused_part_retried": _REFUSED,
    "refusal_not_ended": _ABORT,
    "refused_parts_kept": "payload_reuse PayloadSender._part_refused: self._forget(message)",
    "resent_when_complete": _ABORT,
    "timeout_ignored": "payload_reuse PayloadSender._send_times_out: raise QuiesceTimeout(",
    "recycled_twice": "lifecycle BufferPool.settle: = self._pending.popleft()",
    "pending_forgotten": _SETTLED,
    "failed_send_forgotten": _LENT,
    "failed_send_leaked": _LENT,
    "caller_told_at_once": "payload_reuse PayloadSender._send_part: self._owe(message, tracker, frame)",
    "never_touched": _TOUCH,
    "close_lingers": "payload_reuse PayloadSender._close: self._socket.close(linger=",
    "late_capture": "simulated SimulatedBackend.wait: point=event.point or (stream, 0)",
    "captures_what_ran": "simulated SimulatedBackend.record: event.point = (stream, stream.behind())",
    "unrecorded_blocks": "simulated SimulatedBackend.wait: point=event.point or (stream, 0)",
    "reads_forgotten": "access_order AccessOrder.note: overlaps and (writes or access.writes) and not ordered",
    "wait_returns_early": "simulated SimulatedBackend.synchronize: self.world.run_until(lambda: event.reached)",
    "record_stream_ignored": "simulated SimulatedBackend._reusable: stream.ran >= count",
    "pageable_read_late": "simulated SimulatedBackend.copy_pageable: read = source.clone()",
    "handles_dropped": _KEPT,
    "only_metadata_waited": _BEFORE,
    "waited_after_forward": _BEFORE,
    "waited_on_wrong_stream": _BEFORE,
    "event_before_send": "transport TorchTransport.send: work = dist.isend(",
    "handles_overwritten": _KEPT,
    "receive_read_early": "stage_handoff ReceivedDict: self._link._await_receive(self, left())",
    "receive_unordered": "transport TorchTransport.receive: work = dist.irecv(",
    "gather_read_early": "stage_handoff StageLink._all_gather: handle.wait(left())",
    "tensor_not_kept": "transport TorchHandle.__init__: self._tensors = tuple(tensors)",
    "pending_unbounded": "stage_handoff StageLink._send_metadata: while len(self._pending) >= self.max_pending",
    "metadata_send_blocking": "stage_handoff StageLink._send_metadata: self.transport.send_message(",
    "second_wait_blocks": "transport TorchHandle.wait: self._works.pop(0)",
    "empty_dict_not_sent": "stage_handoff StageLink.isend_tensor_dict: self._send_metadata(numbered)",
    "goes_on_halfway": "stage_handoff StageLink._in_step: self._closed = ",
    "peer_death_unnoticed": "transport TorchHandle.wait: found = self._explain(error, timeout)",
    "read_before_copy": "host_staging Staged.settle: self._staging.backend.synchronize(self._event, timeout)",
    "event_before_copy": "host_staging HostStaging.stage: view, self.backend.record())",
    "pinned_recycled_early": _SETTLED,
    "copy_unordered": "host_staging HostStaging.stage: self.backend.wait(produced)",
    "no_record_stream": "host_staging HostStaging.stage: self.backend.record_stream(tensor)",
    "pinned_never_recycled": "host_staging HostStaging._take: self.pool.settle(self.limit)",
    "news_not_kept": _POST,
    "recheck_masks": _SLEEP,
    "post_dropped_when_idle": _POST,
    "one_post_for_all": "ring_writer RingWriter._complete: self._post(rank)",
    "doorbell_before_notice": "ring_reader _Releaser.tell: self._memory.doorbell.post()",
    "doorbell_cleared_before_sleep": "ring_writer RingWriter._wait: doorbell.wait(seconds)",
    "ignore_one_reader": _HOLDERS,
    "release_before_copy": "ring_reader RingReader._copy: self._releaser.owed |= {slot}",
    "lease_not_honoured": _MAPPING,
    "holders_after_posts": "ring_writer RingWriter._announce: self._holders[slot] = holders",
    "notify_before_publish": "ring_writer RingWriter._announce: self._unposted = local",
    "release_with_a_view": _MAPPING,
    "loan_written_after_publish": "ring_writer RingWriter._loans_in: if slot in self._held}",
    "loan_recycled": "ring_writer RingWriter._recyclable: if slot not in self._loaned",
    "loan_after_close": "broadcast_ring BroadcastRing._begin: if self._closed",
    "body_not_copied": "ring_writer RingWriter._overflow: self._private(frames)",
    "forget_pending_body": "ring_reader RingReader._next_frames: if self._opened is None",
    "lap_reader": "ring_writer RingWriter._await_room: self._behind(rank, peer) >= window",
    "exclude_while_dying": "ring_writer RingWriter._bury: self._exclude(rank)",
    "counted_twice": _RESET,
    "stale_notices": _RESET,
    "leave_drops_leases": "ring_writer RingWriter._hear_leave: (sequence - at) % MODULUS",
    "sleep_after_check": _SLEEP,
    "no_overflow": "broadcast_ring BroadcastRing._publish_now: self._overflow(frames)",
    "death_unnoticed": "ring_writer RingWriter._wait: self._bury()",
    "writer_death_unnoticed": "ring_reader RingReader._await_post: if self._writer_is_gone()",
}
"""Fault -> "module symbol: text", where the text stands on exactly one line of the symbol."""

_MEMORY_MODEL = (
    "a clause of the memory model, which no code implements; model_tests/memory_order/axiomatic.py states it "
    "once more, independently"
)
_FLAGS = "of the ring of flags that others have; this ring posts semaphores instead (docs/memory_order.md)"
NO_CODE = {
    "tracker_before_drop": "a promise of libzmq and pyzmq; model_tests/payload_reuse/test_faults.py holds them to it",
    **dict.fromkeys(
        (
            *("no_store_buffer", "no_forwarding", "fence_ignored", "acquire_ignored", "release_ignored"),
            *("dependencies_ignored", "coherence_ignored", "acquire_always_sc"),
        ),
        _MEMORY_MODEL,
    ),
    **dict.fromkeys(
        (
            *("without_before_reset", "without_before_mark", "without_before_copy", "without_before_done"),
            *("without_before_fill", "without_before_check", "field_fences", "lock_for_fence"),
        ),
        _FLAGS,
    ),
}
"""Faults in what the code relies on, and where to look instead."""


@dataclass(frozen=True)
class Line:
    """A line of a file: its path from the root of the source tree, number, text, and the definition around it."""

    path: str
    number: int
    text: str
    symbol: str

    def __str__(self) -> str:
        return f"{self.path}:{self.number}"


def fault_of(mutant: Mutant) -> str:
    """The value of `Fault` in the mutant's run."""
    return mutant.overrides["Fault"].strip('"')


def in_spec(mutant: Mutant, manifest: Manifest) -> tuple[Line, ...]:
    """The lines of the specification that the fault switches on."""
    fault = fault_of(mutant)
    lines = _search(
        mutant, manifest, re.compile(rf'\bFault\b.*"{re.escape(fault)}"|"{re.escape(fault)}".*\bFault\b')
    )
    if not lines and fault.startswith("without_"):
        position = re.escape(fault.removeprefix("without_"))
        lines = _search(mutant, manifest, re.compile(rf'\b(?:Wait|Post|At)\(\w+, "{position}"'))
    return tuple(lines)


def _search(mutant: Mutant, manifest: Manifest, pattern: re.Pattern[str]) -> list[Line]:
    found = []
    for path in counterexamples.modules(mutant, manifest):
        symbol, comment = "", False
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            code = line.split("\\*")[0]
            comment = comment or "(*" in code
            if comment:
                comment = "*)" not in code
                continue
            if head := re.match(r"(\w+)(?:\([^=]*\)|\[[^=]*\])?\s*==", code):
                symbol = head[1]
            if pattern.search(code):
                found.append(Line(_shown(path), number, " ".join(code.split()), symbol))
    return found


def in_code(mutant: Mutant, manifest: Manifest) -> Line | None:
    """The line of code that is the guard; None if no code is (see `NO_CODE`), or none is known."""
    fault = fault_of(mutant)
    if fault in NO_CODE:
        return None
    if fault in CODE:
        with suppress(LookupError):  # the code has changed: the action is still right
            return resolve(CODE[fault])
    rooms = ROOMS.get(mutant.protocol, ())
    if fault.startswith("without_"):
        label = f"SYNC({fault.removeprefix('without_').replace('_', '.')})"
        for room in rooms:
            for number, text in enumerate(_lines(PACKAGE / f"{room}.py"), 1):
                if label in text:
                    return Line(_shown(PACKAGE / f"{room}.py"), number, text.strip(), label)
    for line in in_spec(mutant, manifest):
        action = re.sub(r"^(?:Begin|End)(?=[A-Z])", "", line.symbol)
        for room in rooms:
            for name, symbol, number, text in _actions(PACKAGE / f"{room}.py"):
                if name == action:
                    return Line(_shown(PACKAGE / f"{room}.py"), number, text, symbol)
    return None


def resolve(entry: str) -> Line:
    """The line that an entry of `CODE` means. LookupError unless the symbol exists and has the text on one line."""
    place, _, snippet = entry.partition(": ")
    module, symbol = place.split(" ")
    path = PACKAGE / f"{module}.py"
    node: ast.AST = _tree(path)
    for part in symbol.split("."):
        node = next(
            (child for child in ast.iter_child_nodes(node) if getattr(child, "name", None) == part),
            ast.Pass(),
        )
        if isinstance(node, ast.Pass):
            raise LookupError(f"{path} has no {symbol}")
    lines = _lines(path)
    start, stop = node.lineno, node.end_lineno or node.lineno  # type: ignore[attr-defined]
    numbers = [number for number in range(start, stop + 1) if snippet in lines[number - 1]]
    if len(numbers) != 1:
        raise LookupError(f"{snippet!r} is on {len(numbers)} lines of {symbol} in {path}, not on one")
    inner = [  # the method around the line, if the entry names its class
        child.name
        for child in ast.walk(node)
        if isinstance(child, ast.FunctionDef)
        and child is not node
        and child.lineno <= numbers[0] <= (child.end_lineno or 0)
    ]
    return Line(_shown(path), numbers[0], lines[numbers[0] - 1].strip(), ".".join([symbol, *inner[:1]]))


def actions(protocol: str) -> dict[str, tuple[str, str]]:
    """The actions that the code of a protocol implements: name -> (module, method)."""
    found: dict[str, tuple[str, str]] = {}
    for room in ROOMS.get(protocol, ()):
        for name, symbol, _, _ in _actions(PACKAGE / f"{room}.py"):
            found.setdefault(name, (room, symbol))
    return found


@cache
def _actions(path: Path) -> list[tuple[str, str, int, str]]:
    """The methods of a module that are marked as actions: action, method, line, text."""
    found = []
    for cls in _tree(path).body:
        for method in cls.body if isinstance(cls, ast.ClassDef) else ():
            for mark in method.decorator_list if isinstance(method, ast.FunctionDef) else ():
                if (
                    isinstance(mark, ast.Call)
                    and isinstance(mark.func, ast.Name)
                    and mark.func.id == "action"
                    and isinstance(mark.args[0], ast.Constant)
                ):
                    assert isinstance(cls, ast.ClassDef)
                    assert isinstance(method, ast.FunctionDef)
                    text = _lines(path)[method.lineno - 1].strip()
                    found.append((str(mark.args[0].value), f"{cls.name}.{method.name}", method.lineno, text))
    return found


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def _shown(path: Path) -> str:
    """From the root of the source tree, or from where the package is installed."""
    root = paths.source_tree() or PACKAGE.parent
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else path.as_posix()
