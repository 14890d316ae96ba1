"""Frames as messages: whole, cut, glued and given up; whose memory they are, and for how long."""

from __future__ import annotations

import datetime
import gc
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import zmq
from model_tests.codec.samples import address, inside, received, same

from quiesce.codec import (
    ABORT,
    DEFAULT_THRESHOLD,
    THRESHOLD_VARIABLE,
    Decoder,
    Encoder,
    check_frames,
    frame_count,
    is_abort,
)
from quiesce.errors import DecodeError, EncodeError, NotQuiescent

FRAMED = Encoder(threshold=0)
DECODER = Decoder()


def tensors(*sizes: int) -> list[torch.Tensor]:
    return [torch.arange(size, dtype=torch.uint8) for size in sizes]


class TestThreshold:
    def test_it_is_a_number_of_bytes(self) -> None:
        for size in (DEFAULT_THRESHOLD - 1, DEFAULT_THRESHOLD):
            assert len(Encoder().encode(tensors(size))) == (1 if size < DEFAULT_THRESHOLD else 2)
        int64 = torch.zeros(2, dtype=torch.int64)
        assert len(Encoder(threshold=16).encode(int64)) == 2
        assert len(Encoder(threshold=17).encode(int64)) == 1

    def test_the_environment_sets_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(THRESHOLD_VARIABLE, "10")
        assert Encoder().threshold == 10
        assert Encoder(threshold=20).threshold == 20
        monkeypatch.delenv(THRESHOLD_VARIABLE)
        assert Encoder().threshold == 256

    @pytest.mark.parametrize("text", ["", "-1", "1.5", "1 KiB", "0x10", "²"])
    def test_a_bad_value_is_named(self, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
        monkeypatch.setenv(THRESHOLD_VARIABLE, text)
        with pytest.raises(ValueError, match=THRESHOLD_VARIABLE):
            Encoder()

    @pytest.mark.parametrize("value", [-1, 1.5, True, "256"])
    def test_a_bad_argument_is_refused(self, value: Any) -> None:
        with pytest.raises(ValueError, match="threshold"):
            Encoder(threshold=value)


class TestFraming:
    def test_no_frame_is_ever_empty(self) -> None:
        frames = FRAMED.encode([*tensors(0, 3, 0), np.empty((2, 0)), b""])
        assert all(memoryview(frame).nbytes for frame in frames)
        assert len(frames) == 2

    def test_whole_messages_pass(self) -> None:
        for sizes in ((), (1,), (5, 6, 7)):
            frames = FRAMED.encode(tensors(*sizes))
            assert frame_count(frames[0]) == len(frames) == 1 + len(sizes)
            check_frames(frames)
            assert not is_abort(frames)

    def test_every_cut_and_every_glue_is_refused(self) -> None:
        """All pieces of a message with all pieces of another; parts and payloads have the same size.

        Not noticed, and expected not to be: a part in the place of another of the same size. libzmq does not
        reorder, so this takes a message that lost its end in front of one that lost its beginning.
        """
        size = len(FRAMED.encode(tensors(5, 5))[0])
        messages = [
            received(FRAMED.encode([torch.full((size,), n, dtype=torch.uint8)] * n)) for n in (3, 2, 1, 0)
        ]
        pieces = [m[i:j] for m in messages for i in range(len(m)) for j in range(i, len(m) + 1)]
        payloads = [m[0] for m in messages]
        counts = {"refused": 0, "replaced": 0}
        for left, right in itertools.product(pieces, pieces):
            frames = left + right
            assert not is_abort(frames)
            if frames in messages:
                continue
            # The sender closes what it could not finish.
            assert is_abort([*frames, ABORT]) == (not frames or frames[0] in payloads)
            heads = [frame in payloads for frame in frames]
            if heads[:1] == [True] and not any(heads[1:]) and len(heads) == frame_count(frames[0]):
                check_frames(frames)
                counts["replaced"] += 1
                continue
            with pytest.raises(DecodeError):
                check_frames(frames)
            with pytest.raises(DecodeError):
                DECODER.decode(frames)
            counts["refused"] += 1
        assert counts["refused"] > 10 * counts["replaced"] > 0

    def test_a_tensor_that_looks_like_a_payload_passes(self) -> None:
        payload = FRAMED.encode("x")[0]
        value = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        assert same([value, value], DECODER.decode(FRAMED.encode([value, value])))

    def test_the_abort_mark(self) -> None:
        assert is_abort([ABORT])
        assert not is_abort([])
        assert not is_abort([b"foreign", b""])
        frames = FRAMED.encode(tensors(3, 4))
        for cut in range(1, len(frames)):
            assert is_abort([*frames[:cut], ABORT])
            with pytest.raises(DecodeError):
                DECODER.decode([*frames[:cut], ABORT])

    @pytest.mark.parametrize(
        "payload", [b"", b"\xc1QSC", b"\xc1QSC" + bytes(8), b"GET / HTTP/1.1", bytes(64)]
    )
    def test_foreign_payloads(self, payload: bytes) -> None:
        with pytest.raises(DecodeError):
            frame_count(payload)
        with pytest.raises(DecodeError):
            check_frames([payload])

    @pytest.mark.parametrize(("offset", "value"), [(4, 2), (4, 0), (5, 2), (6, 1), (7, 1), (8, 9)])
    def test_foreign_headers(self, offset: int, value: int) -> None:
        payload = bytearray(FRAMED.encode("x")[0])
        payload[offset] = value
        with pytest.raises(DecodeError):
            check_frames([payload])

    @pytest.mark.parametrize("limit", [-1, 1.5, None, True])
    def test_bad_limits(self, limit: Any) -> None:
        with pytest.raises(ValueError, match="limit_bytes"):
            Decoder(limit_bytes=limit)

    def test_frames_that_are_no_buffers(self) -> None:
        payload = FRAMED.encode("x")[0]
        for frame in ("text", 3, None, np.zeros((4, 4))[:, ::2]):
            with pytest.raises(DecodeError):
                DECODER.decode([payload, frame])


class TestPayload:
    def test_it_is_written_over_and_fits(self) -> None:
        payload = bytearray(b"\xff" * 1000)
        big = {"a": "x" * 5000}
        for obj in (1, big, "y", big, [2]):
            parts = FRAMED.encode_into(obj, payload)
            assert not parts
            assert bytes(payload) == bytes(FRAMED.encode(obj)[0])
            assert DECODER.decode([payload]) == obj

    def test_growing_a_lent_payload_is_refused(self) -> None:
        payload = bytearray()
        FRAMED.encode_into("x", payload)
        with memoryview(payload), pytest.raises(NotQuiescent):
            FRAMED.encode_into("x" * 1000, payload)
        FRAMED.encode_into("x" * 1000, payload)
        assert DECODER.decode([payload]) == "x" * 1000

    def test_an_error_leaves_nothing_half_encoded(self) -> None:
        """The payload is empty, no part escapes, the caller's memory is let go, and the encoder goes on."""
        payload = bytearray()
        array = np.zeros(1000)
        gone = weakref.ref(array)
        for _ in range(3):
            with pytest.raises(EncodeError):
                FRAMED.encode_into([torch.from_numpy(array), {"x": object()}], payload)
            assert payload == b""
            frames = FRAMED.encode(tensors(3))
            assert len(frames) == 2
        del array
        gc.collect()
        assert gone() is None

    def test_the_same_object_gives_the_same_bytes(self) -> None:
        obj = {"a": tensors(3, 300), "b": np.arange(9.0)}
        assert [bytes(f) for f in FRAMED.encode(obj)] == [bytes(f) for f in FRAMED.encode(obj)]


class TestLifetime:
    def test_parts_keep_the_callers_memory(self) -> None:
        for change in (
            lambda t: t,
            lambda t: t.view(torch.bfloat16),
            lambda t: t.requires_grad_(),
            lambda t: torch.nn.Parameter(t),
            lambda t: t.view(10, 100).T,
            lambda t: t[500:],
            lambda t: t.view(torch.complex64),
        ):
            array = np.ones(1000, np.float32)
            gone = weakref.ref(array)
            parts = FRAMED.encode_into(change(torch.from_numpy(array)), bytearray())
            del array
            gc.collect()
            assert gone() is not None
            assert parts[0].view[3] == 0x3F
            del parts
            gc.collect()
            assert gone() is None

    @pytest.mark.parametrize(
        "escape",
        [
            lambda t: t,
            lambda t: t[3:5],
            lambda t: t.view(torch.int32),
            lambda t: t.numpy(),
            lambda t: t.detach().requires_grad_(),
            lambda t: torch.nn.Parameter(t),
            lambda t: t.untyped_storage(),
            lambda t: memoryview(t.numpy()),
            lambda t: t.expand(3, -1),
            lambda t: torch.from_dlpack(t),
        ],
    )
    def test_decoded_tensors_keep_their_frame(self, escape: Callable[[torch.Tensor], Any]) -> None:
        class Frame(bytearray):
            pass

        frame = Frame(FRAMED.encode(torch.ones(64))[1])
        gone = weakref.ref(frame)
        held = escape(DECODER.decode([FRAMED.encode(torch.ones(64))[0], frame]))
        with pytest.raises(BufferError):
            frame.extend(bytes(1 << 20))
        del frame
        gc.collect()
        assert gone() is not None
        del held
        gc.collect()
        assert gone() is None

    def test_a_decoded_array_keeps_its_frame(self) -> None:
        payload, part = received(FRAMED.encode(np.ones(64)))
        owner = part.obj
        held = DECODER.decode([payload, part])
        part.release()
        with pytest.raises(BufferError):
            owner.extend(b"x")
        del held
        owner.extend(b"x")

    def test_inline_tensors_do_not_touch_the_payload(self) -> None:
        payload = bytearray(Encoder(threshold=1 << 20).encode([torch.ones(64), np.ones(64)])[0])
        tensor, array = DECODER.decode([payload])
        payload[:] = bytes(len(payload))
        payload.extend(bytes(1 << 16))
        assert tensor.sum() == array.sum() == 64


class TestSharing:
    def test_the_report_names_the_frames_shared(self) -> None:
        value = [torch.ones(64), torch.ones(4, 1).expand(4, 5), np.ones(64), torch.ones(64).bfloat16()]
        frames = received(FRAMED.encode(value))
        results, aliased = DECODER.decode_with_report(frames)
        assert aliased == (1, 2, 3, 4)
        for index, result in enumerate(results, 1):
            tensor = torch.as_tensor(result) if index == 3 else result
            assert inside(frames[index], tensor)
        frames[2:4] = [memoryview(bytes(frames[2])), *received([frames[3]], shift=4)]
        results, aliased = DECODER.decode_with_report(frames)
        assert aliased == (1, 4)
        assert same(value, results)
        results, aliased = Decoder(copy=True).decode_with_report(frames)
        assert aliased == ()
        assert same(value, results)
        assert all(t.data_ptr() % 64 == 0 for t in results if isinstance(t, torch.Tensor))

    def test_the_report_names_a_payload_that_is_looked_into(self) -> None:
        for kind in (msgspec.Raw, memoryview):
            payload = bytearray(Encoder().encode(b"some bytes" if kind is memoryview else [1, 2])[0])
            obj, aliased = Decoder(kind).decode_with_report([payload])
            assert aliased == (0,)
            del obj
            assert Decoder().decode_with_report([payload])[1] == ()

    @pytest.mark.parametrize("shift", range(1, 16))
    @pytest.mark.parametrize(
        "dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.complex128]
    )
    def test_misaligned_frames_are_copied(self, dtype: torch.dtype, shift: int) -> None:
        value = torch.ones(64, dtype=dtype)
        frames = received(FRAMED.encode(value), shift)
        need = min(dtype.itemsize, 8)
        result, aliased = DECODER.decode_with_report(frames)
        assert aliased == ((1,) if address(frames[1]) % need == 0 else ())
        assert result.data_ptr() % need == 0
        assert same(value, result)


class TestThreads:
    def test_one_encoder_and_decoder_for_many_threads(self) -> None:
        failures: list[BaseException] = []

        def work(number: int) -> None:
            try:
                payload = bytearray()
                for round_ in range(60):
                    value = [torch.full((n,), number, dtype=torch.int16) for n in range(3 * round_)]
                    parts = FRAMED.encode_into({"of": number, "x": value}, payload)
                    result = DECODER.decode(received([payload, *(part.view for part in parts)]))
                    assert same({"of": number, "x": value}, result)
                    if round_ % 5 == 0:
                        with pytest.raises(EncodeError):
                            FRAMED.encode([*value, object()])
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
                assert not thread.is_alive()
        finally:
            sys.setswitchinterval(interval)
        assert not failures

    def test_a_call_inside_a_call(self) -> None:
        """A finalizer, a time zone or a `__post_init__` may use the same encoder and decoder in mid-call."""

        class Zone(datetime.tzinfo):
            def utcoffset(self, _: datetime.datetime | None) -> datetime.timedelta:
                assert same(tensors(5, 6), DECODER.decode(received(FRAMED.encode(tensors(5, 6)))))
                with pytest.raises(EncodeError):
                    FRAMED.encode([*tensors(7), object()])
                return datetime.timedelta(0)

        class Nested(msgspec.Struct):
            inner: Any

            def __post_init__(self) -> None:
                depth.append(0)
                if len(depth) < 4:
                    decoder.decode(received(FRAMED.encode([{"inner": t} for t in tensors(2, 2)])))

        depth: list[int] = []
        now = datetime.datetime(2020, 1, 1, tzinfo=Zone())
        first, _, second = DECODER.decode(received(FRAMED.encode([*tensors(3), now, *tensors(4)])))
        assert same(tensors(3, 4), [first, second])
        decoder: Decoder[list[Nested]] = Decoder(list[Nested])
        nested = decoder.decode(received(FRAMED.encode([{"inner": t} for t in tensors(3, 4)])))
        assert len(depth) > 4
        assert same(tensors(3, 4), [found.inner for found in nested])


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    context = zmq.Context()
    push, pull = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    for socket in (push, pull):
        socket.linger = 0
        socket.sndtimeo = socket.rcvtimeo = 10_000
    endpoint = {"inproc": "inproc://codec", "ipc": "ipc://*", "tcp": "tcp://127.0.0.1:*"}[request.param]
    push.bind(endpoint)
    pull.connect(push.last_endpoint.decode())
    yield push, pull
    context.destroy(linger=0)


@pytest.mark.parametrize("pair", ["inproc", "ipc", "tcp"], indirect=True)
def test_over_real_sockets(pair: tuple[zmq.Socket[bytes], zmq.Socket[bytes]]) -> None:
    """Whatever alignment libzmq gives, all arrive; over inproc the report says whose memory it is."""
    push, pull = pair
    inproc = push.last_endpoint.startswith(b"inproc")
    for size in (1, 3, 64, 1000, 70_000, 1_000_000):
        value = {"x": torch.randn(size), "y": [torch.randn(size).bfloat16(), np.arange(size)]}
        parts = FRAMED.encode_into(value, payload := bytearray())
        push.send_multipart([payload, *(part.view for part in parts)], copy=False)
        frames = pull.recv_multipart(copy=False)
        result, aliased = DECODER.decode_with_report(frames)
        assert same(value, result)
        shares_sender = 1 in aliased and inside(parts[0].view, result["x"])
        assert shares_sender == (inproc and size * 4 >= zmq.COPY_THRESHOLD)
        del frames, result
