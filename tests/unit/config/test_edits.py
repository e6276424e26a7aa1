"""Edits of a text do to its data what the same change of a dict does, and leave the rest of the text alone."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from harness.checking.rules import edits
from harness.config.text.document import Document, from_text
from harness.config.values.pointers import lookup, put

KEYS = st.sampled_from(["a", "b", "c", "section", "é", "two words"])
LEAVES = st.sampled_from([None, True, 0, -1.5, "x", "", 'quo"te', "[{,:", [], [1, {"a": 2}]])
SECTIONS = st.dictionaries(KEYS, LEAVES | st.dictionaries(KEYS, LEAVES, max_size=3), max_size=4)
FORMS = st.sampled_from([None, 2])
COMMENTED = '{\n  // first\n  "a": 1, # one\n  /* b */ "b": {"c": 2},\n  "section": {}\n}\n'


def pointers(data: dict[str, Any], at: str = "") -> list[str]:
    found = []
    for name, value in data.items():
        found.append(f"{at}/{name}")
        if isinstance(value, dict):
            found += pointers(value, f"{at}/{name}")
    return found


def edited(document: Document, changes: tuple[edits.Edit, ...]) -> Any:
    return from_text(edits.apply(document.text, changes)).data


def cut(data: dict[str, Any], pointer: str) -> object:
    section, name = pointer.rsplit("/", 1)
    parent: Any = lookup(data, section) if section else data
    return parent.pop(name)


def one_of(data: dict[str, Any], draw: st.DataObject) -> str:
    assume(data)
    return draw.draw(st.sampled_from(pointers(data)))


@settings(max_examples=60)
@given(SECTIONS, FORMS, st.data())
def test_removing_a_key_removes_it_alone(data: dict[str, Any], indent: int | None, draw: st.DataObject) -> None:
    pointer = one_of(data, draw)
    document, wanted = from_text(json.dumps(data, indent=indent)), copy.deepcopy(data)
    cut(wanted, pointer)
    assert edited(document, edits.remove(document, pointer)) == wanted


@settings(max_examples=60)
@given(SECTIONS, FORMS, KEYS, st.data())
def test_a_key_gets_a_name_that_is_free(data: dict[str, Any], indent: int | None, new: str, draw: Any) -> None:
    pointer = one_of(data, draw)
    document, wanted = from_text(json.dumps(data, indent=indent)), copy.deepcopy(data)
    beside = f"{pointer.rsplit('/', 1)[0]}/{new}"
    changes = edits.rename(document, pointer, new)
    if beside in pointers(data):
        assert changes == ()
    else:
        put(wanted, beside, cut(wanted, pointer))
        assert edited(document, changes) == wanted


@settings(max_examples=60)
@given(SECTIONS, FORMS, LEAVES, st.data())
def test_a_value_takes_the_place_of_another(data: dict[str, Any], indent: int | None, new: object, draw: Any) -> None:
    pointer = one_of(data, draw)
    document, wanted = from_text(json.dumps(data, indent=indent)), copy.deepcopy(data)
    put(wanted, pointer, new)
    assert edited(document, edits.replace(document, pointer, new)) == wanted


@settings(max_examples=100)
@given(SECTIONS, FORMS, KEYS, KEYS, st.data())
def test_a_key_is_moved_to_a_free_place_or_not_at_all(
    data: dict[str, Any], indent: int | None, section: str, name: str, draw: Any
) -> None:
    pointer, target = one_of(data, draw), f"/{section}/{name}"
    assume(not f"{target}/".startswith(f"{pointer}/"))  # nothing is moved into itself
    document, wanted = from_text(json.dumps(data, indent=indent)), copy.deepcopy(data)
    changes = edits.move(document, pointer, target)
    is_free = target not in pointers(data) and isinstance(data.get(section, {}), dict)
    assert bool(changes) == is_free
    if is_free:
        value = cut(wanted, pointer)
        put(wanted, target, value)
        assert edited(document, changes) == wanted


@pytest.mark.parametrize(
    ("pointer", "left"),
    [
        pytest.param("/a", '{\n  // first\n  "b": {"c": 2},\n  "section": {}\n}\n', id="with the comment behind it"),
        pytest.param("/b/c", COMMENTED.replace('{"c": 2}', "{}"), id="the only key of a section"),
        pytest.param("/section", COMMENTED.replace(',\n  "section": {}', ""), id="the last key, with its comma"),
    ],
)
def test_what_stands_around_a_removed_key_stays(pointer: str, left: str) -> None:
    document = from_text(COMMENTED)
    assert edits.apply(COMMENTED, edits.remove(document, pointer)) == left


def test_a_new_key_stands_in_a_line_of_its_own_where_the_others_do() -> None:
    document = from_text(COMMENTED)
    assert edits.apply(COMMENTED, edits.insert(document, "/d", "4")).endswith('  "section": {},\n  "d": 4\n}\n')
    assert '{"c": 2, "d": 4}' in edits.apply(COMMENTED, edits.insert(document, "/b/d", "4"))
    assert '"section": {"d": 4}' in edits.apply(COMMENTED, edits.insert(document, "/section/d", "4"))
    assert edits.apply(COMMENTED, edits.insert(document, "/new/d", "4")).endswith(',\n  "new": {"d": 4}\n}\n')


@pytest.mark.parametrize("pointer", ["/a/d", "/new/deeper/d", "/b/c/d"])
def test_nothing_is_added_below_what_is_no_section(pointer: str) -> None:
    assert edits.insert(from_text(COMMENTED), pointer, "4") == ()


@pytest.mark.parametrize("pointer", ["/missing", "/a/b", "/b/missing", ""])
def test_what_is_not_there_is_left_alone(pointer: str) -> None:
    document = from_text(COMMENTED)
    assert edits.member(document, pointer) is None
    assert edits.replace(document, pointer, 1) == edits.move(document, pointer, "/x") == ()
    if pointer:
        assert edits.remove(document, pointer) == edits.rename(document, pointer, "x") == ()


def test_a_key_with_a_slash_or_a_tilde_is_found_by_its_pointer() -> None:
    document = from_text('{"a/b": 1, "c~d": 2}')
    assert edited(document, edits.remove(document, "/a~1b")) == {"c~d": 2}
    assert edited(document, edits.replace(document, "/c~0d", 3)) == {"a/b": 1, "c~d": 3}


def test_of_two_keys_of_one_name_the_last_is_changed() -> None:
    document = from_text('{"a": 1, "a": 2}')
    assert edits.apply(document.text, edits.replace(document, "/a", 9)) == '{"a": 1, "a": 9}'
