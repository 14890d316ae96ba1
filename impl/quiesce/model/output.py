"""What TLC says with `-tool`, read into a result."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quiesce.model.values import State, parse_state

_START = re.compile(r"@!@!@STARTMSG (\d+):\d+ @!@!@$")
_END = re.compile(r"@!@!@ENDMSG (\d+) @!@!@$")
_STEP = re.compile(
    r"(\d+): <(.*?)(?: line (\d+), col \d+ to line \d+, col \d+ of module (\w+))?>\n(.*)", re.DOTALL
)
_BACK = re.compile(r"(\d+): Back to state")
_PROGRESS = re.compile(
    r"Progress\((\d+)\).*?: ([\d,]+) states generated.*?, ([\d,]+) distinct.*?, ([\d,]+) states left"
)
_STATS = re.compile(r"([\d,]+) states generated, ([\d,]+) distinct states found, ([\d,]+) states left")
_DEPTH = re.compile(r"depth of the complete state graph search is (\d+)")
_ACTION = re.compile(r"<(\S+) line \d+, .*>: (\d+):(\d+)")
_VIOLATED = re.compile(r"(?:Invariant|[Pp]roperty) (.+?) is (?:violated|false|not true)", re.DOTALL)

_VERDICTS = {
    0: "holds",
    3: "memory",
    10: "assumption",
    11: "deadlock",
    12: "invariant",
    13: "property",
    14: "evaluation",
    75: "evaluation",
    76: "evaluation",
    77: "evaluation",
    150: "parse",
    151: "config",
}
VIOLATIONS = frozenset({"assumption", "deadlock", "invariant", "property"})
"""Verdicts that are an answer about the model; every other one but "holds" means that TLC gave none."""

_MEMORY, _STACK = (1001, 1002), 1005
_BOILERPLATE = ("TLC threw an unexpected exception", "Parsing or semantic analysis failed")
_STATES = (2216, 2217, 2218, 2122)
_NO_ERROR = frozenset({2102, 2114, 2116, 2121, 2264, *_STATES})


@dataclass(frozen=True)
class Progress:
    """How far a run is: `seconds` since it began, and what TLC said last, `printed` seconds after it began.

    TLC says so after some seconds, and then once a minute.
    """

    seconds: float = 0.0
    generated: int = 0
    distinct: int = 0
    queue: int = 0
    depth: int = 0
    printed: float = 0.0


@dataclass(frozen=True)
class TraceStep:
    """One state of a counterexample and the action that led to it; the first one's action is "Init"."""

    action: str
    state: State
    parameters: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Counterexample:
    """A behaviour that breaks what it should not.

    After the last of its `steps` a liveness counterexample goes on for ever: back to the step numbered `loop`
    (counted from 0), or doing nothing when `stutters`. Other counterexamples have neither.
    """

    steps: tuple[TraceStep, ...]
    loop: int | None = None
    stutters: bool = False

    def __str__(self) -> str:
        lines = []
        for number, step in enumerate(self.steps, 1):
            bound = ", ".join(f"{name} = {value!r}" for name, value in step.parameters.items())
            lines.append(f"{number}: {step.action}{f'({bound})' if bound else ''}\n{step.state!r}")
        if self.stutters:
            lines.append("then nothing, for ever")
        if self.loop is not None:
            lines.append(f"then back to state {self.loop + 1}, for ever")
        return "\n\n".join(lines)


@dataclass(frozen=True)
class CheckResult:
    """The outcome of one run of TLC.

    `verdict` is "holds"; or "invariant", "property", "deadlock", "assumption" (with a counterexample, but for
    the last); or "evaluation", "parse", "config", "memory", "timeout", "crashed" when there is no answer.
    `violated` names the invariant or property, "Deadlock", or is empty; several names joined by " or " where
    TLC does not say which of the temporal properties it was. `seconds` is the process's wall clock,
    `coverage` how often each action was taken, None where that is not known, and `printed` the lines that the
    specification itself printed.
    """

    verdict: str
    violated: str = ""
    generated: int = 0
    distinct: int = 0
    depth: int = 0
    seconds: float = 0.0
    coverage: Mapping[str, int | None] = field(default_factory=dict)
    counterexample: Counterexample | None = None
    message: str = ""
    exit_status: int = 0
    printed: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether TLC went through all reachable states and found nothing wrong."""
        return self.verdict == "holds"


class Output:
    """Reads TLC's output line by line; `latest` is how far it said it is."""

    def __init__(self, properties: tuple[str, ...] = ()) -> None:
        self.latest = Progress()
        self._properties = properties
        self._open: list[tuple[int, list[str]]] = []
        self._messages: list[tuple[int, str]] = []
        self._outside: list[str] = []
        self._coverage: dict[str, int] = {}

    def feed(self, line: str) -> None:
        """Take the next line, without its newline."""
        if start := _START.search(line):
            self._open.append((int(start[1]), [line[: start.start()]] if start.start() else []))
        elif _END.search(line) and self._open:
            code, lines = self._open.pop()
            self._message(code, "\n".join(lines))
        else:
            (self._open[-1][1] if self._open else self._outside).append(line)

    def _message(self, code: int, text: str) -> None:
        if code == 2200 and (match := _PROGRESS.search(text)):
            depth, generated, distinct, queue = (int(group.replace(",", "")) for group in match.groups())
            self.latest = Progress(0.0, generated, distinct, queue, depth)
        elif code == 2199 and (match := _STATS.search(text)):
            generated, distinct, queue = (int(group.replace(",", "")) for group in match.groups())
            self.latest = Progress(0.0, generated, distinct, queue, self.latest.depth)
        elif code == 2194 and (match := _DEPTH.search(text)):
            latest = self.latest
            self.latest = Progress(0.0, latest.generated, latest.distinct, latest.queue, int(match[1]))
        elif code == 2201:
            self._coverage = {}
        elif code == 2772 and (match := _ACTION.search(text)):
            name, taken = match[1], int(match[3])
            self._coverage[name] = self._coverage.get(name, 0) + taken
        elif code not in (2221, 2773, 2774, 2775):
            self._messages.append((code, text))

    def result(self, exit_status: int, seconds: float) -> CheckResult:
        """What it all amounts to, once TLC has exited."""
        codes = {code for code, _ in self._messages}
        verdict = _VERDICTS.get(exit_status, "crashed")
        if codes & set(_MEMORY):
            verdict = "memory"
        elif _STACK in codes:
            verdict = "evaluation"
        elif verdict == "holds" and 2193 not in codes:
            verdict = "crashed"
        trace = self._counterexample() if verdict in VIOLATIONS else None
        return CheckResult(
            verdict=verdict,
            violated=self._violated(verdict),
            generated=self.latest.generated,
            distinct=self.latest.distinct,
            depth=self.latest.depth,
            seconds=seconds,
            coverage=self._coverage,
            counterexample=trace,
            message="" if verdict == "holds" else self._explanation(verdict),
            exit_status=exit_status,
            printed=tuple(self._outside),
        )

    def _violated(self, verdict: str) -> str:
        if verdict == "deadlock":
            return "Deadlock"
        for code, text in self._messages:
            if code in (2107, 2108, 2110, 2112, 2146) and (match := _VIOLATED.search(text)):
                # A property of an instantiated module is named by its place alone.
                return " or ".join(self._properties) if match[1].startswith("line ") else match[1]
            if code == 2116:
                return " or ".join(self._properties)
        return ""

    def _counterexample(self) -> Counterexample | None:
        steps: list[TraceStep] = []
        loop, stutters = None, False
        for code, text in self._messages:
            if code in (2107, 2108) and "\n" in text:
                steps.append(TraceStep("Init", parse_state(text.split("\n", 1)[1])))
            elif code == 2218 and "Stuttering" in text:
                stutters = True
            elif code == 2122 or (code == 2218 and _BACK.search(text)):
                back = re.search(r"(\d+): Back to state", text)
                loop = int(back[1]) - 1 if back else None
            elif code in (2216, 2217) and (match := _STEP.match(text)):
                action = match[2] if match[3] or not match[2].startswith("Initial") else "Init"
                steps.append(TraceStep(action, parse_state(match[5])))
        return Counterexample(tuple(steps), loop, stutters) if steps else None

    def _explanation(self, verdict: str) -> str:
        if verdict == "parse":
            keep = [line for line in self._outside if line.strip() and not line.startswith(_NOISE)]
            return "\n".join(keep)
        said = [
            text.lstrip(": \n").rstrip()
            for code, text in self._messages
            if code >= 1000 and code not in _QUIET
        ]
        texts = [text for text in said if text and not text.startswith(_BOILERPLATE)]
        if not texts:
            texts = [line for line in self._outside if line.strip() and not line.startswith(_NOISE)][-20:]
        return "\n".join(dict.fromkeys(texts))


_NOISE = ("Parsing file", "Semantic processing of module", "Starting SANY", "Residual stack trace")
_QUIET = _NO_ERROR | {
    2185,
    2186,
    2187,
    2189,
    2190,
    2191,
    2192,
    2193,
    2194,
    2199,
    2202,
    2207,
    2208,
    2212,
    2219,
    2220,
}
_QUIET |= {2262, 2267, 2268, 2269, 2401, 2777}
