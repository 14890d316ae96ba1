"""Too little of something: typed errors, bounded memory, and back-pressure that the caller sees."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from model_tests.conftest import PROFILE
from model_tests.faults.crew import GIVE_UP_S, Actor, belongings, until
from model_tests.faults.parts import check, content

from quiesce import errors
from quiesce.broadcast_ring import BroadcastRing
from quiesce.payload_receiver import PayloadReceiver
from quiesce.payload_reuse import PayloadSender
from quiesce.ring_reader import RingReader
from quiesce.ring_wire import RingHandle

MIB = 1 << 20
CLONE_NEWNS, MS_REC_PRIVATE = 0x20000, (1 << 14) | (1 << 18)


def forked(call: Callable[..., str], *arguments: Any, limit: float = GIVE_UP_S) -> str:
    """What a function says, within `limit` seconds, in a process of its own, which has everything imported."""
    actor = Actor("tell", call=call, arguments=arguments)
    try:
        until([actor], lambda: actor.over, limit)
        assert actor.report is not None, f"the process ended with {actor.process.exitcode}"
        assert "Traceback" not in actor.report.end, actor.report.end
        return actor.report.end
    finally:
        actor.end()


def exchange() -> None:
    """One ring, one reader, messages of every kind."""
    with BroadcastRing(1, slots=2, slot_bytes=MIB) as ring, RingReader(ring.handle, 0) as reader:
        ring.wait_until_ready(20)
        for size in (10, 200_000, 2 * MIB):
            ring.publish(torch.arange(size, dtype=torch.uint8), 20)
            assert torch.equal(reader.receive(20), torch.arange(size, dtype=torch.uint8))


def without_shm() -> str:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS) or libc.mount(b"none", b"/", None, MS_REC_PRIVATE, None):
        return "not permitted"
    if libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=64k"):
        return "not permitted"
    Path("/dev/shm/full").write_bytes(bytes(64 << 10))
    exchange()
    return "exchanged"


def test_a_full_dev_shm_does_not_matter() -> None:
    """The ring's memory has no name and lies in no mounted file system."""
    if (said := forked(without_shm)) == "not permitted":
        pytest.skip("this process may not mount")
    assert said == "exchanged"


def with_descriptors(more: int) -> str:
    """Open `more` descriptors at most, make everything, and say what came of it."""
    used = len(os.listdir("/proc/self/fd")) - 1
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + more, hard))
    try:
        exchange()
        return "exchanged"
    except (errors.ResourceExhausted, errors.QuiesceTimeout) as error:
        return type(error).__name__
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_out_of_descriptors() -> None:
    """With every number of descriptors left, a ring and its reader are made, or refused, and nothing is left."""
    said = {more: forked(with_descriptors, more) for more in range(0, 60, 3)}
    assert said[0] == "ResourceExhausted"
    assert said[57] == "exchanged"
    assert set(said.values()) <= {"ResourceExhausted", "exchanged"}, said


def with_address_space(handle: str, more: int) -> str:
    """Attach and receive with so many bytes of address space left."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + more, resource.RLIM_INFINITY))
    try:
        BroadcastRing(1, slots=4, slot_bytes=16 * MIB)
        return "made"
    except errors.ResourceExhausted:
        pass
    try:
        RingReader(RingHandle.from_json(handle), 0)
        return "attached"
    except errors.ResourceExhausted as error:
        return str(error)


def test_out_of_address_space() -> None:
    """Neither a ring nor a reader is made for which there is no room, and the descriptor is closed once."""
    with BroadcastRing(1, slots=4, slot_bytes=16 * MIB) as ring:
        assert "cannot attach" in forked(with_address_space, ring.handle.to_json(), 32 * MIB)


@contextmanager
def control_group(limit: int) -> Iterator[Path]:
    """A control group of `limit` bytes of memory below the one of this process; skips where none can be made."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        root, name = {
            "memory": ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
            "": ("/sys/fs/cgroup", "memory.max"),
        }.get(controllers, ("", ""))
        group = Path(root, path.lstrip("/"), f"quiesce-{os.getpid()}")
        if not root or not (group.parent / "cgroup.procs").exists():
            continue
        with suppress(OSError):
            group.mkdir()
            try:
                (group / name).write_text(str(limit))
                yield group
                return
            finally:
                group.rmdir()
    pytest.skip("this process may not make a control group with a limit of memory")


def in_a_control_group(group: Path, address: str) -> str:
    """What does not fit is refused, what fits works, and a sender whose peer stands still stays within the limit."""
    (group / "cgroup.procs").write_text(str(os.getpid()))
    try:
        BroadcastRing(1, slots=4, slot_bytes=64 * MIB)
        return "a ring was made that does not fit"
    except errors.ResourceExhausted as error:
        refusal = str(error)
    exchange()
    taken, _, grown = sending_to_nobody(address, 4).split()
    return f"{refusal}; {taken} messages, {int(grown) >> 20} MiB"


def test_a_limit_of_a_control_group(tmp_path: Path) -> None:
    """What would exceed it is refused beforehand: nobody is killed for it."""
    with (
        zmq.Context() as context,
        context.socket(zmq.PULL) as pull,
        control_group(128 * MIB) as group,
    ):
        pull.rcvhwm = 1
        pull.bind(f"ipc://{tmp_path}/s")
        said = forked(in_a_control_group, group, pull.LAST_ENDPOINT.decode())
        assert "cannot reserve" in said, said


# ------------------------------------------------------------------------------------- a slow consumer, and no consumer


def rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def sending_to_nobody(address: str, bound: int) -> str:
    """Send 1 MiB messages to somebody who never receives: how many were taken, and how the memory grew, in bytes."""
    with zmq.Context() as context:
        push = context.socket(zmq.PUSH)
        push.sndhwm = bound
        push.sndbuf = 64 << 10
        push.connect(address)
        sender = PayloadSender(push)
        before, taken, most = rss(), 0, 0
        for number in range(200):
            try:
                sender.send({"x": torch.full((MIB,), number % 251, dtype=torch.uint8)}, timeout=0.05)
                taken += 1
            except errors.QuiesceTimeout:
                if taken and number > taken + 20:
                    break
            most = max(most, sender.pool.pending)
        grown = rss() - before
        try:
            sender.close(timeout=0.2)
        finally:
            push.close(linger=0)
    return f"{taken} {most} {grown}"


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_a_consumer_that_stands_still(tmp_path: Path, transport: str) -> None:
    """The sender holds no more than its socket's high-water mark in messages, and says that it cannot send."""
    with zmq.Context() as context, context.socket(zmq.PULL) as pull:
        pull.rcvhwm = 1
        pull.rcvbuf = 64 << 10
        pull.bind(f"ipc://{tmp_path}/s" if transport == "ipc" else "tcp://127.0.0.1:*")
        taken, pending, grown = map(int, forked(sending_to_nobody, pull.LAST_ENDPOINT.decode(), 4).split())
    # Its own mark of 4; the receiver's of 1; one on its way in the kernel and one in each engine; those not sent again.
    assert 4 <= taken <= 4 + 1 + 8
    assert pending <= taken
    assert grown <= (taken + 4) * MIB + 32 * MIB


def taking_slowly(address: str, nap: float) -> str:
    """Take and check messages, with a rest before each, until none comes for 2 seconds."""
    count = 0
    with zmq.Context() as context, context.socket(zmq.PULL) as pull:
        pull.rcvhwm = 1
        pull.rcvbuf = 64 << 10
        pull.bind(address)
        with PayloadReceiver(pull) as receiver, suppress(errors.QuiesceTimeout):
            while True:
                check(receiver.receive(2.0 if count else 30.0).value)
                count += 1
                time.sleep(nap)
    return str(count)


def sending_all_it_can(address: str, seconds: float) -> str:
    """Send 1 MiB messages for so long, 60 at least, every second one lent: figures of it as JSON."""
    with zmq.Context() as context, context.socket(zmq.PUSH) as push:
        push.sndhwm = 4
        push.sndbuf = 64 << 10
        push.connect(address)
        with PayloadSender(push) as sender:
            end, sent, refused, most = time.monotonic() + seconds, 0, 0, 0
            first = level = 0
            while time.monotonic() < end or sent < 60:
                message = content(1, sent, MIB)
                try:
                    (sender.lend if sent % 2 else sender.send)(message, timeout=0.01)
                    sent += 1
                except errors.QuiesceTimeout:
                    refused += 1
                most = max(most, sender.counters().in_flight)
                if sent == 40:
                    first = first or rss()
                level = max(level, rss())
            made = sender.pool.made
            sender.close(20.0)
    return json.dumps({"sent": sent, "refused": refused, "most": most, "made": made, "grown": level - first})


def test_a_slow_consumer(tmp_path: Path) -> None:
    """However long it goes on, the sender holds what its socket may hold, and the caller sees that it is refused."""
    address = f"ipc://{tmp_path}/s"
    consumer = Actor("tell", call=taking_slowly, arguments=(address, 0.02))
    try:
        seconds = {"dev": 3.0, "ci": 6.0}.get(PROFILE, 180.0)
        figures = json.loads(forked(sending_all_it_can, address, seconds, limit=seconds + 60))
        until([consumer], lambda: consumer.over)
        assert consumer.report is not None
        assert consumer.report.end == str(figures["sent"])
    finally:
        consumer.end()
    assert figures["refused"] > 0, figures
    # Its own mark of 4, one in libzmq's engine, and one that is being sent; a lent one counts with its payload.
    assert figures["made"] <= 6, figures
    assert figures["most"] <= 2 * 6, figures
    assert figures["grown"] <= 16 * MIB, figures


def test_a_reader_that_stands_still_holds_the_writer_within_its_window() -> None:
    """Bodies beside the slots are bounded by their window, entries by theirs, and the writer says who is behind."""
    with (
        BroadcastRing(1, slots=2, slot_bytes=64 << 10, patience=0.0) as ring,
        RingReader(ring.handle, 0) as reader,
    ):
        ring.wait_until_ready(20)
        before, taken = rss(), 0
        body = torch.zeros(MIB, dtype=torch.uint8)
        for _ in range(40):
            try:
                ring.publish(body, 0.05)
                taken += 1
            except errors.QuiesceTimeout as error:
                refusal = str(error)
                break
        assert "reader 0" in refusal
        assert "messages behind" in refusal
        assert taken == 8
        assert rss() - before <= (8 + 2) * MIB + 16 * MIB
        for _ in range(taken):
            assert reader.receive(20).numel() == MIB
        ring.publish("goes on", 20)
        assert reader.receive(20) == "goes on"


def test_a_full_peer_of_a_router_does_not_burn_the_processor(tmp_path: Path) -> None:
    """A ROUTER socket says that there is room while another peer has some; the sender sleeps between its tries."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.router_mandatory = True
        router.sndhwm = 1
        router.linger = 0
        router.bind(f"ipc://{tmp_path}/s")
        full, idle = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
        for socket, name in ((full, b"full"), (idle, b"idle")):
            socket.rcvhwm = 1
            socket.routing_id = name
            socket.connect(f"ipc://{tmp_path}/s")
            socket.send(b"here")
            assert router.recv_multipart()[0] in (b"full", b"idle")
        sender = PayloadSender(router)

        def fill() -> None:
            for _ in range(100):
                sender.send({"x": torch.zeros(MIB, dtype=torch.uint8)}, prefix=[b"full"], timeout=0.3)

        with pytest.raises(errors.QuiesceTimeout):
            fill()
        start = time.thread_time()
        with pytest.raises(errors.QuiesceTimeout):
            sender.send("small", prefix=[b"full"], timeout=1.0)
        assert time.thread_time() - start < 0.5
        sender.send("small", prefix=[b"idle"], timeout=5.0)
        assert PayloadReceiver(idle).receive(5.0).value == "small"
        full.close(0)
        idle.close(0)
        sender.close(0.2)


def test_nothing_is_left_by_what_was_refused() -> None:
    before = belongings()
    for _ in range(3):
        with pytest.raises(errors.ResourceExhausted):
            BroadcastRing(1, slots=4, slot_bytes=1 << 45)
    assert belongings() == before
