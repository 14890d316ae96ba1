"""What payload reuse is timed beside: vLLM's encoder, pickle, msgspec with copies, a Connection, bare libzmq.

A way to send has `sender(push)`, a function that sends outputs, and `receiver(pull)`, one that returns them.
"""

from __future__ import annotations

import functools
import importlib
import io
import os
import pickle
import sys
import types
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
import zmq

from quiesce.bench.peers import VLLM_INSTALL, VLLM_VARIABLE
from quiesce.codec import Decoder, Encoder
from quiesce.payload_receiver import PayloadReceiver
from quiesce.payload_reuse import PayloadSender

TIMEOUT_S = 60.0


class Outputs(msgspec.Struct):
    """What an engine sends for a step: a few fields, and tensors."""

    step: int
    requests: list[str]
    tensors: list[torch.Tensor]


Send = Callable[[Outputs], object]
Receive = Callable[[], Any]


class Way:
    """quiesce: `lend`, which does not copy, or `send`, after which the caller may write its tensors."""

    def __init__(self, lend: bool) -> None:
        self.lend = lend

    def sender(self, push: zmq.Socket[bytes]) -> Send:
        sender = PayloadSender(push)
        return sender.lend if self.lend else sender.send

    def receiver(self, pull: zmq.Socket[bytes]) -> Receive:
        receiver = PayloadReceiver(pull, Decoder(Outputs))
        return lambda: receiver.receive(TIMEOUT_S).value


class Vllm(Way):
    """Its encoder and decoder, and what its engine does around them: the payload reused, its own frame tracked."""

    def __init__(self) -> None:
        self.module = vllm_serial()

    def sender(self, push: zmq.Socket[bytes]) -> Send:
        encoder = self.module.MsgpackEncoder()
        free: list[bytearray] = []
        pending: deque[tuple[zmq.MessageTracker, bytearray]] = deque()

        def send(outputs: Outputs) -> None:
            while pending and pending[0][0].done:
                _, buffer = pending.popleft()
                if len(free) < 2:
                    free.append(buffer)
            buffer = free.pop() if free else bytearray()
            first, *rest = encoder.encode_into(outputs, buffer)
            tracker = push.send(first, zmq.SNDMORE if rest else 0, copy=False, track=True)
            if rest:
                push.send_multipart(rest, copy=False)
            pending.append((tracker, buffer))

        return send

    def receiver(self, pull: zmq.Socket[bytes]) -> Receive:
        decoder = self.module.MsgpackDecoder(Outputs)
        return lambda: decoder.decode(pull.recv_multipart(copy=False))


@functools.cache
def vllm_serial() -> Any:
    """Its `serial_utils`, from the folder that `QUIESCE_BENCH_VLLM` names; ImportError if that does not work.

    Bare packages stand in for those whose import needs a whole engine.
    """
    if VLLM_VARIABLE not in os.environ:
        raise ImportError(f"{VLLM_VARIABLE} is not set")
    folder = Path(os.environ[VLLM_VARIABLE])
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    for name in ("vllm", "vllm.utils", "vllm.v1"):
        bare = types.ModuleType(name)
        bare.__path__ = [str(folder.joinpath(*name.split(".")))]
        sys.modules.setdefault(name, bare)
    no_gpu = types.SimpleNamespace(is_cuda_alike=bool, is_xpu=bool, is_pin_memory_available=bool)
    _stand_in("vllm.platforms", current_platform=no_gpu)
    _stand_in("vllm.platforms.interface", in_wsl=bool)
    _stand_in("vllm.multimodal")
    _stand_in("vllm.multimodal.inputs", __getattr__=lambda name: type(name, (), {}))
    _stand_in(
        "vllm.v1.utils", tensor_data=lambda t: t.flatten().cpu().contiguous().view(torch.uint8).numpy().data
    )
    return importlib.import_module("vllm.v1.serial_utils")


def _stand_in(name: str, **content: Any) -> None:
    module = types.ModuleType(name)
    module.__path__ = []
    module.__dict__.update(content)
    sys.modules[name] = module


class _Pickler(pickle.Pickler):
    """Tensors as numpy arrays, since torch's own way takes ten times as long."""

    def reducer_override(self, obj: Any) -> Any:
        return (torch.from_numpy, (obj.numpy(),)) if isinstance(obj, torch.Tensor) else NotImplemented


def pickled(obj: object, buffers: list[pickle.PickleBuffer] | None = None) -> bytes:
    file = io.BytesIO()
    _Pickler(file, 5, buffer_callback=None if buffers is None else buffers.append).dump(obj)
    return file.getvalue()


class Pickle(Way):
    """Pickle over ZMQ: one frame."""

    def __init__(self) -> None:
        pass

    def sender(self, push: zmq.Socket[bytes]) -> Send:
        return lambda outputs: push.send(pickled(outputs), copy=False)

    def receiver(self, pull: zmq.Socket[bytes]) -> Receive:
        return lambda: pickle.loads(pull.recv(copy=False).buffer)


class PickleOutOfBand(Pickle):
    """Pickle over ZMQ, protocol 5: the buffers are frames of their own, and not copied."""

    def sender(self, push: zmq.Socket[bytes]) -> Send:
        def send(outputs: Outputs) -> None:
            buffers: list[pickle.PickleBuffer] = []
            head = pickled(outputs, buffers)
            push.send_multipart([head, *(buffer.raw() for buffer in buffers)], copy=False)

        return send

    def receiver(self, pull: zmq.Socket[bytes]) -> Receive:
        def receive() -> Any:
            head, *buffers = pull.recv_multipart(copy=False)
            return pickle.loads(head.buffer, buffers=[frame.buffer for frame in buffers])

        return receive


class Copies(Pickle):
    """msgspec, with the bytes of every tensor inside the one frame."""

    def sender(self, push: zmq.Socket[bytes]) -> Send:
        def plain(tensor: Any) -> Any:
            return str(tensor.dtype)[6:], tuple(tensor.shape), tensor.numpy().tobytes()

        encoder = msgspec.msgpack.Encoder(enc_hook=plain)
        return lambda outputs: push.send(encoder.encode(outputs), copy=False)

    def receiver(self, pull: zmq.Socket[bytes]) -> Receive:
        def tensor(kind: type, parts: Any) -> Any:
            dtype, shape, data = parts
            return torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)).view(shape)

        decoder = msgspec.msgpack.Decoder(Outputs, dec_hook=tensor)
        return lambda: decoder.decode(pull.recv(copy=False).buffer)


class Connection(Pickle):
    """Pickle over a multiprocessing.Connection; the ends are those of `multiprocessing.Pipe`."""

    def sender(self, push: Any) -> Send:
        return lambda outputs: push.send_bytes(pickled(outputs))

    def receiver(self, pull: Any) -> Receive:
        return lambda: pickle.loads(pull.recv_bytes())


class Bare(Pickle):
    """The limit: the same frames, encoded once before, sent without a copy; nothing is decoded."""

    def sender(self, push: zmq.Socket[bytes]) -> Send:
        # The message itself is kept, not its id, which the next one may have when it is gone.
        known: list[Any] = [None, []]

        def send(outputs: Outputs) -> None:
            if known[0] is not outputs:
                known[:] = outputs, [bytes(frame) for frame in Encoder().encode(outputs)]
            push.send_multipart(known[1], copy=False)

        return send

    def receiver(self, pull: zmq.Socket[bytes]) -> Receive:
        return lambda: pull.recv_multipart(copy=False)


LEND, SEND, BARE = "quiesce, lend", "quiesce, send", "bare libzmq"
WAYS: dict[str, Callable[[], Way]] = {
    LEND: lambda: Way(lend=True),
    SEND: lambda: Way(lend=False),
    BARE: Bare,
    "vLLM": Vllm,
    "pickle": Pickle,
    "pickle, out of band": PickleOutOfBand,
    "msgspec, copies": Copies,
    "Connection": Connection,
}


def ways(only: str) -> tuple[dict[str, Way], list[str]]:
    """The ways whose name contains `only`, quiesce's and the bare one always; and what is missing, and why."""
    found, missing = {}, []
    for name, make in WAYS.items():
        if only in name or name in (LEND, SEND, BARE):
            try:
                found[name] = make()
            except ImportError as error:
                missing.append(f"without {name}: {error}; {VLLM_INSTALL}")
    return found, missing
