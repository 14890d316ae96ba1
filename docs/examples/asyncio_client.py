"""asyncio: a client awaits tokens while the engine, in a thread of its own, sends them; closing ends the wait."""

from __future__ import annotations

import asyncio
import threading

import torch
import zmq
import zmq.asyncio

from quiesce.errors import Closed
from quiesce.payload_receiver import AsyncPayloadReceiver
from quiesce.payload_reuse import PayloadSender

TOKENS = 10


def engine(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """Send a token and its log-probabilities for every step."""
    push = context.socket(zmq.PUSH)
    push.connect("inproc://tokens")
    with PayloadSender(push) as sender:
        for step in range(TOKENS):
            sender.send({"token": step, "logprobs": torch.full((32_000,), float(step))}, timeout=30)


async def client(context: zmq.asyncio.Context) -> list[int]:
    """Receive all tokens, then close the receiver under a task that waits for more."""
    pull = context.socket(zmq.PULL)
    pull.bind("inproc://tokens")
    thread = threading.Thread(target=engine, args=(zmq.Context.shadow(context),), daemon=True)
    thread.start()
    tokens = []
    async with AsyncPayloadReceiver(pull) as receiver:
        for _ in range(TOKENS):
            received = (await receiver.receive(timeout=30)).value
            assert bool((received["logprobs"] == received["token"]).all())
            tokens.append(received["token"])
            del received  # over inproc it was the sender's memory
        waiting = asyncio.create_task(receiver.receive(timeout=30))
        await asyncio.sleep(0)
    try:
        await waiting
    except Closed:
        pass
    else:
        raise AssertionError("nothing was sent any more")
    thread.join(30)
    return tokens


def main() -> None:
    """Run client and engine."""
    tokens = asyncio.run(client(zmq.asyncio.Context()))
    assert tokens == list(range(TOKENS))
    print(f"{TOKENS} tokens received")


if __name__ == "__main__":
    main()
