"""Configurations are read, rewritten and refused."""

from __future__ import annotations

import pytest

from quiesce.model.config import Config
from quiesce.model.errors import ModelError, UnknownName

TEXT = r"""
\* the protocol
SPECIFICATION Spec
CONSTANTS
    People = {p1, p2}  \* two are enough
    Shape <- Small (* an operator *)
    Low = -1
    Fault = "none"
INVARIANTS TypeOK Safe
PROPERTIES Live, Fair
SYMMETRY Perms
"""


def test_a_configuration_is_read_without_its_comments() -> None:
    config = Config.parse(TEXT)
    assert config.constants == {
        "People": "= { p1 , p2 }",
        "Shape": "<- Small",
        "Low": "= -1",
        "Fault": '= "none"',
    }
    assert config.invariants == ("TypeOK", "Safe")
    assert config.properties == ("Live", "Fair")


def test_what_is_written_reads_the_same() -> None:
    config = Config.parse(TEXT)
    assert Config.parse(config.text()) == config


def test_constants_are_overridden_by_values_and_operators() -> None:
    config = Config.parse(TEXT).override({"Fault": '"lose"', "Shape": "<- Large"})
    assert config.constants["Fault"] == '= "lose"'
    assert config.constants["Shape"] == "<- Large"
    with pytest.raises(UnknownName, match="did you mean 'People'"):
        config.override({"Peopel": "{}"})


def test_one_check_is_kept_or_none() -> None:
    config = Config.parse(TEXT)
    assert (config.only("Safe").invariants, config.only("Safe").properties) == (("Safe",), ())
    assert (config.only("Live").invariants, config.only("Live").properties) == ((), ("Live",))
    assert config.only(None).invariants + config.only(None).properties == ()
    with pytest.raises(UnknownName, match="is called 'Saef'; did you mean 'Safe'"):
        config.only("Saef")


def test_whole_sections_are_left_out() -> None:
    assert "SYMMETRY" not in Config.parse(TEXT).without(["symmetry"]).text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Spec", "begins with 'Spec'"),
        ("CONSTANT Fault", "assigns nothing"),
        ("CONSTANT Fault =", "has no value"),
        ("CONSTANT = 1", "no constant stands before"),
    ],
)
def test_nonsense_is_refused(text: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        Config.parse(text)
