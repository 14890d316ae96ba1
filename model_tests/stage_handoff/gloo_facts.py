"""What gloo's handles do, bare and behind a link: two processes, python -m model_tests.stage_handoff.gloo_facts."""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from quiesce.errors import QuiesceError, QuiesceTimeout
from quiesce.stage_handoff import StageLink
from quiesce.transport import TorchTransport

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.bool,
    torch.int64,
    torch.uint16,
    torch.complex64,
]
LIMIT = timedelta(seconds=20)
THROUGH = "through"
"""The key by which the sender says that the receiver may go."""


def values() -> dict[str, Any]:
    """A dict with all sorts of tensors."""
    tensors = {str(dtype): torch.arange(12).view(3, 4).to(dtype) for dtype in DTYPES}
    return {
        **tensors,
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(2.5),
        "strided": torch.ones(4, 6)[:, ::2],
    }


def sender(store: dist.Store) -> dict[str, Any]:
    """Rank 0."""
    found: dict[str, Any] = {}
    tensor = torch.zeros(1 << 20, dtype=torch.int32)
    work = dist.isend(tensor, 1)
    tensor.fill_(7)
    dist.barrier()
    # The peer posts its receive now: ample time for the transfer.
    time.sleep(0.5)
    found["completed_before_wait"] = work.is_completed()
    work.wait(LIMIT)
    found["completed_after_wait"] = work.is_completed()
    with StageLink(TorchTransport(), to=1, timeout=20.0) as link:
        (metadata, *handles) = link.isend_tensor_dict(values())
        link.before_forward()
        for handle in (metadata, *handles):
            handle.wait(1.0)
            handle.wait(1.0)
        link.isend_tensor_dict({"nothing": None})
    dist.barrier()
    # The peer sends nothing: the wait is bounded, and the link ends.
    link = StageLink(TorchTransport(), source=1, to=1, timeout=0.5)
    try:
        link.irecv_tensor_dict()
    except QuiesceTimeout:
        found["silence"] = "QuiesceTimeout"
    try:
        link.before_forward()
    except QuiesceError as error:
        found["afterwards"] = type(error).__name__
    store.set(THROUGH, "")
    return found


def receiver(store: dist.Store) -> dict[str, Any]:
    """Rank 1."""
    found: dict[str, Any] = {}
    tensor = torch.zeros(1 << 20, dtype=torch.int32)
    dist.barrier()
    work = dist.irecv(tensor, 0)
    work.wait(LIMIT)
    found["arrived_changed"] = bool((tensor == 7).any())
    with StageLink(TorchTransport(), source=0, timeout=20.0) as link:
        buffer = torch.empty(3, 4)
        received = link.irecv_tensor_dict(into={"torch.float32": buffer})
        arrived = received.wait()
        sent = values()
        found["equal"] = [key for key, t in sent.items() if _same(arrived[key], t)]
        found["static"] = arrived["torch.float32"].data_ptr() == buffer.data_ptr()
        found["again"] = received.wait().keys() == arrived.keys()
        found["no_tensors"] = link.irecv_tensor_dict().wait() == {"nothing": None}
    dist.barrier()
    # Not gone before the sender has found it silent.
    store.wait([THROUGH], LIMIT)
    return found


def left_alone() -> dict[str, Any]:
    """Rank 0, whose peer has died: every call ends with an error of this library."""
    found: dict[str, Any] = {}
    calls = {
        "receive": lambda link: link.irecv_tensor_dict(),
        "send": lambda link: (link.isend_tensor_dict({"x": torch.zeros(1 << 20)}), link.before_forward()),
        "close": lambda link: (link.isend_tensor_dict({"n": 1}), link.close(1.0)),
    }
    for name, call in calls.items():
        try:
            call(StageLink(TorchTransport(), source=1, to=1, timeout=5.0))
        except QuiesceError as error:
            found[name] = type(error).__name__
    return found


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(
        one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8)
    )


if __name__ == "__main__":
    rank, store = int(sys.argv[1]), dist.FileStore(sys.argv[2], 2)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=LIMIT)
    if sys.argv[3:] == ["dies"]:
        dist.barrier()
        if rank:
            print("{}", flush=True)
            os._exit(0)
        print(json.dumps(left_alone()), flush=True)
        # The group cannot be taken down in order without its peer.
        os._exit(0)
    print(json.dumps(receiver(store) if rank else sender(store)))
