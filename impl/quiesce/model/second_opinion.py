"""The verdict of TLC's command line on recorded cases: a generated module, many cases in one start.

It shares with `quiesce.model.judging` what an event means, and nothing else: TLC has the counters as they are, takes
every hidden step by itself, and searches in its own way.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from quiesce.model import manifest, tlc
from quiesce.model.case import Case
from quiesce.model.config import Config
from quiesce.model.errors import ModelError
from quiesce.model.oracle import Oracle
from quiesce.model.validation import History, Observation
from quiesce.model.values import freeze, show

_MODEL_VALUE = re.compile(r"\b[brst]\d+\b")
_ACCEPTED = re.compile(r'<<"accepted", (\d+)>>')


def accepts(cases: Sequence[Case], *, timeout: float = 600.0, heap: int = 2 << 30) -> list[bool]:
    """Which cases TLC finds a behaviour for, in any of their worlds.

    One start of TLC for all cases with the same constants. `timeout` is in seconds a start, `heap` in bytes.
    ModelError if TLC gives no answer.
    """
    accepted = [False] * len(cases)
    for world in range(max((len(case.worlds) for case in cases), default=0)):
        groups: dict[tuple[object, ...], list[int]] = {}
        for number, case in enumerate(cases):
            if not accepted[number] and world < len(case.worlds):
                constants = {**case.worlds[world], **case.counters}
                start = tuple(sorted((name, show(freeze(value))) for name, value in case.start.items()))
                key = case.model, case.definitions, tuple(sorted(constants.items())), start
                groups.setdefault(key, []).append(number)
        for numbers in groups.values():
            constants = {**cases[numbers[0]].worlds[world], **cases[numbers[0]].counters}
            for found in _start([cases[number] for number in numbers], constants, timeout, heap):
                accepted[numbers[found]] = True
    return accepted


def _start(cases: Sequence[Case], constants: Mapping[str, str], timeout: float, heap: int) -> list[int]:
    base = manifest.load()
    model = base.models[cases[0].model]
    config = base.config(model).override(constants).only(None)
    with tempfile.TemporaryDirectory(prefix="quiesce-opinion-") as scratch:
        module = Path(scratch, "Opinion.tla")
        oracle = cases[0].walk(cases[0].worlds[0]).oracle
        text = _module(cases, model.module, oracle)
        # Buffers, slots and readers are model values, which a module must declare before it can name them.
        values = sorted(set(_MODEL_VALUE.findall(text)))
        declared = f"CONSTANTS {', '.join(values)}\n" if values else ""
        module.write_text(text.replace("VARIABLES", f"{declared}VARIABLES", 1), encoding="utf-8")
        names = {key: value for key, value in config.names.items() if key != "specification"}
        constants = {**config.constants, **{value: f"= {value}" for value in values}}
        run = Config(constants, {**names, "init": ("TracedInit",), "next": ("TracedNext",)})
        result = tlc.run(
            module,
            run,
            libraries=base.libraries,
            heap=heap,
            timeout=timeout,
            deadlock=False,
            coverage=False,
            short=True,
        )
    if not result.holds:
        raise ModelError(f"TLC has no answer ({result.verdict}): {result.message}")
    return sorted({int(match[1]) - 1 for line in result.printed if (match := _ACCEPTED.search(line))})


def _module(cases: Sequence[Case], extends: str, oracle: Oracle) -> str:
    histories = [History(case.spans) for case in cases]
    steps = [place.step for history in histories for line in history.lines for place in line]
    actions = {step.action: oracle.actions[step.action] for step in steps}
    conditions = {step.where.name: len(step.where.arguments) for step in steps if step.where}
    first = cases[0]
    start = [f"/\\ {name} = {show(freeze(value))}" for name, value in first.start.items()]
    if start:
        initial = oracle.initial()[0]
        start += [
            f"/\\ {name} = {show(initial[name])}" for name in oracle.variables if name not in first.start
        ]
    variables = ", ".join(oracle.variables)
    return "\n".join(
        [
            "---- MODULE Opinion ----",
            f"EXTENDS {extends}, TLC",
            first.definitions,
            "VARIABLES which, place",
            f"Traces == <<\n{(',' + chr(10)).join(map(_trace, histories, [oracle] * len(cases)))}>>",
            "TracedAction(a, p) ==",
            *_choice("a", {name: _applied(name, "p", len(formals)) for name, formals in actions.items()}),
            "TracedActions(e) == \\E p \\in e.p : TracedAction(e.a, p)",
            "TracedWhere(e) ==",
            *_choice(
                "e.w",
                {"": "TRUE", **{name: _applied(name, "e.v", count) for name, count in conditions.items()}},
            ),
            "TracedHidden ==",
            *(f"    \\/ {text}" for text in first.hidden.values()),
            "TracedInit ==",
            *(["    " + line for line in start] or ["    /\\ Init"]),
            "    /\\ which \\in DOMAIN Traces",
            "    /\\ place = [l \\in DOMAIN Traces[which] |-> 0]",
            "    /\\ TLCSet(which, FALSE)",
            "TracedOver == \\A l \\in DOMAIN place : place[l] = Len(Traces[which][l])",
            "TracedStep(l) ==",
            "    /\\ place[l] < Len(Traces[which][l])",
            "    /\\ LET e == Traces[which][l][place[l] + 1] IN",
            "        /\\ \\A k \\in DOMAIN place : place[k] >= e.n[k]",
            f"        /\\ (TracedActions(e) /\\ TracedWhere(e)) \\/ (e.o /\\ UNCHANGED <<{variables}>>)",
            "    /\\ place' = [place EXCEPT ![l] = @ + 1]",
            "TracedNext ==",
            "    \\* What is known needs no more looking.",
            "    /\\ ~TLCGet(which)",
            '    /\\ IF TracedOver THEN TLCSet(which, TRUE) /\\ PrintT(<<"accepted", which>>)',
            f"            /\\ UNCHANGED <<{variables}, place>>",
            "       ELSE (\\E l \\in DOMAIN place : TracedStep(l)) \\/ (TracedHidden /\\ UNCHANGED place)",
            "    /\\ UNCHANGED which",
            "====\n",
        ]
    )


def _applied(name: str, arguments: str, count: int) -> str:
    return f"{name}({', '.join(f'{arguments}[{i}]' for i in range(1, count + 1))})" if count else name


def _choice(value: str, branches: Mapping[str, str]) -> list[str]:
    found = [f'{value} = "{name}" -> {text}' for name, text in branches.items()]
    return [f"    {'CASE' if not i else '  []'} {branch}" for i, branch in enumerate(found)]


def _trace(history: History, oracle: Oracle) -> str:
    lines = []
    for line in history.lines:
        entries = []
        for place in line:
            needs = ", ".join(map(str, place.needs))
            entries.append(f"[{_step(place.step, oracle)}, n |-> <<{needs}>>]")
        lines.append(f"<<{', '.join(entries)}>>")
    return f"  <<{', '.join(lines)}>>"


def _step(step: Observation, oracle: Oracle) -> str:
    where = step.where.name if step.where else ""
    values = ", ".join(show(freeze(value)) for value in step.where.arguments) if step.where else ""
    parameters = _parameters(step, oracle.actions[step.action])
    condition = f'w |-> "{where}", v |-> <<{values}>>'
    return f'a |-> "{step.action}", p |-> {parameters}, {condition}, o |-> {show(step.optional)}'


def _parameters(step: Observation, formals: Sequence[str]) -> str:
    """The set of what the parameters may have been: an event that did not end does not tell all of them."""
    given = [show(freeze(step.parameters[name])) if name in step.parameters else name for name in formals]
    unknown = ", ".join(f"{name} \\in {_DOMAINS[name]}" for name in formals if name not in step.parameters)
    together = f"<<{', '.join(given)}>>"
    return f"{{{together} : {unknown}}}" if unknown else f"{{{together}}}"


_DOMAINS = {"r": "Local", "s": "Slots", "b": "Buffers"}
