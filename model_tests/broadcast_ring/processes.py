"""Reader and writer processes for the tests: they attach by the handle's JSON, and can die at any action."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import resource
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from quiesce import errors, events
from quiesce.broadcast_ring import BroadcastRing
from quiesce.ring_memory import Process, start_time
from quiesce.ring_reader import RemoteReader, RingReader
from quiesce.ring_wire import RingHandle

START_S = 60.0
"""Seconds a process may take to start and import torch on a busy machine."""


_says: list[Any] = []
"""How a child talks to its parent."""


def numbers(index: int, size: int) -> torch.Tensor:
    """What message `index` holds: any mixture with another message, or a hole, changes the check."""
    return torch.arange(size, dtype=torch.int64) + index * 1_000_003


def check(message: dict[str, Any], index: int) -> None:
    assert message["index"] == index, f"got message {message['index']}, due is {index}"
    size = message["numbers"].numel()
    assert torch.equal(message["numbers"], numbers(index, size)), f"message {index} is torn"
    message["numbers"].add_(1)
    assert torch.equal(message["numbers"], numbers(index, size) + 1), (
        f"message {index} is not this reader's own"
    )


def die_at(action: str, phase: str, count: int, busy: bool) -> Any:
    """An observer that kills this process at the `count`-th such edge, of a reader that is `busy` with an entry."""
    left = [count]

    def observer(event: events.Event) -> None:
        if (event.action, event.phase) == (action, phase):
            if busy and getattr(event.subject, "_opened", None) is None:
                return
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)

    return observer


def read_all(
    handle: str,
    rank: int,
    keep: int,
    fault: str = "",
    remote: bool = False,
    patience: float = START_S,
    most: int | None = None,
) -> int:
    """Receive and check everything, keeping the last `keep` messages; returns how many there were.

    A `receive` that lasts longer than `patience` seconds is repeated. After `most` messages the reader leaves.
    """
    torch.set_num_threads(1)  # the pool of a forked process's parent is not there
    with events.observe(die_at(*_edge(fault))) if fault else _nothing():
        reader = (RemoteReader if remote else RingReader)(RingHandle.from_json(handle), rank)
        with reader:
            reader.wait_until_ready(START_S)
            first, count, kept = None, 0, []
            give_up_at = time.monotonic() + 2 * START_S
            while count != most:
                try:
                    message = reader.receive(patience)
                except errors.Closed:
                    break
                except errors.QuiesceTimeout:
                    assert time.monotonic() < give_up_at, "nothing comes"
                    continue
                first = message["index"] if first is None else first
                check(message, first + count)
                count += 1
                kept.append((message, first + count - 1))
                if len(kept) > keep:
                    old, index = kept.pop(0)
                    assert torch.equal(old["numbers"], numbers(index, old["numbers"].numel()) + 1), (
                        "a lease was torn"
                    )
    return count


def read_some(handle: str, rank: int, most: int, drop: bool) -> int:
    """Receive `most` messages and leave; the last one's lease is kept until the writer has ended, or is dropped."""
    torch.set_num_threads(1)
    attached = RingHandle.from_json(handle)
    writer = Process(attached.pid, start_time(attached.pid) or 0)
    with RingReader(attached, rank) as reader:
        for index in range(most):
            message = reader.receive(START_S)
            check(message, index)
    if drop:
        del message
    until(writer.has_ended)
    if not drop:
        tensor = message["numbers"]
        assert torch.equal(tensor, numbers(most - 1, tensor.numel()) + 1), (
            "a lease did not outlive the writer"
        )
    return most


def write_all(fault: str, sizes: list[int], rounds: int, readers: int, patience: float = 0.001) -> None:
    """Say the handle, then publish, and say what was published; for tests in which the writer dies."""
    ring = BroadcastRing(readers, slots=2, slot_bytes=2 << 20, window=4, patience=patience)
    with events.observe(die_at(*_edge(fault))) if fault else _nothing(), ring:
        _says[0](ring.handle.to_json())
        ring.wait_until_ready(START_S)
        for index in range(rounds):
            tensor = numbers(index, sizes[index % len(sizes)])
            if index % 3 == 1 and tensor.nbytes <= 2 << 20:
                loan = ring.empty(tensor.shape, tensor.dtype)
                loan.copy_(tensor)
                tensor = loan
                del loan
            ring.publish({"index": index, "numbers": tensor}, START_S)
            _says[0](index)


def write_to_a_stopped_reader(nbytes: int) -> None:
    """Say the handle; when the reader has stopped itself, publish a message beside the slots and one in them."""
    with BroadcastRing(1, slots=1, slot_bytes=4096) as ring:
        _says[0](ring.handle.to_json())
        ring.wait_until_ready(START_S)
        process = ring._peers[0].process
        assert process
        until(lambda: Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
        ring.publish(torch.zeros(nbytes, dtype=torch.uint8))
        ring.publish("after it")
        _says[0]("published")
        time.sleep(START_S)


def stop_then_read(handle: str, reader_class: type[RingReader]) -> list[Any]:
    """Be let in, stop, and when woken say which messages there are until the writer is found dead."""
    got = []
    with reader_class(RingHandle.from_json(handle), 0) as reader:
        reader.wait_until_ready(START_S)
        os.kill(os.getpid(), signal.SIGSTOP)
        for _ in range(3):
            with suppress(errors.PeerDied, errors.QuiesceTimeout):
                got.append(reader.receive(START_S))
    return got


def create_within(limit: int) -> str:
    """What a ring says that asks for more than the quota on files gives."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    return create(limit)


def create(slot_bytes: int) -> str:
    """What a ring of two slots says: why it cannot be made, or what came through it."""
    try:
        with BroadcastRing(1, slots=2, slot_bytes=slot_bytes) as ring, RingReader(ring.handle, 0) as reader:
            ring.wait_until_ready(START_S)
            for index in range(6):
                ring.publish({"index": index, "numbers": numbers(index, slot_bytes // 8)})
                check(reader.receive(START_S), index)
    except errors.ResourceExhausted as error:
        return str(error)
    return "all of it came through"


def _edge(fault: str) -> tuple[str, str, int, bool]:
    action, phase, count, *busy = fault.split(".")
    return action, phase, int(count), busy == ["busy"]


@contextmanager
def _nothing() -> Iterator[None]:
    yield


class Child:
    """One of these functions, run in a process of its own that has everything imported already."""

    _context: Any = None

    def __init__(self, function: str, *arguments: object) -> None:
        if Child._context is None:
            Child._context = multiprocessing.get_context("forkserver")
            Child._context.set_forkserver_preload([__name__])
        self._pipe, theirs = Child._context.Pipe()
        self.process = Child._context.Process(target=_run, args=(theirs, function, arguments), daemon=True)
        self.process.start()
        theirs.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def hears(self, timeout: float = 2 * START_S) -> Any:
        """The next thing it says; the last is what it returns."""
        assert self._pipe.poll(timeout), "the process says nothing"
        try:
            said = self._pipe.recv()
        except EOFError:
            raise AssertionError(f"the process ended with {self.exit_code()}") from None
        assert not isinstance(said, str) or not said.startswith("Traceback"), said
        return said

    def last_words(self) -> list[Any]:
        """All that a process said which has ended, from where it was last heard."""
        words = []
        with suppress(EOFError):
            while self._pipe.poll(START_S):
                words.append(self._pipe.recv())
        return words

    def exit_code(self, timeout: float = START_S) -> int | None:
        self.process.join(timeout)
        return self.process.exitcode

    def end(self) -> None:
        """Kill it if it still lives; does nothing the second time."""
        self.process.kill()
        self.process.join(START_S)
        self._pipe.close()
        assert not self.process.is_alive(), "the process was killed and has not ended"


def _run(pipe: Any, function: str, arguments: tuple[Any, ...]) -> None:
    _says.append(pipe.send)
    try:
        pipe.send(globals()[function](*arguments))
    except BaseException:
        pipe.send(traceback.format_exc())


def until(condition: Any, timeout: float = START_S) -> None:
    """Wait for something that another process does."""
    end_at = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end_at, "it did not happen"
        time.sleep(0.01)


def who_has(inode: int) -> set[str]:
    """The processes that have this segment open or mapped; it has no name by which to find it."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # ended meanwhile, or somebody else's
            if re.search(rf" {inode} +/memfd:quiesce-ring", (process / "maps").read_text()):
                found.add(process.name)
            if any(
                "quiesce-ring" in os.readlink(fd) and fd.stat().st_ino == inode
                for fd in (process / "fd").iterdir()
            ):
                found.add(process.name)
    return found


if __name__ == "__main__":  # for processes that are started by exec: a function, and its arguments as JSON
    print(globals()[sys.argv[1]](*map(json.loads, sys.argv[2:])))
