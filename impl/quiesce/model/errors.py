"""What can go wrong around a model, apart from the model being wrong."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from quiesce.errors import QuiesceError


class ModelError(QuiesceError):
    """A model could not be checked or asked: a wrong name, a broken file, no Java, no memory."""


class UnknownName(ModelError, KeyError):
    """No model, mutant, action, operator or variable has that name; the message offers the nearest."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        self.kind, self.name, self.known = kind, name, tuple(known)
        super().__init__(kind, name)

    def __str__(self) -> str:
        close = difflib.get_close_matches(self.name, self.known, n=3, cutoff=0.55)
        if close:
            return f"no {self.kind} is called {self.name!r}; did you mean {' or '.join(map(repr, close))}?"
        some, more = ", ".join(sorted(self.known)[:12]) or "none", len(self.known) - 12
        return f"no {self.kind} is called {self.name!r}; there are: {some}" + (
            f" and {more} more" if more > 0 else ""
        )


class SpecError(ModelError):
    """TLC rejected the specification or its configuration, or failed while evaluating an expression of it."""


class Disabled(QuiesceError):
    """An action cannot be taken in a state.

    `conjunct` is the text of its first false conjunct and `location` says where that stands, as
    "line 12 of PayloadReuse"; both are empty when no instance of the action has the parameters asked for.
    """

    def __init__(self, action: str, message: str, conjunct: str = "", location: str = "") -> None:
        self.action, self.conjunct, self.location = action, conjunct, location
        super().__init__(message)
