"""Fork, threads, interpreters that exit with work in flight, and cancelled coroutines."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
import zmq.asyncio
from model_tests.forking import outcome

from quiesce import errors, events
from quiesce.broadcast_ring import BroadcastRing
from quiesce.payload_receiver import AsyncPayloadReceiver, PayloadReceiver
from quiesce.payload_reuse import PayloadSender
from quiesce.ring_reader import RingReader
from quiesce.turns import Turns

LARGE = 100_000


@contextmanager
def pair(address: str = "inproc://lifetimes") -> Iterator[tuple[PayloadSender, PayloadReceiver[Any]]]:
    context = zmq.Context()
    pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    pull.bind(address)
    push.connect(pull.LAST_ENDPOINT.decode())
    with PayloadSender(push) as sender, PayloadReceiver(pull) as receiver:
        yield sender, receiver
    context.destroy(linger=0)


def test_use_after_fork_is_refused() -> None:
    """Every call of every object, also while another thread of the parent is in the middle of one."""
    with (
        pair() as (sender, receiver),
        BroadcastRing(1, slots=2, slot_bytes=1 << 16) as ring,
        RingReader(ring.handle, 0) as reader,
    ):
        ring.wait_until_ready(20)
        calls: list[Callable[[], object]] = [
            lambda: sender.send(1), lambda: sender.lend(1), sender.settle, sender.touch, sender.close,
            receiver.receive,
            lambda: ring.publish(1), lambda: ring.empty((2,)), ring.wait_until_ready, lambda: ring.exclude(0),
            reader.receive, reader.wait_until_ready,
        ]  # fmt: skip

        def wait_in_vain() -> None:
            with pytest.raises(errors.QuiesceTimeout):
                receiver.receive(1.0)

        busy = threading.Thread(target=wait_in_vain)
        busy.start()
        for call in calls:
            said = outcome(call, 20)
            assert said.startswith("WrongProcess: "), said
            assert "process" in said
        busy.join(20)
        # The parent's objects are what they were.
        sender.send("after")
        assert receiver.receive(20).value == "after"
        ring.publish("after", 20)
        assert reader.receive(20) == "after"


def test_threads_take_turns() -> None:
    """Two threads on one receiver, two on one reader: each message goes to one of them, whole."""
    with (
        pair() as (sender, receiver),
        BroadcastRing(1, slots=4, slot_bytes=1 << 20) as ring,
        RingReader(ring.handle, 0) as reader,
    ):
        ring.wait_until_ready(20)
        got: dict[str, list[int]] = {"payload": [], "ring": []}

        def take(name: str, receive: Callable[[], Any]) -> None:
            while (message := receive())[0] >= 0:
                assert bool((message[1] == message[0]).all())
                got[name].append(message[0])

        threads = [
            threading.Thread(target=take, args=arguments)
            for arguments in (
                ("payload", lambda: receiver.receive(20).value),
                ("ring", lambda: reader.receive(20)),
            )
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for number in (*range(100), -1, -1):
            tensor = torch.full((LARGE,), number, dtype=torch.int32)
            sender.send([number, tensor], timeout=20)
            ring.publish([number, tensor], 20)
        for thread in threads:
            thread.join(30)
        assert sorted(got["payload"]) == sorted(got["ring"]) == list(range(100))


def test_an_exception_never_leaves_a_turn_taken() -> None:
    """A signal handler raises at every moment of taking and ending a turn; the next call finds it free."""

    class Alarm(Exception):
        pass

    def handler(*_: object) -> None:
        raise Alarm

    turns = Turns("this object")
    before = signal.signal(signal.SIGALRM, handler)
    chance = random.Random(5)
    interrupted = 0
    try:
        for _ in range(2_000):
            try:
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-6, 3e-5))
                for _ in range(20):
                    turns.take(1.0, lambda: None)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Alarm:
                interrupted += 1
            assert not turns.mine
    finally:
        signal.signal(signal.SIGALRM, before)
    assert interrupted > 100


EXITS = {
    "payload": """
import torch, zmq
from quiesce.payload_reuse import PayloadSender
context = zmq.Context()
push = context.socket(zmq.PUSH)
push.connect("tcp://127.0.0.1:9")
sender = PayloadSender(push)
loan = sender.lend([torch.zeros(1 << 20)])
sender.send([torch.zeros(1 << 20)])
""",
    "payload on its way to a peer": """
import os, tempfile, time, torch, zmq
from quiesce.payload_reuse import PayloadSender
address = "ipc://" + tempfile.mkdtemp() + "/s"
if os.fork() == 0:
    pull = zmq.Context().socket(zmq.PULL)
    pull.rcvhwm = 1
    pull.bind(address)
    time.sleep(5)
    os._exit(0)
push = zmq.Context().socket(zmq.PUSH)
push.connect(address)
sender = PayloadSender(push)
for _ in range(6):
    sender.send([torch.zeros(1 << 23)])
loan = sender.lend([torch.zeros(1 << 23)])
time.sleep(0.5)
""",
    "payload inproc": """
import torch, zmq
from quiesce.payload_reuse import PayloadSender
from quiesce.payload_receiver import PayloadReceiver
context = zmq.Context()
pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
pull.bind("inproc://x"); push.connect("inproc://x")
sender, receiver = PayloadSender(push), PayloadReceiver(pull)
loan = sender.lend([torch.zeros(1 << 20)])
held = receiver.receive()
""",
    "beside bare sockets, left open with what they received": """
import torch, zmq
from quiesce.payload_reuse import PayloadSender
context = zmq.Context()
pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
pull.bind("inproc://x"); push.connect("inproc://x")
sender = PayloadSender(push)
sender.send([torch.zeros(1 << 20)])
loan = sender.lend([torch.zeros(1 << 20)])
frames = pull.recv_multipart(copy=False)
other = zmq.Context.instance().socket(zmq.PULL)
other.bind("tcp://127.0.0.1:*")
""",
    "ring": """
import torch
from quiesce.broadcast_ring import BroadcastRing
from quiesce.ring_reader import RingReader
ring = BroadcastRing(2, slots=2, slot_bytes=1 << 23)
reader, other = RingReader(ring.handle, 0), RingReader(ring.handle, 1)
ring.wait_until_ready(20)
ring.publish(torch.zeros(1 << 20)); ring.publish(torch.zeros(1 << 23))
lease = reader.receive(20)
loan = ring.empty((10,))
""",
    "a thread that receives": """
import threading
from quiesce.broadcast_ring import BroadcastRing
from quiesce.ring_reader import RingReader
ring = BroadcastRing(1, slots=2, slot_bytes=1 << 16)
reader = RingReader(ring.handle, 0)
threading.Thread(target=reader.receive, args=(600.0,), daemon=True).start()
""",
    "stage": """
import os, tempfile, torch, torch.distributed as dist
from quiesce.stage_handoff import StageLink
from quiesce.transport import TorchTransport
folder = tempfile.mkdtemp()
hears, tells = os.pipe()
if os.fork() == 0:
    dist.init_process_group("gloo", init_method=f"file://{folder}/s", rank=1, world_size=2)
    os.close(tells)
    os.read(hears, 1)  # not gone before the other is connected
    os._exit(0)
dist.init_process_group("gloo", init_method=f"file://{folder}/s", rank=0, world_size=2)
os.write(tells, b"!")
link = StageLink(TorchTransport(), source=1, to=1)
try:
    link.isend_tensor_dict({"x": torch.zeros(1 << 20)})
except Exception:
    pass
""",
}


# Imports once; each of the scripts runs in a fork of its own, which then exits as any interpreter does.
FORKS = """
import json, os, signal, sys
import quiesce.broadcast_ring, quiesce.ring_reader, quiesce.payload_receiver, quiesce.stage_handoff
found = {}
for name, script in json.loads(sys.argv[1]).items():
    child = os.fork()
    if not child:
        signal.alarm(60)  # ends it if it hangs
        space = {"__name__": "__main__"}  # kept, as an interpreter keeps its globals until it exits
        exec(script, space)
        sys.exit(0)
    found[name] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(json.dumps(found))
"""


def test_interpreters_exit_with_work_in_flight() -> None:
    """Nothing was closed, and nobody takes what was sent: they end all the same, and not by a signal."""
    with tempfile.TemporaryDirectory() as folder:  # not tmp_path, which may be too long for an ipc address
        found = subprocess.run(
            [sys.executable, "-c", FORKS, json.dumps(EXITS)],
            capture_output=True, text=True, timeout=280,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "TMPDIR": folder},
        )  # fmt: skip
    assert json.loads(found.stdout) == dict.fromkeys(EXITS, 0), found.stderr


def test_a_receive_cancelled_at_any_moment_takes_nothing(tmp_path: Path) -> None:
    """The one await of the library: cancelled while messages come and go, it has taken a message or has not."""
    chance = random.Random(11)

    async def run() -> tuple[int, int]:
        context, asynchronous = zmq.Context(), zmq.asyncio.Context()
        pull, push = asynchronous.socket(zmq.PULL), context.socket(zmq.PUSH)
        pull.bind(f"ipc://{tmp_path}/s")
        push.connect(f"ipc://{tmp_path}/s")
        cancelled = due = 0
        with PayloadSender(push) as sender:
            async with AsyncPayloadReceiver(pull) as receiver:
                for number in range(80):
                    sender.send([number, torch.full((LARGE,), number % 251, dtype=torch.uint8)])
                    while due <= number:
                        waiting = asyncio.create_task(receiver.receive(20))
                        for _ in range(chance.randrange(4)):
                            await asyncio.sleep(chance.choice([0, 0, 1e-4]))
                        if chance.random() < 0.7:
                            waiting.cancel()
                        try:
                            value = (await waiting).value
                        except asyncio.CancelledError:
                            cancelled += 1
                            continue
                        assert value[0] == due
                        assert bool((value[1] == due % 251).all())
                        due += 1
        context.destroy(linger=0)
        asynchronous.destroy(linger=0)
        return cancelled, due

    cancelled, due = asyncio.run(asyncio.wait_for(run(), 120))
    assert due == 80
    assert cancelled > 20


def test_exceptions_in_observers_are_how_faults_are_injected() -> None:
    """What all of these tests rest on: an observer's exception leaves the sender as any other does."""
    with pair() as (sender, receiver):

        def fail(event: events.Event) -> None:
            if event.action == "Encode":
                raise KeyboardInterrupt

        with events.observe(fail), pytest.raises(KeyboardInterrupt):
            sender.send(1)
        sender.send(2)
        assert receiver.receive(20).value == 2
