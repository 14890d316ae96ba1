"""vLLM's loop that sends an engine's outputs, with its own encoder, held to `spec/PayloadReuse.tla`."""

from __future__ import annotations

import sys
import types
from collections.abc import Collection
from typing import Any

import torch
from model_tests.foreign import loading
from model_tests.foreign.sender import Sender
from model_tests.foreign.wire import size


class Vllm(Sender):
    """`EngineCoreProc.process_output_sockets` with one client.

    Replaced are the socket, the queue, and the encoder by one that stops before it and after.
    """

    version: str
    constants = {**Sender.constants, "Tensors": "{t1}", "Shapes": "<- Encoded"}
    small = {
        "no tensors": {"Shapes": "<- Alone", "MaxParts": "1", "MaxMessage": "2", "HighWater": "2"},
        "a small tensor": {
            "Tensors": "{t1}",
            "Shapes": "<- SmallTensorBehind",
            "Buffers": "{b1, b2}",
            "MaxMessage": "2",
            "HighWater": "2",
        },
    }

    def set_up(self) -> None:
        core = self.core = loading.module(self.version, "vllm.v1.engine.core")
        self.structs = loading.module(self.version, "vllm.v1.engine")
        adapter = self

        class Encoder(core.MsgpackEncoder):  # type: ignore[misc]
            def encode_into(self, obj: Any, buf: bytearray) -> Any:
                return adapter.encode(lambda: super(Encoder, self).encode_into(obj, buf), id(buf))

        self.replaced = {"MsgpackEncoder": Encoder, "make_zmq_socket": lambda *_, **__: self.wire.socket}
        self.kept = {name: getattr(core, name) for name in self.replaced}
        vars(core).update(self.replaced)
        self.locals: dict[str, Any] = {}

    def loop(self) -> None:
        process = self.core.EngineCoreProc.__new__(self.core.EngineCoreProc)
        process.output_queue = types.SimpleNamespace(get=self._get)
        process.process_output_sockets(["not used"], None, 0)

    def _get(self) -> tuple[int, Any]:
        self.frame = sys._getframe(1)
        return 0, self.next()

    def new(self) -> Any:
        return self.structs.EngineCoreOutputs()

    def fill(self, message: Any) -> None:
        payload, *others = self.parts
        text = chr(self.wire.message) * size(payload["large"])
        tensors = [torch.from_numpy(self.tensor[: size(part["large"])]) for part in others]
        output = self.structs.EngineCoreOutput(request_id=text, new_token_ids=[])
        output.pooling_output = tensors[0] if tensors else None
        message.outputs = [output]

    def pools(self) -> tuple[list[int], list[tuple[int, Collection[Any]]]]:
        mine = self.frame.f_locals
        pending = [(id(entry[-1]), [entry[0]]) for entry in reversed(mine["pending"])]
        return [id(buffer) for buffer in mine["reuse_buffers"]], pending

    def close(self) -> None:
        super().close()
        vars(self.core).update(self.kept)
        del self.frame


class Vllm0260(Vllm):
    version = "0.26.0"


class Vllm0330(Vllm):
    version = "0.33.0"


class Alone(Vllm):
    """Payloads without tensors."""

    constants = {**Vllm.constants, "Tensors": "{}", "Shapes": "<- Alone"}


class Alone0260(Alone, Vllm0260):
    pass


class Alone0330(Alone, Vllm0330):
    pass
