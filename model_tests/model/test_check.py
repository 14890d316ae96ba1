"""`quiesce check`: what is pinned holds, what is not as pinned fails, and each failure says what to do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from quiesce.model import check, judge, manifest
from quiesce.model.command import select
from quiesce.model.errors import ModelError, UnknownName

Write = Callable[..., Path]
ENDLESS = """
[[model]]
name = "post"
protocol = "endless"
module = "Endless"
config = "Endless.cfg"
proves = "nothing, for ever"
"""


def run(*arguments: str, path: Path) -> subprocess.CompletedProcess[str]:
    """Run the command without a terminal, as CI does."""
    command = [sys.executable, "-m", "quiesce.cli", "check", "--manifest", str(path), *arguments]
    environment = {**os.environ, "COLUMNS": "200"}
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=environment)


def test_all_as_pinned_exits_with_0_and_shows_what_a_reviewer_reads(write_manifest: Write) -> None:
    done = run(path=write_manifest())
    assert done.returncode == 0, done.stdout + done.stderr
    for text in (
        "no letter is lost",
        "134",
        "a plain letter is thrown away",
        "NothingLost",
        "holds",
        "caught",
    ):
        assert text in done.stdout
    assert "post: holds" in done.stderr
    assert "lose: caught" in done.stderr


def test_a_run_ends_with_a_line_that_sums_it_up(write_manifest: Write) -> None:
    done = run("post", path=write_manifest())
    assert done.stdout.splitlines()[-1] == "models: 1 of 1 hold; mutants: 1 of 1 are caught"
    done = run("lose", path=write_manifest(('"NothingLost"\ndepth = 4', '"NothingLost"\ndepth = 5')))
    assert done.stdout.splitlines()[-1] == "mutants: 0 of 1 are caught"


def test_a_protocol_is_all_its_models_of_that_size_and_their_mutants() -> None:
    known = manifest.load()
    names = [entry.name for entry in select(known, ["payload_reuse"], large=False)]
    of = [model for model in known.models.values() if model.protocol == "payload_reuse"]
    assert {"payload_reuse_stream", "last_frame_tracker"} <= set(names)
    small = {model.name for model in of if model.size == manifest.SMALL}
    assert set(names) == small | {m.name for m in known.mutants.values() if m.model in small}
    assert len(names) == len(set(names))
    large = {entry.name for entry in select(known, ["payload_reuse"], large=True)}
    assert large & {model.name for model in of} == {model.name for model in of} - small
    with pytest.raises(UnknownName, match="did you mean"):
        select(known, ["payload_reus"], large=False)


def test_json_has_every_number_and_the_counterexample(write_manifest: Write) -> None:
    done = run("--json", "post", path=write_manifest())
    model, mutant = json.loads(done.stdout)
    assert (model["name"], model["verdict"], model["distinct"], model["depth"]) == ("post", "holds", 134, 13)
    assert model["coverage"] == {"Read": 116, "Send": 78, "Deliver": 1, "Done": 1}
    assert (mutant["name"], mutant["violated"]) == ("lose", "NothingLost")
    assert [step["action"] for step in mutant["counterexample"]["steps"]] == [
        "Init",
        "Send",
        "Deliver",
        "Read",
    ]
    assert done.stderr == ""


def test_what_is_not_as_pinned_exits_with_1(write_manifest: Write) -> None:
    done = run("post", path=write_manifest(("distinct = 134", "distinct = 135"), ("depth = 13\n", "")))
    assert done.returncode == 1
    assert "post: distinct: expected 135, seen 134" in done.stdout
    assert "post: depth is not pinned; seen 13 (quiesce check --pin writes it)" in done.stdout
    assert "lose: caught" in done.stderr


@pytest.mark.parametrize(
    ("replacement", "message"),
    [
        (("depth = 13\n", "depth = 12\n"), "depth: expected 12, seen 13"),
        (
            ('"NothingLost"\ndepth = 4', '"NothingLost"\ndepth = 5'),
            "depth of the counterexample: expected 5, seen 4",
        ),
        (
            ('violates = "NothingLost"', 'violates = "TypeOK"'),
            "survived: TypeOK still holds with Fault = 'lose'",
        ),
    ],
)
def test_each_deviation_is_told(replacement: tuple[str, str], message: str, write_manifest: Write) -> None:
    found = manifest.load(write_manifest(replacement))
    entry = found.find("post" if "depth = 13" in replacement[0] else "lose")
    assert judge(entry, check(entry, manifest=found)).problems == (message,)


@pytest.mark.parametrize(
    ("replacement", "message"),
    [
        (('Never = "there to be vacuous", ', ""), "the action Never is never taken"),
        (
            ("untaken = {", 'untaken = { Count = "why",'),
            "the action Count is taken, but `untaken` gives a reason",
        ),
        (("untaken = {", 'untaken = { Cuont = "why",'), "no action is called 'Cuont'; did you mean 'Count'"),
    ],
)
def test_a_vacuous_action_needs_a_reason_and_a_reason_a_vacuous_action(
    replacement: tuple[str, str], message: str, write_manifest: Write
) -> None:
    found = manifest.load(write_manifest(replacement))
    judgement = judge(found.models["failing"], check("failing", manifest=found))
    assert len(judgement.problems) == 1
    assert message in judgement.problems[0]


def test_a_mutant_caught_by_something_else_is_a_failure(write_manifest: Write) -> None:
    text = '[[mutant]]\nname = "lasso"\nprotocol = "failing"\nmodel = "failing"\nbug = "b"\nviolates = "Deadlock"\n'
    path = write_manifest()
    path.write_text(path.read_text() + text)
    found = manifest.load(path)
    judgement = judge(found.mutants["lasso"], check("lasso", manifest=found))
    assert judgement.problems == ("survived: Deadlock still holds with Fault = 'lasso'",)
    wrong = judge(found.mutants["lasso"], check("deadlock", manifest=found))
    assert wrong.good is False
    other = judge(found.mutants["lose"], check("deadlock", manifest=found))
    assert other.problems == ("expected NothingLost to be violated, but it was Deadlock",)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("psot", "did you mean 'post'"),
        ("los", "did you mean 'lose'"),
        ("zzz", "there are: deadlock, failing, lose"),
    ],
)
def test_an_unknown_name_exits_with_2_and_offers_the_nearest(
    name: str, message: str, write_manifest: Write
) -> None:
    done = run(name, path=write_manifest())
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stdout == ""


def test_no_answer_from_tlc_exits_with_2(write_manifest: Write) -> None:
    path = write_manifest()
    (path.parent / "Post.tla").write_text("---- MODULE Post ----\nx ==\n====\n")
    config = path.parent / "MCFailing.cfg"
    config.write_text(config.read_text().replace("PROPERTIES", "PROPERTIES Unheard"))
    done = run("--json", "lose", "failing", path=path)
    assert done.returncode == 2
    problems = {entry["name"]: " ".join(entry["problems"]) for entry in json.loads(done.stdout)}
    assert "no answer (parse)" in problems["lose"]
    assert "no answer (config): The property Unheard" in problems["failing"]
    assert problems["deadlock"] == ""


def test_a_run_may_not_take_for_ever(write_manifest: Write) -> None:
    done = run("--timeout", "0.2", "lose", path=write_manifest())
    assert done.returncode == 3
    assert "no verdict after 0.2 s" in done.stdout


def test_pinning_writes_the_numbers_and_keeps_the_rest(write_manifest: Write) -> None:
    path = write_manifest(
        ("distinct = 134  # pinned\ndepth = 13\n", "distinct = 7  # pinned\n"),
        ('violates = "NothingLost"\ndepth = 4\n', 'violates = "NothingLost"\n'),
    )
    before = path.read_text()
    done = run("--pin", "post", path=path)
    assert "pinned in" in done.stderr
    assert path.read_text() == before.replace(
        "distinct = 7  # pinned\n", "distinct = 134  # pinned\ndepth = 13\n"
    ).replace('violates = "NothingLost"\n', 'violates = "NothingLost"\ndepth = 4\n')
    assert run("post", path=path).returncode == 0


def test_pinning_does_not_pin_what_is_wrong(write_manifest: Write) -> None:
    path = write_manifest(('violates = "NothingLost"\ndepth = 4', 'violates = "TypeOK"\ndepth = 4'))
    before = path.read_text()
    assert run("--pin", "lose", path=path).returncode == 1
    assert path.read_text() == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_command_leaves_nothing(number: int, write_manifest: Write, tmp_path: Path) -> None:
    path = write_manifest(text=ENDLESS)
    (path.parent / "Endless.cfg").write_text('INIT Init\nNEXT Next\nCONSTANT Fault = "none"\n')
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    command = [sys.executable, "-m", "quiesce.cli", "check", "--manifest", str(path), "post"]
    environment = {**os.environ, "TMPDIR": str(scratch)}
    process = subprocess.Popen(
        command,
        env=environment,
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        # A shell that starts the tests in the background leaves SIGINT ignored, which is inherited.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        deadline = time.monotonic() + 60
        while not list(scratch.glob("quiesce-tlc-*/meta")):
            assert time.monotonic() < deadline, "TLC did not start"
            time.sleep(0.05)
        process.send_signal(number)
        assert process.wait(60) == 128 + number
    finally:
        process.kill()
    assert list(scratch.glob("quiesce-*")) == []


def test_a_wrong_manifest_says_where(write_manifest: Write) -> None:
    cases = {
        ('proves = "no letter is lost"\n', ""): "model post: proves is missing",
        ("distinct = 134", 'distinct = "134"'): "model post: distinct = '134', but it must be a number",
        ('name = "lose"', 'name = "post"'): "'post' is both a model and a mutant",
        ('name = "lose"', 'name = "Lose"'): "names are snake case",
        ('name = "deadlock"', 'name = "lose"'): "mutant lose: there are two of that name",
        ('model = "post"', 'model = "pots"'): "mutant lose: no model is called 'pots'; did you mean 'post'",
        ("depth = 13", "deptth = 13"): "model post: no key is called 'deptth'; did you mean 'depth'",
        ("depth = 13", 'depth = 13\nsize = "tiny"'): "size is 'tiny'; it must be 'small' or 'large'",
        ("[[mutant]]", "[[mutants]]"): "no table is called 'mutants'; did you mean 'mutant'",
        (
            'Never = "there to be vacuous"',
            'Never = ""',
        ): "untaken.Never = '', but it must be a string that says",
        ("depth = 13", "depth = "): "is not TOML",
    }
    for replacement, message in cases.items():
        with pytest.raises(ModelError) as caught:
            manifest.load(write_manifest(replacement))
        assert message in str(caught.value)
    with pytest.raises(ModelError, match="cannot read the manifest"):
        manifest.load(Path(tempfile.gettempdir(), "nowhere", "manifest.toml"))


def test_a_configuration_without_the_fault_is_an_error(write_manifest: Write) -> None:
    path = write_manifest()
    config = path.parent / "MCPost.cfg"
    config.write_text(config.read_text().replace('Fault = "none"', ""))
    with pytest.raises(UnknownName, match="no constant of the configuration is called 'Fault'"):
        check("lose", manifest=manifest.load(path))
