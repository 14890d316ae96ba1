"""What each process of the three protocols does in a test of faults: send, receive, check, and go on after errors."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import zmq
from model_tests.faults.crew import GIVE_UP_S, STOP_S, TIMEOUT_S, Injected, Play

from quiesce import errors, events
from quiesce.broadcast_ring import BroadcastRing
from quiesce.events import action
from quiesce.host_staging import HostStaging
from quiesce.payload_receiver import PayloadReceiver, Received
from quiesce.payload_reuse import COPY_THRESHOLD, PayloadSender
from quiesce.ring_reader import RemoteReader, RingReader
from quiesce.ring_wire import RingHandle
from quiesce.stage_handoff import StageLink
from quiesce.streams import CpuBackend
from quiesce.transport import TorchTransport

MESSAGES = 14
"""Messages that a sender sends at least; it goes on until it is told to stop, so that others may join."""
PAUSE_S = 0.003
"""Seconds between two messages."""
CLOSE_S = 15 * TIMEOUT_S
"""Seconds that a sender lingers: enough for a receiver that rests to take what is on its way."""
LEASE_BYTES = 64 << 10
SLOT_BYTES = 128 << 10
RING_SIZES = [
    100,
    LEASE_BYTES + 8,
    5_000,
    SLOT_BYTES + 16_384,
]  # inline or copied, leased, copied, beside the slots
KERNEL_BYTES = 16 << 10
"""What the kernel is asked to keep of a ZMQ connection in each direction."""
PAYLOAD_SIZES = [100, COPY_THRESHOLD, COPY_THRESHOLD + 8]


def content(sender: int, index: int, size: int) -> dict[str, Any]:
    """Message `index` of a sender: its numbers are like those of no other message, and their checksum goes along."""
    numbers = torch.arange(size // 8, dtype=torch.int64) * 7 + (index * 1_000_003 + sender)
    return {"sender": sender, "index": index, "numbers": numbers, "sum": zlib.crc32(numbers.numpy())}


def check(message: dict[str, Any]) -> tuple[int, int]:
    """Sender and number of a message that is whole."""
    sender, index, numbers = message["sender"], message["index"], message["numbers"]
    assert zlib.crc32(numbers.numpy()) == message["sum"], f"message {index} is torn"
    assert torch.equal(numbers, content(sender, index, 8 * numbers.numel())["numbers"]), (
        f"message {index} holds another's numbers"
    )
    return sender, index


def _send_all(play: Play, send: Callable[[int], Any], messages: int = MESSAGES) -> None:
    """Send message after message until told to stop. After a timeout a message is sent again; after any other error
    it is not known to have arrived, and the next one follows."""
    give_up_at = time.monotonic() + GIVE_UP_S
    index = 0
    while index < messages or play.told() != "stop":
        assert time.monotonic() < give_up_at, "nobody says stop"
        result = play.call("send", lambda number=index: send(number))
        if isinstance(result, errors.QuiesceTimeout):
            continue
        if isinstance(result, errors.Closed):
            return
        if isinstance(result, Exception):
            play.report.unsure.append(index)
            play.say("unsure", index)
        index += 1
        play.report.facts["sent"] = index
        if index == messages:
            play.say("enough", index)
        time.sleep(PAUSE_S)


# ------------------------------------------------------------------------------------------------ the broadcast ring


def ring_writer(play: Play, readers: int, remote: int = 0, idle: bool = False) -> None:
    """`idle`: rests before its sixth message for longer than readers wait."""
    ring = BroadcastRing(
        readers, slots=2, slot_bytes=SLOT_BYTES, window=8, patience=0.01,
        remote=remote, bind="tcp://127.0.0.1:*" if remote else None,
    )  # fmt: skip
    play.say("handle", ring.handle.to_json())
    give_up_at = time.monotonic() + GIVE_UP_S
    while isinstance(play.call("wait_until_ready", lambda: ring.wait_until_ready(TIMEOUT_S)), Exception):
        assert time.monotonic() < give_up_at, "nobody joins"

    def publish(index: int) -> None:
        if idle and index == 6:
            time.sleep(2 * TIMEOUT_S)
        message = content(1, index, RING_SIZES[index % len(RING_SIZES)])
        if index % 4 == 1:
            loan = ring.empty(message["numbers"].shape, torch.int64, TIMEOUT_S)
            loan.copy_(message["numbers"])
            message["numbers"] = loan
            del loan
        ring.publish(message, TIMEOUT_S)

    _send_all(play, publish)
    # Readers that have received all and keep nothing hold nothing.
    give_up_at = time.monotonic() + 5 * STOP_S
    while True:
        ring._greet()
        ring._bury()
        ring._collect()
        held = [rank for holders in ring._holders for rank in holders]
        if not held or time.monotonic() > give_up_at:
            break
        time.sleep(0.01)
    play.report.facts["held"] = held
    if isinstance(play.call("close", lambda: ring.close(TIMEOUT_S)), Injected):
        play.call("close", lambda: ring.close(TIMEOUT_S))
    play.report.end = "closed"


def ring_reader(
    play: Play, handle: str, rank: int, remote: bool = False, most: int = 0, nap: float = 0.0
) -> None:
    """Receives to the end, or leaves after `most` messages; keeps every third message until the next one came, and
    rests between two for `nap` seconds."""
    kind = RemoteReader if remote else RingReader
    attached = play.call("attach", lambda: kind(RingHandle.from_json(handle), rank))
    if isinstance(attached, Injected):  # it is the caller's to try again
        attached = play.call("attach", lambda: kind(RingHandle.from_json(handle), rank))
    if isinstance(attached, Exception):
        play.report.end = type(attached).__name__
        return
    reader, kept = attached, None
    reader.lease_bytes = LEASE_BYTES
    give_up_at = time.monotonic() + GIVE_UP_S
    while not most or len(play.report.got) < most:
        assert time.monotonic() < give_up_at, "nothing ends"
        message = play.call("receive", lambda reader=reader: reader.receive(TIMEOUT_S))
        if isinstance(message, errors.QuiesceTimeout | Injected):
            if kept is not None:
                check(kept)
            kept = None
            continue
        if "the writer refused" in str(message) and type(message) is errors.QuiesceError:
            # It has not yet noticed the end of who had the rank, or not yet heard all it had told: ask again.
            reader.close()
            time.sleep(0.05)
            reader = kind(RingHandle.from_json(handle), rank)
            reader.lease_bytes = LEASE_BYTES
            continue
        if isinstance(message, Exception):
            play.report.end = type(message).__name__
            break
        play.report.got.append(check(message)[1])
        if kept is not None:
            check(kept)
        kept = message if len(play.report.got) % 3 == 1 else None
        if len(play.report.got) == 1:
            play.say("receives", True)
        time.sleep(nap)
    del message
    if isinstance(play.call("close", reader.close), Injected):
        play.call("close", reader.close)
    if kept is not None:
        check(kept)
    play.report.end = play.report.end or "left"


# ------------------------------------------------------------------------------------------------------ payload reuse


class Receiver(PayloadReceiver[Any]):
    """A receiver whose part in the specification, which is that of the environment, is marked."""

    @action("PeerTake")
    def _take(self) -> Received[Any] | None:
        return super()._take()

    @action("Read")
    def read(self, message: Any) -> tuple[int, int]:
        return check(message)

    @action("PeerDrop")
    def drop(self, received: list[Any]) -> None:
        received.clear()


def _socket(play: Play, context: zmq.Context[Any], kind: int, address: str, bind: bool) -> zmq.Socket[bytes]:
    """A socket with room for less than one large message; where it bound, it says."""
    socket = context.socket(kind)
    socket.linger = 0
    socket.sndhwm = 2
    # Over ipc a receiver at its mark loses the end of the stream when the sender closes (docs/limits.md).
    socket.rcvhwm = 0 if address.startswith("ipc") else 2
    # Not less: a TCP window below a segment opens only when the sender probes it, every 200 ms.
    socket.setsockopt(zmq.SNDBUF, KERNEL_BYTES)
    socket.setsockopt(zmq.RCVBUF, KERNEL_BYTES)
    socket.reconnect_ivl = 10
    if bind:
        give_up_at = time.monotonic() + GIVE_UP_S
        while True:
            try:
                socket.bind(address)
                play.say("bound", socket.LAST_ENDPOINT.decode())
                break
            except zmq.ZMQError:  # whoever was there before is not quite gone
                assert time.monotonic() < give_up_at, f"{address} stays taken"
                time.sleep(0.02)
    else:
        socket.connect(address)
    return socket


class Interrupted(Injected):
    """What a signal handler of the sender raises."""


def _interrupting(play: Play) -> events.Observer:
    """Every fourth message of three frames or more is cut behind its first part."""
    parts = 0

    def observer(event: events.Event) -> None:
        nonlocal parts
        if event.action == "SendPart" and event.phase == "end" and event.fields["part"] == 1:
            parts += 1
            if parts % 4 == 0:
                raise Interrupted("by a signal")

    return observer


def payload_sender(
    play: Play, address: str, bind: bool, sender_id: int, interrupts: bool = False, staged: bool = False
) -> None:
    """Sends copied and lent tensors, through pinned buffers if `staged`; `interrupts` cuts messages short."""
    context = zmq.Context()
    sender = PayloadSender(_socket(play, context, zmq.PUSH, address, bind), free_limit=1)
    staging = HostStaging(CpuBackend(), max(PAYLOAD_SIZES) + 8, limit=2) if staged else None

    def send(index: int) -> None:
        message = content(sender_id, index, PAYLOAD_SIZES[index % len(PAYLOAD_SIZES)])
        if staging is not None:
            place = staging.stage(message["numbers"], TIMEOUT_S)
            try:
                message["numbers"] = place.settle(TIMEOUT_S)
                loan = sender.lend(message, timeout=TIMEOUT_S)
                place.lend([loan])
            except BaseException:
                # Messages that failed halfway may have been lent the buffer.
                if place._buffer is not None:
                    place.lend(sender.loans)
                raise
        elif index % 2:
            sender.lend(message, timeout=TIMEOUT_S)
        else:
            sender.send(message, timeout=TIMEOUT_S)
            sender.settle()

    with events.observe(_interrupting(play)) if interrupts else nullcontext():
        _send_all(play, send)
    for _ in range(3):  # closing again goes on waiting
        if not isinstance(play.call("close", lambda: sender.close(CLOSE_S)), Exception):
            break
    if staging is not None:
        play.call("close staging", lambda: staging.close(TIMEOUT_S))
        play.report.facts["pinned"] = staging.made
    play.report.facts["pending"] = sender.pool.pending + len(sender.loans)
    context.term()
    play.report.end = "closed"


def payload_receiver(play: Play, address: str, bind: bool, nap: float = 0.0) -> None:
    """Receives until told to stop and nothing more comes."""
    context = zmq.Context()
    receiver = Receiver(_socket(play, context, zmq.PULL, address, bind))
    give_up_at = time.monotonic() + GIVE_UP_S
    stop = False
    while True:
        assert time.monotonic() < give_up_at, "nobody says stop"
        stop = stop or play.told() == "stop"
        received = play.call("receive", lambda: receiver.receive(TIMEOUT_S))
        if isinstance(received, errors.QuiesceTimeout):
            if stop:
                break
            continue
        if isinstance(received, Exception):
            continue
        seen = play.call("read", lambda message=received.value: receiver.read(message))
        if not isinstance(seen, Exception):
            play.report.got.append(seen)
        held = [received]
        del received
        play.call("drop", lambda held=held: receiver.drop(held))
        held.clear()
        if len(play.report.got) == 1:
            play.say("receives", True)
        time.sleep(nap)
    receiver.close()
    context.term()
    play.report.facts["aborted"] = receiver.aborted
    play.report.end = "told"


def payload_both(play: Play, address: str, sender_id: int, interrupts: bool = False) -> None:
    """Sender and receiver in one process, over inproc, where the receiver holds the sender's memory."""
    context = zmq.Context()
    pull, push = (
        _socket(play, context, zmq.PULL, address, True),
        _socket(play, context, zmq.PUSH, address, False),
    )
    sender, receiver = PayloadSender(push, free_limit=1), Receiver(pull)

    def take(timeout: float) -> None:
        received = play.call("receive", lambda: receiver.receive(timeout))
        if not isinstance(received, Exception):
            seen = play.call("read", lambda: receiver.read(received.value))
            if not isinstance(seen, Exception):
                play.report.got.append(seen)

    got: list[Any] = []
    with events.observe(_interrupting(play)) if interrupts else nullcontext():
        for index in range(MESSAGES):
            message = content(sender_id, index, PAYLOAD_SIZES[index % len(PAYLOAD_SIZES)])
            act = sender.lend if index % 2 else sender.send
            if isinstance(play.call("send", lambda act=act, m=message: act(m, timeout=TIMEOUT_S)), Exception):
                play.report.unsure.append(index)
            if index % 3:  # two of three, so that some are in flight when the next is sent
                take(0.05)
    while len(play.report.got) > len(got):
        got = list(play.report.got)
        take(0.05)
    for _ in range(3):
        if not isinstance(play.call("close", lambda: sender.close(TIMEOUT_S)), Exception):
            break
    receiver.close()
    play.report.facts |= {"pending": sender.pool.pending + len(sender.loans), "sent": MESSAGES}
    context.term()
    play.report.end = "closed"


# ------------------------------------------------------------------------------------------------------ stage handoff


def stage_rank(
    play: Play, store: str, rank: int, stages: int, parallel: int = 1, micro_batches: int = 10
) -> None:
    """One rank of a pipeline whose last stage answers the first; an error ends its link, and it tries twice more."""
    world = stages * parallel
    number, part = divmod(rank, parallel)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=GIVE_UP_S)
    )  # fmt: skip
    groups = [dist.new_group(list(range(s * parallel, (s + 1) * parallel))) for s in range(stages)]
    play.say("ready", True)
    assert play.told(GIVE_UP_S) == "go"
    link = StageLink(
        TorchTransport(gather_group=groups[number]),
        source=(rank - parallel) % world, to=(rank + parallel) % world,
        max_pending=2, tensor_parallel=(part, parallel), timeout=TIMEOUT_S,
    )  # fmt: skip
    output = torch.zeros(1 << 13, dtype=torch.int64)

    def answer() -> None:
        play.report.got.append(link.irecv_tensor_dict().wait()["index"])

    def step(index: int) -> None:
        """As stage 0: send micro-batch `index`, two ahead of the answers. As another: receive one, send it on."""
        if number == 0:
            if index >= 2:
                answer()
            if index >= micro_batches:
                return
            message = content(1, index, 8 * (1_000 + 8 * index))
        else:
            message = link.irecv_tensor_dict().wait()
            play.report.got.append(message["index"])
            expected = content(message["sender"], message["index"], 8 * message["numbers"].numel())
            assert torch.equal(message["numbers"], expected["numbers"] + number - 1), (
                f"micro-batch {index} is another's or torn"
            )
            assert message["numbers"].numel() == 1_000 + 8 * message["index"]
        link.before_forward()
        if number == stages - 1:
            link.isend_tensor_dict({"index": message["index"]})
            return
        flat = output[: message["numbers"].numel()]
        torch.add(message["numbers"], number if number else 0, out=flat)
        if number:
            flat.sub_(number - 1)
        link.isend_tensor_dict({"sender": message["sender"], "index": message["index"], "numbers": flat})

    steps = micro_batches + (2 if number == 0 else 0)
    failures = 0
    for index in range(steps):
        result = play.call("step", lambda index=index: step(index))
        if isinstance(result, Exception):
            failures += 1
            play.report.unsure.append(index)
            # One rank alone of a tensor parallel group must not go on with the next micro-batch.
            if failures == 3 or parallel > 1:
                break
    play.call("close", lambda: link.close(TIMEOUT_S))
    play.report.facts["sent"] = micro_batches
    dist.destroy_process_group()
    play.report.end = "ended"


# ------------------------------------------------------------------------------------------------------------ anything


def tell(play: Play, call: Callable[..., str], arguments: tuple[Any, ...]) -> None:
    """What a function says."""
    play.report.end = call(*arguments)
