"""Stage handoff: a pipeline stage hands its activations to the next, and knows when it may write them again.

A step receives a dict, runs forward, and sends a dict: one metadata message from host to host (the values that are no
tensors, and the shapes of those that are), then each tensor from device to device.

    link.before_forward()                              # what the last step sent may be overwritten now
    received = link.irecv_tensor_dict().wait()
    outputs = forward(received)
    link.isend_tensor_dict(outputs)                    # returns at once; outputs are lent

`before_forward` is the one place that settles the previous step. The rules, H1 to H8, and the faults they prevent are
in `spec/StageHandoff.tla`. One thread uses a link at a time. A call that fails halfway, for whatever reason, ends it.
It cannot be used while a CUDA graph is being captured: capture forward alone, with static inputs and outputs, and call
the link between replays.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, TypeVar

import msgspec
import torch

from quiesce.arrays import MAX_AXES
from quiesce.borrowing import Borrowing, Counters, age
from quiesce.codec import DEFAULT_LIMIT
from quiesce.errors import Closed, DecodeError, EncodeError, NotQuiescent, QuiesceError
from quiesce.events import action
from quiesce.lifecycle import seconds
from quiesce.streams import CpuBackend, StreamBackend
from quiesce.transport import Handle, Transport
from quiesce.turns import Turns

R = TypeVar("R")

_log = logging.getLogger(__name__)

TIMEOUT = 60.0
"""Seconds that a wait of a link may take unless told otherwise."""


class TensorMeta(msgspec.Struct, frozen=True, array_like=True):
    """A tensor that follows: its key, shape (elements), dtype, and of how many slices one comes; 0 if it is whole."""

    key: str
    shape: tuple[int, ...]
    dtype: str
    sliced: int


class Metadata(msgspec.Struct, frozen=True, array_like=True):
    """The metadata message of one dict: its number, the values that are no tensors, the tensors in their order."""

    number: int
    values: dict[str, Any]
    tensors: tuple[TensorMeta, ...]
    keys: tuple[str, ...]


_encode: Callable[[Metadata], bytes] = msgspec.msgpack.Encoder().encode
_decode: Callable[[bytes], Metadata] = msgspec.msgpack.Decoder(Metadata).decode


def _is_plain(value: object) -> bool:
    try:
        msgspec.msgpack.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return False
    return True


class ReceivedDict:
    """A dict on its way in. `wait()` orders the current stream behind it and returns it; again, it returns it again."""

    def __init__(
        self,
        link: StageLink,
        metadata: Metadata,
        parts: dict[str, torch.Tensor],
        wholes: dict[str, torch.Tensor],
    ):
        self._link = link
        self.metadata = metadata
        self.parts = parts
        self.wholes = wholes
        self.handles: list[Handle] = []
        self.settled = False

    def wait(self, timeout: float | None = None) -> dict[str, Any]:
        """The dict, with its tensors safe to read on the current stream. Raises `QuiesceTimeout`, `PeerDied`."""
        limit = self._link._limit(timeout)
        if self.handles and not self.settled:
            self._link._in_step(lambda: self._settle(limit))
        self.settled = True
        tensors = {meta.key: self.wholes[meta.key] for meta in self.metadata.tensors}
        return {
            key: tensors[key] if key in tensors else self.metadata.values[key] for key in self.metadata.keys
        }

    def _settle(self, timeout: float | None) -> None:
        left = self._link._counting(timeout)
        self._link._await_receive(self, left())
        if any(tensor.sliced for tensor in self.metadata.tensors):
            self._link._all_gather(self, left())


class StageLink:
    """One rank of a pipeline: receives dicts from `source`, sends dicts to `to` (ranks; None at an end).

    `max_pending` bounds the metadata messages on their way: at least the number of micro-batches in flight, or sends
    wait for the peer. With `tensor_parallel=(rank, size)` a tensor whose size divides is sent in slices, each rank its
    own, and gathered by the receivers. `timeout`, in seconds, bounds every wait that is given none.
    `limit_bytes` bounds what the tensors of one dict may need. Of two links between the same ranks, over one process
    group, each takes what comes first: make one.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        source: int | None = None,
        to: int | None = None,
        backend: StreamBackend | None = None,
        max_pending: int = 64,
        tensor_parallel: tuple[int, int] = (0, 1),
        timeout: float = TIMEOUT,
        limit_bytes: int = DEFAULT_LIMIT,
    ):
        if max_pending < 1:
            raise ValueError(
                f"max_pending is {max_pending}; a send that may not be pending blocks the pipeline"
            )
        if not 0 <= tensor_parallel[0] < tensor_parallel[1]:
            raise ValueError(
                f"tensor_parallel is {tensor_parallel}; it must be (rank, size) with rank below size"
            )
        seconds(timeout)
        self.transport = transport
        self.backend: StreamBackend = backend or CpuBackend()
        self.source, self.to = source, to
        self.max_pending = max_pending
        self.timeout = timeout
        self.limit_bytes = limit_bytes
        self._part, self._parts = tensor_parallel
        self._sent = self._received = self._copied = self._waits = 0
        self._borrowing: Borrowing | None = None
        self._unsettled: list[Handle] = []
        self._arriving: list[ReceivedDict] = []
        self._pending: deque[tuple[Handle, list[Handle]]] = deque()
        self._since_settled = 0
        self._closed = ""
        self._turns = Turns("this stage link")

    @property
    def rank(self) -> int:
        """The rank of this end, as the transport counts."""
        return self.transport.rank

    @property
    def unsettled(self) -> int:
        """Device handles of sends that `before_forward` will wait for."""
        return len(self._unsettled)

    @property
    def pending(self) -> int:
        """Metadata messages sent and not reaped."""
        return len(self._pending)

    def counters(self) -> Counters:
        """What sends are unsettled; a fallback is a tensor copied to be sent, a wait one for metadata to be taken."""
        lent = self._borrowing
        return Counters(
            in_flight=len(self._unsettled),
            oldest_s=age(lent.since if lent else None),
            holder=f"the send to rank {self.to}" if lent else "",
            messages=self._sent,
            fallbacks=self._copied,
            waits=self._waits,
        )

    def irecv_tensor_dict(
        self, into: Mapping[str, torch.Tensor] | None = None, timeout: float | None = None
    ) -> ReceivedDict:
        """Receive the next dict: waits for its metadata, posts a receive for each tensor, and returns.

        Tensors named in `into` are received there; they are ordered behind the current stream, which may still read
        them. Raises `QuiesceTimeout`, `PeerDied`, and `DecodeError` if the message does not fit, or has no tensor for a
        name in `into`.
        """
        limit = self._limit(timeout)
        buffers = {} if into is None else into
        if not isinstance(buffers, Mapping) or not all(isinstance(t, torch.Tensor) for t in buffers.values()):
            raise TypeError("`into` must be a dict of keys and the tensors to receive into")
        self._peer(self.source, "nobody to receive from; pass source")
        return self._in_step(lambda: self._receive(buffers, limit))

    def _receive(self, into: Mapping[str, torch.Tensor], timeout: float | None) -> ReceivedDict:
        metadata = self._receive_metadata(timeout)
        parts, wholes = self._destinations(metadata, into)
        received = ReceivedDict(self, metadata, parts, wholes)
        # Kept until waited for, though the caller may let go of them: their memory is written all the while.
        self._arriving = [earlier for earlier in self._arriving if not earlier.settled]
        if metadata.tensors:
            self._arriving.append(received)
            self._post_receive(received)
        return received

    def isend_tensor_dict(self, values: Mapping[str, Any]) -> list[Handle]:
        """Send a dict and return its handles, that of the metadata first; its tensors are lent until settled.

        The link keeps the handles: `before_forward` settles those of the tensors, the metadata is reaped later. A
        tensor that is not contiguous is copied. Keys must be strings, values that are no tensors what msgpack knows.
        Raises `EncodeError` before anything is sent.
        """
        self._usable()
        if not isinstance(values, Mapping):
            raise EncodeError(f"a link sends dicts, not a {type(values).__name__}; give the tensor a key")
        for key in values:
            if not isinstance(key, str):
                raise EncodeError(
                    f"key {key!r} is of type {type(key).__name__}; the keys of a dict must be strings"
                )
        if self._since_settled >= self.max_pending:
            raise NotQuiescent(
                f"{self._since_settled} dicts were sent since before_forward(); call it before each forward, or raise "
                "max_pending"
            )
        tensors = {key: value for key, value in values.items() if isinstance(value, torch.Tensor)}
        for key, t in tensors.items():
            if lack := self._unfit(t):
                raise EncodeError(f"tensor {key!r} {lack}")
        metas = tuple(
            TensorMeta(
                key,
                tuple(t.shape),
                str(t.dtype).removeprefix("torch."),
                self._parts if self._is_sliced(t) else 0,
            )
            for key, t in tensors.items()
        )
        others = {key: value for key, value in values.items() if key not in tensors}
        metadata = Metadata(self._sent, others, metas, tuple(values))
        message = self._message(metadata)
        self._peer(self.to)

        def send() -> list[Handle]:
            # Another thread may have sent one since: its turn came first.
            late = metadata.number != self._sent
            numbered = (
                self._message(msgspec.structs.replace(metadata, number=self._sent)) if late else message
            )
            return [self._send_metadata(numbered), *(self._send_tensors(tensors) if tensors else ())]

        return self._in_step(send)

    def close(self, timeout: float | None = None) -> None:
        """Wait until everything sent has arrived, for at most `timeout` seconds altogether, and end the link.

        Raises `QuiesceTimeout` or `PeerDied` if something may not have; the link is closed all the same, unless another
        thread is still in the middle of a call of it.
        """
        left = self._counting(timeout)
        self._turns.take(left(), lambda: self._close_now(left))

    def _close_now(self, left: Callable[[], float]) -> None:
        if self._closed:
            return
        handles = [*self._unsettled, *(metadata for metadata, _ in self._pending)]
        try:
            for handle in handles:
                handle.wait(left())
        finally:
            self._unsettled.clear()
            self._pending.clear()
            self._arriving.clear()
            self._closed = "it was closed"

    def __enter__(self) -> StageLink:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._unsettled.clear()
            self._pending.clear()
            self._closed = f"it was left by {kind.__name__ if kind else 'an error'}"

    # The actions of the specification, in its order.

    @action(
        "ReceiveMetadata",
        lambda link, result, timeout: {"r": link.rank, "source": link.source, "message": result.number},
    )
    def _receive_metadata(self, timeout: float | None) -> Metadata:
        message = self.transport.receive_message(self._peer(self.source), self._limit(timeout))
        try:
            metadata = _decode(message)
        except (msgspec.DecodeError, RecursionError) as error:
            raise DecodeError(
                f"metadata from rank {self.source} is not a message of a stage link: {error}"
            ) from error
        if metadata.number != self._received:
            raise DecodeError(
                f"rank {self.source} sent dict {metadata.number}, but {self._received} is the next"
            )
        self._received += 1
        return metadata

    @action("PostReceive", lambda link, result, received: {"r": link.rank})
    def _post_receive(self, received: ReceivedDict) -> None:
        received.handles = [
            self.transport.receive(received.parts[meta.key].view(-1), self._peer(self.source))
            for meta in received.metadata.tensors
        ]

    @action("AwaitReceive", lambda link, result, received, timeout: {"r": link.rank})
    def _await_receive(self, received: ReceivedDict, timeout: float | None) -> None:
        left = self._counting(timeout)
        for handle in received.handles:
            handle.wait(left())

    @action("AllGather", lambda link, result, received, timeout: {"r": link.rank})
    def _all_gather(self, received: ReceivedDict, timeout: float | None) -> None:
        gathers = [
            self.transport.gather(received.wholes[meta.key].view(-1), received.parts[meta.key].view(-1))
            for meta in received.metadata.tensors
            if meta.sliced
        ]
        left = self._counting(timeout)
        for handle in gathers:
            handle.wait(left())

    @action("BeforeForward", lambda link, result, timeout=None: {"r": link.rank})
    def before_forward(self, timeout: float | None = None) -> None:
        """Settle the previous step: later work on the current stream may overwrite what it sent.

        With NCCL the current stream is ordered behind the sends and the host goes on; with gloo the host waits. Reaps
        metadata that is known to have arrived. Raises `QuiesceTimeout`, `PeerDied`.
        """
        limit = self._limit(timeout)
        self._in_step(lambda: self._settle_previous(limit))

    def _settle_previous(self, timeout: float | None) -> None:
        left = self._counting(timeout)
        while self._unsettled:
            self._unsettled[0].wait(left())
            del self._unsettled[0]
        self._since_settled = 0
        self._borrowing = None
        while self._pending and self._has_arrived(*self._pending[0]):
            self._reap_metadata()

    @action(
        "SendMetadata",
        lambda link, result, message: {
            "r": link.rank,
            "source": link.source,
            "to": link.to,
            "message": link._sent - 1,
            "max_pending": link.max_pending,
            "device": type(link.backend).__name__,
        },
    )
    def _send_metadata(self, message: bytes) -> Handle:
        # Full: the oldest must have been taken. This blocks only if fewer may be pending than steps are in flight.
        self._waits += len(self._pending) >= self.max_pending
        while len(self._pending) >= self.max_pending:
            self._reap_metadata()
        handle = self.transport.send_message(message, self._peer(self.to))
        self._pending.append((handle, []))
        self._sent += 1
        self._since_settled += 1
        return handle

    @action("SendTensors", lambda link, result, tensors: {"r": link.rank})
    def _send_tensors(self, tensors: Mapping[str, torch.Tensor]) -> list[Handle]:
        handles = [self.transport.send(self._slice(t), self._peer(self.to)) for t in tensors.values()]
        self._copied += sum(not tensor.is_contiguous() for tensor in tensors.values())
        if self._borrowing is None:
            self._borrowing = Borrowing()
        self._borrowing.look(f"what rank {self.rank} sent")
        self._unsettled.extend(handles)
        self._pending[-1][1].extend(handles)
        return handles

    @action("ReapMetadata", lambda link, result: {"r": link.rank})
    def _reap_metadata(self) -> None:
        self._pending[0][0].wait(self.timeout)
        self._pending.popleft()

    @staticmethod
    def _has_arrived(metadata: Handle, tensors: list[Handle]) -> bool:
        # The peer takes the metadata before it can receive a tensor.
        return metadata.received or any(handle.received for handle in tensors)

    def _usable(self) -> None:
        if self._closed:
            raise Closed(f"the stage link of rank {self.rank} cannot be used: {self._closed}")
        if self.backend.capturing():
            raise QuiesceError(
                "a stage link cannot be used under graph capture; capture forward alone, between its calls"
            )

    def _in_step(self, call: Callable[[], R]) -> R:
        """H8: one call at a time, and the link ends with one that fails: nobody knows which message comes next."""
        self._turns.check_process()
        self._usable()

        def guarded() -> R:
            try:
                return call()
            except BaseException as error:
                self._closed = f"it failed before ({str(error) or type(error).__name__})"
                _log.info("the stage link of rank %d ends: %s", self.rank, self._closed)
                raise

        return self._turns.take(0.0, guarded)

    def _limit(self, timeout: float | None) -> float:
        """Refused before a step begins, a bad one does not end the link."""
        return seconds(self.timeout if timeout is None else timeout)

    def _counting(self, timeout: float | None) -> Callable[[], float]:
        """Tells, whenever asked, how many of these seconds are left: a call has one limit, however many waits."""
        end = time.monotonic() + self._limit(timeout)
        return lambda: max(round(end - time.monotonic(), 3), 0.0)

    def _peer(self, peer: int | None, lack: str = "nobody to send to; pass `to`") -> int:
        if peer is None:
            raise QuiesceError(f"rank {self.rank} has {lack} to StageLink")
        return peer

    def _is_sliced(self, tensor: torch.Tensor) -> bool:
        return self._parts > 1 and tensor.numel() > 0 and tensor.numel() % self._parts == 0

    def _slice(self, tensor: torch.Tensor) -> torch.Tensor:
        flat = tensor.resolve_conj().resolve_neg().contiguous().view(-1)
        return flat.view(self._parts, -1)[self._part] if self._is_sliced(tensor) else flat

    def _unfit(self, tensor: torch.Tensor) -> str:
        """Why this tensor has no bytes that could be sent or received into; "" if it has."""
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
            kind = (
                "quantized" if tensor.is_quantized else "nested" if tensor.is_nested else str(tensor.layout)
            )
            return f"is {kind}; send its plain tensors instead"
        device: str = getattr(self.transport, "device", "")
        if tensor.device.type == "meta" or device not in ("", tensor.device.type):
            where = f"lie on a {device} device" if device else "have bytes"
            return f"is on device {str(tensor.device)!r}; what goes over this transport must {where}"
        last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        end = (tensor.storage_offset() + last + 1) * tensor.element_size() if tensor.numel() else 0
        if tensor.untyped_storage().nbytes() < end:
            return "has lost its storage, freed or shrunk; send it before that"
        return ""

    def _message(self, metadata: Metadata) -> bytes:
        try:
            return _encode(metadata)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            names = [repr(key) for key, value in metadata.values.items() if not _is_plain(value)]
            raise EncodeError(
                f"the value of {', '.join(names) or 'a key'} cannot be sent beside the tensors: {error}; it must be "
                "what msgpack knows. Tensors go as values of the dict itself, numpy arrays through torch.from_numpy"
            ) from error

    def _destinations(
        self, metadata: Metadata, into: Mapping[str, torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Where each tensor is received, and where it is whole: the same, but for slices."""
        parts, wholes = {}, {}
        names = [*metadata.values, *(meta.key for meta in metadata.tensors)]
        if sorted(names) != sorted(metadata.keys) or len(set(names)) != len(names):
            raise DecodeError(f"the keys of a dict from rank {self.source} are not those of its values")
        arrived = [meta.key for meta in metadata.tensors]
        if unknown := [key for key in into if key not in arrived]:
            raise DecodeError(
                f"no tensor arrived for the buffers {unknown}; those from rank {self.source} are {arrived}"
            )
        needed = 0
        for meta in metadata.tensors:
            dtype = getattr(torch, meta.dtype, None)
            if (
                not isinstance(dtype, torch.dtype)
                or meta.dtype.startswith(("qint", "quint"))  # never sent: their scale would be lost
                or min(meta.shape, default=0) < 0
                or len(meta.shape) > MAX_AXES
            ):
                raise DecodeError(f"tensor {meta.key!r} has dtype {meta.dtype!r} and shape {meta.shape}")
            needed += math.prod(meta.shape) * dtype.itemsize
            if needed > self.limit_bytes or max(meta.shape, default=0) > self.limit_bytes:
                raise DecodeError(
                    f"with {meta.key!r} of {meta.shape} the dict needs more than {self.limit_bytes} bytes; raise "
                    "limit_bytes if that is meant"
                )
            if meta.sliced and (meta.sliced != self._parts or math.prod(meta.shape) % self._parts):
                raise DecodeError(
                    f"tensor {meta.key!r} of {meta.shape} comes in {meta.sliced} slices, and is to be gathered from "
                    f"{self._parts}: see tensor_parallel"
                )
            whole = into[meta.key] if meta.key in into else self._empty(meta.shape, dtype)
            if lack := self._unfit(whole):
                raise DecodeError(f"the buffer for {meta.key!r} {lack}")
            if tuple(whole.shape) != meta.shape or whole.dtype != dtype or not whole.is_contiguous():
                gaps = "" if whole.is_contiguous() else f", not contiguous (strides {whole.stride()})"
                raise DecodeError(
                    f"the buffer for {meta.key!r} is {tuple(whole.shape)} of {whole.dtype}{gaps}; it must be "
                    f"contiguous, {meta.shape} of {dtype}"
                )
            wholes[meta.key] = whole
            size = whole.numel() // self._parts
            parts[meta.key] = self._empty((size,), dtype) if meta.sliced else whole
        return parts, wholes

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        try:
            return self.backend.empty(shape, dtype)
        except RuntimeError as error:
            raise DecodeError(f"a tensor of {shape} of {dtype} cannot be made here: {error}") from error
