"""The implementation and TLC's evaluator, step by step together.

The implementation says which action its sender takes next, Hypothesis says what the environment does; the
specification must allow both, and after each step both must show the same state.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from model_tests.payload_reuse.world import Interrupted, World, stop_name
from model_tests.stepper import Stop

from quiesce.errors import PeerDied, QuiesceTimeout
from quiesce.model import Disabled, ModelValue, Oracle, State, Step, label
from quiesce.payload_reuse import PayloadSender

FREE_LIMIT = 1
MODEL = "payload_reuse_all"
# What the lockstep test changes in that model, which need not be searched here: longer runs, and what World does.
OVERRIDES = {
    "Transport": '"inproc"',
    "Side": '"bind"',
    "Buffers": "{b1, b2, b3, b4}",
    "MaxMessage": "6",
    "MaxParts": "3",
    "Shapes": "<- LockstepShapes",
    "HighWater": "2",
    "FreeLimit": f"{FREE_LIMIT}",
    "PeerMayDie": "TRUE",
    "MayInterrupt": "TRUE",
}
ENVIRONMENT = ("PeerTake", "BeginRead", "EndRead", "PeerDrop", "TrackerFires", "PeerReturns")
# The sender's calls of the socket, in which it notices that a peer died some time ago.
NOTICING = ("SendPart", "SendTimesOut", "Abort")
TENSOR = ModelValue("t1")


def oracle() -> Oracle:
    return Oracle.load(MODEL, set=OVERRIDES)


class Lockstep(RuleBasedStateMachine):
    """`sender_class` is the implementation under test."""

    sender_class: type[PayloadSender] = PayloadSender

    def __init__(self) -> None:
        super().__init__()
        self.spec = oracle()
        self.world = World(self.sender_class, FREE_LIMIT)
        self.states: list[State] = list(self.spec.initial())
        self.names: dict[int, ModelValue] = {}
        self.trail: list[str] = []
        self.shape: Any = ()
        self.sent_all = False

    @property
    def state(self) -> State:
        return self.states[0]

    # Following the specification.

    def follow(self, action: str, **parameters: Any) -> None:
        """Take the step in every state that the specification may be in."""
        if action in NOTICING:
            self.touch("Notice")
        self.trail.append(f"{action}({', '.join(f'{k}={v}' for k, v in parameters.items())})")
        reached = self._step(self.states, action, parameters)
        if not reached:
            reason = self.spec.why_disabled(self.state, action, **parameters)
            raise AssertionError(
                f"the implementation did what the specification forbids: {reason}\n" + "\n".join(self.trail)
            )
        self.states = reached

    def _step(self, states: list[State], action: str, parameters: dict[str, Any]) -> list[State]:
        reached: dict[State, None] = {}
        for state in states:
            try:
                reached.update(dict.fromkeys(self.spec.step(state, action, **parameters)))
            except Disabled:
                continue
        return list(reached)

    def touch(self, action: str) -> None:
        """The socket is looked at, which changes only those states in which there is something to notice."""
        self.states = [t for s in self.states for t in self._step([s], action, {}) or [s]]

    def name(self, key: int) -> ModelValue:
        return self.names.get(key, ModelValue(f"unknown-{key}"))

    def compare(self) -> None:
        """Keep the states that look like the implementation; there must be one."""
        view = self.world.view()
        free = {self.name(key) for key in view["free"]}
        pending = {self.name(key) for key in view["pending"]}
        seen = {
            "free": free,
            "pending": pending,
            "undone": view["undone"],
            "holding": view["holding"],
            "read": view["read"],
        }
        assert len(pending) == len(view["pending"]), f"a buffer is pending twice\n{self.trail}"
        kept = [state for state in self.states if self._abstract(state) == seen]
        assert kept, (
            f"the implementation shows {seen},\nthe specification {self._abstract(self.state)}\n"
            + "\n".join(self.trail)
        )
        self.states = kept
        read_early = [
            key
            for key, gate in self.world.gates.items()
            if gate.tracker.done
            and all(any((f["msg"], f["part"]) == key for f in state["alive"]) for state in self.states)
        ]
        assert not read_early, f"trackers {read_early} fired while their frames can be read\n{self.trail}"

    @staticmethod
    def _abstract(state: State) -> dict[str, Any]:
        return {
            "free": set(state["free"]),
            "pending": {entry["buffer"] for entry in state["pending"]},
            "undone": {(f["msg"], f["part"]) for f in state["undone"]},
            "holding": len(state["holding"]),
            # An abort mark has no bytes, hence no version.
            "read": [0 if entry["part"] == 0 else entry["version"] for entry in state["seen"]],
        }

    # The sender: the implementation says what it does.

    def advance(self, stop: Stop) -> None:
        action = stop_name(stop)
        if action == "Take":
            key = stop.fields["buffer"]
            if key not in self.names:
                buffers = sorted(self.spec.evaluate("Buffers"), key=str)
                self.names[key] = next(b for b in buffers if b not in self.names.values())
            self.follow("Take", b=self.name(key))
        elif action == "EndEncode":
            self.follow("EndEncode", s=self.shape)
        elif action == "Recycle":
            self.follow("Recycle", b=self.name(stop.fields["buffer"]))
        elif action == "DropSurplus":
            self.follow("DropSurplus", b=self.name(stop.fields["buffer"]))
            # Its address may come again, for another buffer.
            del self.names[stop.fields["buffer"]]
        elif action == "Touch":
            self.touch("Touch")
        elif action:
            self.follow(action)
        elif stop.action == "raise":
            error = stop.fields["error"]
            assert isinstance(error, (QuiesceTimeout, PeerDied, Interrupted)), repr(error)
            if isinstance(error, QuiesceTimeout):
                self.follow("SendTimesOut")
        if not self.world.stepper.running:
            unfinished = f"the call ended, but the specification is at {self.state['step']}\n{self.trail}"
            assert self.state["step"] in ("idle", "closed"), unfinished
        self.compare()

    def offers(self) -> dict[str, Callable[[st.DataObject], None]]:
        """What may be done next, by name: the sender's next action, the caller's, the environment's."""
        spec = {step.action for step in self.spec.successors(self.state)}
        found: dict[str, Callable[[st.DataObject], None]] = {}
        if self.world.stepper.running:
            found["go on"] = self.go_on
            if "Interrupt" in spec:
                found["interrupt"] = self.interrupt
        else:
            if "BeginOverwrite" in spec:
                found["overwrite"] = self.overwrite
            if "Take" in spec:
                found["send"] = self.send
            if self.state["pending"] or "Touch" in spec:
                found["settle"] = self.settle
            if "Close" in spec:
                found["close"] = self.close
        if "PeerDies" in spec and (self.state["number"] > 1 or self.state["step"] == "sending"):
            found["peer dies"] = functools.partial(self.peer_dies, False)
            if self.state["partial"]:
                found["peer dies, the next part is refused"] = functools.partial(self.peer_dies, True)
        for name, step in self.environment().items():
            found[name] = functools.partial(self.environment_moves, step)
        return found

    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        """One rule for all, so that Hypothesis does not leave whole actions out of a run."""
        offers = self.offers()
        if not offers:
            assert self.state["socket"] != "open", "nothing can be done, though the socket is open"
            return
        offers[data.draw(st.sampled_from(list(offers)))](data)
        if not self.world.stepper.running:
            asked = {(f["msg"], f["part"]) for f in self.state["loan"][TENSOR]}
            undone = {(f["msg"], f["part"]) for f in self.state["undone"]}
            done = not self.world.sender.loans
            told = f"the sender says that its loans are {'' if done else 'not '}done\n" + "\n".join(
                self.trail
            )
            assert done == (not asked & undone), told

    def send(self, data: st.DataObject) -> None:
        self.shape = data.draw(st.sampled_from(sorted(self.spec.evaluate("LockstepShapes"), key=str)))
        parts = [(part["large"], part["lent"]) for part in self.shape]
        self.advance(self.world.stepper.start(self.world.call(parts, self.state["number"])))

    def go_on(self, data: st.DataObject) -> None:
        self.advance(self.world.stepper.resume())

    def interrupt(self, data: st.DataObject) -> None:
        self.follow("Interrupt")
        self.advance(self.world.stepper.resume(Interrupted()))

    def settle(self, data: st.DataObject) -> None:
        """Run `settle`, or the end of `close`; afterwards nothing may be left that the specification would settle."""
        sender = self.world.sender
        closed = self.state["step"] == "closed"
        stop = self.world.stepper.start(
            functools.partial(sender.pool.settle, sender.pool.pending) if closed else sender.settle
        )
        self.advance(stop)
        while self.world.stepper.running:
            stop = self.world.stepper.resume()
            self.advance(stop)
        assert stop.action == "return", stop
        settled = ("Touch", "Recycle", "DropSurplus")
        left = {s: {t.action for t in self.spec.successors(s) if t.action in settled} for s in self.states}
        self.states = [state for state in self.states if not left[state]]
        assert self.states, f"settle() left {left.popitem()[1]} undone\n" + "\n".join(self.trail)

    def overwrite(self, data: st.DataObject) -> None:
        """The caller writes its tensor, which the sender says it may."""
        self.follow("BeginOverwrite", t=TENSOR)
        self.world.overwrite(self.state["number"])
        self.follow("EndOverwrite", t=TENSOR)
        self.compare()

    def close(self, data: st.DataObject) -> None:
        self.world.stepper.start(lambda: self.world.sender._close(0.1))
        self.follow("Close")
        while self.world.stepper.running:
            self.world.stepper.resume()
        self.world.sender.pool.free_limit = 0
        self.world.sender.pool._free.clear()
        self.follow("Reap")
        self.compare()

    def peer_dies(self, refuse: bool, data: st.DataObject) -> None:
        """Within a message libzmq refuses the next part, or swallows it."""
        within = bool(self.state["partial"])
        self.world.dies(within, refuse)
        self.follow("PeerDies")
        if within:
            self.states = self._step(self.states, "Notice", {})
        self.compare()

    def environment(self) -> dict[str, Step]:
        """What the environment may do, whichever of the states is the true one."""
        offered = [
            {label(t.action, t.parameters): t for t in self.spec.successors(state) if t.action in ENVIRONMENT}
            for state in self.states
        ]
        return {name: step for name, step in offered[0].items() if all(name in other for other in offered)}

    def environment_moves(self, step: Step, data: st.DataObject) -> None:
        world = self.world
        if step.action == "PeerTake":
            if not world.take():
                # In some of the states the message went to the dead pipe; it was one of those.
                self.states = [s for s in self.states if not s["pipe"] or s["holding"]]
                assert self.states, "a message is in the pipe but cannot be received\n" + "\n".join(
                    self.trail
                )
                return
        elif step.action == "BeginRead":
            world.begin_read()
        elif step.action == "EndRead":
            world.end_read()
        elif step.action == "PeerDrop":
            world.drop()
        elif step.action == "TrackerFires":
            world.fires(step.parameters["m"], step.parameters["i"])
        elif step.action == "PeerReturns":
            world.returns()
        self.follow(step.action, **step.parameters)
        if step.action == "PeerReturns":
            self.touch("Notice")
        self.compare()

    def teardown(self) -> None:
        self.world.close()
