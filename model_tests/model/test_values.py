"""Values survive the way to TLA+ text and back, and what has no counterpart is refused."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quiesce.model.errors import ModelError
from quiesce.model.values import Function, ModelValue, State, freeze, parse, parse_state, show

scalars = (
    st.booleans()
    | st.integers(-(2**31), 2**31 - 1)
    | st.text(max_size=6)
    | st.builds(ModelValue, st.sampled_from("abc"))
)
fields = st.text("abc", min_size=1, max_size=3)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3).map(tuple)
        | st.frozensets(inner, max_size=3)
        | st.dictionaries(fields, inner, min_size=1, max_size=3).map(Function)
        | st.dictionaries(inner, inner, min_size=1, max_size=3).map(freeze)
    ),
    max_leaves=12,
)


@given(values)
def test_every_value_can_be_read_back_from_its_text(value: object) -> None:
    assert parse(show(value)) == value
    assert hash(parse(show(value))) == hash(value)


@given(values)
def test_freezing_changes_no_frozen_value(value: object) -> None:
    assert freeze(value) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1..3", frozenset({1, 2, 3})),
        ("<<>>", ()),
        ("(1 :> 7 @@ 2 :> 8)", (7, 8)),
        ("(0 :> 7 @@ 1 :> 8)", Function({0: 7, 1: 8})),
        ('[kind |-> "a", more |-> {TRUE}]', Function(kind="a", more=frozenset({True}))),
        ("{<<1, p1>>}", frozenset({(1, ModelValue("p1"))})),
        ("{1, 2} \\X {3}", frozenset({(1, 3), (2, 3)})),
        ("<< [a |-> 1],\n   [a |-> 2] >>", (Function(a=1), Function(a=2))),
        ('"a \\"quoted\\" \\\\ text"', 'a "quoted" \\ text'),
    ],
)
def test_what_tlc_prints_is_read(text: str, value: object) -> None:
    assert parse(text) == value


@pytest.mark.parametrize(
    "text", ["", "{1", "<<1>> 2", "[a |-> ]", "SUBSET {1}", "[x \\in S |-> x]", "(1 :> 2", "1 +"]
)
def test_what_is_no_value_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(ModelError, match="cannot read the TLA\\+ value"):
        parse(text)


def test_a_model_value_is_not_the_string_of_its_name() -> None:
    assert ModelValue("p1") != "p1"
    assert len({ModelValue("p1"), "p1"}) == 2


def test_a_float_has_no_counterpart() -> None:
    with pytest.raises(ModelError, match=r"2.5 \(float\) has no TLA\+ counterpart"):
        freeze({"a": [2.5]})


def test_plain_python_values_are_frozen_at_any_depth() -> None:
    frozen = freeze({"log": [{1, 2}], "at": {1: "a", 2: "b"}})
    assert frozen == Function(log=(frozenset({1, 2}),), at=("a", "b"))
    assert hash(frozen)


def test_functions_are_immutable_mappings_and_can_be_pickled() -> None:
    function = Function({0: "a"}, b=1)
    assert function == {0: "a", "b": 1}
    assert pickle.loads(pickle.dumps(function)) == function
    with pytest.raises(TypeError):
        function[0] = "b"  # type: ignore[index]


def test_a_state_is_read_from_one_equation_or_several() -> None:
    assert parse_state("x = 1") == State(x=1)
    assert parse_state('/\\ x = <<1,\n   2>>\n/\\ y = "/\\\\ z = 3"') == State(x=(1, 2), y="/\\ z = 3")
