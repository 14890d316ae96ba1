"""The fence table: how verdicts are read, that the page is up to date, that labels and specification agree."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from quiesce.model import fences, paths
from quiesce.model.config import Config
from quiesce.model.errors import ModelError
from quiesce.model.fences import Archive, Question, digest, every, on, read_verdicts, written

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "memory_order.md"
SYNC = re.compile(r"#.*?\bSYNC\((\w+\.\w+)\)")
RELEASES, ACQUIRES = (".post(",), (".wait(", ".try_wait(", ".spin(")


def sets(*names: str) -> set[frozenset[str]]:
    return {frozenset(name.split()) for name in names}


def test_a_set_that_was_never_seen_to_end_is_an_error() -> None:
    with pytest.raises(ModelError, match="no verdict on 1 sets"):
        read_verdicts(['<<"completes", {"a"}>>'], sets("a", "b"))


def test_a_larger_violated_set_violates_smaller_ones_and_violation_wins() -> None:
    lines = ['<<"completes", {"a"}>>', '<< "violated",', '   {"a", "b"} >>', '<<"completes", {"c"}>>']
    answer = read_verdicts(lines, sets("", "a", "a b", "c"))
    assert answer.safe == sets("c")
    assert answer.violated == sets("", "a", "a b")


def test_least_and_largest() -> None:
    lines = [f'<<"completes", {{{names}}}>>' for names in ('"a", "b"', '"b"', '"c", "b"')]
    answer = read_verdicts([*lines, '<<"violated", {"a"}>>'], sets("", "a", "b", "a b", "b c"))
    assert set(answer.least()) == sets("b")
    assert set(answer.largest()) == sets("a")


def test_the_page_is_up_to_date() -> None:
    """Whoever changes the specification makes the tables anew: make fence-table."""
    assert f"{fences.BEGIN} {digest()} -->" in PAGE.read_text()


def test_a_page_without_the_marks_is_refused() -> None:
    with pytest.raises(ModelError, match="no part"):
        written("# nothing here", "table", "digest")


def test_answers_are_kept_until_something_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    question = on(every("doorbell", "arm", "full_fence", True), sets("", "doorbell_post doorbell_wait"))
    archive = Archive(tmp_path)
    first = archive.ask(question)
    assert (archive.runs, archive.ask(question), archive.runs) == (1, first, 1)
    assert first.safe == sets("doorbell_post doorbell_wait")
    monkeypatch.setattr(fences, "digest", lambda: "changed")
    changed = Archive(tmp_path)
    assert (changed.ask(question), changed.runs) == (first, 1)


def some_sets() -> set[frozenset[str]]:
    four = {"before_reset", "before_mark", "before_copy", "before_done"}
    five = {"before_fill", "before_mark", "before_check", "before_copy", "before_done"}
    enough = [frozenset(four), frozenset(five)]
    return {*enough, *(s - {x} for s in enough for x in s), fences.FIELD_FOUR, fences.FIELD_FIVE}


def test_the_minimal_sets_of_the_page_are_minimal_and_the_field_s_are_not_enough() -> None:
    answer = Archive(None).ask(on(every("flags", "arm", "full_fence", True), some_sets()))
    assert {len(s) for s in answer.safe} == {4, 5}
    assert len(answer.safe) == 2
    row = next(
        line
        for line in PAGE.read_text().splitlines()
        if line.startswith("| full fence") and "ARMv8 |" in line
    )
    for least in answer.safe:
        assert " + ".join(f"`{x}`" for x in fences.POSITIONS["flags"] if x in least) in row


@pytest.mark.parametrize(
    ("ring", "model"), [("semaphores", "arm"), ("semaphores", "tso"), ("flags", "tso"), ("flags", "sc")]
)
def test_what_needs_nothing_on_x86_may_need_all_on_arm(ring: str, model: str) -> None:
    question = every(ring, model, "full_fence", False, slots=2 if ring == "semaphores" else 1)
    nothing, everything = frozenset[str](), frozenset(fences.POSITIONS[ring])
    answer = Archive(None).ask(on(question, {nothing, everything}))
    assert answer.safe == ({everything} if model == "arm" else {nothing, everything})


def labels_of(source: str) -> list[tuple[str, str]]:
    """Every label, with the code that it stands on; a comment of its own speaks of the line after it."""
    lines = source.splitlines()
    found = []
    for number, line in enumerate(lines):
        if match := SYNC.search(line):
            code = line.split("#")[0].strip() or lines[number + 1].strip()
            found.append((match[1], code))
    return found


def ring_sources() -> dict[str, str]:
    package = ROOT / "impl" / "quiesce"
    return {name: (package / name).read_text() for name in ("ring_writer.py", "ring_reader.py")}


def specified_labels() -> set[str]:
    text = (paths.spec_directory() / "RingMemory.tla").read_text()
    named = dict(
        re.findall(r"^(WriterCalls|ReaderCalls|DoorbellCalls|Outside)\s*== \{([^}]*)\}", text, re.MULTILINE)
    )
    assert len(named) == 4
    return {name.replace("_", ".") for names in named.values() for name in re.findall(r'"(\w+)"', names)}


def test_labels_in_the_code_are_those_of_the_specification() -> None:
    found = {label for source in ring_sources().values() for label, _ in labels_of(source)}
    assert found == specified_labels()


def test_labels_stand_on_calls_that_order_as_the_specification_says() -> None:
    """A `post` releases, a `wait` acquires, both on a process-shared semaphore; a `send` is the socket's."""
    for name, source in ring_sources().items():
        for label, code in labels_of(source):
            kind = label.split(".")[1]
            expected = {"post": RELEASES, "wait": ACQUIRES, "send": ("_say(", "send")}[kind]
            assert any(call in code for call in expected), (name, label, code)


def test_every_semaphore_call_of_the_ring_is_labelled() -> None:
    """A call that synchronises without a label is one that the specification does not know."""
    call = re.compile(r"\b(?:posts|passed|notices|doorbell)\.(?:post|wait|try_wait|spin)\(")
    for name, source in ring_sources().items():
        for number, line in enumerate(source.splitlines(), 1):
            if call.search(line.split("#")[0]):
                assert SYNC.search(line), f"{name}:{number} synchronises without a label: {line.strip()}"


def test_dropping_or_renaming_a_label_is_noticed() -> None:
    source = ring_sources()["ring_reader.py"]
    assert labels_of(source) != labels_of(source.replace("SYNC(pass.post)", ""))
    assert labels_of(source.replace("SYNC(pass.post)", "SYNC(pass.wait)")) != labels_of(source)


def test_a_question_names_its_constants() -> None:
    question = Question("flags", "arm", "lock", True, 2, 1, 1, 0, 2, (("before_mark",),))
    constants = question.constants()
    assert constants["PositionSets"] == '{{"before_mark"}}'
    config = Config.parse((paths.spec_directory() / "models" / "MCFenceTable.cfg").read_text())
    assert set(constants) <= set(config.constants)
    assert replace(question, sets=None).constants()["PositionSets"] == "<- EverySet"


def test_an_unknown_mechanism_is_no_table() -> None:
    with pytest.raises(ModelError, match="gave no table"):
        Archive(None).ask(on(every("flags", "arm", "magic", True), sets("before_mark")))
