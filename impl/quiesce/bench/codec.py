"""Time the codec: `python -m quiesce.bench.codec`. Prints microseconds, the median of the runs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import msgspec
import torch
import zmq

from quiesce.codec import Decoder, Encoder


class Small(msgspec.Struct):
    """A request as an engine core gets it: a few fields, three small tensors."""

    request_id: str
    lengths: list[int]
    tokens: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor


def median(call: Callable[[], object], runs: int) -> float:
    """Median time of a call in microseconds."""
    times = []
    for _ in range(runs):
        begin = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - begin)
    return statistics.median(times) / 1000


def round_trip(socket: zmq.Socket[bytes], peer: zmq.Socket[bytes], obj: object) -> None:
    """Encode, send, receive in the same thread, decode."""
    socket.send_multipart(Encoder_.encode(obj), copy=False)
    Decoder_.decode(peer.recv_multipart(copy=False))


Encoder_, Decoder_ = Encoder(), Decoder()


def main() -> None:
    cases: dict[str, tuple[object, type, int]] = {
        "3 small tensors in a Struct": (
            Small("r-1", [1, 2, 3], torch.arange(16), torch.arange(16), torch.ones(16, dtype=torch.bool)),
            Small,
            5000,
        ),
        "1 tensor of 64 KiB": (torch.randn(128, 128), torch.Tensor, 5000),
        "300 tensors of 64 KiB": ([torch.randn(128, 128) for _ in range(300)], list[torch.Tensor], 100),
        "300 bfloat16 of 64 KiB": (
            [torch.randn(256, 128).bfloat16() for _ in range(300)],
            list[torch.Tensor],
            100,
        ),
        "1 tensor of 1 MiB": (torch.randn(512, 512), torch.Tensor, 1000),
        "1 tensor of 64 MiB": (torch.randn(4096, 4096), torch.Tensor, 30),
    }
    print(f"{'':30}{'encode':>10}{'decode':>10}{'ipc trip':>12}   us")
    context = zmq.Context()
    push, pull = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    for socket in (push, pull):
        socket.linger = 0
        socket.rcvtimeo = socket.sndtimeo = 10_000
    try:
        push.bind("ipc://*")
        pull.connect(push.last_endpoint.decode())
        for name, (obj, kind, runs) in cases.items():
            payload, decoder = bytearray(), Decoder(kind)
            frames = [bytearray(frame) for frame in Encoder_.encode(obj)]
            encode = median(lambda obj=obj, payload=payload: Encoder_.encode_into(obj, payload), runs)  # type: ignore[misc]
            decode = median(lambda decoder=decoder, frames=frames: decoder.decode(frames), runs)  # type: ignore[misc]
            trip = median(lambda obj=obj: round_trip(push, pull, obj), runs)  # type: ignore[misc]
            print(f"{name:30}{encode:10.1f}{decode:10.1f}{trip:12.1f}")
    finally:
        context.destroy(linger=0)


if __name__ == "__main__":
    main()
