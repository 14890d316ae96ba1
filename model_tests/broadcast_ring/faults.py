"""The mutants of `spec/BroadcastRing.tla` as faulty variants of the implementation, under the same names."""

from __future__ import annotations

import time
import weakref
from typing import Any

from quiesce.broadcast_ring import BroadcastRing
from quiesce.codec import Buffer
from quiesce.errors import QuiesceError, QuiesceTimeout
from quiesce.ring_reader import RingReader
from quiesce.ring_wire import Deadline


class IgnoreOneReader(BroadcastRing):
    def _recyclable(self) -> list[int]:
        lent = [slot for slot in self._lent if len(self._holders[slot]) == 1 and slot not in self._loaned]
        return [*super()._recyclable(), *(slot for slot in lent if slot != self._current)]


class HoldersAfterPosts(BroadcastRing):
    late: tuple[int, set[int]] | None = None

    def _publish(self, slot: int, frames: list[Buffer], plan: list[int]) -> None:
        super()._publish(slot, frames, plan)
        self.late = slot, self._holders[slot]
        self._holders[slot] = set()

    def _return(self) -> None:
        if self.late:
            self._holders[self.late[0]] = self.late[1]
        super()._return()


class NotifyBeforePublish(BroadcastRing):
    def _publish(self, slot: int, frames: list[Buffer], plan: list[int]) -> None:
        told = {rank for rank in self._admitted() if self._is_local(rank)}
        for rank in told:
            self._post(rank)
        super()._publish(slot, frames, plan)
        self._unposted -= told


class LoanWrittenAfterPublish(BroadcastRing):
    """Takes a published loan for one that may still be written."""

    def _recyclable(self) -> list[int]:
        self._held.update(slot for slot in self._loaned if slot in self._lent)
        return super()._recyclable()


class LoanRecycled(BroadcastRing):
    def _recyclable(self) -> list[int]:
        kept = [slot for slot in self._loaned if slot not in self._free and slot != self._current]
        return [*super()._recyclable(), *(slot for slot in kept if not self._holders[slot])]


class LoanAfterClose(BroadcastRing):
    def _begin(self, deadline: Deadline) -> Deadline:
        return deadline if self._closed else super()._begin(deadline)


class BodyNotCopied(BroadcastRing):
    @staticmethod
    def _private(frames: list[Buffer]) -> list[Buffer]:
        return frames


class LapReader(BroadcastRing):
    def _await_room(self, deadline: Any, window: int) -> None:
        """Never full."""


class ExcludeWhileDying(BroadcastRing):
    """Takes a process that does not answer for one that has ended."""

    def _bury(self) -> list[int]:
        for rank, peer in list(self._peers.items()):
            if peer.process and not peer.process.has_ended():
                with open(f"/proc/{peer.process.pid}/stat") as stat:
                    if stat.read().rpartition(")")[2].split()[0] == "T":
                        self._exclude(rank)
        return super()._bury()


class CountedTwice(BroadcastRing):
    """A new reader finds the posts that were meant for the one before."""

    def _admit(self, hello: Any, identity: bytes) -> None:
        local = self._is_local(hello.rank)
        posts = self._memory.ranks[hello.rank].posts.value() if local else 0
        super()._admit(hello, identity)
        for _ in range(posts):
            self._memory.ranks[hello.rank].posts.post()


class StaleNotices(BroadcastRing):
    """Hears what a reader told before it died only when its successor reads, and takes it for the successor's."""

    def _hear(self, rank: int) -> None:
        process = self._peers[rank].process
        if process is None or not process.has_ended():
            super()._hear(rank)

    def _admit(self, hello: Any, identity: bytes) -> None:
        if self._is_local(hello.rank):
            stale = self.__dict__.setdefault("stale", [])
            stale += [hello.rank] * self._memory.ranks[hello.rank].notices.value()
        super()._admit(hello, identity)

    def _publish(self, slot: int, frames: list[Buffer], plan: list[int]) -> None:
        super()._publish(slot, frames, plan)
        for rank in self.__dict__.pop("stale", []):
            self._memory.ranks[rank].notices.post()


class LeaveDropsLeases(BroadcastRing):
    def _hear_leave(self, rank: int, at: int) -> None:
        super()._hear_leave(rank, at)
        for holders in self._holders:
            holders.discard(rank)


class NoOverflow(BroadcastRing):
    def _await_slot(self, deadline: Any) -> int | None:
        slot = super()._await_slot(Deadline(1.0))
        if slot is None:
            raise QuiesceTimeout("it would wait for ever")
        return slot


class DeathUnnoticed(BroadcastRing):
    def _bury(self) -> list[int]:
        """Nobody looks."""
        return []


class ReleaseBeforeCopy(RingReader):
    def _copy(self, slot: int, pieces: list[tuple[int, int]]) -> list[Buffer]:
        self._releaser.release(slot)
        return super()._copy(slot, pieces)


class LeaseNotHonoured(RingReader):
    def _lease(self, slot: int, pieces: list[tuple[int, int]]) -> list[Buffer]:
        frames = super()._lease(slot, pieces)
        lease = self._releaser.leases[slot]
        self._releaser.release(slot)
        self._releaser.leases[slot] = lease
        return frames


class ReleaseWithAView(RingReader):
    leased: int | None = None

    def _lease(self, slot: int, pieces: list[tuple[int, int]]) -> list[Buffer]:
        self.leased = slot
        return super()._lease(slot, pieces)

    def receive(self, timeout: float = 30.0) -> Any:
        self.leased = None
        value = super().receive(timeout)
        if self.leased is not None:
            weakref.finalize(value, self._releaser.release, self.leased)
        return value


class ForgetPendingBody(RingReader):
    def _time_out(self, deadline: Any) -> Any:
        self._opened = None
        return super()._time_out(deadline)


class SleepAfterCheck(RingReader):
    """Looks once, and then sleeps whatever has come since."""

    def _sleep(self, seconds: float) -> bool:
        if self._words.posts.try_wait():
            return True
        self.about_to_sleep()
        time.sleep(seconds)
        return False

    def about_to_sleep(self) -> None:
        """Where a post is slept through."""


class SkipLostBody(RingReader):
    def _find_writer_dead(self) -> QuiesceError:
        if self._opened is None:
            return super()._find_writer_dead()
        self._opened = None
        return QuiesceTimeout("the body is given up")


class JoinerWaitsForTheDead(RingReader):
    def _writer_is_gone(self) -> bool:
        return self._cursor is not None and super()._writer_is_gone()

    def _is_cut_off(self) -> bool:
        return self._cursor is not None and super()._is_cut_off()


class WriterDeathUnnoticed(RingReader):
    def _writer_is_gone(self) -> bool:
        return False

    def _is_cut_off(self) -> bool:
        return False


WRITERS: dict[str, type[BroadcastRing]] = {
    "ignore_one_reader": IgnoreOneReader,
    "holders_after_posts": HoldersAfterPosts,
    "notify_before_publish": NotifyBeforePublish,
    "loan_written_after_publish": LoanWrittenAfterPublish,
    "loan_recycled": LoanRecycled,
    "body_not_copied": BodyNotCopied,
    "lap_reader": LapReader,
    "exclude_while_dying": ExcludeWhileDying,
    "counted_twice": CountedTwice,
    "stale_notices": StaleNotices,
    "leave_drops_leases": LeaveDropsLeases,
}
READERS: dict[str, type[RingReader]] = {
    "release_before_copy": ReleaseBeforeCopy,
    "lease_not_honoured": LeaseNotHonoured,
    "release_with_a_view": ReleaseWithAView,
    "forget_pending_body": ForgetPendingBody,
}
PROGRESS = {
    "no_overflow", "death_unnoticed", "sleep_after_check", "writer_death_unnoticed", "joiner_waits_for_the_dead",
    "skip_lost_body", "loan_after_close",
}  # fmt: skip
"""Faults that show in that something never happens, or when somebody has ended; `test_progress` catches them."""
