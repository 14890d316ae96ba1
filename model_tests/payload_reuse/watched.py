"""A socket that notes what it was told and can be told to fail, and what tests of edges build on it."""

from __future__ import annotations

from typing import Any

import torch
import zmq

LARGE = 100_000


class Signal(Exception):
    pass


class Watched(zmq.Socket):  # type: ignore[type-arg]
    """A socket that notes how long it was told to wait and to linger, and can be told to fail in the middle."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.__dict__.update(polls=[], lingers=[], fail_at=0, ready=False, refuse_next=False)

    def poll(self, timeout: Any = None, flags: int = zmq.POLLIN) -> int:
        self.polls.append(timeout)
        return flags if self.ready else super().poll(timeout, flags)

    def close(self, linger: Any = None) -> None:
        self.lingers.append(linger)
        super().close(linger)

    def send(self, *args: Any, **options: Any) -> Any:
        """What is left behind by a refusal is what is left when libzmq swallows the part."""
        result = super().send(*args, **options)
        if self.refuse_next:
            self.refuse_next = False
            raise zmq.Again
        return result

    def recv(self, *args: Any, **options: Any) -> Any:
        self.fail_at -= 1
        if self.fail_at == 0:
            raise Signal
        return super().recv(*args, **options)


def joined(context: zmq.Context[Any], kind: int = zmq.PUSH, peer: int = zmq.PULL) -> Any:
    front, back = context.socket(kind, socket_class=Watched), context.socket(peer, socket_class=Watched)
    front.bind("inproc://edges")
    back.connect("inproc://edges")
    return front, back


def full(size: int, value: int = 1) -> torch.Tensor:
    return torch.full((size,), value, dtype=torch.uint8)
