"""Recording what the protocols do: one file a process, one line of JSON for each begin and end of an action.

`record` records within a block, `start` for the rest of the process. A process whose environment sets
`QUIESCE_TRACE` to a directory, as `quiesce trace` does, records from the import of quiesce on. A record is written
by one system call before the action goes on, so that a process that is killed leaves all of them but perhaps the
last. `docs/traces.md` describes the format; `quiesce.model.traces` reads it.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec

from quiesce.errors import QuiesceError
from quiesce.events import Event, observe

SCHEMA = 1
"""The version of the format; a reader refuses others."""
VARIABLE = "QUIESCE_TRACE"
"""The environment variable that names the directory to record into."""


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first line of a file. A field of a line is described by the string beside it in `FIELDS`."""

    quiesce: int
    pid: int
    boot: str
    monotonic: int
    wall: int


class Record(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Every other line."""

    n: int
    t: int
    ph: str
    a: str
    th: int
    c: str = ""
    o: int = 0
    f: dict[str, object] = {}
    of: int = -1


FIELDS: dict[str, str] = {
    "quiesce": "version of the format",
    "pid": "process that writes the file",
    "boot": "identity of this run of the machine: only within it can the clocks of two files be compared",
    "monotonic": "CLOCK_MONOTONIC when the file was begun, nanoseconds",
    "wall": "the time of day at that moment, nanoseconds since 1970",
    "n": "number of the record within the file",
    "t": "CLOCK_MONOTONIC, nanoseconds",
    "ph": "phase: B before the method runs, E after it returned, X after it raised",
    "a": "action, by its name in the specification",
    "th": "thread, by its native identifier",
    "c": "class of the object that acts (B only)",
    "o": "object that acts, numbered within the process (B only)",
    "f": "parameters of the action, and what links it to others; of X the error's class (E and X only)",
    "of": "`n` of the B that this ends (E and X only)",
}
"""What each field of a line means; the page is made of it."""


class Recorder:
    """An observer of `quiesce.events` that writes into `directory`, in any thread, also after a fork.

    A disk that is full ends the recording with a word on stderr, and not the protocol.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._begin()
        except OSError as error:
            raise QuiesceError(f"cannot record into {self.directory}: {error.strerror}") from error

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._numbers = itertools.count(1)
        self._objects = itertools.count(1)
        self._open = threading.local()
        started = time.monotonic_ns()
        self.path = self.directory / f"{self._pid}-{started}.jsonl"
        # Appending, so that one write is one whole line wherever another thread is.
        self._file = os.open(
            self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644
        )
        self._write(Header(SCHEMA, self._pid, boot(), started, time.time_ns()))

    def __call__(self, event: Event) -> None:
        if self._pid != os.getpid():
            self._after_fork()
        number, began = next(self._numbers), self._open.__dict__.setdefault("began", [])
        subject, thread = event.subject, threading.get_native_id()
        if event.phase == "begin":
            began.append((number, event.action, id(subject)))
            self._write(
                Record(
                    number,
                    time.monotonic_ns(),
                    "B",
                    event.action,
                    thread,
                    type(subject).__name__,
                    self._object(subject),
                )
            )
            return
        # A fork in the middle of an action leaves the child with an end whose begin is another process's.
        while began:
            of, action, acting = began.pop()
            if (action, acting) == (event.action, id(subject)):
                error = event.phase == "error"
                fields: dict[str, object] = dict(event.fields)
                if error:
                    fields = {"error": type(event.fields["error"]).__name__}
                self._write(
                    Record(
                        number,
                        time.monotonic_ns(),
                        "X" if error else "E",
                        action,
                        thread,
                        f=fields,
                        of=of,
                    )
                )
                return

    def _object(self, subject: object) -> int:
        """A number that no later object gets, as its address might."""
        known = vars(subject).get(_NUMBER)
        if known is None or known[0] is not self._objects:
            known = vars(subject)[_NUMBER] = (self._objects, next(self._objects))
        return int(known[1])

    def _after_fork(self) -> None:
        self.close()
        self._begin()

    def _write(self, line: Header | Record) -> None:
        if self._file < 0:
            return
        data = _encode(line) + b"\n"
        try:
            if os.write(self._file, data) == len(data):
                return
            problem = "the disk is full"
        except OSError as error:
            problem = str(error.strerror)
        self.close()
        print(f"quiesce: recording into {self.path} ended: {problem}", file=sys.stderr)

    def close(self) -> None:
        """Write no more."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


_encode = msgspec.json.Encoder(enc_hook=repr).encode
_NUMBER = "_quiesce_number"
_process = ExitStack()


def boot() -> str:
    """The identity of this run of the machine, "" where the system gives none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


@contextmanager
def record(directory: str | os.PathLike[str]) -> Iterator[Recorder]:
    """Record all actions of this process, and of those it forks, while the block runs.

    QuiesceError if `directory` cannot be written.
    """
    recorder = Recorder(directory)
    try:
        with observe(recorder):
            yield recorder
    finally:
        recorder.close()


def start(directory: str | os.PathLike[str]) -> None:
    """Record all actions of this process, and of those it forks, from now on. QuiesceError as for `record`."""
    _process.enter_context(record(directory))
