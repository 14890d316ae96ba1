"""The mutants of `spec/PayloadReuse.tla` as faulty senders, under the same names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import zmq

from quiesce.borrowing import Borrowing
from quiesce.errors import PeerDied, QuiesceTimeout
from quiesce.events import action
from quiesce.lifecycle import BufferPool, Loan, Tracker
from quiesce.payload_reuse import PayloadBuffer, PayloadSender, _Frame, _Message

Pending = Sequence[Tracker]


class Never:
    done = False

    def wait(self, timeout: float) -> None:
        raise QuiesceTimeout("never done")


class LastFrameTracker(PayloadSender):
    def _asked(self, message: _Message) -> list[Tracker]:
        return message.trackers[-1:]


class CopiedFrameTracker(PayloadSender):
    def _asked(self, message: _Message) -> list[Tracker]:
        return [tracker for tracker in message.trackers if tracker.done][:1] or super()._asked(message)


class NoTracker(PayloadSender):
    def _asked(self, message: _Message) -> list[Tracker]:
        return []


class _PoolFault(PayloadSender):
    """A sender whose pool is of class `Pool`."""

    Pool: type[BufferPool[PayloadBuffer]]

    def __init__(self, socket: zmq.Socket[bytes], *, free_limit: int = 1024, **options: object) -> None:
        super().__init__(socket, free_limit=free_limit, **options)  # type: ignore[arg-type]
        self.pool = self.Pool(PayloadBuffer, free_limit, size=len)


class RecycledAtSend(_PoolFault):
    class Pool(BufferPool[PayloadBuffer]):
        def lend(self, buffer: PayloadBuffer, trackers: Iterable[Tracker]) -> None:
            super().lend(buffer, [])
            self.settle()


class RecycledAtReceive(PayloadSender):
    """Recycles when the receiver acknowledged the message, as an application's protocol might."""

    def __init__(self, socket: zmq.Socket[bytes], **options: object) -> None:
        super().__init__(socket, **options)  # type: ignore[arg-type]
        self.acknowledged: set[int] = set()

    def _asked(self, message: _Message) -> list[Tracker]:
        return [_Acknowledged(self, message.number)] if super()._asked(message) else []


class _Acknowledged:
    def __init__(self, sender: RecycledAtReceive, number: int) -> None:
        self.sender = sender
        self.number = number

    @property
    def done(self) -> bool:
        return self.number in self.sender.acknowledged

    def wait(self, timeout: float) -> None:
        raise NotImplementedError


class FreeListUnbounded(_PoolFault):
    class Pool(BufferPool[PayloadBuffer]):
        def _has_room(self, buffer: PayloadBuffer) -> bool:
            return True


class OrphanPart(PayloadSender):
    def _abort(self, message: _Message) -> None:
        """Ignore that the rest of the message is missing."""


class RefusedPartRetried(PayloadSender):
    @action("PartRefused")
    def _part_refused(self, message: _Message) -> None:
        """Let the loop send the part again."""


class RefusedPartsKept(PayloadSender):
    def _forget(self, message: _Message) -> None:
        """Wait for them all the same."""


class RefusalNotEnded(PayloadSender):
    def _part_refused(self, message: _Message) -> None:
        self._refused = True
        super()._part_refused(message)

    def _abort(self, message: _Message) -> None:
        if not self.__dict__.pop("_refused", False):
            super()._abort(message)


class ResentWhenComplete(PayloadSender):
    def _transmit(self, obj: object, lend: bool, timeout: float, prefix: Sequence[bytes]) -> _Message:
        try:
            return super()._transmit(obj, lend, timeout, prefix)
        except (QuiesceTimeout, PeerDied):
            raise
        except BaseException:
            return super()._transmit(obj, lend, timeout, prefix)

    def _abort(self, message: _Message) -> None:
        if len(message.trackers) < len(message.frames):
            super()._abort(message)


class TimeoutIgnored(PayloadSender):
    def send(self, obj: object, **options: object) -> None:
        try:
            super().send(obj, **options)  # type: ignore[arg-type]
        except QuiesceTimeout:
            return

    def lend(self, obj: object, **options: object) -> Loan:
        try:
            return super().lend(obj, **options)  # type: ignore[arg-type]
        except QuiesceTimeout:
            return Loan("nothing")


class RecycledTwice(_PoolFault):
    class Pool(BufferPool[PayloadBuffer]):
        def _recycle(self, buffer: PayloadBuffer) -> None:
            super()._recycle(buffer)
            self._pending.append((buffer, [], Borrowing()))


class PendingForgotten(PayloadSender):
    """Takes a socket without a peer for the end of all reading."""

    def _look(self) -> None:
        super()._look()
        if not self._socket.poll(0, zmq.POLLOUT):
            for _ in range(len(self.pool._pending)):
                buffer, _, since = self.pool._pending.popleft()
                self.pool._pending.append((buffer, [], since))


class FailedSendForgotten(PayloadSender):
    def _asked(self, message: _Message) -> list[Tracker]:
        return super()._asked(message) if len(message.trackers) == len(message.frames) else []


class FailedSendLeaked(PayloadSender):
    def _asked(self, message: _Message) -> list[Tracker]:
        return super()._asked(message) if len(message.trackers) == len(message.frames) else [Never()]


class CallerToldAtOnce(PayloadSender):
    def _owe(self, message: _Message, tracker: Tracker, frame: _Frame) -> None:
        """Leave it out of the loan."""


class NeverTouched(PayloadSender):
    def _look(self) -> None:
        """Only wait for trackers."""


class CloseLingers(PayloadSender):
    def _close(self, timeout: float) -> None:
        self._socket.close()


FAULTY: dict[str, type[PayloadSender]] = {
    "last_frame_tracker": LastFrameTracker,
    "copied_frame_tracker": CopiedFrameTracker,
    "no_tracker": NoTracker,
    "recycled_at_send": RecycledAtSend,
    "recycled_at_receive": RecycledAtReceive,
    "free_list_unbounded": FreeListUnbounded,
    "orphan_part": OrphanPart,
    "refused_part_retried": RefusedPartRetried,
    "refused_parts_kept": RefusedPartsKept,
    "refusal_not_ended": RefusalNotEnded,
    "resent_when_complete": ResentWhenComplete,
    "timeout_ignored": TimeoutIgnored,
    "recycled_twice": RecycledTwice,
    "pending_forgotten": PendingForgotten,
    "failed_send_forgotten": FailedSendForgotten,
    "failed_send_leaked": FailedSendLeaked,
    "caller_told_at_once": CallerToldAtOnce,
    "never_touched": NeverTouched,
    "close_lingers": CloseLingers,
}
