"""PUSH and PULL: one process sends the same tensor for every step, without a copy, and another receives it."""

from __future__ import annotations

import multiprocessing
import tempfile

import torch
import zmq

from quiesce.payload_receiver import PayloadReceiver
from quiesce.payload_reuse import PayloadSender

STEPS = 20


def consumer(endpoint: str) -> None:
    """Receive every step and check what came."""
    pull = zmq.Context().socket(zmq.PULL)
    pull.bind(endpoint)
    with PayloadReceiver(pull) as receiver:
        for step in range(STEPS):
            received = receiver.receive(timeout=30).value
            assert received["step"] == step
            assert bool((received["logits"] == step).all())


def main() -> None:
    """Write one tensor for every step, as an engine does, and wait for its loan in between."""
    with tempfile.TemporaryDirectory() as folder:
        endpoint = f"ipc://{folder}/logits"
        process = multiprocessing.get_context("spawn").Process(target=consumer, args=(endpoint,), daemon=True)
        process.start()
        push = zmq.Context().socket(zmq.PUSH)
        push.connect(endpoint)
        logits = torch.empty(64, 8_000)
        with PayloadSender(push) as sender:
            for step in range(STEPS):
                logits.fill_(step)
                loan = sender.lend({"step": step, "logits": logits}, timeout=30)
                # ... whatever else there is to do ...
                loan.wait(timeout=30)  # the I/O thread has read the last byte: logits may be written
            process.join(60)
        assert process.exitcode == 0
    print(f"{STEPS} steps sent from one tensor, all intact")


if __name__ == "__main__":
    main()
