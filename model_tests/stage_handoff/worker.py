"""One process of a real pipeline over gloo: python -m model_tests.stage_handoff.worker '<Job as JSON>'.

The pipeline is a ring: the last stage answers the first with a digest of its output. Rank 0 (or the ranks of stage 0)
compares the digests with those of a run in one process, and prints what it found as JSON.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from quiesce.stage_handoff import StageLink
from quiesce.transport import Handle, TorchTransport

MAX_BYTES = 16 << 20


@dataclass(frozen=True)
class Job:
    """What a process of the pipeline does; times in seconds, sizes in bytes."""

    rank: int
    stages: int
    store: str
    parallel: int = 1
    steps: int = 200
    in_flight: int = 3
    large: int = 4
    small_bytes: int = 256 << 10
    dropped_wait: bool = False
    seed: int = 1
    timeout: float = 60.0

    def argument(self) -> str:
        """The job as a command line argument."""
        return json.dumps(asdict(self))


class WaitSkipped(StageLink):
    """The handles of the tensors are kept alive and not waited for; a bare gloo Work would lose the message."""

    def before_forward(self, timeout: float | None = None) -> None:
        self.__dict__.setdefault("skipped", []).extend(self._unsettled)
        self._unsettled = []
        super().before_forward(timeout)

    def close(self, timeout: float | None = None) -> None:
        skipped: list[Handle] = self.__dict__.get("skipped", [])
        self._unsettled = skipped + self._unsettled
        super().close(timeout)


def chunks(job: Job) -> Iterator[int]:
    """The sizes (elements of four bytes) of all micro-batches: each step is cut into one to three, some are large."""
    choose = random.Random(job.seed)
    large = set(choose.sample(range(job.steps), job.large))
    for step in range(job.steps):
        total = MAX_BYTES // 4 if step in large else choose.randrange(1, job.small_bytes // 4)
        parts = choose.randrange(1, 4)
        for part in range(parts):
            yield (total * (part + 1)) // parts - (total * part) // parts if total >= parts else total


class Stage:
    """What a stage computes, bit for bit the same anywhere: into buffers that are written again in every step."""

    def __init__(self, number: int):
        self.number = number
        self.tokens = torch.zeros(MAX_BYTES // 4, dtype=torch.int32)
        self.hidden = torch.zeros(MAX_BYTES // 4, dtype=torch.float32)

    def forward(self, tokens: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mixed, warmed = self.tokens[: tokens.numel()], self.hidden[: hidden.numel()]
        torch.mul(tokens, 1_103_515_245, out=mixed)
        mixed.add_(12_345 + self.number)
        torch.mul(hidden, 0.75, out=warmed)
        warmed.add_(float(self.number) + 0.1)
        return mixed, warmed


def inputs(number: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The micro-batch that enters the first stage."""
    tokens = torch.arange(number, number + size, dtype=torch.int32)
    return tokens, tokens.to(torch.float32)


def digest(tokens: torch.Tensor, hidden: torch.Tensor) -> str:
    """What the last stage says of its output."""
    seen = hashlib.blake2b(tokens.numpy().tobytes(), digest_size=12)
    seen.update(hidden.numpy().tobytes())
    return seen.hexdigest()


def alone(job: Job) -> list[str]:
    """The digests of a run in one process."""
    stages = [Stage(number) for number in range(job.stages)]
    found = []
    for number, size in enumerate(chunks(job)):
        batch = inputs(number, size)
        for stage in stages:
            batch = stage.forward(*batch)
        found.append(digest(*batch))
    return found


def run(job: Job) -> dict[str, Any]:
    """Take part in the pipeline; what there is to say afterwards."""
    stage_number, part = divmod(job.rank, job.parallel)
    world = job.stages * job.parallel
    dist.init_process_group(
        "gloo",
        init_method=f"file://{job.store}",
        rank=job.rank,
        world_size=world,
        timeout=timedelta(seconds=job.timeout),
    )
    groups = [
        dist.new_group(list(range(s * job.parallel, (s + 1) * job.parallel))) for s in range(job.stages)
    ]
    link = (WaitSkipped if job.dropped_wait else StageLink)(
        TorchTransport(gather_group=groups[stage_number]),
        source=(job.rank - job.parallel) % world,
        to=(job.rank + job.parallel) % world,
        max_pending=job.in_flight,
        tensor_parallel=(part, job.parallel),
        timeout=job.timeout,
    )
    stage = Stage(stage_number)
    digests: list[str] = []
    unsettled = 0
    with torch.inference_mode(), link:
        for number, size in enumerate(chunks(job)):
            if stage_number == 0:
                if number >= job.in_flight:
                    digests.append(link.irecv_tensor_dict().wait()["digest"])
                batch = inputs(number, size)
            else:
                received = link.irecv_tensor_dict()
                values = received.wait()
                assert values["number"] == number
                batch = values["tokens"], values["hidden"]
            unsettled = max(unsettled, link.unsettled)
            link.before_forward()
            outputs = stage.forward(*batch)
            if stage_number == job.stages - 1:
                link.isend_tensor_dict({"digest": digest(*outputs)})
            else:
                link.isend_tensor_dict({"tokens": outputs[0], "number": number, "hidden": outputs[1]})
        if stage_number == 0:
            while len(digests) <= number:
                digests.append(link.irecv_tensor_dict().wait()["digest"])
    dist.barrier()
    dist.destroy_process_group()
    report: dict[str, Any] = {"rank": job.rank, "unsettled": unsettled}
    if stage_number == 0:
        expected = alone(job)
        report["micro_batches"] = len(expected)
        report["wrong"] = sum(seen != meant for seen, meant in zip(digests, expected, strict=True))
    return report


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(run(Job(**json.loads(sys.argv[1])))))
