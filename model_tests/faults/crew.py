"""Processes that play a part in a protocol, and what they say: forked from one that has everything imported.

A part is a function of `parts.py`. It talks to the test through a pipe, may be struck by a fault at any edge of any
action, and says at the end what it received, what went wrong, how long its longest call took and what it left behind.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import zmq

from quiesce import errors, events, recording

TIMEOUT_S = 0.4
"""Seconds that every call of a part may wait: short, so that a stopped process outlasts all of them."""
STOP_S = 3 * TIMEOUT_S
"""Seconds that a stopped process stays stopped."""
GIVE_UP_S = 60.0
"""Seconds after which a process that does not end fails its test: many times any timeout, for a busy machine."""


class Injected(Exception):
    """The exception that a fault raises: no error of the library."""


@dataclass(frozen=True)
class Fault:
    """`kind` is "kill", "stop" or "raise"; it strikes at the `occurrence`-th such edge of the action."""

    action: str
    phase: str
    kind: str
    occurrence: int = 1

    def __str__(self) -> str:
        return f"{self.kind}-{self.action}.{self.phase}.{self.occurrence}"


@dataclass
class Report:
    """What a part says when it ends. Times in seconds."""

    got: list[Any] = field(default_factory=list)
    unsure: list[int] = field(default_factory=list)
    errors: list[tuple[str, str, str]] = field(default_factory=list)
    longest: float = 0.0
    end: str = ""
    left: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


class Play:
    """What a part has in hand: the pipe to the test, its report, and its calls, which are timed."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self.report = Report()

    def say(self, *words: object) -> None:
        self._pipe.send(words)

    def told(self, timeout: float = 0.0) -> str | None:
        """What the test said last, if anything."""
        return self._pipe.recv() if self._pipe.poll(timeout) else None

    def call(self, name: str, function: Callable[[], Any]) -> Any:
        """The result of a call, or the error it raised, noted under the name of the call."""
        start = time.monotonic()
        try:
            return function()
        except (errors.QuiesceError, Injected) as error:
            self.report.errors.append((name, type(error).__name__, str(error)))
            error.__traceback__ = None
            return error
        finally:
            self.report.longest = max(self.report.longest, time.monotonic() - start)

    def count(self, event: events.Event) -> None:
        if event.phase == "begin":
            self.report.counts[event.action] = self.report.counts.get(event.action, 0) + 1

    def striking(self, fault: Fault) -> events.Observer:
        left = fault.occurrence

        def observer(event: events.Event) -> None:
            nonlocal left
            if (event.action, event.phase) != (fault.action, fault.phase):
                return
            left -= 1
            if left:
                return
            self.say("strikes", str(fault))
            if fault.kind == "raise":
                raise Injected(str(fault))
            os.kill(os.getpid(), signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)

        return observer


def belongings() -> dict[str, int]:
    """What this process holds that could leak: descriptors by kind, threads, mappings of shared memory."""
    found: dict[str, int] = {"threads": len(os.listdir("/proc/self/task"))}
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            kind = re.sub(r"\d+", "", os.readlink(f"/proc/self/fd/{fd}"))
            found[kind] = found.get(kind, 0) + 1
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:" in line or "/dev/shm" in line:
            found["mapped"] = found.get("mapped", 0) + 1
    return found


def _left(before: dict[str, int]) -> list[str]:
    give_up_at = time.monotonic() + 5.0
    while True:
        gc.collect()
        more = {what: n - before.get(what, 0) for what, n in belongings().items() if n > before.get(what, 0)}
        if not more or time.monotonic() > give_up_at:
            return [f"{n} {what}" for what, n in more.items()]
        time.sleep(0.02)


def _start_collector() -> None:
    """Let pyzmq start the thread that collects frames sent without a copy, which a process keeps to its end."""
    with zmq.Context() as context, context.socket(zmq.PAIR) as here, context.socket(zmq.PAIR) as there:
        here.bind("inproc://warm")
        there.connect("inproc://warm")
        here.copy_threshold = 0
        here.send(bytearray(1), copy=False)
        there.rcvtimeo = int(1_000 * GIVE_UP_S)
        there.recv()


def _act(
    pipe: Connection, part: str, faults: Sequence[Fault], record: str | None, arguments: dict[str, Any]
) -> None:
    from model_tests.faults import load, parts

    torch.set_num_threads(1)  # the pool of a forked process's parent is not there
    _start_collector()
    play = Play(pipe)
    before = belongings()
    try:
        with ExitStack() as observing:
            for observer in (play.count, *map(play.striking, faults)):
                observing.enter_context(events.observe(observer))
            if record:
                observing.enter_context(recording.record(record))
            module, _, name = part.rpartition(":")
            getattr(load if module else parts, name)(play, **arguments)
    except BaseException:
        play.report.end = traceback.format_exc()
    play.report.left = _left(before)
    play.say("ends", play.report)


class Actor:
    """One part, in a process of its own."""

    _context: Any = None

    def __init__(
        self, part: str, faults: Sequence[Fault] = (), record: str | None = None, **arguments: Any
    ) -> None:
        if Actor._context is None:
            Actor._context = multiprocessing.get_context("forkserver")
            Actor._context.set_forkserver_preload(["model_tests.faults.parts", "model_tests.faults.load"])
        self.part = part
        self.pipe, theirs = Actor._context.Pipe()
        self.process = Actor._context.Process(
            target=_act, args=(theirs, part, faults, record, arguments), daemon=True
        )
        self.process.start()
        theirs.close()
        self.killed = False
        self.struck: set[str] = set()
        self.report: Report | None = None
        self.words: list[tuple[Any, ...]] = []
        self._continue_at: float | None = None

    def tell(self, word: str) -> None:
        with suppress(OSError):
            self.pipe.send(word)

    @property
    def over(self) -> bool:
        """Whether it has ended, with its report or without."""
        return self.report is not None or self.process.exitcode is not None

    def listen(self) -> None:
        """Take in what it said; let it go on if it has been stopped for long enough."""
        with suppress(EOFError, OSError):
            while self.pipe.poll():
                words = self.pipe.recv()
                if words[0] == "strikes":
                    self.struck.add(words[1])
                    if words[1].startswith("stop"):
                        self._continue_at = time.monotonic() + STOP_S
                elif words[0] == "ends":
                    self.report = words[1]
                else:
                    self.words.append(words)
        if self._continue_at is not None and time.monotonic() >= self._continue_at:
            os.kill(self.process.pid, signal.SIGCONT)
            self._continue_at = None

    def said(self, word: str) -> Any:
        """What it said first under this word; None if it has not yet."""
        return next((words[1] for words in self.words if words[0] == word), None)

    def kill(self) -> None:
        """Kill it in the middle of whatever it does; nobody waits for its report."""
        self.killed = True
        self.process.kill()

    def end(self) -> None:
        self.process.kill()
        self.process.join(GIVE_UP_S)
        self.pipe.close()
        assert not self.process.is_alive(), f"{self.part} was killed and has not ended"


@contextmanager
def stage() -> Iterator[list[Actor]]:
    """The list of actors of one point; at the end none of them is left."""
    actors: list[Actor] = []
    try:
        yield actors
    finally:
        with ExitStack() as ending:  # all of them, also after one that does not end
            for actor in reversed(actors):
                ending.callback(actor.end)


def until(actors: list[Actor], condition: Callable[[], Any], limit: float = GIVE_UP_S) -> Any:
    """Listen to all of them until something holds; AssertionError, with where each stands, after `limit` seconds."""
    give_up_at = time.monotonic() + limit
    while True:
        for actor in actors:
            actor.listen()
        if value := condition():
            return value
        assert time.monotonic() < give_up_at, "stuck: " + "; ".join(
            f"{actor.part} {'over' if actor.over else 'runs'} {actor.words[-2:]}" for actor in actors
        )
        wait([actor.pipe for actor in actors if not actor.over] or [actors[0].process.sentinel], 0.05)
