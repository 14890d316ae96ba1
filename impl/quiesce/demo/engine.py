"""The demo's engine: a client, an engine core, and two tensor-parallel workers for each of two pipeline stages.

client --payload reuse--> core --broadcast ring--> workers --stage handoff--> workers of the next stage
client <--payload reuse-- core <--payload reuse-------------------------------- first worker of the last stage
"""

from __future__ import annotations

import importlib
import multiprocessing
import secrets
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import zmq

from quiesce.broadcast_ring import BroadcastRing
from quiesce.demo.transformer import SHARDS, STAGES, Config, Output, Stage, prompt
from quiesce.errors import PeerDied, QuiesceTimeout
from quiesce.payload_receiver import PayloadReceiver
from quiesce.payload_reuse import PayloadSender
from quiesce.ring_reader import RingReader
from quiesce.ring_wire import RingHandle
from quiesce.stage_handoff import StageLink
from quiesce.transport import TorchTransport

IN_FLIGHT = 4
"""Steps that the core schedules ahead of their results."""
SLICE_S, TIMEOUT_S = 0.5, 120.0
"""Seconds between two looks at whether the other processes live; seconds that the slowest step may take."""
CLASSES = {
    "sender": "quiesce.payload_reuse:PayloadSender",
    "ring": "quiesce.broadcast_ring:BroadcastRing",
    "reader": "quiesce.ring_reader:RingReader",
    "link": "quiesce.stage_handoff:StageLink",
}
"""What the processes are built from, as module:class; a fault puts another class in one place."""


@dataclass(frozen=True)
class Job:
    """What all processes of one run have to know."""

    config: Config
    prompts: tuple[int, ...]
    answer: int
    classes: Mapping[str, str]
    folder: str
    name: str = field(default_factory=lambda: secrets.token_hex(8))

    def endpoint(self, what: str) -> str:
        """Where the queue of this name is."""
        return f"ipc://@quiesce-demo-{self.name}-{what}"

    def load(self, role: str) -> Any:
        """The class that plays a role."""
        module, _, name = self.classes[role].partition(":")
        return getattr(importlib.import_module(module), name)


def serve(job: Job, say: Callable[[int, int], None]) -> list[Output]:
    """Run the engine on the prompts of `job`; `say(request, token)` hears each token as it comes.

    Raises `PeerDied` if a process of the engine ends early, `QuiesceTimeout` if nothing comes for `TIMEOUT_S`.
    """
    spawn = multiprocessing.get_context("spawn")
    outputs = [Output([], []) for _ in job.prompts]
    core = spawn.Process(target=_core, args=(job,), name="quiesce-demo-core")
    with zmq.Context() as context:
        push, pull = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        pull.bind(job.endpoint("outputs"))
        push.bind(job.endpoint("requests"))
        core.start()
        receiver: PayloadReceiver[dict[str, Any]] = PayloadReceiver(pull)
        try:
            with job.load("sender")(push) as sender, receiver:
                _ask(job, sender)
                while any(len(output.tokens) < job.answer for output in outputs):
                    message = _receive(receiver, [core])
                    output = outputs[message["request"]]
                    # A copy: the tensor lies in ZMQ's memory, which is better given back.
                    output.log_probabilities.append(message["log_probabilities"].clone())
                    if message["token"] >= 0:
                        output.tokens.append(message["token"])
                        say(message["request"], message["token"])
                sender.send({"stop": True}, timeout=TIMEOUT_S)
                core.join(TIMEOUT_S)
        finally:
            _end([core])
    return outputs


def _ask(job: Job, sender: PayloadSender) -> None:
    """Send every prompt, a chunk of embeddings a message, without waiting for anything but room."""
    for request, tokens in enumerate(job.prompts):
        embeddings = prompt(job.config, request, tokens)
        for start in range(0, tokens, job.config.chunk):
            chunk = embeddings[start : start + job.config.chunk]
            positions = torch.arange(start, start + len(chunk))
            message = {"request": request, "embeddings": chunk, "positions": positions}
            sender.send(message, timeout=TIMEOUT_S)


def _receive(receiver: PayloadReceiver[dict[str, Any]], processes: Sequence[BaseProcess]) -> dict[str, Any]:
    """The next message, as long as the processes it may come from live."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            return receiver.receive(SLICE_S).value
        except QuiesceTimeout:
            dead = [process.name for process in processes if not process.is_alive()]
            if dead:
                raise PeerDied(f"{dead[0]} ended early; its error is above") from None
            if time.monotonic() > deadline:
                raise


def _end(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        if process.is_alive():
            process.terminate()
        process.join(10)
        if process.is_alive():
            process.kill()
            process.join(10)


@dataclass
class Step:
    """What the core tells the workers: whose tokens from where on, of at most how many, and what goes in."""

    request: int
    start: int
    length: int
    answers: bool = False
    token: int = -1
    embeddings: torch.Tensor | None = None


@dataclass
class _Request:
    """What the core knows of a request: chunks of its prompt, how far it is scheduled, and its next token."""

    length: int
    chunks: deque[torch.Tensor] = field(default_factory=deque)
    scheduled: int = 0
    tokens: int = 0
    next: int | None = None


def _core(job: Job) -> None:
    torch.set_num_threads(1)
    client = multiprocessing.parent_process()
    assert client is not None
    spawn = multiprocessing.get_context("spawn")
    requests = [_Request(tokens + job.answer) for tokens in job.prompts]
    chunk_bytes = job.config.chunk * job.config.width * 4
    with zmq.Context() as context:
        asked, done, told = (context.socket(kind) for kind in (zmq.PULL, zmq.PULL, zmq.PUSH))
        asked.connect(job.endpoint("requests"))
        done.bind(job.endpoint("results"))
        told.connect(job.endpoint("outputs"))
        ring: BroadcastRing = job.load("ring")(STAGES * SHARDS, slots=2, slot_bytes=chunk_bytes, patience=1.0)
        workers = [
            spawn.Process(target=_worker, args=(job, ring.handle, rank), name=f"quiesce-demo-worker-{rank}")
            for rank in range(STAGES * SHARDS)
        ]
        inputs: PayloadReceiver[dict[str, Any]] = PayloadReceiver(asked)
        results: PayloadReceiver[dict[str, Any]] = PayloadReceiver(done)
        try:
            for worker in workers:
                worker.start()
            with ring, inputs, results, job.load("sender")(told) as sender:
                ring.wait_until_ready(TIMEOUT_S)
                _take_prompts(job, inputs, requests, client)
                in_flight = 0
                while any(request.tokens < job.answer for request in requests):
                    in_flight += _schedule(ring, requests, IN_FLIGHT - in_flight)
                    result = _receive(results, [client, *workers])
                    in_flight -= 1
                    request = requests[result["request"]]
                    if result["token"] >= 0:
                        request.tokens += 1
                        request.next = result["token"] if request.tokens < job.answer else None
                    sender.lend(result, timeout=TIMEOUT_S)
                ring.publish(None, timeout=TIMEOUT_S)
                # Until the client has everything, and says so.
                _receive(inputs, [client])
                for worker in workers:
                    worker.join(TIMEOUT_S)
        finally:
            _end(workers)


def _take_prompts(
    job: Job, inputs: PayloadReceiver[dict[str, Any]], requests: list[_Request], client: Any
) -> None:
    for _ in range(sum(-(-tokens // job.config.chunk) for tokens in job.prompts)):
        message = _receive(inputs, [client])
        requests[message["request"]].chunks.append(message["embeddings"])


def _schedule(ring: BroadcastRing, requests: list[_Request], room: int) -> int:
    """Publish at most `room` steps: a token that has come first, else a chunk of a prompt; returns how many."""
    before = room
    while room:
        ready = next((r for r in requests if r.next is not None), None)
        ready = ready or next((r for r in requests if r.chunks), None)
        if ready is None:
            break
        step = Step(requests.index(ready), ready.scheduled, ready.length)
        if ready.next is not None:
            step.token, ready.next = ready.next, None
        else:
            step.embeddings = ready.chunks.popleft()
        step.answers = not ready.chunks
        ready.scheduled += 1 if step.embeddings is None else len(step.embeddings)
        ring.publish(step, timeout=TIMEOUT_S)
        room -= 1
    return before - room


def _worker(job: Job, handle: RingHandle, rank: int) -> None:
    torch.set_num_threads(1)
    number, shard = divmod(rank, SHARDS)
    first, last = number == 0, number == STAGES - 1
    reader: RingReader = job.load("reader")(handle, rank)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{Path(job.folder) / 'store'}",
        rank=rank,
        world_size=STAGES * SHARDS,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    groups = [dist.new_group(list(range(s * SHARDS, (s + 1) * SHARDS))) for s in range(STAGES)]

    def add(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        dist.all_reduce(parts[0], group=groups[number])
        return parts[0]

    def join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        rows = [torch.empty_like(parts[0]) for _ in range(SHARDS)]
        dist.all_gather(rows, parts[0].contiguous(), group=groups[number])
        return torch.cat(rows, -1)

    link: StageLink = job.load("link")(
        TorchTransport(gather_group=groups[number]),
        source=None if first else rank - SHARDS,
        to=None if last else rank + SHARDS,
        tensor_parallel=(shard, SHARDS),
        timeout=TIMEOUT_S,
    )
    stage = Stage(job.config, number, [shard])
    with zmq.Context() as context, torch.inference_mode(), reader, link:
        push = context.socket(zmq.PUSH)
        push.connect(job.endpoint("results"))
        with job.load("sender")(push) as sender:
            while (step := reader.receive(TIMEOUT_S)) is not None:
                request, start, length, answers = step.request, step.start, step.length, step.answers
                entering = stage.embedding[step.token : step.token + 1]
                if first and step.embeddings is not None:
                    entering = step.embeddings
                # What goes in lies in the ring, and stays there as long as it is used; other stages let go at once.
                del step
                if not first:
                    entering = link.irecv_tensor_dict().wait()["hidden"]
                link.before_forward()
                hidden = stage.forward(request, start, length, entering, add)
                if not last:
                    link.isend_tensor_dict({"hidden": hidden})
                    continue
                rows = stage.log_probabilities(hidden, join)
                if shard == 0:
                    token = int(rows[-1].argmax()) if answers else -1
                    result = {"request": request, "token": token, "log_probabilities": rows}
                    sender.send(result, timeout=TIMEOUT_S)
    dist.destroy_process_group()


def run(
    config: Config,
    prompts: Sequence[int],
    answer: int,
    classes: Mapping[str, str],
    say: Callable[[int, int], None],
) -> list[Output]:
    """The outputs of the engine for prompts of these lengths (tokens), each answered with `answer` tokens."""
    with tempfile.TemporaryDirectory(prefix="quiesce-demo-") as folder:
        return serve(Job(config, tuple(prompts), answer, {**CLASSES, **classes}, folder), say)
