"""Messages between the ranks of a simulated world: a `Transport` in one process, of either flavour.

A tensor is sent on a stream of its own and meets its receive there; metadata lies in a mailbox. With flavour "nccl" a
send is ordered behind the current stream and waiting for a handle orders the current stream; with "gloo" the host
computes itself, and waiting lets streams run until the handle is reached.
"""

from __future__ import annotations

from collections import deque

import torch

from quiesce.errors import QuiesceError, QuiesceTimeout
from quiesce.simulated import Item, SimulatedBackend, SimulatedEvent, SimulatedStream


class Mailbox:
    """Metadata from one rank to another, and how many messages the receiver has taken."""

    def __init__(self) -> None:
        self.messages: deque[bytes] = deque()
        self.sent = 0
        self.taken = 0


class SimulatedPeers:
    """What the transports of one world share: the mailboxes, by sender and receiver."""

    def __init__(self) -> None:
        self.mail: dict[tuple[int, int], Mailbox] = {}

    def mailbox(self, source: int, to: int) -> Mailbox:
        """The mailbox for metadata from `source` to `to`."""
        return self.mail.setdefault((source, to), Mailbox())


class MessageHandle:
    """A metadata message on its way: over once the receiver has taken it."""

    def __init__(self, mailbox: Mailbox, number: int, backend: SimulatedBackend):
        self._mailbox, self._number, self._backend = mailbox, number, backend

    @property
    def received(self) -> bool:
        """Whether the receiver has taken it."""
        return self._mailbox.taken >= self._number

    def wait(self, timeout: float) -> None:
        """Raises `QuiesceTimeout` at once if it was not taken: nobody else runs while the host waits."""
        if not self.received:
            raise QuiesceTimeout("the peer has not taken the metadata, and cannot while this host waits")


class TransferHandle:
    """One side of a transfer: a point on its stream. Owns the tensor until it is waited for."""

    def __init__(
        self, event: SimulatedEvent, backend: SimulatedBackend, blocks_host: bool, tensor: torch.Tensor
    ):
        self.event = event
        self.backend = backend
        self._blocks_host = blocks_host
        self._tensor: torch.Tensor | None = tensor

    @property
    def received(self) -> bool:
        """With "gloo", whether the point is reached; with "nccl" never."""
        return self._blocks_host and self.event.reached

    def wait(self, timeout: float) -> None:
        """Order the current stream behind the point ("nccl"), or let streams run until it is reached ("gloo")."""
        if self._tensor is not None:
            if self._blocks_host:
                self.backend.synchronize(self.event, timeout)
            else:
                self.backend.wait(self.event)
            self._tensor = None


class SimulatedTransport:
    """One rank's end. `flavour` is "nccl" or "gloo"."""

    def __init__(self, peers: SimulatedPeers, backend: SimulatedBackend, rank: int, flavour: str = "nccl"):
        if flavour not in ("nccl", "gloo"):
            raise QuiesceError(f"there is no flavour {flavour!r} of handles; it is 'nccl' or 'gloo'")
        self.peers = peers
        self.backend = backend
        self.flavour = flavour
        self._rank = rank
        self._streams: dict[str, SimulatedStream] = {}

    @property
    def rank(self) -> int:
        """The rank of this end."""
        return self._rank

    def stream(self, name: str) -> SimulatedStream:
        """A stream of this rank: "out 2" sends to rank 2, "in 0" receives from rank 0, "gather" gathers."""
        if name not in self._streams:
            self._streams[name] = self.backend.stream(name)
        return self._streams[name]

    def send_message(self, message: bytes, to: int) -> MessageHandle:
        """Put metadata into the mailbox of rank `to`."""
        mailbox = self.peers.mailbox(self.rank, to)
        mailbox.messages.append(message)
        mailbox.sent += 1
        return MessageHandle(mailbox, mailbox.sent, self.backend)

    def receive_message(self, source: int, timeout: float) -> bytes:
        """Take metadata from `source`. `QuiesceTimeout` at once if there is none."""
        mailbox = self.peers.mailbox(source, self.rank)
        if not mailbox.messages:
            raise QuiesceTimeout(f"rank {source} has sent no metadata, and cannot while this host waits")
        mailbox.taken += 1
        return mailbox.messages.popleft()

    def send(self, tensor: torch.Tensor, to: int) -> TransferHandle:
        """Enqueue a send on the stream "out `to`"."""
        return self._transfer("send", tensor, (self.rank, to), self.stream(f"out {to}"))

    def receive(self, tensor: torch.Tensor, source: int) -> TransferHandle:
        """Enqueue a receive on the stream "in `source`"."""
        stream = self.stream(f"in {source}")
        self.backend.world.receivers[source, self.rank] = stream
        return self._transfer("recv", tensor, (source, self.rank), stream)

    def gather(self, whole: torch.Tensor, part: torch.Tensor) -> TransferHandle:
        """The other ranks of the group are taken to have sent the same part, as ranks that behave alike would."""
        stream = self.stream("gather")
        self._order(stream)
        with self.backend.using(stream):
            self.backend.launch(_repeat, (part,), (whole,))
            return self._handle(self.backend.record(), whole)

    def _transfer(
        self, kind: str, tensor: torch.Tensor, line: tuple[int, int], stream: SimulatedStream
    ) -> TransferHandle:
        self._order(stream)
        alias = self.backend.alias(tensor)
        reads, writes = ([alias], []) if kind == "send" else ([], [alias])
        self.backend.enqueue(Item(kind, tensor=alias, line=line), reads, writes, stream)
        return self._handle(self.backend.record(stream=stream), tensor)

    def _order(self, stream: SimulatedStream) -> None:
        if self.flavour == "nccl":
            self.backend.wait(self.backend.record(), stream=stream)

    def _handle(self, event: SimulatedEvent, tensor: torch.Tensor) -> TransferHandle:
        return TransferHandle(event, self.backend, self.flavour == "gloo", tensor)


def _repeat(part: torch.Tensor, whole: torch.Tensor) -> None:
    whole.view(-1, part.numel()).copy_(part)
