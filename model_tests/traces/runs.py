"""Real runs of the three protocols between processes, each process recorded, some killed at a step.

Every function that makes a run takes the directory to record into. Processes are forked from a server that has
everything imported, so that a run takes a fraction of a second.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import zmq

from quiesce import errors
from quiesce.broadcast_ring import BroadcastRing
from quiesce.events import Event, observe
from quiesce.payload_receiver import PayloadReceiver
from quiesce.payload_reuse import COPY_THRESHOLD, PayloadSender
from quiesce.recording import record
from quiesce.ring_reader import RingReader
from quiesce.ring_wire import RingHandle
from quiesce.stage_handoff import StageLink
from quiesce.transport import TorchTransport

LIMIT = 60.0
"""Seconds that anything may take on a busy machine."""


@dataclass(frozen=True)
class Kill:
    """Where a process kills itself: at the `count`-th such edge of `action`."""

    action: str
    phase: str
    count: int

    def __call__(self, event: Event) -> None:
        if (event.action, event.phase) == (self.action, self.phase):
            object.__setattr__(self, "count", self.count - 1)
            if not self.count:
                self.happen()

    def happen(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Interrupted(BaseException):
    """What a signal handler might raise."""


class Interrupt(Kill):
    """Raises there instead."""

    def happen(self) -> None:
        raise Interrupted


@contextmanager
def recorded(directory: Path, kill: Kill | None = None) -> Iterator[None]:
    """Record this process; the observer that kills comes second, so that what it dies at is written down."""
    with ExitStack() as stack:
        stack.enter_context(record(directory))
        if kill:
            stack.enter_context(observe(kill))
        yield


class Process:
    """A function running in a process of its own; `hears` what it says with its first argument, `say`."""

    _context: Any = None

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        if Process._context is None:
            Process._context = multiprocessing.get_context("forkserver")
            Process._context.set_forkserver_preload([__name__])
        self._pipe, theirs = Process._context.Pipe()
        self.process = Process._context.Process(target=_run, args=(theirs, function, arguments), daemon=True)
        self.process.start()
        theirs.close()

    def hears(self) -> Any:
        assert self._pipe.poll(LIMIT), "the process says nothing"
        said = self._pipe.recv()
        assert not isinstance(said, str) or not said.startswith("Traceback"), said
        return said

    def ends(self) -> bool:
        """Wait for its end; whether it got through. (Its exit status is not always known to its server.)"""
        said = None
        with suppress(EOFError):
            while self._pipe.poll(LIMIT):
                said = self._pipe.recv()
                assert not isinstance(said, str) or not said.startswith("Traceback"), said
        self.process.join(LIMIT)
        assert not self.process.is_alive(), "the process does not end"
        return bool(said == "through")

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self._pipe.close()


def _run(pipe: Any, function: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)  # the pool of a forked process's parent is not there
    try:
        function(pipe.send, *arguments)
        pipe.send("through")
    except BaseException:
        with suppress(OSError):
            pipe.send(traceback.format_exc())


@contextmanager
def processes() -> Iterator[Callable[..., Process]]:
    """Starts processes and leaves none behind."""
    with ExitStack() as stack:

        def start(function: Callable[..., object], *arguments: object) -> Process:
            process = Process(function, *arguments)
            stack.callback(process.end)
            return process

        yield start


# ------------------------------------------------------------------------------------------------------- payload reuse


@dataclass(frozen=True)
class Payload:
    """A run of one sender and one receiver; `delay` in seconds at most between two messages received.

    `large`: every message is a large payload with two tensors; otherwise payloads and tensors are of any size.
    """

    messages: int = 20
    address: str = "tcp://127.0.0.1:*"
    free_limit: int = 2
    delay: float = 0.0
    seed: int = 1
    high_water: int = 4
    sender: type[PayloadSender] = PayloadSender
    kill: Kill | None = None
    large: bool = False

    @property
    def is_sound(self) -> bool:
        """Whether every message must arrive, since nothing is faulty and nobody is killed."""
        return self.kill is None and self.sender is PayloadSender


def _send(say: Callable[[Any], None], directory: Path, run: Payload, address: str) -> None:
    choose = random.Random(run.seed)
    context = zmq.Context()
    push = context.socket(zmq.PUSH)
    push.sndhwm = run.high_water
    push.connect(address)
    with recorded(directory, run.kill), run.sender(push, free_limit=run.free_limit) as sender:
        for number in range(run.messages):
            pad = bytes([number % 251]) * choose.choice([400, COPY_THRESHOLD + 5_000])
            tensors = [
                torch.full((choose.choice([100, 30_000]),), number) for _ in range(choose.randrange(3))
            ]
            while True:
                try:
                    sender.send(
                        {"pad": pad, "tensors": tensors}, timeout=0.02 if choose.random() < 0.3 else 1.0
                    )
                    break
                except errors.QuiesceTimeout:
                    continue
                except Interrupted:
                    break
            if choose.random() < 0.3:
                sender.settle()
    context.term()


def _receive(say: Callable[[Any], None], run: Payload) -> None:
    choose = random.Random(run.seed)
    context = zmq.Context()
    pull = context.socket(zmq.PULL)
    # Over ipc a receiver at its mark loses the end of the stream when the sender closes (docs/limits.md).
    pull.rcvhwm = 0 if run.address.startswith("ipc") else run.high_water
    pull.bind(run.address)
    say(pull.LAST_ENDPOINT.decode())
    with PayloadReceiver(pull) as receiver:
        for _ in range(run.messages):
            try:
                received = receiver.receive(LIMIT)
            except (errors.QuiesceTimeout, errors.DecodeError):
                if run.is_sound:
                    raise
                continue
            del received
            time.sleep(choose.random() * run.delay)


def payload(directory: Path, run: Payload) -> None:
    with processes() as start:
        receiver = start(_receive, run)
        sender = start(_send, directory, run, receiver.hears())
        # A process that is to be killed may get through before it comes to that step so often.
        assert sender.ends() or isinstance(run.kill, Kill)
        assert not run.is_sound or receiver.ends()


# ------------------------------------------------------------------------------------------------------ broadcast ring


@dataclass(frozen=True)
class Ring:
    """A run of one writer and some readers; `kills` by rank, with -1 for the writer."""

    messages: int = 12
    readers: int = 2
    slots: int = 2
    window: int = 4
    delay: float = 0.0
    seed: int = 1
    writer: type[BroadcastRing] = BroadcastRing
    reader: type[RingReader] = RingReader
    kills: tuple[tuple[int, Kill], ...] = ()
    leave_after: int | None = None

    def kill(self, rank: int) -> Kill | None:
        return dict(self.kills).get(rank)

    @property
    def is_sound(self) -> bool:
        """Whether readers must find nothing but the end, since nothing is faulty and nobody is killed."""
        return not self.kills and self.writer is BroadcastRing and self.reader is RingReader


SLOT_BYTES = 64 << 10


def _write(say: Callable[[Any], None], directory: Path, run: Ring) -> None:
    choose = random.Random(run.seed)
    with (
        recorded(directory, run.kill(-1)),
        run.writer(
            run.readers, slots=run.slots, slot_bytes=SLOT_BYTES, window=run.window, patience=0.002
        ) as ring,
    ):
        say(ring.handle.to_json())
        with suppress(errors.PeerDied, errors.QuiesceTimeout):  # of a reader that is killed while it joins
            ring.wait_until_ready(0.3 if run.kills else LIMIT)
        for number in range(run.messages):
            size = choose.choice([10, 10, 2_000, 12_000])
            tensor = torch.arange(size, dtype=torch.int64) + number
            if choose.random() < 0.3 and tensor.nbytes < SLOT_BYTES:
                with suppress(errors.QuiesceTimeout):
                    loan = ring.empty(tensor.shape, tensor.dtype, timeout=0.05)
                    loan.copy_(tensor)
                    tensor = loan
                    del loan
            ring.publish({"number": number, "tensor": tensor}, LIMIT)
            del tensor


def _read(say: Callable[[Any], None], directory: Path, run: Ring, handle: str, rank: int) -> None:
    choose = random.Random(run.seed + rank)
    kept: list[Any] = []
    with recorded(directory, run.kill(rank)):
        try:
            reader = run.reader(RingHandle.from_json(handle), rank)
        except errors.PeerDied:
            return
        reader.lease_bytes = 8_000
        with reader:
            count = 0
            give_up_at = time.monotonic() + LIMIT
            while count != run.leave_after and time.monotonic() < give_up_at:
                try:
                    kept.append(reader.receive(0.02))
                except errors.QuiesceTimeout:
                    continue
                except errors.Closed:
                    break
                except errors.QuiesceError:
                    if run.is_sound:
                        raise
                    break
                count += 1
                if len(kept) > choose.randrange(3):
                    kept.pop(0)
                time.sleep(choose.random() * run.delay)
        kept.clear()
    assert not run.is_sound or count == (run.messages if run.leave_after is None else run.leave_after), count


def ring(directory: Path, run: Ring) -> None:
    with processes() as start:
        writer = start(_write, directory, run)
        handle = writer.hears()
        readers = [start(_read, directory, run, handle, rank) for rank in range(run.readers)]
        for rank, process in [(-1, writer), *enumerate(readers)]:
            assert process.ends() or run.kill(rank), f"reader {rank} (-1: the writer) was killed"


# ------------------------------------------------------------------------------------------------------- stage handoff


@dataclass(frozen=True)
class Stage:
    """Runs of one pipeline over gloo, one after the other: one trace for each directory."""

    ranks: int = 2
    steps: int = 6
    in_flight: int = 2
    delay: float = 0.0
    extra: bool = False
    settles_first: bool = False  # in front of the receive of its step, and not behind it
    answers: bool = True
    link: type[StageLink] = StageLink
    kills: tuple[tuple[int, Kill], ...] = ()


def _stage(
    say: Callable[[Any], None], directories: Sequence[Path], run: Stage, store: str, rank: int
) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=run.ranks,
        timeout=timedelta(seconds=LIMIT),
    )
    for number, directory in enumerate(directories):
        dist.barrier()
        with recorded(directory, dict(run.kills).get(rank)):
            link = run.link(
                TorchTransport(),
                source=(rank - 1) % run.ranks if rank or run.answers else None,
                to=(rank + 1) % run.ranks if rank < run.ranks - 1 or run.answers else None,
                max_pending=run.in_flight + run.extra * run.in_flight,
                timeout=5.0 if run.kills else LIMIT,
            )
            try:
                _pipeline(run, link, rank, random.Random(97 * number + rank))
            except errors.QuiesceError:
                if not run.kills:
                    raise
                return
    dist.barrier()
    dist.destroy_process_group()


def _pipeline(run: Stage, link: StageLink, rank: int, choose: random.Random) -> None:
    output = torch.zeros(5_000)
    with link:
        for step in range(run.steps):
            if run.settles_first:
                link.before_forward()
            if rank or (run.answers and step >= run.in_flight):
                received = link.irecv_tensor_dict()
                time.sleep(choose.random() * run.delay)
                received.wait()
                if rank and run.extra:
                    link.irecv_tensor_dict().wait()
            if not run.settles_first:
                link.before_forward()
            output.fill_(step)
            time.sleep(choose.random() * run.delay)
            if rank == run.ranks - 1:
                if run.answers:
                    link.isend_tensor_dict({"token": step})
            else:
                link.isend_tensor_dict({"hidden": output})
                if run.extra:
                    link.isend_tensor_dict({"step": step})
        for _ in range(0 if rank or not run.answers else min(run.in_flight, run.steps)):
            link.irecv_tensor_dict().wait()


def stage(directories: Sequence[Path], run: Stage) -> None:
    store = str(directories[0].parent / f"store-{directories[0].name}")
    with processes() as start:
        ranks = [start(_stage, directories, run, store, rank) for rank in range(run.ranks)]
        for rank, process in enumerate(ranks):
            assert process.ends() or rank in dict(run.kills), f"rank {rank} was killed"
    Path(store).unlink(missing_ok=True)
