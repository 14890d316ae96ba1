"""Work shared out among threads, all of which stop when one of them fails or Ctrl-C is pressed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def each(work: Callable[[T, threading.Event], R], items: Iterable[T], jobs: int) -> list[R]:
    """What `work(item, stop)` returns for each item, in their order, `jobs` of them at a time.

    Whoever works has to end soon after `stop` is set, in whatever way: what it returns or raises then is not heard.
    """
    stop = threading.Event()
    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(work, item, stop) for item in items]
        try:
            return [future.result() for future in futures]
        except BaseException:
            stop.set()
            for future in futures:
                future.cancel()
            raise
