"""The page says what the code says: the segment, the labels of synchronisation, the actions."""

from __future__ import annotations

import re
from pathlib import Path

from quiesce import broadcast_ring, events, ring_memory, ring_reader, ring_wire, ring_writer
from quiesce.broadcast_ring import BroadcastRing
from quiesce.ring_memory import Layout
from quiesce.ring_reader import RingReader, _Releaser

PAGE = (Path(__file__).parents[2] / "docs" / "broadcast_ring.md").read_text(encoding="utf-8")


def section(name: str) -> str:
    found = re.search(rf"<!-- {name}: begin -->\n(.*?)<!-- {name}: end -->", PAGE, re.DOTALL)
    assert found
    return found[1]


def segment() -> str:
    memory, line = ring_memory, ring_memory.LINE
    one, two = Layout(1, 3, 2, 1 << 20), Layout(2, 3, 2, 1 << 20)
    assert one.rank_at(0) == memory.RANKS_AT
    assert two.entries_at - one.entries_at == one.rank_bytes
    assert one.rank_bytes == memory.NOTICE_RING_AT + line
    assert one.slots_at % 4096 == 0
    rows = [
        (
            "0",
            f"{memory._HEADER.size}",
            "header: magic, version, ranks, slots, window, slot bytes, writer, digest",
        ),
        (f"{memory.DOORBELL_AT}", f"{line}", "doorbell, a semaphore: a reader has told something"),
        (f"{memory.RANKS_AT}", "ranks * rank bytes", "for each rank"),
        (f"  + {memory.POSTS_AT}", f"{line}", "  posts, a semaphore: messages to open"),
        (f"  + {memory.PASSED_AT}", f"{line}", "  passed, a semaphore: messages opened"),
        (f"  + {memory.NOTICES_AT}", f"{line}", "  notices, a semaphore: releases and leaving"),
        (f"  + {memory.LEFT_AT}", f"{line}", "  the number up to which a reader that left opened"),
        (
            f"  + {memory.NOTICE_RING_AT}",
            "4 * (slots + 1)",
            f"  the ring of notices: slots, or {ring_writer.LEFT:#x} for leaving; to a multiple of {line}",
        ),
        (
            "then",
            f"window * {memory.ENTRY_BYTES}",
            "entries: number, kind and slot, offset of the table, number of frames",
        ),
        ("then, at a page", "slots * slot bytes", "slots"),
        (
            "  + 0",
            "16 * frames",
            f"  table: offset and length of each frame; then the frames, each at a multiple of {line}",
        ),
        (
            f"  + {ring_writer.LOAN_AT}",
            "",
            "  a tensor made by empty; table and pickle go before or after it",
        ),
    ]
    lines = [f"{a:<21}{b:<21}{c}" for a, b, c in [("offset", "bytes", "what"), *rows]]
    return "```\n" + "\n".join(lines) + "\n```\n"


def test_segment() -> None:
    assert section("segment") == segment()


def test_labels() -> None:
    sources = [
        Path(module.__file__ or "").read_text()
        for module in (broadcast_ring, ring_memory, ring_reader, ring_wire, ring_writer)
    ]
    labels = {label for source in sources for label in re.findall(r"# .*?SYNC\((\w+\.\w+)\)", source)}
    assert set(re.findall(r"`([^`]+)`", section("labels"))) == labels


def test_actions() -> None:
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| (.+?) \|", PAGE[: PAGE.index("## What is")], re.MULTILINE)
    named = {action for actions, _ in rows for action in re.findall(r"\w+", actions)}
    spec = (Path(__file__).parents[2] / "spec" / "BroadcastRing.tla").read_text(encoding="utf-8")
    after = spec[spec.index("WriterNext ==") : spec.index("Safety == Init")]
    actions = set(re.findall(r"\\/ (?:\\E [^:]+: )?(\w+)", after)) - {"WriterNext", "Done"}
    assert named == actions
    coded = {**events.actions(BroadcastRing), **events.actions(RingReader), **events.actions(_Releaser)}
    for action, method in coded.items():
        names = {action} if action in actions else {f"Begin{action}", f"End{action}"}
        assert names <= actions
        assert method in PAGE
