"""Each private part of DeepSpeed that the harness depends on is where it was seen, and as it was."""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import deepspeed
import pytest

import harness
from harness.deepspeed.touch import Touch
from harness.deepspeed.touches import TOUCHES

PRODUCT = Path(harness.__file__).parent


def find(where: str) -> Any:
    """Return the module or member of DeepSpeed; ImportError or AttributeError where there is none."""
    module, _, path = where.partition(":")
    found: Any = importlib.import_module(module)
    for name in filter(None, path.split(".")):
        found = getattr(found, name)
    return found


@cache
def words_of(where: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return what the code of `where` assigns (attributes, fields of a class) and what it reads (names and texts)."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(find(where))))
    assigned, read = set(), set()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=word, ctx=ast.Store()):
                assigned.add(word)
            case ast.AnnAssign(target=ast.Name(id=word)):
                assigned.add(word)
            case ast.Attribute(attr=word) | ast.Name(id=word) | ast.arg(arg=word) | ast.FunctionDef(name=word):
                read.add(word)
            case ast.keyword(arg=str(word)) | ast.Constant(value=str(word)):
                read.add(word)
    return frozenset(assigned), frozenset(read)


def differences(touch: Touch) -> Iterator[str]:
    """Yield what is not as it was seen."""
    try:
        found = find(touch.where)
    except (ImportError, AttributeError) as error:
        yield f"it is gone ({error})"
        return
    if touch.parameters is not None:
        taken = tuple(name for name in inspect.signature(inspect.unwrap(found)).parameters if name != "self")
        if taken != touch.parameters:
            yield f"it takes {taken}, not {touch.parameters}"
    if touch.sets or touch.uses:
        assigned, read = words_of(touch.where)
        yield from (f"it no longer sets {word}" for word in touch.sets if word not in assigned)
        yield from (f"it no longer uses {word}" for word in touch.uses if word not in read | assigned)


@pytest.mark.parametrize("touch", TOUCHES, ids=lambda touch: touch.name)
def test_a_touched_part_of_deepspeed_is_as_it_was_seen(touch: Touch) -> None:
    changed = "; ".join(differences(touch))
    assert not changed, (
        f"DeepSpeed {deepspeed.__version__} has changed {touch.where} since {touch.seen}: {changed}. "
        f"The harness depends on it: {touch.why}"
    )


@pytest.mark.parametrize(
    ("touch", "expected"),
    [
        (Touch("module", "deepspeed.no_such_module", ""), "it is gone (No module named"),
        (Touch("member", "deepspeed.runtime.engine:DeepSpeedEngine.no_such", ""), "it is gone (type object"),
        (Touch("call", "deepspeed.runtime.zero.stage3:defragment", "", ("a", "b")), "it takes ('tensors',), not"),
        (Touch("set", "deepspeed.runtime.engine:DeepSpeedEngine", "", sets=("nix",)), "it no longer sets nix"),
        (Touch("use", "deepspeed.runtime.engine:DeepSpeedEngine", "", uses=("nix",)), "it no longer uses nix"),
    ],
    ids=lambda value: value.name if isinstance(value, Touch) else "",
)
def test_what_has_changed_is_told(touch: Touch, expected: str) -> None:
    assert next(differences(touch)).startswith(expected)


def test_each_touch_has_a_name_of_its_own() -> None:
    assert len({touch.name for touch in TOUCHES}) == len(TOUCHES)


def test_private_names_of_deepspeed_stand_in_one_folder() -> None:
    private = {
        word
        for touch in TOUCHES
        for word in (*touch.sets, *touch.uses, touch.where.rpartition(":")[2].rpartition(".")[2])
        if word.startswith(("_", "ds_")) and not word.endswith("__")
    }
    assert {"_global_grad_norm", "ds_tensor", "_zero_init_param"} <= private
    outside = (path for path in PRODUCT.rglob("*.py") if path.parent.name != "deepspeed" or "rules" in path.parts)
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(outside)}
    elsewhere = [
        f"{path.relative_to(PRODUCT)}:{node.lineno} {word}"
        for path, text in texts.items()
        if any(word in text for word in private)  # to parse all takes a second
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute | ast.Constant | ast.FunctionDef)
        for word in [getattr(node, "attr", getattr(node, "value", getattr(node, "name", None)))]
        if isinstance(word, str) and word in private
    ]
    assert elsewhere == []
