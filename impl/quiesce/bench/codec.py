"""Time the codec: `python -m quiesce.bench.codec`.

Prints medians in microseconds: encode (into a reused payload); decode (from aligned, writable frames); frames
encoded before sent over ipc and received, in one thread; and the whole trip: encode, send, receive, decode.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
import zmq

from quiesce.bench.measuring import Figures
from quiesce.codec import Decoder, Encoder


class Request(msgspec.Struct):
    """As an engine core gets it: a few fields, three small tensors."""

    request_id: str
    lengths: list[int]
    tokens: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor


def cases() -> dict[str, tuple[object, Any, int]]:
    """Name -> object, type to decode into, number of runs."""
    small = Request("r-1", [1, 2, 3], torch.arange(16), torch.arange(16), torch.ones(16, dtype=torch.bool))
    many = [torch.randn(128, 128) for _ in range(300)]
    return {
        "Struct with 3 small tensors": (small, Request, 5000),
        "1 tensor of 64 KiB": (many[0], torch.Tensor, 5000),
        "300 tensors of 64 KiB": (many, list[torch.Tensor], 100),
        "300 bfloat16 tensors of 32 KiB": ([t.bfloat16() for t in many], list[torch.Tensor], 100),
        "300 transposed tensors of 64 KiB": ([t.T for t in many], list[torch.Tensor], 100),
        "1 tensor of 1 MiB": (torch.randn(512, 512), torch.Tensor, 1000),
        "1 tensor of 64 MiB": (torch.randn(4096, 4096), torch.Tensor, 30),
    }


def median(call: Callable[[], object], runs: int) -> float:
    """Median time of a call in microseconds."""
    times = []
    for _ in range(runs):
        begin = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - begin)
    return statistics.median(times) / 1000


def main(json: Path | None = None) -> None:
    """Print the medians in microseconds; `json` is a file to write them to."""
    encoder = Encoder()
    figures = Figures("codec", json)
    print(f"{'us':34}{'encode':>10}{'decode':>10}{'ipc':>10}{'trip':>10}")
    with zmq.Context() as context, context.socket(zmq.PUSH) as push, context.socket(zmq.PULL) as pull:
        for socket in (push, pull):
            socket.linger = 0
            socket.rcvtimeo = socket.sndtimeo = 10_000
        push.bind("ipc://*")
        pull.connect(str(push.get_string(zmq.LAST_ENDPOINT)))
        for name, (obj, kind, runs) in cases().items():
            decoder: Decoder[Any] = Decoder(kind)
            frames = [bytearray(frame) for frame in encoder.encode(obj)]

            def ipc(frames: list[bytearray] = frames) -> None:
                push.send_multipart(frames, copy=False)
                pull.recv_multipart(copy=False)

            def trip(obj: object = obj, decoder: Decoder[Any] = decoder) -> None:
                push.send_multipart(encoder.encode(obj), copy=False)
                decoder.decode(pull.recv_multipart(copy=False))

            encode = functools.partial(encoder.encode_into, obj, bytearray())
            decode = functools.partial(decoder.decode, frames)
            times = {
                what: median(call, runs)
                for what, call in (("encode", encode), ("decode", decode), ("ipc", ipc), ("trip", trip))
            }
            print(f"{name:34}", *(f"{time:9.1f}" for time in times.values()))
            figures.add({"message": name, **times})
