"""A sender and a ring as one writes them at first, with the standard library and pyzmq: arrays in shared memory."""

from __future__ import annotations

import json
from collections import deque
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import numpy as np
import zmq


class NaiveSender:
    """Sends arrays from shared memory without copying, and uses the memory again when the tracker says done.

    `header_first` says in which order the two frames of a message go out; a buffer has `nbytes` bytes.
    """

    def __init__(self, socket: zmq.Socket[Any], nbytes: int, header_first: bool = False) -> None:
        self.socket = socket
        self.nbytes = nbytes
        self.header_first = header_first
        self.buffers: list[SharedMemory] = []
        self.free: list[SharedMemory] = []
        self.pending: deque[tuple[zmq.MessageTracker, SharedMemory]] = deque()

    def send(self, array: np.ndarray[Any, Any]) -> None:
        """Send one array with a header that describes it."""
        self.reclaim()
        buffer = self.free.pop() if self.free else self.new()
        frames = self.encode(array, buffer)
        tracker = self.socket.send_multipart(frames, copy=False, track=True)
        self.pending.append((tracker, buffer))

    def new(self) -> SharedMemory:
        """One more buffer."""
        self.buffers.append(SharedMemory(create=True, size=self.nbytes))
        return self.buffers[-1]

    def encode(self, array: np.ndarray[Any, Any], buffer: SharedMemory) -> list[Any]:
        """Copy an array into a buffer; the frames of the message."""
        place = np.ndarray(array.shape, array.dtype, buffer.buf)
        place[...] = array
        header = json.dumps({"shape": array.shape, "dtype": array.dtype.str}).encode()
        body = buffer.buf[: array.nbytes]
        return [header, body] if self.header_first else [body, header]

    def reclaim(self) -> None:
        """Take back the buffers that are not being sent any more."""
        waiting: deque[tuple[zmq.MessageTracker, SharedMemory]] = deque()
        for tracker, buffer in self.pending:
            if tracker.done:
                self.free.append(buffer)
            else:
                waiting.append((tracker, buffer))
        self.pending = waiting

    def close(self) -> None:
        """Free the memory; nothing may be sending any more."""
        for buffer in self.buffers:
            buffer.close()
            buffer.unlink()


def receive(frames: list[Any]) -> np.ndarray[Any, Any]:
    """The array of a received message, in whichever order its frames came; a view of them."""
    header, body = sorted((bytes(frame) if len(frame) < 200 else frame for frame in frames), key=len)
    about = json.loads(header)
    return np.frombuffer(body, about["dtype"]).reshape(about["shape"])


class NaiveRing:
    """Arrays for many readers in `slots` pieces of shared memory, of `nbytes` bytes each, used in turn.

    Each of `sockets` leads to one reader and carries the numbers of the slots. Whether a reader is through is not
    asked; with slots enough it will be.
    """

    def __init__(self, sockets: list[zmq.Socket[Any]], slots: int, nbytes: int) -> None:
        self.sockets = sockets
        self.slots, self.nbytes = slots, nbytes
        self.memory = SharedMemory(create=True, size=slots * nbytes)
        self.count = 0

    def publish(self, array: np.ndarray[Any, Any]) -> None:
        """Copy an array of bytes into the next slot, and tell the readers."""
        slot = self.count % self.slots
        self.count += 1
        self.view(slot)[: len(array)] = array
        for socket in self.sockets:
            socket.send(bytes([slot]))

    def view(self, slot: int) -> np.ndarray[Any, Any]:
        """The bytes of a slot."""
        return np.ndarray(self.nbytes, np.uint8, self.memory.buf, slot * self.nbytes)

    def receive(self, socket: zmq.Socket[Any]) -> np.ndarray[Any, Any]:
        """What a reader gets: the bytes of the next message, where they lie."""
        return self.view(socket.recv()[0])

    def close(self) -> None:
        """Free the memory; no array that was received may be left."""
        self.memory.close()
        self.memory.unlink()
