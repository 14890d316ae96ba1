"""`StageLink` held to `spec/StageHandoff.tla`: two ranks on simulated devices, one action at a time."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from model_tests.stage_handoff import faults
from model_tests.stage_handoff.pipeline import ELEMENTS, Deadlock, Pipeline, Rank, Shape, meant
from model_tests.stepper import Stepper, Stop
from model_tests.traces import runs

from quiesce.errors import QuiesceTimeout
from quiesce.events import Event
from quiesce.model import Oracle, State, Step, case_stage
from quiesce.model.adapter import Adapter, does, lets
from quiesce.model.case import Case
from quiesce.model.replay import Suite
from quiesce.model.traces import Trace
from quiesce.simulated import SimulatedStream
from quiesce.simulated_transport import MessageHandle, SimulatedTransport, TransferHandle

HOST = (
    "ReceiveMetadata", "PostReceive", "AwaitReceive", "AllGather", "BeforeForward", "Forward", "SendMetadata",
    "SendTensors",
)  # fmt: skip
STREAMS = ("Pass", "BeginWork", "EndWork", "BeginTransfer", "EndTransfer")
# Where a host is that stands within a call, behind this action of it.
LOOK = "Look"
WITHIN = {
    "ReceiveMetadata": "post",
    "AwaitReceive": "gather",
    "SendMetadata": "tensors",
    "BeforeForward": "forward",
}


class Interrupted(BaseException):
    """What a signal handler might raise, in a call of the link or between two."""


def version(memory: torch.Tensor, known: int) -> int:
    """The version a block holds as a whole; 0 for anything else."""
    values = memory.unique().tolist()
    return values[0] if len(values) == 1 and 1 <= values[0] <= known else 0


def edges(event: Event) -> bool:
    return event.phase == "end" or event.action == LOOK


class _Message(MessageHandle):
    """Metadata whose sender may look a moment too early for it to have arrived."""

    look: Callable[[], bool]

    @property
    def received(self) -> bool:
        return self.look() and self._mailbox.taken >= self._number


class _Transfer(TransferHandle):
    """The same of a tensor, which is looked at when the metadata has not arrived."""

    look: Callable[[], bool]

    @property
    def received(self) -> bool:
        return self._blocks_host and self.event.reached and self.look()


def reaps(state: State, r: int) -> bool:
    """Whether a host is about to send, and finds as much on its way as its model allows; one of gloo has to be idle.

    A reason is not told the constants of its model; where two messages are on their way, what was counted tells them.
    """
    dicts, answers = state["metadata"]
    step, stream = state["step"][r - 1], (1, "out") if r == 1 else (2, "in")
    # With nccl a wait goes before each transfer, and one dict is sent in each step.
    nccl = state["ran"][stream] + len(state["queue"][stream]) > step
    two_dicts = not nccl and dicts["sent"] >= state["step"][0]
    bound = 3 if two_dicts and step - answers["taken"] > 1 else 2
    sent = state["metadata"][r - 1]
    full = sent["sent"] - sent["reaped"] >= bound
    return full and state["at"][r - 1] in ("metadata", "more") and (nccl or not state["queue"][r, "compute"])


class Stage(Adapter):
    """`link` and `transport` are the implementation under test."""

    model = "stage_handoff_nccl"
    small = {
        "nccl": {},
        "gloo": {"Flavour": '"gloo"', "WaitTwice": "TRUE"},
        "extra": {"Flavour": '"gloo"', "Extra": "TRUE", "MaxPending": "3"},
        "fresh": {"Fresh": "TRUE", "Steps": "2"},
        "gather": {"Gather": "TRUE", "Steps": "2"},
        "two dicts": {"Flavour": '"gloo"', "Extra": "TRUE", "InFlight": "1"},
        "two steps": {"Steps": "2", "InFlight": "1"},
        "one step, fresh": {"Fresh": "TRUE", "Steps": "1", "InFlight": "1"},
        "one step, gathered": {"Gather": "TRUE", "Steps": "1", "InFlight": "1"},
        "an exception": {"Flavour": '"gloo"', "Steps": "1", "InFlight": "1", "MayInterrupt": "TRUE"},
    }
    reasons = {
        "what has arrived is reaped before forward, or when too much is on its way": (
            lambda state, step: (
                step.action == "ReapMetadata"
                and not reaps(state, step.parameters["r"])
                and state["at"][step.parameters["r"] - 1] != "forward"
            )
        ),
        "the ranks are of one process, and have no connection that could break": (
            lambda state, step: step.action == "FindPeerGone"
        ),
    }
    shape = Shape(scratch=False)

    def __init__(self, oracle: Oracle) -> None:
        super().__init__(oracle)
        known = oracle.evaluate
        self.bound = known("MaxPending")
        shape = replace(
            self.shape, flavour=known("Flavour"), steps=known("Steps"), in_flight=known("InFlight"),
            max_pending=self.bound, fresh=known("Fresh"), gather=known("Gather"), extra=known("Extra"),
            wait_twice=known("WaitTwice"),
        )  # fmt: skip
        torch.set_num_threads(1)
        self.hosts = [Stepper(edges), Stepper(edges)]
        self.within = ["", ""]
        self.sees = [True, True]
        self.pipeline = Pipeline(lambda below: 0, replace(shape, transport=self._late(shape.transport)))
        self.blocks = {memory.data_ptr(): (2, name) for name, memory in self.pipeline.ranks[1].memory.items()}
        for rank in self.pipeline.ranks:
            self.blocks |= {memory.data_ptr(): (rank.number, "out") for memory in rank.outputs}

    def _late(self, transport: type[SimulatedTransport]) -> type[SimulatedTransport]:
        adapter = self

        class Late(transport):  # type: ignore[valid-type, misc]
            def send_message(self, message: bytes, to: int) -> MessageHandle:
                handle = super().send_message(message, to)
                handle.__class__ = _Message
                handle.look = functools.partial(adapter._look, self.rank - 1, True)
                return handle

            def send(self, tensor: torch.Tensor, to: int) -> TransferHandle:
                handle = super().send(tensor, to)
                handle.__class__ = _Transfer
                handle.look = functools.partial(adapter._look, self.rank - 1, False)
                return handle

        return Late

    def _look(self, index: int, stops: bool) -> bool:
        """Whether the host sees what has arrived; before forward it stops to be told so."""
        host = self.hosts[index]
        if self.pipeline.ranks[index].at != "settle" or threading.current_thread() is not host._thread:
            return True
        if stops:
            host._observe(Event(LOOK, "begin", self, {}))
        return self.sees[index]

    @does(*STREAMS)
    def run(self, s: tuple[int, str]) -> None:
        named = self.named()
        self.pipeline.world.run(next(stream for stream in named if named[stream] == s))

    @does("Interrupt")
    def interrupt(self, r: int) -> None:
        """Where its host stands: within a call of the link, or between two, so that it leaves the link's block."""
        rank, host = self.pipeline.ranks[r - 1], self.hosts[r - 1]
        error = Interrupted()
        if host.running:
            stop = host.resume(error)
            assert stop.fields.get("error") is error, stop
        else:
            rank.link.__exit__(Interrupted, error, None)
        self.within[r - 1] = ""
        rank.at = "failed"

    @lets(*HOST, "ReapMetadata")
    def go_on(self, wanted: Step) -> None:
        """The host of a rank takes its next step."""
        index = wanted.parameters["r"] - 1
        rank, host = self.pipeline.ranks[index], self.hosts[index]
        where = rank.at
        self.sees[index] = wanted.action == "ReapMetadata"
        if not host.running:
            self._tell(index, where, self._start(index, wanted), wanted)
        while not self.reported:
            if not host.running:
                self._tell(index, rank.at, self._start(index, wanted), wanted)
            else:
                self._tell(index, where, host.resume(), wanted)

    def _start(self, index: int, wanted: Step) -> Stop:
        """The next call of a host. For forward, the free memory that is not wanted is in use elsewhere meanwhile."""
        rank, kept = self.pipeline.ranks[index], []
        free = rank.backend._free
        if wanted.action == "Forward" and rank.at == "forward":
            named = {id(block): self.blocks.get(address) for address, block in rank.backend._blocks.items()}
            kept = [block for block in free if named[id(block)] not in (None, wanted.parameters["b"])]
        free[:] = [block for block in free if block not in kept]
        try:
            return self.hosts[index].start(rank.move)
        finally:
            free[:0] = kept

    def _tell(self, index: int, where: str, stop: Stop, wanted: Step) -> None:
        rank, r = self.pipeline.ranks[index], index + 1
        if stop.action == "raise":
            raise stop.fields["error"]
        if stop.action == "return":
            self.within[index] = ""
            if where == "forward":
                self.happened("Forward", r=r, b=self._block(rank, wanted))
            elif where == "again":
                self.happened("AwaitReceive", r=r)
            return
        if stop.action == LOOK:
            # Handles are settled before anything is reaped.
            if where == "settle" and self.within[index] != "BeforeForward":
                self.within[index] = "BeforeForward"
                self.happened("BeforeForward", r=r)
            return
        if stop.action == "BeforeForward" and self.within[index] == "BeforeForward":
            self._end(index, where, wanted)
            return
        self.happened(stop.action, r=r)
        first = where == "receive" and r == 2, where == "metadata" and r == 1
        if (stop.action, True) in (("ReceiveMetadata", first[0]), ("SendMetadata", first[1])) or (
            stop.action == "AwaitReceive" and self.pipeline.shape.gather
        ):
            self.within[index] = stop.action
        elif stop.action != "ReapMetadata":
            self._end(index, where, wanted)

    def _end(self, index: int, where: str, wanted: Step) -> None:
        while self.hosts[index].running:
            self._tell(index, where, self.hosts[index].resume(), wanted)

    def _block(self, rank: Rank, wanted: Step) -> tuple[int, str]:
        """The block that forward writes; one not seen before takes the name that is wanted, if that is left."""
        address = rank.outputs[0].data_ptr()
        if address not in self.blocks:
            left = {(1, "out"), (1, "spare")} - set(self.blocks.values())
            hoped = wanted.parameters.get("b")
            self.blocks[address] = hoped if hoped in left else min(left)
        return self.blocks[address]

    def can(self, step: Step) -> bool:
        if step.action in (*STREAMS, "Interrupt", "Done"):
            return True
        rank = self.pipeline.ranks[step.parameters["r"] - 1]
        if step.action != "ReapMetadata":
            return self.hosts[rank.number - 1].running or rank.may_move()
        if self.within[rank.number - 1] == "BeforeForward":
            return bool(rank.link._pending)
        return rank.at in ("metadata", "more") and rank.link.pending >= self.bound and rank.may_move()

    def attempts(self) -> list[Step]:
        """None: whatever a host is asked for, it goes on by itself, and whether it can is to be seen."""
        return []

    def named(self) -> dict[SimulatedStream, tuple[int, str]]:
        """The streams by the names of the specification: <<rank, kind>>."""
        return {s: (int(s.name[0]), s.name[2:].split()[0]) for s in self.pipeline.world.streams}

    def view(self) -> Mapping[str, Any]:
        world, named = self.pipeline.world, self.named()
        running = [s for s in world.streams if s.queue and s.queue[0].running]
        found: dict[str, Any] = {
            "queues": {named[s]: items(s, named) for s in world.streams if s.queue},
            "ran": {named[s]: s.ran for s in world.streams if s.ran},
            "busy": {named[s] for s in running}
            | {named[world.receivers[s.queue[0].line]] for s in running if s.queue[0].kind == "send"},
            "streams that can go on": {(name, named[stream]) for name, stream in world.runnable()},
            "memory": {},
        }
        for rank, within in zip(self.pipeline.ranks, self.within, strict=True):
            other = self.pipeline.ranks[2 - rank.number]
            sent = other.inbox.sent
            found[f"rank {rank.number}"] = {
                "at": WITHIN.get(within, rank.at),
                "step": rank.step,
                "has ended": bool(rank.link._closed),
                "handles": {
                    (named[h.event.point[0]], h.event.point[1])  # type: ignore[attr-defined]
                    for h in rank.link._unsettled
                },
                "metadata": (sent, other.inbox.taken, sent - rank.link.pending),
                "can go on": within != "" or rank.may_move(),
            }
            for address, block in rank.backend._blocks.items():
                name = self.blocks.get(address)
                if name:
                    memory = torch.from_numpy(block.memory).view(torch.int32)[:ELEMENTS]
                    held = version(memory, self.pipeline.shape.steps)
                    found["memory"][name] = (held, block not in rank.backend._free)
        return found

    def facts(self, state: State) -> Mapping[str, Any]:
        steps = self.oracle.successors(state)
        found: dict[str, Any] = {
            "queues": {s: tuple(map(item, items)) for s, items in state["queue"].items() if items},
            "ran": {s: ran for s, ran in state["ran"].items() if ran},
            "busy": state["busy"],
            "streams that can go on": {(s.action, s.parameters["s"]) for s in steps if s.action in STREAMS},
            "memory": {
                name: (state["memory"][name], state["block"][name]["live"])
                for rank in self.pipeline.ranks
                for address in rank.backend._blocks
                if (name := self.blocks.get(address))
            },
        }
        for index, within in enumerate(self.within):
            metadata = state["metadata"][index]
            failed = state["at"][index] == "failed"
            found[f"rank {index + 1}"] = {
                "at": state["at"][index],
                "step": state["step"][index],
                "has ended": failed,
                "handles": {(p["stream"], p["count"]) for p in state["handles"][index]},
                "metadata": (metadata["sent"], metadata["taken"], metadata["reaped"]),
                "can go on": within != "" or any(self._moves(state, step, index + 1) for step in steps),
            }
            if failed:  # what it has sent is nobody's to settle or reap any more
                seen = self.view()[f"rank {index + 1}"]
                found[f"rank {index + 1}"] |= {
                    "handles": seen["handles"],
                    "metadata": (metadata["sent"], metadata["taken"], seen["metadata"][2]),
                }
        return found

    def _moves(self, state: State, step: Step, r: int) -> bool:
        if step.parameters.get("r") != r:
            return False
        # A send that finds the bound reached reaps first, if it can.
        full = state["at"][r - 1] in ("metadata", "more")
        idle = self.pipeline.shape.flavour == "nccl" or not state["queue"][r, "compute"]
        return step.action in HOST or (step.action == "ReapMetadata" and full and idle)

    def damage(self) -> str:
        """What the second rank's forwards found, once the pipeline has run to its end."""
        self.sees = [True, True]
        self.close()
        try:
            found = self.pipeline.run()
        except (Deadlock, QuiesceTimeout) as error:
            return f"the pipeline stopped: {error}"
        if found != meant(self.pipeline.shape):
            return f"the second rank received {found} instead of {meant(self.pipeline.shape)} (-1: a mixture)"
        return ""

    def close(self) -> None:
        for host in self.hosts:
            while host.running:
                host.resume()

    @classmethod
    def record(cls, directory: Path) -> None:
        runs.stage([directory], runs.Stage())

    @classmethod
    def cases(cls, trace: Trace) -> list[Case]:
        return case_stage.cases(trace.events)


def items(stream: SimulatedStream, named: Mapping[SimulatedStream, Any]) -> tuple[Any, ...]:
    """A queue as the specification sees it: the kind of each item, and the point of each wait."""
    return tuple((i.kind, (named[i.point[0]], i.point[1])) if i.point else i.kind for i in stream.queue)


def item(item: Mapping[str, Any]) -> Any:
    """The same of an item in a state of the specification."""
    point = item.get("point")
    return (item["kind"], (point["stream"], point["count"])) if point else item["kind"]


_SHAPES = {
    **faults.CORRUPTING,
    **faults.STOPPING,
    "goes_on_halfway": Shape(flavour="gloo", steps=1, link=faults.GoesOnHalfway),
}


def _variant(name: str) -> type[Stage]:
    shape = _SHAPES[name]
    kinds = {
        "an exception": name == "goes_on_halfway",
        "extra": shape.extra,
        "gather": shape.gather,
        "fresh": shape.fresh,
        "gloo": shape.wait_twice,
    }
    members = {
        "shape": replace(shape, scratch=False),
        "constants": Stage.small[next((kind for kind, meant in kinds.items() if meant), "nccl")],
        "__module__": __name__,
        "__qualname__": f"VARIANTS[{name!r}]",
    }
    return type(f"Stage_{name}", (Stage,), members)


VARIANTS = {name: _variant(name) for name in _SHAPES}
"""The same with faulty links and transports, by the names of the mutants, each in a model that shows its fault."""

SUITE = Suite(
    Stage,
    VARIANTS,
    {
        **dict.fromkeys(VARIANTS, "two steps"),
        "goes_on_halfway": "an exception",
        "handles_overwritten": "extra",
        "gather_read_early": "gather",
        "tensor_not_kept": "fresh",
        "second_wait_blocks": "gloo",
        "metadata_send_blocking": "gloo",
        "empty_dict_not_sent": "gloo",
    },
)
