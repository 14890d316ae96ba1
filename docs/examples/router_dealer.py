"""ROUTER and DEALER: a server answers several clients, each by its routing id, over one reusing sender."""

from __future__ import annotations

import tempfile
import threading

import torch
import zmq

from quiesce.payload_receiver import PayloadReceiver
from quiesce.payload_reuse import PayloadSender

CLIENTS, REQUESTS = 3, 5


def client(endpoint: str, number: int, answers: dict[int, list[float]]) -> None:
    """Ask for sums, and take the answers in order."""
    dealer = zmq.Context().socket(zmq.DEALER)
    dealer.connect(endpoint)
    # The receiver first: both use one socket, which the sender closes when it is left.
    receiver = PayloadReceiver(dealer)
    with PayloadSender(dealer) as sender:
        for request in range(REQUESTS):
            sender.send({"numbers": torch.full((50_000,), float(number + request))}, timeout=30)
            answers[number].append(receiver.receive(timeout=30).value["mean"])


def main() -> None:
    """Serve all requests of all clients, from one thread, which alone uses the socket."""
    answers: dict[int, list[float]] = {number: [] for number in range(CLIENTS)}
    with tempfile.TemporaryDirectory() as folder:
        endpoint = f"ipc://{folder}/sums"
        router = zmq.Context().socket(zmq.ROUTER)
        router.bind(endpoint)
        threads = [
            threading.Thread(target=client, args=(endpoint, n, answers), daemon=True) for n in range(CLIENTS)
        ]
        for thread in threads:
            thread.start()
        receiver = PayloadReceiver(router, prefix=1)  # a ROUTER puts the routing id in front
        with PayloadSender(router) as sender:
            for _ in range(CLIENTS * REQUESTS):
                request = receiver.receive(timeout=30)
                answer = {"mean": float(request.value["numbers"].mean())}
                sender.send(answer, prefix=request.prefix, timeout=30)
            for thread in threads:
                thread.join(60)
    for number, means in answers.items():
        assert means == [float(number + request) for request in range(REQUESTS)]
    print(f"{CLIENTS} clients got {REQUESTS} answers each")


if __name__ == "__main__":
    main()
