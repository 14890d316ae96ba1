"""TLC as a library: check models, step through them, hold traces against them (extra: `quiesce[model]`)."""

from quiesce.model import manifest
from quiesce.model.checking import Judgement, check, judge
from quiesce.model.errors import Disabled, ModelError, SpecError, UnknownName
from quiesce.model.oracle import Oracle, Step, label
from quiesce.model.output import CheckResult, Counterexample, Progress, TraceStep
from quiesce.model.validation import Explanation, Observation, explains
from quiesce.model.values import Function, ModelValue, State

__all__ = [
    "CheckResult",
    "Counterexample",
    "Disabled",
    "Explanation",
    "Function",
    "Judgement",
    "ModelError",
    "ModelValue",
    "Observation",
    "Oracle",
    "Progress",
    "SpecError",
    "State",
    "Step",
    "TraceStep",
    "UnknownName",
    "check",
    "explains",
    "judge",
    "label",
    "manifest",
]
