"""Single values as DeepSpeed's lenient sections take them: held to pydantic itself, and to the limits of the schema."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from harness.checking.schema import Key
from harness.checking.schema.coercion import as_float, read
from harness.config.values.coercion import as_bool, as_int

READERS = {bool: as_bool, int: as_int, float: as_float}
ADAPTERS = {kind: TypeAdapter(kind) for kind in READERS}


def by_pydantic(kind: type, value: object) -> object:
    """What pydantic makes of a value; None where it refuses it."""
    try:
        return ADAPTERS[kind].validate_python(value)
    except ValidationError:
        return None


def is_same(ours: object, theirs: object) -> bool:
    both_nan = isinstance(ours, float) and isinstance(theirs, float) and math.isnan(ours) and math.isnan(theirs)
    return both_nan or (ours == theirs and type(ours) is type(theirs))


STATED = [
    *("1", "+1", "-0", "007", "1_000", "1__0", "_1", "1_", "1.", "1.0", "1_0.00", ".0", "1.5", "1e3", "0x10", "+-1"),
    *(
        " 1\t",
        "1 .0",
        "- 1",
        "",
        " ",
        "٣",
        "１",
        "\u20031",
        "on",
        "Off",
        "T",
        "yes",
        " true",
        "00",
        " 1_0",
        "inf",
        "-Infinity",
    ),
    *(
        "-Infinity",
        "nan",
        "1_0.5",
        "1_.5",
        "1e_5",
        "1e400",
        True,
        False,
        0,
        1,
        2,
        -1,
        0.0,
        1.0,
        1.5,
        -0.0,
        2.0**62,
        2.0**63,
        -(2.0**63),
        1e308,
    ),
    *(2**63, 10**400, -(10**400), None, [], {}),
]


@pytest.mark.parametrize("kind", READERS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("value", STATED, ids=lambda value: ascii(value)[:12])
def test_a_value_is_read_or_refused_as_pydantic_does(kind: type, value: object) -> None:
    ours, theirs = READERS[kind](value), by_pydantic(kind, value)
    assert is_same(ours, theirs), (ours, theirs)


NUMERALS = st.text("0123456789_+-. eEinfaN\t٣", max_size=7)


@settings(max_examples=150)
@given(st.sampled_from(list(READERS)), NUMERALS | st.integers() | st.floats() | st.sampled_from(["TRUE", "No", "y"]))
def test_any_numeral_is_read_as_pydantic_reads_it(kind: type, value: object) -> None:
    assume(not (isinstance(value, str) and re.search("0_*[-+]|0__", value)))  # pydantic reads "0-4" as -4
    assert is_same(READERS[kind](value), by_pydantic(kind, value))


def key(**spec: object) -> Key:
    return Key("key", dict(spec))


@pytest.mark.parametrize(
    ("spec", "value", "fault", "wanted"),
    [
        pytest.param({"type": "integer"}, "8", "converted", "a whole number", id="a number in quotes"),
        pytest.param({"type": "integer"}, True, "converted", "a whole number", id="a switch for a number"),
        pytest.param({"type": "integer"}, 5e8, "", "", id="a whole float"),
        pytest.param({"type": "integer"}, 0.5, "type", "a whole number", id="a fraction"),
        pytest.param({"type": "boolean"}, 1, "", "", id="1 for true"),
        pytest.param({"type": "boolean"}, "on", "converted", "true or false", id="a word for true"),
        pytest.param({"type": "boolean"}, 2, "type", "true or false", id="2 for true"),
        pytest.param({"type": ["integer", "null"]}, None, "", "", id="null where it may be"),
        pytest.param({"type": "integer"}, None, "type", "a whole number", id="null where it may not be"),
        pytest.param({"type": ["number", "string"]}, [], "type", "a number or a string", id="two types, none of them"),
        pytest.param({"type": "integer", "minimum": 1}, 0, "range", "at least 1", id="below the least"),
        pytest.param({"type": "integer", "minimum": 1}, 1, "", "", id="the least"),
        pytest.param({"type": "number", "exclusiveMinimum": 0}, 0.0, "range", "more than 0", id="an open border"),
        pytest.param({"type": "number", "exclusiveMinimum": 0}, 1e-300, "", "", id="just inside an open border"),
        pytest.param({"type": "number", "maximum": 1}, 1, "", "", id="the most"),
        pytest.param({"type": "number", "maximum": 1}, 1.0000001, "range", "at most 1", id="above the most"),
        pytest.param({"type": "number", "exclusiveMaximum": 1}, 1, "range", "less than 1", id="an open upper border"),
        pytest.param({"type": "string", "minLength": 1}, "", "range", "not empty", id="an empty word"),
        pytest.param({"type": "string", "enum": ["a", "b"]}, "c", "choice", "a or b", id="none of the choices"),
        pytest.param({"type": "string", "enum": ["a", "b"]}, "A", "choice", "a or b", id="another case"),
        pytest.param({"type": "string", "enum": ["a"], "x-case": "any"}, "A", "", "", id="any case"),
        pytest.param({"type": "integer", "enum": [0, 1]}, "x", "choice", "a whole number", id="a word for a choice"),
        pytest.param(
            {"type": "array", "items": {"type": "integer"}},
            [1, "2"],
            "type",
            "a list in which each item is a whole number",
            id="an item of another type",
        ),
        pytest.param({"type": "array", "items": {"type": "integer"}}, [], "", "", id="no item"),
        pytest.param({"type": "array", "x-items": ["a", "b"]}, ["a", "z"], "choice", "a list of a or b", id="items"),
        pytest.param({}, {"any": "thing"}, "", "", id="no type"),
    ],
)
def test_the_fault_of_a_value_and_what_is_wanted(spec: dict, value: object, fault: str, wanted: str) -> None:
    reading = read(key(**spec), value, pydantic=True)
    assert (reading.fault, reading.wanted) == (fault, wanted)


def test_a_plain_section_converts_no_string() -> None:
    number = key(type="integer")
    assert read(number, "8", pydantic=True).value == 8
    refused = read(number, "8", pydantic=False)
    assert (refused.value, refused.fault) == ("8", "type")
    exact = read(key(type="boolean", **{"x-exact": True}), "true", pydantic=True)
    assert exact.fault == "type"  # DeepSpeed looks at the value itself here


def test_auto_beside_a_type_leaves_the_type_as_it_is() -> None:
    either = key(anyOf=[{"type": "integer", "minimum": 1}, {"const": "auto"}])
    assert either.takes_auto and either.types == ("integer",)
    assert read(either, 0, pydantic=True).fault == "range"
