"""What a stage link sends over: torch.distributed, behind handles that may be waited for twice.

A torch `Work` over gloo never says that it is done before it was waited for, blocks for ever when waited for again,
and loses its message when dropped too early. The handles here own what they stand for until it is waited for.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from quiesce.errors import DecodeError, PeerDied, QuiesceError, QuiesceTimeout
from quiesce.lifecycle import seconds

METADATA_TAG, TENSOR_TAG = 0x5153, 0x5154
MAX_MESSAGE = 64 << 20
"""Bytes that a metadata message may have."""
_LONGEST = 1e9  # seconds: gloo adds what it is told to its clock, in nanoseconds of 64 bits


class Handle(Protocol):
    """One or more messages on their way, and the memory they need. Waiting again returns at once."""

    @property
    def received(self) -> bool:
        """Whether the peer is known to have taken the message. False says nothing."""

    def wait(self, timeout: float) -> None:
        """Hold back later work of the current stream (or the host, for gloo) until the memory may be used again.

        Raises `QuiesceTimeout` or `PeerDied`; the same error again, if asked again.
        """


class Transport(Protocol):
    """Messages between ranks. Metadata goes from host to host, tensors from device to device. Times in seconds."""

    @property
    def rank(self) -> int:
        """The rank of this process."""

    def send_message(self, message: bytes, to: int) -> Handle:
        """Send metadata, without waiting for the peer."""

    def receive_message(self, source: int, timeout: float) -> bytes:
        """The next metadata message from `source`."""

    def send(self, tensor: torch.Tensor, to: int) -> Handle:
        """Send a contiguous tensor of one dimension; ordered behind the current stream."""

    def receive(self, tensor: torch.Tensor, source: int) -> Handle:
        """Receive into a contiguous tensor of one dimension; ordered behind the current stream."""

    def gather(self, whole: torch.Tensor, part: torch.Tensor) -> Handle:
        """Fill `whole` with the parts of all ranks of the tensor parallel group, in their order."""


class TorchHandle:
    """The handle of torch works. `tensors` are kept alive until it is waited for."""

    def __init__(self, works: Sequence[Any], tensors: Sequence[torch.Tensor], blocks_host: bool, what: str):
        self._works = list(works)
        self._tensors = tuple(tensors)
        self._blocks_host = blocks_host
        self._what = what
        self._error: QuiesceError | None = None

    @property
    def received(self) -> bool:
        """Over gloo, whether it was waited for; with NCCL never, since a send may end in a buffer."""
        # A send of NCCL may end in a buffer of the peer; one of gloo ends when the peer has received.
        return self._blocks_host and not self._works  # a work that failed stays

    def wait(self, timeout: float) -> None:
        """Wait for every work: on the host over gloo, by ordering the current stream with NCCL.

        `QuiesceTimeout` after `timeout` seconds (gloo alone can be bounded), `PeerDied` if the connection is gone; the
        same error again, if asked again.
        """
        timeout = min(seconds(timeout), _LONGEST)
        if self._error:
            # Anew, for an error that is kept would keep the frames of its traceback alive.
            raise type(self._error)(*self._error.args)
        deadline = time.monotonic() + timeout
        while self._works:
            try:
                if self._blocks_host:
                    self._works[0].wait(timedelta(seconds=max(deadline - time.monotonic(), 1e-3)))
                else:
                    self._works[0].wait()
            except RuntimeError as error:
                found = self._explain(error, timeout)
                self._error = type(found)(*found.args)
                raise found from error
            self._works.pop(0)
        self._tensors = ()

    def _explain(self, error: RuntimeError, timeout: float) -> QuiesceError:
        if "imed out" in str(error):
            return QuiesceTimeout(
                f"{self._what}: the peer did not answer within {round(timeout, 3):g} s. gloo has closed the connection "
                "for good: make the process group anew, or allow more time"
            )
        return _gone(self._what, error)


def _gone(what: str, error: RuntimeError) -> PeerDied:
    return PeerDied(f"{what}: the connection is gone ({str(error).splitlines()[0][:200]})")


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """A connection that is found to be gone when something is posted, rather than when it is waited for."""
    try:
        yield
    except RuntimeError as error:
        raise _gone(what, error) from error


class TorchTransport:
    """Tensors over `device_group`, metadata over `metadata_group` (gloo), slices gathered over `gather_group`.

    A group that is not given is the default group. Metadata needs a group whose backend is gloo, since it is host
    memory; make one with `torch.distributed.new_group(backend="gloo")` beside an NCCL group.
    """

    def __init__(self, device_group: Any = None, metadata_group: Any = None, gather_group: Any = None):
        if not dist.is_initialized():
            raise QuiesceError("torch.distributed is not initialised; call init_process_group first")
        if dist.get_backend(metadata_group) != "gloo":
            raise QuiesceError("metadata is host memory and needs a gloo group; pass metadata_group")
        self._device_group, self._metadata_group = device_group, metadata_group
        self._gather_group = gather_group
        backend = dist.get_backend(device_group)
        self._blocks_host = backend == "gloo"
        self.device = {"gloo": "cpu", "nccl": "cuda"}.get(backend, "")
        """The type of the device whose tensors it sends and receives; "" if that is not known."""

    @property
    def rank(self) -> int:
        """The rank of this process in the default group."""
        return dist.get_rank()

    def _other(self, peer: int) -> int:
        """gloo ends the process for a rank that there is not, and waits for ever for its own."""
        ranks = dist.get_world_size()
        if peer == self.rank or not 0 <= peer < ranks:
            raise QuiesceError(
                f"rank {self.rank} cannot exchange tensors with rank {peer}: there are {ranks}, and it takes another"
            )
        return peer

    def send_message(self, message: bytes, to: int) -> TorchHandle:
        """Send the size and the bytes; both are owned by the handle. `PeerDied` if the connection is gone."""
        # The receiver must know the size: gloo aborts a receive into a buffer that is too small.
        size = torch.frombuffer(bytearray(struct.pack("<q", len(message))), dtype=torch.uint8)
        body = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        what = f"metadata from rank {self.rank} to rank {to}"
        with _explained(what):
            works = [
                dist.isend(t, self._other(to), group=self._metadata_group, tag=METADATA_TAG)
                for t in (size, body)
            ]
        return TorchHandle(works, (size, body), True, what)

    def receive_message(self, source: int, timeout: float) -> bytes:
        """The next metadata message from `source`.

        Raises `QuiesceTimeout` after `timeout` seconds, `PeerDied`, and `DecodeError` for what is no stage link's.
        """
        deadline = time.monotonic() + seconds(timeout)
        header = self._receive_bytes(8, source, deadline)
        (size,) = struct.unpack("<q", header)
        if not 0 < size <= MAX_MESSAGE:
            raise DecodeError(
                f"rank {source} announced metadata of {size} bytes; the sender is no stage link"
            )
        return self._receive_bytes(size, source, deadline)

    def _receive_bytes(self, size: int, source: int, deadline: float) -> bytes:
        buffer = bytearray(size)
        tensor = torch.frombuffer(buffer, dtype=torch.uint8)
        what = f"metadata from rank {source} to rank {self.rank}"
        with _explained(what):
            work = dist.irecv(tensor, self._other(source), group=self._metadata_group, tag=METADATA_TAG)
        TorchHandle([work], [tensor], True, what).wait(max(deadline - time.monotonic(), 1e-3))
        return bytes(buffer)

    def send(self, tensor: torch.Tensor, to: int) -> TorchHandle:
        """Send the bytes of a contiguous tensor of one dimension. `PeerDied` if the connection is gone."""
        what = f"a tensor from rank {self.rank} to rank {to}"
        with _explained(what):
            work = dist.isend(
                tensor.view(torch.uint8), self._other(to), group=self._device_group, tag=TENSOR_TAG
            )
        return TorchHandle([work], [tensor], self._blocks_host, what)

    def receive(self, tensor: torch.Tensor, source: int) -> TorchHandle:
        """Receive into a contiguous tensor of one dimension. `PeerDied` if the connection is gone."""
        what = f"a tensor from rank {source} to rank {self.rank}"
        with _explained(what):
            work = dist.irecv(
                tensor.view(torch.uint8), self._other(source), group=self._device_group, tag=TENSOR_TAG
            )
        return TorchHandle([work], [tensor], self._blocks_host, what)

    def gather(self, whole: torch.Tensor, part: torch.Tensor) -> TorchHandle:
        """Gather the parts of all ranks of `gather_group` into `whole`; `part` is one of equal size (elements)."""
        parts = dist.get_world_size(self._gather_group)
        work = dist.all_gather(
            list(whole.view(torch.uint8).view(parts, -1)),
            part.view(torch.uint8),
            group=self._gather_group,
            async_op=True,
        )
        return TorchHandle([work], [whole, part], self._blocks_host, f"a gather at rank {self.rank}")
