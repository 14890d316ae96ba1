"""An exception of a signal handler at a chosen moment of all at which Python may run one.

CPython looks for signals when a call returns, when a function begins and when a loop jumps back. A trace function
raises there; between other instructions it does not, since no signal handler would.
"""

from __future__ import annotations

import dis
import functools
import itertools
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import pytest

import quiesce

SOURCES = quiesce.__path__[0]
_LOOKS = {"CALL", "CALL_KW", "CALL_FUNCTION", "CALL_METHOD", "CALL_FUNCTION_EX", "RESUME", "JUMP_BACKWARD"}


class Outside(BaseException):
    """What a signal handler raises."""


@functools.cache
def _moments(code: CodeType) -> frozenset[int]:
    """Offsets of the instructions in front of which a signal handler may have run."""
    table = dis._parse_exception_table(code)  # type: ignore[attr-defined]

    def handler(offset: int) -> Any:
        return next(((e.target, e.depth) for e in table if e.start <= offset < e.end), None)

    instructions = list(dis.get_instructions(code))
    return frozenset(
        then.offset
        for first, then in itertools.pairwise(instructions)
        # Where a block begins or ends between the two, the exception of a handler would belong to the first.
        if first.opname in _LOOKS and handler(first.offset) == handler(then.offset)
    )


class Interruption:
    """Raises Outside at the `number`-th moment within the library; `where` says which that was, None if none."""

    def __init__(self, number: int) -> None:
        self._left = number
        self.where: str | None = None

    def during(self, call: Callable[[], Any]) -> Any:
        """What the call returns; None if it was interrupted."""
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            return call()
        except Outside:
            return None
        finally:
            sys.settrace(before)

    def _enter(self, frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(SOURCES):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._step

    def _step(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "opcode" and self.where is None and frame.f_lasti in _moments(frame.f_code):
            if not self._left:
                self.where = f"{frame.f_code.co_filename.removeprefix(SOURCES)}:{frame.f_lineno}"
                sys.settrace(None)
                raise Outside
            self._left -= 1
        return self._step


def at_each(attempt: Callable[[Interruption], None], stride: int) -> None:
    """`attempt(interruption)` with one after `stride - 1` others, until none strikes any more."""
    number, struck = 0, 0
    while True:
        interruption = Interruption(number)
        try:
            attempt(interruption)
        except Exception as error:
            pytest.fail(f"interrupted at {interruption.where}, moment {number}: {error!r}")
        if interruption.where is None:
            break
        number += stride
        struck += 1
    assert struck > 3, "there was nothing to interrupt"
