"""Stage handoff over gloo: two processes, static buffers, several micro-batches in flight, equal to one process."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist

from quiesce.stage_handoff import StageLink
from quiesce.transport import TorchTransport

STEPS, WIDTH = 30, 1_000


def layer(rank: int) -> torch.Tensor:
    """The weights of one stage, the same in every process."""
    weights = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(rank))
    return weights.div_(WIDTH**0.5)


def stage(rank: int, store: str) -> None:
    """Rank 0 sends what its layer makes of each step; rank 1 applies its own and checks against one process."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=limit)
    mine, output = layer(rank), torch.empty(8, WIDTH)
    with StageLink(
        TorchTransport(), source=None if rank == 0 else 0, to=1 if rank == 0 else None, max_pending=8
    ) as link:
        for step in range(STEPS):
            link.before_forward()  # what the last step sent may be overwritten from here on
            if rank == 0:
                torch.mm(torch.full((8, WIDTH), float(step)), mine, out=output)
                link.isend_tensor_dict({"step": step, "hidden": output})
            else:
                values = link.irecv_tensor_dict().wait()
                torch.mm(values["hidden"], mine, out=output)
                alone = torch.full((8, WIDTH), float(step)) @ layer(0) @ mine
                assert values["step"] == step
                assert torch.equal(output, alone)
    dist.destroy_process_group()


def main() -> None:
    """Run both stages."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["quiesce.stage_handoff", "quiesce.transport"])  # import torch once
    with tempfile.TemporaryDirectory() as folder:
        store = f"{folder}/store"
        processes = [server.Process(target=stage, args=(rank, store), daemon=True) for rank in (0, 1)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(120)
            assert process.exitcode == 0
    print(f"{STEPS} steps through two stages, equal to one process to the bit")


if __name__ == "__main__":
    main()
