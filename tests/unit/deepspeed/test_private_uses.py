"""Each private part of DeepSpeed that the harness depends on is where it was seen, and as it was."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import deepspeed
import pytest

import harness

PRODUCT = Path(harness.__file__).parent
TABLE = json.loads((PRODUCT / "deepspeed/private_uses.json").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class PrivateUse:
    """Something of DeepSpeed that its documentation does not promise, and that the harness depends on.

    Attributes:
        name: the module of the harness that uses it, and what it is.
        where: `module` or `module:member` of DeepSpeed.
        why: what the harness does with it.
        parameters: names that a function must take, in order, without `self`; None for anything else.
        sets: attributes that the code of `where` must assign.
        uses: names and texts that the code of `where` must read.
    """

    name: str
    where: str
    why: str
    parameters: tuple[str, ...] | None = None
    sets: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()


LISTS = ("parameters", "sets", "uses")
PRIVATE_USES = [
    PrivateUse(f"{module}: {row['what']}", row["where"], row["why"], **{k: tuple(row[k]) for k in LISTS if k in row})
    for module, rows in TABLE["private_uses"].items()
    for row in rows
]


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


def differences(use: PrivateUse) -> Iterator[str]:
    """Yield what is not as it was seen."""
    try:
        found = find(use.where)
    except (ImportError, AttributeError) as error:
        yield f"it is gone ({error})"
        return
    if use.parameters is not None:
        taken = tuple(name for name in inspect.signature(inspect.unwrap(found)).parameters if name != "self")
        if taken != use.parameters:
            yield f"it takes {taken}, not {use.parameters}"
    if use.sets or use.uses:
        assigned, read = words_of(use.where)
        yield from (f"it no longer sets {word}" for word in use.sets if word not in assigned)
        yield from (f"it no longer uses {word}" for word in use.uses if word not in read | assigned)


@pytest.mark.parametrize("use", PRIVATE_USES, ids=lambda use: use.name)
def test_what_the_harness_uses_of_deepspeed_is_as_it_was_seen(use: PrivateUse) -> None:
    changed = "; ".join(differences(use))
    assert not changed, (
        f"DeepSpeed {deepspeed.__version__} has changed {use.where} since {TABLE['deepspeed']}: {changed}. "
        f"The harness depends on it: {use.why}"
    )


@pytest.mark.parametrize(
    ("use", "expected"),
    [
        (PrivateUse("module", "deepspeed.no_such_module", ""), "it is gone (No module named"),
        (PrivateUse("member", "deepspeed.runtime.engine:DeepSpeedEngine.no_such", ""), "it is gone (type object"),
        (PrivateUse("call", "deepspeed.runtime.zero.stage3:defragment", "", ("a", "b")), "it takes ('tensors',), not"),
        (PrivateUse("set", "deepspeed.runtime.engine:DeepSpeedEngine", "", sets=("nix",)), "it no longer sets nix"),
        (PrivateUse("use", "deepspeed.runtime.engine:DeepSpeedEngine", "", uses=("nix",)), "it no longer uses nix"),
    ],
    ids=lambda value: value.name if isinstance(value, PrivateUse) else "",
)
def test_what_has_changed_is_told(use: PrivateUse, expected: str) -> None:
    assert next(differences(use)).startswith(expected)


def test_each_use_has_a_name_of_its_own() -> None:
    assert len({use.name for use in PRIVATE_USES}) == len(PRIVATE_USES)


def test_private_names_of_deepspeed_stand_in_one_folder() -> None:
    private = {
        word
        for use in PRIVATE_USES
        for word in (*use.sets, *use.uses, use.where.rpartition(":")[2].rpartition(".")[2])
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
