"""vLLM's `MessageQueue` held to `spec/BroadcastRing.tla`: its writer and its readers in one process, step by step."""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from model_tests.foreign import loading
from model_tests.foreign.wire import Ended
from model_tests.stepper import PATIENCE, Stepper, Stop

from quiesce.bench.peers import remove_sockets
from quiesce.events import action
from quiesce.model import ModelValue, Oracle, State, Step
from quiesce.model.adapter import Adapter, does, lets

NAME = "vllm.distributed.device_communicators.shm_broadcast"
IN_SLOT, TOO_LONG = 1 << 20, 3 << 19
"""Bytes of a message: beside the pickle, which begins at 1 MiB, but in a chunk; and too long for a chunk."""
CHUNK = 5 << 18
ANYTHING_BUT = 0xEE


class Steps:
    """Where the queue's own code passes."""

    @action("Step", lambda self, result, name: {"name": name})
    def at(self, name: str) -> None:
        """Stop here."""


class Flags:
    """The flags of a chunk, as the queue sees them; setting one is a step."""

    def __init__(self, flags: memoryview, rank: int | None, steps: Steps) -> None:
        self.flags, self.rank, self.steps = flags, rank, steps

    def __getitem__(self, index: Any) -> Any:
        return self.flags[index]

    def __setitem__(self, index: int, value: int) -> None:
        if self.rank is not None:
            self.steps.at("Read")
        self.flags[index] = value
        if self.rank is not None:
            self.steps.at("Release")
        elif index == 0:
            self.steps.at("Publish" if value else "Take")


def _message(kind: str, count: int, number: int) -> Any:
    array = np.full(count, number, np.uint8)
    return torch.from_numpy(array) if kind == "tensor" else array


class Ring(Adapter):
    """`kind` is what is sent: a tensor or an array. Hearing and recycling are one look at the next chunk's flags."""

    version: str
    kind = "array"
    model = "ring_slots"
    constants: Mapping[str, str] = {"Slots": "{s1, s2}", "Window": "4", "Messages": "12", "Bodies": "FALSE"}
    small = {"two readers": {"Slots": "{s1, s2}", "Window": "4", "Messages": "3", "Bodies": "FALSE"}}
    hidden = frozenset({"HearRelease", "Recycle"})
    waits_run_out = False
    caller_writes = True
    """Whether the caller writes its memory again when a call has returned."""

    def __init__(self, oracle: Oracle) -> None:
        super().__init__(oracle)
        self.readers = sorted(oracle.evaluate("Readers"))
        self.slots = sorted(oracle.evaluate("Slots"))
        self.steps = Steps()
        self.markers: set[int] = set()
        self.got = dict.fromkeys(self.readers, 0)
        self.held: dict[ModelValue, dict[ModelValue, tuple[int, Any]]] = {r: {} for r in self.readers}
        self.sent: Any = None
        self.aliased = self.overflowing = False
        self.number = 0
        self.patience = 0.0
        self.awaited: ModelValue | None = None
        self.shm = loading.module(self.version, NAME)
        with self._watched():
            self.queue = self.shm.MessageQueue(
                len(self.readers), len(self.readers), max_chunk_bytes=CHUNK, max_chunks=len(self.slots)
            )
            self.handle = self.queue.export_handle()
            self.ends = [
                self.shm.MessageQueue.create_from_handle(self.handle, n) for n, _ in enumerate(self.readers)
            ]
        for rank, end in enumerate(self.ends):
            end.buffer.rank = rank
        for end in (self.queue, *self.ends):
            end.local_socket.rcvtimeo = int(1000 * PATIENCE)
            end.wait_until_ready()
        send = self.queue.local_socket.send_multipart

        def send_body(buffers: Any, **options: Any) -> Any:
            sent = np.asarray(self.sent)
            frames = [np.frombuffer(each, np.uint8) for each in buffers]
            self.aliased = self.caller_writes and any(np.shares_memory(frame, sent) for frame in frames)
            send(buffers, **options)
            self.steps.at("SendBody")

        self.queue.local_socket.send_multipart = send_body
        self.receive = self.shm.MessageQueue.recv
        self.shm.MessageQueue.recv = staticmethod(self._await_body)
        stops = lambda event: (event.action, event.phase) == ("Step", "end")  # noqa: E731
        self.writer = Stepper(stops)
        self.steppers = {reader: Stepper(stops) for reader in self.readers}

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Within it, rings are made whose chunks and flags tell who looks at them."""
        shm, steps = self.shm, self.steps
        original = shm.ShmRingBuffer

        class Watched(original):  # type: ignore[misc, valid-type]
            rank: int | None = None

            @contextmanager
            def get_metadata(self, current_idx: int) -> Iterator[Flags]:
                with super().get_metadata(current_idx) as flags:
                    yield Flags(flags, self.rank, steps)

            @contextmanager
            def get_data(self, current_idx: int) -> Iterator[memoryview]:
                steps.at("BeginFill" if self.rank is None else "Open")
                with super().get_data(current_idx) as data:
                    yield data
                    if self.rank is None:
                        steps.at("EndFill")

        shm.ShmRingBuffer = Watched
        try:
            yield
        finally:
            shm.ShmRingBuffer = original

    # The writer.

    @lets("Take", "BeginFill", "EndFill", "Publish", "Overflow", "SendBody", "Return")
    def write(self, wanted: Step) -> None:
        if self.writer.running:
            self._wrote(self.writer.resume())
            return
        self.overflowing = wanted.action == "Overflow"
        self.number += 1
        self.chunk = self.queue.current_idx
        self.sent = _message(self.kind, TOO_LONG if self.overflowing else IN_SLOT, self.number)
        self._wrote(self.writer.start(self._enqueue))

    def _enqueue(self) -> None:
        loading.use(self.version)
        self.queue.enqueue(self.sent, 0.0)

    def _wrote(self, stop: Stop) -> None:
        name = stop.fields.get("name", stop.action)
        slot = self.slots[self.chunk]
        if self.overflowing and name in ("Take", "BeginFill", "EndFill"):
            # The chunk that says "the body comes over the socket" is no slot of the specification.
            self._wrote(self.writer.resume())
        elif name in ("Take", "BeginFill", "EndFill"):
            self.happened(name, s=slot)
        elif name == "Publish":
            (self.markers.add if self.overflowing else self.markers.discard)(self.chunk)
            if self.overflowing:
                self.happened("Overflow")
            else:
                self.happened("Publish", s=slot)
            # One flag tells all readers.
            for reader in self.readers:
                self.happened("Post", r=reader)
        elif name == "SendBody":
            for reader in self.readers:
                self.happened("SendBody", r=reader)
        else:
            assert name == "return", stop
            self.happened("Return")
            # From here on the memory is the caller's again.
            if self.caller_writes:
                np.asarray(self.sent)[:] = ANYTHING_BUT

    # The readers.

    @lets("Open", "BeginCopy", "Lease", "Release", "TakeBody", "TimeOut")
    def read(self, wanted: Step) -> None:
        reader = wanted.parameters["r"]
        stepper, end = self.steppers[reader], self.ends[self.readers.index(reader)]
        self.patience = PATIENCE / 4 if wanted.action == "TakeBody" else 0.0
        self.awaited = None
        stop = stepper.resume() if stepper.running else stepper.start(lambda: self._dequeue(end))
        while not self.reported:
            self._read(reader, stop)
            if self.reported or not stepper.running:
                break
            stop = stepper.resume()

    def _dequeue(self, end: Any) -> Any:
        loading.use(self.version)
        return end.dequeue(0.0)

    def _await_body(self, socket: Any, timeout: float) -> Any:
        self.steps.at("AwaitBody")
        return self.receive(socket, self.patience)

    def _read(self, reader: ModelValue, stop: Stop) -> None:
        name = stop.fields.get("name", stop.action)
        rank = self.readers.index(reader)
        chunk = self.ends[rank].current_idx
        body = chunk in self.markers
        if name == "Open":
            self.happened("Open", r=reader)
        elif name == "Read" and not body:
            self._received(reader, self.slots[chunk])
        elif name == "Release" and not body:
            self.happened("Release", r=reader, s=self.slots[chunk])
            while self.steppers[reader].running:
                self.steppers[reader].resume()
        elif name == "AwaitBody":
            self.awaited = reader
        elif name == "raise":
            assert isinstance(stop.fields["error"], TimeoutError), stop
            self._forget(stop)
            if self.awaited == reader:
                self.happened("TimeOut", r=reader)
        elif name == "return":
            value = np.asarray(stop.fields["value"])
            self.got[reader] = self._number(value)
            self.happened("TakeBody", r=reader)

    def _received(self, reader: ModelValue, slot: ModelValue) -> None:
        """What was read is a view of the ring, hence a lease, or a copy."""
        frame: Any = sys._current_frames()[self.steppers[reader]._thread.ident]  # type: ignore[union-attr]
        while frame.f_code.co_name != "dequeue":
            frame = frame.f_back
        value = np.asarray(frame.f_locals["obj"])
        self.got[reader] = number = self._number(value)
        ring = self.ends[self.readers.index(reader)].buffer.shared_memory.buf
        if np.shares_memory(value, np.frombuffer(ring, np.uint8)):
            self.held[reader][slot] = number, value
            self.happened("Lease", r=reader)
        else:
            self.happened("BeginCopy", r=reader)
            self.happened("EndCopy", r=reader)

    @staticmethod
    def _forget(stop: Stop) -> None:
        """A traceback keeps the frames it passed alive, and with them views of the ring."""
        error = stop.fields.get("error")
        if error is not None:
            traceback.clear_frames(error.__traceback__)
            error.__traceback__ = None

    @staticmethod
    def _number(value: Any) -> int:
        """The message that all bytes are of, or 0."""
        return int(value[0]) if value[0] != ANYTHING_BUT and (value == value[0]).all() else 0

    @does("Drop")
    def drop(self, r: ModelValue, s: ModelValue) -> None:
        del self.held[r][s]

    def can(self, step: Step) -> bool:
        if step.action in ("Take", "Overflow"):
            chunk = self.queue.current_idx
            here = step.action == "Overflow" or step.parameters["s"] == self.slots[chunk]
            return here and not self._unread(chunk)
        if step.action == "TimeOut":
            return self.waits_run_out and not self.states[0]["bodies"][step.parameters["r"]]
        return True

    def attempts(self) -> list[Step]:
        """None: the queue goes on by itself, whatever it is asked for."""
        return []

    def weight(self, step: Step) -> int:
        return {"TimeOut": 8, "Overflow": 2}.get(step.action, 4)

    # What is to be seen.

    def _unread(self, chunk: int) -> set[ModelValue]:
        """The readers for which a chunk lies there."""
        buffer = self.queue.buffer
        start = buffer.metadata_offset + chunk * buffer.metadata_size
        written, *read = buffer.shared_memory.buf[start : start + buffer.metadata_size]
        return {r for r, done in zip(self.readers, read, strict=True) if written and not done}

    def view(self) -> Mapping[str, Any]:
        found: dict[str, Any] = {
            f"unread {slot}": self._unread(chunk) if chunk not in self.markers else set()
            for chunk, slot in enumerate(self.slots)
        }
        if not self.writer.running:
            found["next to write"] = self.queue.current_idx
        for rank, reader in enumerate(self.readers):
            if not self.steppers[reader].running:
                found[f"next to read {reader}"] = self.ends[rank].current_idx
            found[f"got {reader}"] = self.got[reader]
            held = self.held[reader].values()
            found[f"torn {reader}"] = {number for number, value in held if self._number(value) != number}
        found["a body is the caller's memory"] = self.aliased
        return found

    def facts(self, state: State) -> Mapping[str, Any]:
        count = len(self.slots)
        found: dict[str, Any] = {
            f"unread {slot}": set(state["holders"][slot]) if state["slot"][slot] == "lent" else set()
            for slot in self.slots
        }
        if not self.writer.running:
            found["next to write"] = state["sequence"] % count
        for reader in self.readers:
            if not self.steppers[reader].running:
                found[f"next to read {reader}"] = state["cursor"][reader] % count
            found[f"got {reader}"] = state["got"][reader]
            found[f"torn {reader}"] = set()
        found["a body is the caller's memory"] = False
        return found

    def close(self) -> None:
        for stepper in (self.writer, *self.steppers.values()):
            while stepper.running:
                stop = stepper.resume(Ended())
                self._forget(stop)
            # What it returned may be a view of the ring.
            stepper._stop = None
        self.shm.MessageQueue.recv = staticmethod(self.receive)
        self.held.clear()
        for end in (self.queue, *self.ends):
            spin = end._spin_condition
            for name in ("local_notify_socket", "read_cancel_socket", "write_cancel_socket"):
                socket = getattr(spin, name)
                if socket is not None:
                    socket.close(linger=0)
            end.local_socket.close(linger=0)
            end.local_socket.context.term()
        remove_sockets(self.handle)
        for end in (*self.ends, self.queue):
            memory = end.buffer.shared_memory
            try:
                memory.close()
            except BufferError:
                # Frames of a call that was ended lie in a cycle.
                gc.collect()
                memory.close()
            end.buffer.is_creator = False
        memory.unlink()


class Ring0260(Ring):
    version = "0.26.0"


class Ring0330(Ring):
    version = "0.33.0"


def sending(
    ring: type[Ring], kind: str, bodies: bool = False, waits_run_out: bool = False, caller_writes: bool = True
) -> type[Ring]:
    """The same with tensors or arrays; with messages too long for a chunk, and readers whose waits for them run out."""
    members = {
        "kind": kind,
        "constants": {**Ring.constants, "Bodies": "TRUE" if bodies else "FALSE"},
        "waits_run_out": waits_run_out,
        "caller_writes": caller_writes,
        "__module__": __name__,
    }
    return type(ring.__name__, (ring,), members)
