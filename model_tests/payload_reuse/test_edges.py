"""What the larger tests of a sender pass over: exact thresholds, time limits, errors on the way out, leaks."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from typing import Any

import pytest
import torch
import zmq
from model_tests.payload_reuse.watched import LARGE, Signal, Watched, full, joined

from quiesce import events
from quiesce.codec import Decoder
from quiesce.errors import Closed, NotQuiescent, PeerDied, QuiesceError, QuiesceTimeout
from quiesce.lifecycle import Loan
from quiesce.payload_receiver import PayloadReceiver
from quiesce.payload_reuse import COPY_THRESHOLD, PayloadSender


def wait_for_pending(sender: PayloadSender) -> None:
    for _, trackers, _ in sender.pool._pending:
        for tracker in trackers:
            tracker.wait(5)


@pytest.mark.parametrize("size", [COPY_THRESHOLD - 1, COPY_THRESHOLD])
def test_a_tensor_is_lent_from_the_threshold_on(context: zmq.Context[Any], size: int) -> None:
    push, pull = joined(context)
    with PayloadSender(push) as sender, PayloadReceiver(pull) as receiver:
        told: list[Any] = []
        with events.observe(lambda event: told.extend(event.fields.get("shape", ()))):  # type: ignore[arg-type]
            loan = sender.lend([full(size)])
        received = receiver.receive()
        assert loan.done == (size < COPY_THRESHOLD)
        assert any(is_large for is_large, _ in told) == (size >= COPY_THRESHOLD)
        del received
        loan.wait(5)
        assert sender.loans == ()


def test_what_had_to_be_copied_is_not_owed_to_the_caller(context: zmq.Context[Any]) -> None:
    push, pull = joined(context)
    with PayloadSender(push) as sender, PayloadReceiver(pull) as receiver:
        tensor = torch.arange(2 * LARGE)[::2]
        assert sender.lend([tensor]).done
        sender.send([tensor])
        for _ in range(2):
            received = receiver.receive()
            assert torch.equal(received.value[0], tensor)
            del received


def test_copied_tensors_keep_an_alignment_that_can_be_shared(context: zmq.Context[Any]) -> None:
    """Behind a tensor of odd size the next one is still not copied again by the receiver."""
    push, pull = joined(context)
    with PayloadSender(push) as sender, PayloadReceiver(pull) as receiver:
        sender.send([full(LARGE + 1), torch.arange(LARGE)])
        odd, even = receiver.receive().value
        assert torch.equal(odd, full(LARGE + 1))
        assert torch.equal(even, torch.arange(LARGE))
        distance = even.data_ptr() - odd.data_ptr()
        del odd, even
        # The next multiple of 64 bytes: the receiver's tensors are views of one body.
        assert distance == LARGE + 32


def test_a_buffer_goes_round_with_its_body_and_without_old_views(context: zmq.Context[Any]) -> None:
    push, pull = joined(context)
    with PayloadSender(push) as sender, PayloadReceiver(pull, Decoder(copy=True)) as receiver:
        bodies: list[bytearray] = []
        for number, size in enumerate([COPY_THRESHOLD, LARGE, LARGE, COPY_THRESHOLD, LARGE]):
            sender.send([full(size, number)])
            assert torch.equal(receiver.receive().value[0], full(size, number))
            wait_for_pending(sender)
            [(buffer, *_)] = sender.pool._pending
            if size == LARGE:
                bodies.append(buffer.body)
            assert len(buffer._views) == 2
        assert all(body is bodies[0] for body in bodies)


def test_sending_alone_recycles_buffers_and_forgets_loans(context: zmq.Context[Any]) -> None:
    push, pull = joined(context)
    with PayloadSender(push) as sender, PayloadReceiver(pull) as receiver:
        first, second = sender.lend([full(LARGE)]), sender.lend([full(LARGE)])
        receiver.receive()
        held = receiver.receive()
        first.wait(5)
        forgotten = weakref.ref(first)
        del first
        for _ in range(20):
            sender.send("small")
        gc.collect()
        assert forgotten() is None
        assert sender.loans == (second,)
        # No frame over a buffer is in flight: the same one goes round.
        assert sender.pool.free + sender.pool.pending == 1
        del held


def test_a_message_that_no_peer_can_be_sent_is_not_begun(context: zmq.Context[Any]) -> None:
    router = context.socket(zmq.ROUTER)
    router.router_mandatory = True
    seen: list[str] = []
    with PayloadSender(router) as sender:
        with events.observe(lambda event: seen.append(event.action)), pytest.raises(PeerDied):
            sender.send("hello", prefix=[b"nobody"])
        assert "Abort" not in seen
        assert (sender.pool.free, sender.pool.pending) == (1, 0)


def test_settling_comes_to_all_pending_buffers(context: zmq.Context[Any]) -> None:
    push, pull = joined(context)
    with PayloadSender(push) as sender, PayloadReceiver(pull) as receiver:
        for _ in range(20):
            sender.send({"pad": bytes(LARGE)})
        assert sender.pool.pending == 20
        for _ in range(20):
            receiver.receive()
        wait_for_pending(sender)
        assert sender.settle() == 20
        assert (sender.pool.free, sender.pool.pending) == (20, 0)


def test_settling_alone_lets_the_socket_notice_that_its_peer_died(context: zmq.Context[Any]) -> None:
    push, pull = joined(context)
    with PayloadSender(push) as sender:
        sender.send([full(LARGE)])
        pull.close(linger=0)
        deadline = time.monotonic() + 5
        while sender.pool.pending and time.monotonic() < deadline:
            sender.settle()
            time.sleep(0.001)
        assert (sender.pool.free, sender.pool.pending) == (1, 0)


def test_the_bytes_of_payload_and_body_are_bounded_together(context: zmq.Context[Any]) -> None:
    push, pull = joined(context)
    with PayloadSender(push) as sender, PayloadReceiver(pull, Decoder(copy=True)) as receiver:
        sender.pool.free_bytes = LARGE
        for obj, kept in (("small", 1), ([full(LARGE)], 0), ({"pad": bytes(LARGE)}, 0)):
            sender.send(obj)
            receiver.receive()
            wait_for_pending(sender)
            sender.settle()
            assert (sender.pool.free, sender.pool.pending) == (kept, 0)


def test_an_exception_that_is_kept_holds_no_frame(context: zmq.Context[Any]) -> None:
    push, pull = joined(context)

    def observer(event: events.Event) -> None:
        if event.action == "SendPart" and event.phase == "end" and event.fields["part"] == 2:
            raise Signal

    with PayloadSender(push) as sender, PayloadReceiver(pull) as receiver:
        with events.observe(observer), pytest.raises(Signal) as kept:
            sender.lend([full(LARGE), full(LARGE)])
        [loan] = sender.loans
        with pytest.raises(QuiesceTimeout):
            receiver.receive(0.01)
        loan.wait(5)
        assert kept.value.__traceback__ is not None


@pytest.mark.parametrize("refused", ["part", "mark"])
def test_a_refusal_tells_that_what_was_begun_is_gone(context: zmq.Context[Any], refused: str) -> None:
    push, pull = joined(context)

    def observer(event: events.Event) -> None:
        if event.action == "SendPart" and event.phase == "end" and event.fields["part"] == 2:
            pull.close(linger=0)
            push.refuse_next = True
            if refused == "mark":
                raise Signal

    with PayloadSender(push) as sender:
        with events.observe(observer), pytest.raises(PeerDied if refused == "part" else Signal):
            sender.lend([full(LARGE), full(LARGE)])
        assert sender.loans == ()
        assert (sender.settle(), sender.pool.pending) == (1, 0)


def test_a_mark_without_room_says_nothing_of_a_message_sent_whole(context: zmq.Context[Any]) -> None:
    push, pull = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    push.sndhwm = pull.rcvhwm = 1
    push.bind("inproc://full")
    pull.connect("inproc://full")

    def observer(event: events.Event) -> None:
        if event.action == "SendPart" and event.phase == "end" and event.fields["part"] == 2:
            raise Signal

    with PayloadSender(push) as sender, PayloadReceiver(pull) as receiver:
        sender.send("takes one of two places")
        with events.observe(observer), pytest.raises(Signal):
            sender.lend([full(LARGE)])
        with pytest.raises(QuiesceTimeout):
            sender.send("no room", timeout=0)
        [loan] = sender.loans
        receiver.receive()
        held = receiver.receive()
        assert receiver.aborted == 0
        with pytest.raises(QuiesceTimeout):
            loan.wait(0)
        del held
        loan.wait(5)


def test_an_exception_after_which_the_socket_is_gone_is_the_one_raised(context: zmq.Context[Any]) -> None:
    push, _ = joined(context)

    def observer(event: events.Event) -> None:
        if event.action == "SendPart" and event.phase == "end":
            push.close(linger=0)
            raise Signal

    sender = PayloadSender(push)
    with events.observe(observer), pytest.raises(Signal):
        sender.lend([full(LARGE)])
    sender.close()


def test_a_waiting_time_is_what_the_socket_is_told(context: zmq.Context[Any]) -> None:
    push, pull = joined(context)
    push_alone = context.socket(zmq.PUSH, socket_class=Watched)
    push_alone.bind("inproc://alone")
    sender = PayloadSender(push_alone)
    with pytest.raises(QuiesceTimeout, match=r"message 1 .* 0.05 s"):
        sender.send(1, timeout=0.05)
    with pytest.raises(QuiesceTimeout, match="message 2 "):
        sender.send(1, timeout=0.05)
    receiver = PayloadReceiver(pull)
    with pytest.raises(QuiesceTimeout):
        receiver.receive(0.05)
    for polls in (push_alone.polls, pull.polls):
        assert 1 < max(polls) <= 50, polls
    sender.close(timeout=1.5)
    receiver.close()
    [linger] = push_alone.lingers
    assert 1000 < linger <= 1500
    assert pull.lingers == [0]
    push.close(linger=0)


def test_room_that_comes_in_time_is_used(context: zmq.Context[Any]) -> None:
    push = context.socket(zmq.PUSH)
    push.bind("inproc://late")
    pull = context.socket(zmq.PULL)
    joining = threading.Timer(0.05, pull.connect, ["inproc://late"])
    joining.start()
    with PayloadSender(push) as sender, PayloadReceiver(pull) as receiver:
        sender.send("late", timeout=5)
        assert receiver.receive().value == "late"
    joining.join(5)
    assert not joining.is_alive()


def test_a_router_says_that_it_has_room_though_the_peer_has_none(context: zmq.Context[Any]) -> None:
    """A ROUTER polls as writable while some peer has room; the waiting must end all the same."""
    router = context.socket(zmq.ROUTER)
    router.sndhwm = 1
    router.router_mandatory = True
    router.rcvtimeo = 5_000
    router.bind("inproc://room")
    dealers = [context.socket(zmq.DEALER) for _ in range(2)]
    for dealer in dealers:
        dealer.rcvhwm = 1
        dealer.connect("inproc://room")
        dealer.send(b"hello")
    prefix = [router.recv_multipart()[0]]
    router.recv_multipart()
    sender = PayloadSender(router)
    for _ in range(2):
        sender.send("fits", timeout=0, prefix=prefix)
    assert router.poll(0, zmq.POLLOUT)
    with pytest.raises(QuiesceTimeout):
        sender.send("does not fit", timeout=0.05, prefix=prefix)
    sender.close(0)


def test_a_socket_or_context_closed_by_others_is_closed(context: zmq.Context[Any]) -> None:
    for close in ("socket", "context"):
        own = zmq.Context()
        push, pull = own.socket(zmq.PUSH), own.socket(zmq.PULL)
        push.bind("inproc://closed")
        pull.connect("inproc://closed")
        sender, receiver = PayloadSender(push), PayloadReceiver(pull)
        ending = threading.Thread(target=own.term)
        if close == "socket":
            push.close(linger=0)
            pull.close(linger=0)
        else:
            ending.start()
            pull.rcvtimeo = 5_000
            with pytest.raises(zmq.ContextTerminated):
                pull.recv()
        with pytest.raises(Closed, match="message 1"):
            sender.send(1)
        with pytest.raises(Closed):
            receiver.receive(0)
        receiver.close()
        with contextlib.suppress(zmq.ZMQError):
            sender.close(0)
        if close == "context":
            ending.join(10)
            assert not ending.is_alive()
        else:
            own.term()


def test_touching_leaves_a_send_in_progress_alone(context: zmq.Context[Any]) -> None:
    """A socket is for one thread at a time; the send looks at it anyway, and the touch does not wait for it."""
    push, pull = joined(context)
    looked: list[str] = []

    def observer(event: events.Event) -> None:
        if event.action == "Touch":
            looked.append(event.phase)
        if event.action == "SendPart" and event.phase == "begin":
            thread = threading.Thread(target=sender.touch)
            thread.start()
            thread.join(10)
            assert not thread.is_alive()

    with PayloadSender(push) as sender, PayloadReceiver(pull), events.observe(observer):
        sender.send(1)
        assert not looked
        sender.touch()
        assert looked == ["begin", "end"]


def test_a_call_waits_for_another_threads_no_longer_than_it_says(context: zmq.Context[Any]) -> None:
    push, pull = joined(context)
    errors: list[BaseException] = []

    def late() -> None:
        try:
            sender.send(2, timeout=0.05)
        except QuiesceTimeout as error:
            errors.append(error)

    def observer(event: events.Event) -> None:
        if event.action == "SendPart" and event.phase == "begin" and not errors:
            thread = threading.Thread(target=late)
            thread.start()
            thread.join(10)

    with PayloadSender(push) as sender, PayloadReceiver(pull):
        with events.observe(observer):
            sender.send(1)
        assert len(errors) == 1
        assert "another thread" in str(errors[0])


def test_a_call_from_within_a_call_is_refused(context: zmq.Context[Any]) -> None:
    """As a signal handler or a finalizer might make it: its parts would stand among those of the other message."""
    push, pull = joined(context)
    refused: list[QuiesceError] = []

    def observer(event: events.Event) -> None:
        if event.action == "SendPart" and event.phase == "begin" and not refused:
            with pytest.raises(QuiesceError, match="signal handler") as caught:
                sender.send("nested")
            refused.append(caught.value)

    with PayloadSender(push) as sender, PayloadReceiver(pull) as receiver:
        with events.observe(observer):
            sender.send([1, full(LARGE)])
        assert receiver.receive().value[0] == 1
        assert refused


@pytest.mark.parametrize("phase", ["begin", "end"])
def test_a_loan_survives_an_exception_after_the_last_part(context: zmq.Context[Any], phase: str) -> None:
    push, pull = joined(context)

    def observer(event: events.Event) -> None:
        if event.action == "Remember" and event.phase == phase:
            raise Signal

    with PayloadSender(push) as sender, PayloadReceiver(pull) as receiver:
        with events.observe(observer), pytest.raises(Signal):
            sender.lend([full(LARGE)])
        assert len(sender.loans) == 1
        received = receiver.receive()
        assert not sender.loans[0].done
        del received
        for loan in sender.loans:
            loan.wait(5)


@pytest.mark.parametrize("timeout", [-1, -0.001, float("nan"), float("inf"), None, "1"])
def test_a_timeout_must_be_a_finite_number_of_seconds(context: zmq.Context[Any], timeout: Any) -> None:
    push, pull = joined(context)
    with PayloadSender(push) as sender, PayloadReceiver(pull) as receiver:
        for call in (sender.close, receiver.receive, lambda timeout: sender.send(1, timeout=timeout)):
            with pytest.raises(ValueError, match=f"timeout is {timeout!r}; give a finite"):
                call(timeout)
        sender.send("still open")
        assert receiver.receive().value == "still open"


def test_many_open_loans_do_not_pile_up_behind_the_oldest(context: zmq.Context[Any]) -> None:
    push, pull = joined(context)
    with PayloadSender(push) as sender, PayloadReceiver(pull) as receiver:
        sender.lend([full(LARGE)])
        oldest = receiver.receive()
        for _ in range(200):
            sender.send(0)
            sender.lend([full(LARGE)])
            receiver.receive()
            receiver.receive()
        assert len(sender._loans) < 20
        del oldest


@pytest.mark.parametrize("kind", [zmq.REQ, zmq.REP])
def test_sockets_that_cannot_end_a_cut_message_are_refused(context: zmq.Context[Any], kind: int) -> None:
    with pytest.raises(ValueError, match="DEALER"):
        PayloadSender(context.socket(kind))


class ImpatientSender(PayloadSender):
    """Closes without waiting when its block is left."""

    def close(self, timeout: float = 0.0) -> None:
        super().close(timeout)


@pytest.mark.parametrize("error", [None, Signal()])
def test_leaving_the_block_reports_memory_still_read_unless_an_error_is_under_way(
    context: zmq.Context[Any], error: Signal | None
) -> None:
    push, pull = joined(context)
    sender, receiver = ImpatientSender(push), PayloadReceiver(pull)
    loan = sender.lend([full(LARGE)])
    held = receiver.receive()

    def leave() -> None:
        with sender:
            if error:
                raise error

    with pytest.raises(Signal if error else NotQuiescent):
        leave()
    # Closed or not, the loan goes on.
    with pytest.raises(QuiesceTimeout):
        loan.wait(0)
    del held
    loan.wait(5)


def test_closing_without_lingering_gives_libzmq_time_to_let_go(context: zmq.Context[Any]) -> None:
    push = context.socket(zmq.PUSH)
    push.connect("tcp://127.0.0.1:9")
    sender = PayloadSender(push)
    loans = [sender.lend([full(LARGE), {"pad": bytes(LARGE)}]) for _ in range(10)]
    sender.close(timeout=0)
    assert all(loan.done for loan in loans)


def test_payload_memory_that_a_receiver_holds_is_reported_at_closing(context: zmq.Context[Any]) -> None:
    push, pull = joined(context)
    sender = PayloadSender(push)
    sender.send([full(LARGE)])
    held = PayloadReceiver(pull).receive()
    sender.lend([full(LARGE)])
    with pytest.raises(
        NotQuiescent, match=r"closing: 1 buffer\(s\), 1 loan\(s\), the first of message 2\. A rec"
    ):
        sender.close(0)
    del held


@pytest.mark.parametrize("call", ["send", "lend", "settle"])
def test_nothing_is_done_with_a_closed_sender(context: zmq.Context[Any], call: str) -> None:
    push, _ = joined(context)
    sender = PayloadSender(push)
    sender.close()
    with pytest.raises(Closed, match="this sender was closed"):
        getattr(sender, call)(*([] if call == "settle" else ["too late"]))


def test_a_receiver_is_closed_between_two_calls_of_another_thread(context: zmq.Context[Any]) -> None:
    """libzmq takes a socket that one thread closes below another's call for memory, and the process ends."""
    _, pull = joined(context)
    receiver = PayloadReceiver(pull)
    ended: list[type] = []

    def receive() -> None:
        with pytest.raises(QuiesceTimeout) as caught:
            receiver.receive(0.5)
        ended.append(caught.type)

    thread = threading.Thread(target=receive)
    thread.start()
    deadline = time.monotonic() + 10
    while not pull.polls and time.monotonic() < deadline:
        time.sleep(0.001)
    receiver.close()
    thread.join(10)
    assert ended == [QuiesceTimeout]
    with pytest.raises(Closed):
        receiver.receive(0)


def test_what_was_waited_for_another_thread_counts(context: zmq.Context[Any]) -> None:
    push, pull = joined(context)
    sender = PayloadSender(push)
    pull.close(linger=0)
    push.ready = True  # so that it tries for as long as it may, and is refused

    begun = threading.Event()
    thread = threading.Thread(
        target=lambda: sender._turns.take(5, lambda: begun.set() or time.sleep(0.3))  # type: ignore[func-returns-value]
    )
    thread.start()
    assert begun.wait(10)
    with pytest.raises(QuiesceTimeout):
        sender.send(1, timeout=0.5)
    assert push.polls
    assert max(push.polls) <= 200
    sender.close(0)


def test_closing_has_one_limit_for_the_turn_and_for_what_is_queued(context: zmq.Context[Any]) -> None:
    push, _ = joined(context)
    sender = PayloadSender(push)
    begun = threading.Event()
    thread = threading.Thread(
        target=lambda: sender._turns.take(5, lambda: begun.set() or time.sleep(0.3))  # type: ignore[func-returns-value]
    )
    thread.start()
    assert begun.wait(10)
    sender.close(timeout=20.0)
    thread.join(10)
    [linger] = push.lingers
    assert linger <= 19_800


def test_a_private_copy_is_let_go_when_it_was_read(context: zmq.Context[Any]) -> None:
    """What a tensor with gaps was copied to is no part of the buffer, and not kept with it on the free list."""
    push, pull = joined(context)
    with PayloadSender(push) as sender, PayloadReceiver(pull) as receiver:
        sender.lend([full(2 * LARGE).view(-1, 2)[:, 0].repeat(4)[::2]])
        assert max(view.nbytes for view in sender.pool._pending[0][0]._views) > LARGE
        receiver.receive()
        deadline = time.monotonic() + 10
        while sender.pool.pending and time.monotonic() < deadline:
            sender.settle()
        assert sender.pool.free == 1
        assert sender.pool._free[0]._views == []


def test_a_loan_that_is_looked_at_while_it_ends_is_done() -> None:
    """By another thread, say: the sender forgets what was refused in between."""
    loan = Loan("memory")

    class Forgotten:
        @property
        def done(self) -> bool:
            loan.clear()
            return False

    loan.add(Forgotten(), None)
    assert loan.done
    assert loan.done
