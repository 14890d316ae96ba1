"""The broadcast ring's shared memory: its layout, its semaphores, and how processes come to share it.

The segment has no name: it is a memfd, opened by others through the creator's entry in /proc, so that nothing
is left behind however the creator ends, and nobody but the same user gets at it. Every word in it has one
process that writes it, and is read only after a semaphore said that it was written; POSIX makes `sem_post` and
`sem_wait` synchronise memory, on every CPU. Each such position in the code carries the label that the memory
model knows it by, as `# SYNC(label)`.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import hmac
import mmap
import os
import select
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import filterfalse
from pathlib import Path
from typing import Any

import numpy as np

from quiesce.codec import Buffer
from quiesce.errors import DecodeError, PeerDied, QuiesceError, ResourceExhausted

MAGIC = b"QRNG"
VERSION = 1
LINE = 64
"""Bytes of a cache line; also what a semaphore and every frame in a slot are aligned to."""
HEADER_BYTES = 4 * LINE
DOORBELL_AT = HEADER_BYTES
RANKS_AT = DOORBELL_AT + LINE
POSTS_AT, PASSED_AT, NOTICES_AT, LEFT_AT, NOTICE_RING_AT = (LINE * i for i in range(5))
"""Offsets in a rank's part: three semaphores, the word of a reader that left, its ring of notices."""
ENTRY_BYTES = LINE
SLICE_S = 0.1
"""Seconds after which a sleeper looks whether the process it waits for still lives."""

# Of control groups, version 2 and 1: where they are mounted, and the files that tell the limit and what is used of it.
_LIMITS = {
    "": ("", "memory.max", "memory.current"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
}
# magic, version, ranks, slots, window, slot bytes, writer's pid, its start time, digest of the secret
_HEADER = struct.Struct("<4sIIIIQQQ16s")


def _posted(failed: Any, *_: Any) -> Any:
    if failed:
        raise OSError(ctypes.get_errno(), "sem_post")


class Semaphore:
    """A process-shared POSIX semaphore at an address in shared memory. Posting releases, waiting acquires.

    No exception of a signal handler loses a post: Python runs handlers between its own instructions only, and each
    post is given, or taken and kept in `taken`, by one call into C.
    """

    _now = ctypes.PyDLL(None, use_errno=True)  # calls that never block keep the GIL: a third of the cost
    _blocking = ctypes.CDLL(None, use_errno=True)
    _clock, _clock_id, _wait_until = (
        (time.CLOCK_MONOTONIC, ((time.CLOCK_MONOTONIC,),), _blocking.sem_clockwait)
        if hasattr(_blocking, "sem_clockwait")
        else (time.CLOCK_REALTIME, (), _blocking.sem_timedwait)
    )
    _init, _post, _try_wait = _now.sem_init, _now.sem_post, _now.sem_trywait
    _post.errcheck = _posted

    class _Timespec(ctypes.Structure):
        _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]

    def __init__(self, address: int) -> None:
        self._at = ctypes.c_void_p(address)
        self.taken: list[int] = []
        """Posts taken and not yet acted on: whoever does deletes one (`del taken[0]`) as it notes what it did."""
        self.post = partial(self._post, self._at)
        """Leave one post; wakes a sleeper. OSError when there are 2**31 - 1 already."""

    def reset(self) -> None:
        """Make it a fresh semaphore of value 0; nobody else may be using it."""
        if self._init(self._at, 1, 0):
            raise OSError(ctypes.get_errno(), "sem_init")
        self.taken.clear()

    def try_wait(self) -> bool:
        """Whether a post is taken, this one or one before that nobody has acted on."""
        if not self.taken:
            self.taken.extend(filterfalse(None, map(self._try_wait, (self._at,))))
        return bool(self.taken)

    def spin(self, seconds: float) -> bool:
        """The same, looking for one for so many seconds without sleeping."""
        if self.try_wait():
            return True
        if seconds <= 0:
            return False
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            os.sched_yield()
            if self.try_wait():
                return True
        return False

    def wait(self, seconds: float) -> bool:
        """The same, sleeping for at most so many seconds; False if none came, or a signal did."""
        if seconds <= 0 or self.taken:
            return self.try_wait()
        end = time.clock_gettime(self._clock) + seconds
        until = ctypes.byref(self._Timespec(int(end), int(end % 1 * 1e9)))
        self.taken.extend(filterfalse(None, map(self._wait_until, (self._at,), *self._clock_id, (until,))))
        if not self.taken and ctypes.get_errno() not in (errno.ETIMEDOUT, errno.EINTR):
            raise OSError(ctypes.get_errno(), "sem_wait")
        return bool(self.taken)

    def value(self) -> int:
        """How many posts there are; only a hint while others run."""
        value = ctypes.c_int()
        self._now.sem_getvalue(self._at, ctypes.byref(value))
        return value.value


@dataclass(frozen=True)
class Layout:
    """Where everything lies, in bytes from the start of the segment. `slot_bytes` is a multiple of the page."""

    ranks: int
    slots: int
    window: int
    slot_bytes: int

    @cached_property
    def rank_bytes(self) -> int:
        """A reader has at most one notice a slot outstanding, and the one that it left."""
        return NOTICE_RING_AT + round_up(4 * (self.slots + 1), LINE)

    @cached_property
    def entries_at(self) -> int:
        return RANKS_AT + self.ranks * self.rank_bytes

    @cached_property
    def slots_at(self) -> int:
        return round_up(self.entries_at + self.window * ENTRY_BYTES, mmap.ALLOCATIONGRANULARITY)

    @cached_property
    def total(self) -> int:
        return self.slots_at + self.slots * self.slot_bytes

    def rank_at(self, rank: int) -> int:
        return RANKS_AT + rank * self.rank_bytes

    def slot_at(self, slot: int) -> int:
        return self.slots_at + slot * self.slot_bytes


class Rank:
    """One reader's words and semaphores."""

    def __init__(self, memory: RingMemory, rank: int) -> None:
        at = memory.layout.rank_at(rank)
        self.posts = Semaphore(memory.address + at + POSTS_AT)
        self.passed = Semaphore(memory.address + at + PASSED_AT)
        self.notices = Semaphore(memory.address + at + NOTICES_AT)
        self.left = memory.view[at + LEFT_AT : at + LEFT_AT + 8].cast("Q")
        self.ring = memory.view[at + NOTICE_RING_AT :][: 4 * (memory.layout.slots + 1)].cast("I")

    def reset(self) -> None:
        for semaphore in (self.posts, self.passed, self.notices):
            semaphore.reset()


class RingMemory:
    """The segment, mapped shared. It stays mapped as long as anything refers to it."""

    def __init__(self, fd: int, layout: Layout) -> None:
        self.layout = layout
        self.mapping = mmap.mmap(fd, layout.total)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.mapping))
        self.view = memoryview(self.mapping)
        self.doorbell = Semaphore(self.address + DOORBELL_AT)
        self.ranks = [Rank(self, rank) for rank in range(layout.ranks)]
        entries = self.view[layout.entries_at : layout.entries_at + layout.window * ENTRY_BYTES].cast("Q")
        words = ENTRY_BYTES // 8
        self.entries = [entries[i * words : i * words + 4] for i in range(layout.window)]
        # Last: from here on the descriptor is this object's to close.
        self.fd = fd

    def close(self) -> None:
        """Close the descriptor: nobody can attach any more. What is mapped stays mapped."""
        fd, self.fd = getattr(self, "fd", -1), -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()

    @classmethod
    def create(cls, layout: Layout, secret: bytes) -> RingMemory:
        """Reserve and lay out a segment. ResourceExhausted if there is no memory for it; never SIGBUS later."""
        fd = -1
        try:
            fd = os.memfd_create("quiesce-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.fchmod(fd, 0o600)
            if layout.total > available_memory():
                raise OSError(errno.ENOMEM, "that is more than is free")
            os.posix_fallocate(fd, 0, layout.total)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            memory = cls(fd, layout)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            raise ResourceExhausted(
                error.errno,
                f"cannot reserve {layout.total} bytes of shared memory ({error.strerror}); "
                "ask for fewer or smaller slots, or raise the memory limit",
            ) from error
        except BaseException:
            if fd >= 0:
                os.close(fd)
            raise
        memory.doorbell.reset()
        for rank in memory.ranks:
            rank.reset()
        pid = os.getpid()
        fields = (
            MAGIC,
            VERSION,
            layout.ranks,
            layout.slots,
            layout.window,
            layout.slot_bytes,
            pid,
            start_time(pid) or 0,
        )
        _HEADER.pack_into(memory.mapping, 0, *fields, digest(secret, b"segment", repr(fields).encode()))
        return memory

    @classmethod
    def attach(cls, pid: int, fd: int, secret: bytes) -> RingMemory:
        """Map the segment that process `pid` has open as `fd`.

        PeerDied if the process is gone, DecodeError if what it has open is not the ring of this secret.
        """
        path = f"/proc/{pid}/fd/{fd}"
        try:
            mine = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise PeerDied(
                f"cannot attach: the writer, process {pid}, is gone or has closed the ring ({path})"
            ) from error
        except OSError as error:
            _refuse_if_exhausted(error)
            raise QuiesceError(
                f"cannot open {path} ({error.strerror}); run reader and writer as the same user "
                "and in one process namespace, or attach as a remote reader"
            ) from error
        try:
            head = os.pread(mine, _HEADER.size, 0)
            if len(head) < _HEADER.size:
                raise DecodeError(f"{path} is not a broadcast ring")
            *fields, mark = _HEADER.unpack(head)
            magic, version, ranks, slots, window, slot_bytes, owner, started = fields
            if magic == MAGIC and version != VERSION:
                raise DecodeError(
                    f"{path} is a ring of version {version}; this library reads version {VERSION}"
                )
            if not hmac.compare_digest(mark, digest(secret, b"segment", repr(tuple(fields)).encode())):
                raise DecodeError(
                    f"{path} is not the ring of this handle; the handle is out of date or forged"
                )
            if owner != pid or start_time(pid) != started:
                raise PeerDied(f"cannot attach: the writer, process {pid}, is gone")
            layout = Layout(ranks, slots, window, slot_bytes)
            if os.fstat(mine).st_size < layout.total:
                raise DecodeError(
                    f"{path} was cut off: it is shorter than the ring that its header describes"
                )
            return cls(mine, layout)
        except OSError as error:
            os.close(mine)
            _refuse_if_exhausted(error)
            raise DecodeError(f"{path} is not a broadcast ring ({error.strerror})") from error
        except BaseException:
            os.close(mine)
            raise


def _refuse_if_exhausted(error: OSError) -> None:
    if error.errno in (errno.ENOMEM, errno.EMFILE, errno.ENFILE):
        raise ResourceExhausted(
            error.errno, f"cannot attach to the other process ({error.strerror}); raise the limit"
        ) from error


def available_memory() -> int:
    """Bytes that can be had without swapping or exceeding a control group; reserving more gets somebody killed."""
    with open("/proc/meminfo") as info:
        free = next(int(line.split()[1]) << 10 for line in info if line.startswith("MemAvailable"))
    return min([free, *_left_in_control_groups()])


def _left_in_control_groups() -> Iterator[int]:
    """What the group of this process and those above it leave, in bytes; nothing where there is no limit."""
    groups = Path("/proc/self/cgroup")
    for line in groups.read_text().splitlines() if groups.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers not in _LIMITS:
            continue
        mounted, limit, usage = _LIMITS[controllers]
        root = Path("/sys/fs/cgroup", mounted)
        own = root / path.lstrip("/")
        for group in (own, *own.parents):
            # No such file at the root, or in a container that does not see its own path; "max" is no number.
            with suppress(OSError, ValueError):
                left = int((group / limit).read_text()) - int((group / usage).read_text())
                yield left + _cached(group / "memory.stat")
            if group == root:
                break


def _cached(stat: Path) -> int:
    """Bytes of a group that are copies of files, which the kernel drops when the group needs memory."""
    found = dict(line.split() for line in stat.read_text().splitlines())
    return sum(
        int(found.get(f"total_{name}", found.get(name, 0))) for name in ("active_file", "inactive_file")
    )


SHORT_BYTES = 1 << 16
"""Shorter copies are made by Python itself, others by numpy, which lets other threads go on meanwhile."""


def copy(target: memoryview, source: Buffer) -> None:
    """Copy bytes between buffers of one size."""
    if target.nbytes < SHORT_BYTES:
        target[:] = memoryview(source)
    else:
        np.frombuffer(target, np.uint8)[:] = np.frombuffer(source, np.uint8)


def copied(source: memoryview) -> Buffer:
    """The same bytes in memory of their own."""
    return bytearray(source) if source.nbytes < SHORT_BYTES else np.array(np.frombuffer(source, np.uint8))


def round_up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


def digest(secret: bytes, *parts: bytes) -> bytes:
    """Sixteen bytes that only somebody who knows the secret can make of these parts."""
    keyed = hashlib.blake2b(key=secret, digest_size=16)
    for part in parts:
        keyed.update(len(part).to_bytes(8, "little"))
        keyed.update(part)
    return keyed.digest()


def start_time(pid: int) -> int | None:
    """When a process started, in clock ticks since boot: with its number, who it is. None if there is none.

    ResourceExhausted if there are no descriptors left.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return int(stat.read().rpartition(b")")[2].split()[19])
    except (FileNotFoundError, ProcessLookupError):
        return None
    except OSError as error:
        _refuse_if_exhausted(error)
        raise


class Process:
    """Another process, known by a descriptor, so that its number cannot be taken for somebody else's."""

    _fds: list[int] = []

    def __init__(self, pid: int, started: int) -> None:
        self.pid = pid
        self._fds = []
        try:
            # Opened and noted by one call into C: no exception of a signal handler leaves it open.
            self._fds.extend(map(os.pidfd_open, (pid,)))
        except ProcessLookupError:
            return
        except OSError as error:
            _refuse_if_exhausted(error)
            raise
        if start_time(pid) != started:
            self.__del__()

    def has_ended(self) -> bool:
        """Whether the kernel has taken its memory away."""
        if not self._fds:
            return True
        poll = select.poll()
        poll.register(self._fds[0], select.POLLIN)
        return bool(poll.poll(0))

    def __del__(self) -> None:
        while self._fds:
            os.close(self._fds.pop())
