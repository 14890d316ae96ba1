"""What the processes of a soak do: send and receive as fast as they can, check everything, and keep measurements."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
import time
import zlib
from array import array
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import zmq
from model_tests.faults.crew import GIVE_UP_S, Play

from quiesce import errors
from quiesce.broadcast_ring import BroadcastRing
from quiesce.payload_receiver import PayloadReceiver
from quiesce.payload_reuse import PayloadSender
from quiesce.ring_reader import RingReader
from quiesce.ring_wire import RingHandle
from quiesce.stage_handoff import StageLink
from quiesce.transport import TorchTransport

KIB, MIB = 1 << 10, 1 << 20
WAIT_S = 5.0
SAMPLE_S = 0.25
SIZES = [
    KIB,
    64 * KIB,
    MIB,
    16 * KIB,
    256 * KIB,
    2 * MIB + 64 * KIB,
]  # the last does not fit a slot of the ring


class _Mallinfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "chunks", "small", "maps", "mapped", "_1", "_2", "used", "free", "top")
    ]


_libc = ctypes.CDLL(None)
if hasattr(_libc, "mallinfo2"):
    _libc.mallinfo2.restype = _Mallinfo


def allocated() -> int:
    """Bytes that this process has from malloc and has not freed, over all of glibc's arenas; 0 under another libc."""
    if not hasattr(_libc, "mallinfo2"):
        return 0
    found = _libc.mallinfo2()
    return int(found.used + found.mapped)


class Measured:
    """Of one process: messages, bytes, wrong ones, latencies in seconds, and its memory over time.

    A sample of memory is a time, resident bytes, bytes allocated by malloc, and blocks allocated by Python.
    """

    def __init__(self, core: int) -> None:
        with suppress(OSError):
            os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[core % os.cpu_count()]})  # type: ignore[operator]
        self.messages = self.bytes = self.wrong = 0
        self.latencies = array("d")
        self.memory: list[tuple[float, int, int, int]] = []
        self._next = 0.0

    def count(self, nbytes: int, wrong: bool, sent_at: float | None = None) -> None:
        self.messages += 1
        self.bytes += nbytes
        self.wrong += wrong
        if sent_at is not None:
            self.latencies.append(time.monotonic() - sent_at)
        self.look()

    def look(self) -> None:
        if (now := time.monotonic()) >= self._next:
            self._next = now + SAMPLE_S
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            resident = pages * resource.getpagesize()
            self.memory.append((now, resident, allocated(), sys.getallocatedblocks()))

    def facts(self) -> dict[str, Any]:
        """As plain values; of more than a million latencies, every n-th."""
        found = np.frombuffer(self.latencies, float)
        return {
            "messages": self.messages,
            "bytes": self.bytes,
            "wrong": self.wrong,
            "latencies": found[:: max(1, len(found) // 1_000_000)].copy(),
            "memory": self.memory,
        }


BLOCK = torch.arange(SIZES[-1] // 8, dtype=torch.int64)


def content(number: int) -> dict[str, Any]:
    """Message `number`: a tensor that is like no other message's, its checksum, and when it was made."""
    numbers = BLOCK[: SIZES[number % len(SIZES)] // 8] + number * 1_000_003
    return {"number": number, "numbers": numbers, "sum": zlib.crc32(numbers.numpy()), "at": time.monotonic()}


def is_wrong(message: dict[str, Any]) -> bool:
    numbers = message["numbers"]
    return zlib.crc32(numbers.numpy()) != message["sum"] or int(numbers[0]) != message["number"] * 1_000_003


def _drive(play: Play, measured: Measured, send: Callable[[dict[str, Any]], Any], most: int) -> None:
    number = 0
    while number != most and play.told() != "stop":
        message = content(number)
        try:
            send(message)
        except (errors.QuiesceTimeout, errors.PeerDied):
            # Nobody has it: a guest may be killed between two parts.
            measured.look()
            continue
        measured.count(message["numbers"].nbytes, False)
        number += 1
    play.report.facts |= measured.facts()


def ring_writer(play: Play, readers: int, most: int = -1) -> None:
    measured = Measured(0)
    with BroadcastRing(readers, slots=8, slot_bytes=2 * MIB) as ring:
        play.say("handle", ring.handle.to_json())
        while True:
            with suppress(errors.PeerDied, errors.QuiesceTimeout):
                ring.wait_until_ready(WAIT_S)
                break
        _drive(play, measured, lambda message: ring.publish(message, WAIT_S), most)
    play.report.end = "closed"


def ring_reader(play: Play, handle: str, rank: int) -> None:
    """Stays until the writer closes, or it is told to leave; one behind, so that leases are held."""
    measured, last, kept = Measured(1), None, None
    skipped = 0
    with RingReader(RingHandle.from_json(handle), rank) as reader:
        while play.told() != "leave":
            try:
                message = reader.receive(WAIT_S)
            except errors.QuiesceTimeout:
                measured.look()
                continue
            except errors.Closed:
                break
            skipped += last is not None and message["number"] != last + 1
            last = message["number"]
            wrong = is_wrong(message) or (kept is not None and is_wrong(kept))
            measured.count(message["numbers"].nbytes, wrong, message["at"])
            kept = message
    play.report.facts |= {**measured.facts(), "out of order": skipped}
    play.report.end = "left"


def payload_sender(play: Play, address: str, most: int = -1) -> None:
    measured = Measured(0)
    with zmq.Context() as context, context.socket(zmq.PUSH) as push:
        push.sndhwm = 8
        push.bind(address)
        with PayloadSender(push) as sender:
            _drive(
                play,
                measured,
                lambda m: (sender.lend if m["number"] % 2 else sender.send)(m, timeout=WAIT_S) and None,
                most,
            )
            play.say("sent", measured.messages)
            give_up_at = time.monotonic() + GIVE_UP_S
            while play.told(WAIT_S) != "close":
                assert time.monotonic() < give_up_at, "nobody says close"
            pool = sender.pool
            play.report.facts |= {
                "buffers made": pool.made,
                "buffers free": pool.free,
                "pending": pool.pending,
            }
    play.report.end = "closed"


def payload_receiver(play: Play, address: str) -> None:
    """Told to leave, it does so with the next message; told to stop, when none comes any more."""
    measured, last, disorder = Measured(1), -1, 0
    with zmq.Context() as context, context.socket(zmq.PULL) as pull:
        pull.rcvhwm = 8
        pull.connect(address)
        with PayloadReceiver(pull) as receiver:
            leaves = None
            while leaves != "leave":
                try:
                    message = receiver.receive(0.5).value
                except errors.QuiesceTimeout:
                    measured.look()
                    if (leaves := leaves or play.told()) == "stop":
                        break
                    continue
                leaves = leaves or play.told()
                disorder += message["number"] <= last
                last = message["number"]
                measured.count(message["numbers"].nbytes, is_wrong(message), message["at"])
                del message
    play.report.facts |= {**measured.facts(), "out of order": disorder}
    play.report.end = "told"


def stage_rank(play: Play, folder: str, rank: int, life: int, most: int = -1) -> None:
    """One of two stages. The second dies with its life; the first begins another with a new one."""
    measured = Measured(rank)
    number = disorder = 0
    output = torch.zeros(SIZES[-1] // 8, dtype=torch.int64)
    while play.told() != "stop":
        store = f"{folder}/store-{life}"
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=GIVE_UP_S)
        )  # fmt: skip
        play.say("life", life)
        first, ended = number, False
        try:
            with StageLink(
                TorchTransport(), source=1 - rank, to=1 - rank, max_pending=2, timeout=WAIT_S
            ) as link:
                while not ended:
                    if rank == 0:
                        ended = play.told() == "stop" or number == most
                        message = content(number)
                        flat = output[: message["numbers"].numel()]
                        if number >= first + 2:
                            answer = link.irecv_tensor_dict().wait()
                            disorder += answer["number"] != number - 2
                            measured.count(0, answer["wrong"], answer["at"])
                        link.before_forward()
                        flat.copy_(message["numbers"])
                        link.isend_tensor_dict({**message, "numbers": flat, "ended": ended})
                    else:
                        message = link.irecv_tensor_dict().wait()
                        disorder += number > first and message["number"] != number
                        number = message["number"]
                        ended = message["ended"]
                        measured.count(message["numbers"].nbytes, is_wrong(message))
                        link.before_forward()
                        link.isend_tensor_dict(
                            {"number": message["number"], "wrong": is_wrong(message), "at": message["at"]}
                        )
                    number += 1
                for due in (number - 2, number - 1) if rank == 0 and number >= first + 2 else ():
                    answer = link.irecv_tensor_dict().wait()
                    disorder += answer["number"] != due
                    measured.count(0, answer["wrong"], answer["at"])
        except (errors.PeerDied, errors.QuiesceTimeout):
            number += 1  # what was on its way went with the peer
        dist.destroy_process_group()
        life += 1
        if ended:
            break
    play.report.facts |= {**measured.facts(), "out of order": disorder}
    play.report.end = "ended"
