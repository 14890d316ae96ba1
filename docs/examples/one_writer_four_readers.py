"""The broadcast ring: one writer, four reader processes; large tensors are written and read where they lie."""

from __future__ import annotations

import multiprocessing

from quiesce.broadcast_ring import BroadcastRing
from quiesce.errors import Closed
from quiesce.ring_reader import RingReader
from quiesce.ring_wire import RingHandle

READERS, STEPS = 4, 10


def reader(handle: RingHandle, rank: int) -> None:
    """Receive until the writer closes; a tensor of 1 MiB or more is a lease of the ring's memory."""
    steps = 0
    with RingReader(handle, rank) as ring:
        while True:
            try:
                message = ring.receive(timeout=60)
            except Closed:
                break
            assert bool((message["activations"] == message["step"]).all())
            steps += 1
            del message  # the slot goes back with the last view of it
    assert steps == STEPS


def main() -> None:
    """Build each step's tensor in the ring, so that publishing copies nothing."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["quiesce.ring_reader"])  # import torch once for all readers
    with BroadcastRing(readers=READERS, slots=4, slot_bytes=4 << 20) as ring:
        processes = [
            server.Process(target=reader, args=(ring.handle, rank), daemon=True) for rank in range(READERS)
        ]
        for process in processes:
            process.start()
        ring.wait_until_ready(timeout=120)
        for step in range(STEPS):
            activations = ring.empty((512, 1024))
            activations.fill_(step)
            ring.publish({"step": step, "activations": activations}, timeout=30)
            del activations  # published: nobody writes it any more
        counters = ring.counters()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    print(f"{counters.messages} messages to {READERS} readers, {counters.fallbacks} beside the slots")


if __name__ == "__main__":
    main()
