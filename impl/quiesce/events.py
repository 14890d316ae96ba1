"""Actions and their observers: the names that the specifications and the code share.

A method that implements an action of a specification is marked with `@action`. The mark is a plain attribute:
an unobserved method runs exactly as written. `observe` replaces the marked methods of all loaded protocol modules
by wrappers for as long as it is active, so that recording, lockstep tests and crash injection all hang on the
same names, and none of them needs code in the protocols. A class defined while something is being observed is
observed too, and keeps the wrappers.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

Method = TypeVar("Method", bound=Callable[..., Any])
Log = Callable[..., Mapping[str, object]]
Phase = Literal["begin", "end", "error"]

_marked: set[tuple[str, str]] = set()
_observers: list[Observer] = []
_originals: dict[tuple[type, str], Callable[..., Any]] = {}
_lock = threading.RLock()


@dataclass(frozen=True)
class Event:
    """One edge of one action.

    `phase` is "begin" before the method runs, "end" after it returned, "error" after it raised. `fields` holds the
    action's parameters under the names the specification uses; it is empty at "begin", because some of them
    (the buffer that `Take` chose) are known only at the end.
    """

    action: str
    phase: Phase
    subject: object
    fields: Mapping[str, object]


Observer = Callable[[Event], None]


def action(name: str, log: Log | None = None) -> Callable[[Method], Method]:
    """Mark a method as the implementation of the action `name`.

    `log(self, result, *args, **kwargs)` returns the parameters of the action; it is called only while observed.
    An action that the specification splits into `Begin<name>` and `End<name>` is marked `name`: its two events
    are the two steps.
    """

    def mark(method: Method) -> Method:
        method.__quiesce_action__ = (name, log)  # type: ignore[attr-defined]
        _marked.add((method.__module__, method.__qualname__))
        # Its class does not exist yet: what is being observed already must learn of it here.
        return _wrap(method) if _observers else method  # type: ignore[return-value]

    return mark


def actions(cls: type) -> dict[str, str]:
    """The actions that `cls` implements, as action name -> method name, in the order of the source."""
    found = {}
    for base in reversed(cls.__mro__):
        for attribute, method in vars(base).items():
            if hasattr(method, "__quiesce_action__"):
                found[method.__quiesce_action__[0]] = attribute
    return found


@contextmanager
def observe(observer: Observer) -> Iterator[None]:
    """Call `observer` at the begin and the end of every marked method, in whichever thread runs it.

    An exception raised by the observer propagates into the protocol, which is how faults are injected.
    """
    with _lock:
        _observers.append(observer)
        if len(_observers) == 1:
            _install()
    try:
        yield
    finally:
        with _lock:
            _observers.remove(observer)
            if not _observers:
                _restore()


def _install() -> None:
    for module, qualname in _marked:
        owner_name, _, attribute = qualname.rpartition(".")
        owner: Any = sys.modules[module]
        for part in owner_name.split("."):
            owner = getattr(owner, part, None)
        if isinstance(owner, type) and not hasattr(vars(owner)[attribute], "__quiesce_observed__"):
            method = vars(owner)[attribute]
            _originals[owner, attribute] = method
            setattr(owner, attribute, _wrap(method))


def _restore() -> None:
    for (owner, attribute), method in _originals.items():
        setattr(owner, attribute, method)
    _originals.clear()


def _wrap(method: Callable[..., Any]) -> Callable[..., Any]:
    name, log = method.__quiesce_action__  # type: ignore[attr-defined]

    def tell(phase: Phase, subject: object, fields: Mapping[str, object]) -> None:
        for observer in tuple(_observers):
            observer(Event(name, phase, subject, fields))

    @functools.wraps(method)
    def observed(self: object, *args: object, **kwargs: object) -> object:
        tell("begin", self, {})
        try:
            result = method(self, *args, **kwargs)
        except BaseException as error:
            tell("error", self, {"error": error})
            raise
        tell("end", self, log(self, result, *args, **kwargs) if log else {})
        return result

    observed.__quiesce_observed__ = True  # type: ignore[attr-defined]
    return observed
