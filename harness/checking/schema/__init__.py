"""The schema of DeepSpeed's config as the rules use it.

The JSON files in `data/` are the only table of keys, with type, default, and how DeepSpeed reads each. Besides the
words of JSON Schema 2020-12 they use a few of our own: `x-reader` (pydantic sections refuse unknown keys, plain ones
ignore them), `x-crashes` (a wrong value ends DeepSpeed's parser), `x-checked-if` (the switch with which all
values of a section are used), `x-exact` (no conversion), `x-aliases` (names that people write instead),
`x-stages` (ZeRO stages at which a key acts), `x-harness` (a key of the harness, which DeepSpeed refuses), `x-removed`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import metadata
from pathlib import Path

from harness.config.values.json_object import JsonObject
from harness.optimizers import OPTIMIZERS
from harness.schedules import SCHEDULES

FOLDER = Path(__file__).resolve().parent / "data"
ROOT = "deepspeed.json"
_DIALECT = "https://json-schema.org/draft/2020-12/schema"


@dataclass(frozen=True)
class Key:
    """The schema of one key, or of the whole config, whose name is empty."""

    name: str
    spec: JsonObject

    @property
    def core(self) -> JsonObject:
        """The part that describes a value other than "auto"."""
        core: JsonObject = self.spec["anyOf"][0] if "anyOf" in self.spec else self.spec
        return core

    @property
    def types(self) -> tuple[str, ...]:
        """The JSON types that the value may have; empty if anything goes."""
        declared = self.core.get("type", ())
        return (declared,) if isinstance(declared, str) else tuple(declared)

    @property
    def takes_auto(self) -> bool:
        """Whether the value may be "auto"."""
        return "anyOf" in self.spec

    @property
    def is_section(self) -> bool:
        """Whether the value is an object with keys of its own."""
        return "properties" in self.spec

    @property
    def is_pydantic(self) -> bool:
        """Whether DeepSpeed reads this section through a model that checks every key."""
        return self.spec.get("x-reader") == "pydantic"

    @property
    def unknown_keys(self) -> str:
        """What DeepSpeed does with an unknown key: rejected, ignored, or free (any key is allowed)."""
        return str(self.spec.get("x-unknown-keys", "free"))

    @cached_property
    def keys(self) -> dict[str, Key]:
        """The keys of this section, by every name that DeepSpeed accepts."""
        return _keys(self.spec["properties"]) if self.is_section else {}

    def removed(self, name: str) -> str | None:
        """Return advice for a key whose feature DeepSpeed has removed; None if it is no such key."""
        hint: str | None = self.spec.get("x-removed", {}).get(name)
        return hint


def _keys(properties: JsonObject) -> dict[str, Key]:
    keys = {}
    for name, spec in properties.items():
        key = Key(name, spec)
        keys[name] = key
        if "x-second-name" in spec:
            keys[spec["x-second-name"]] = key
    return keys


@cache
def files() -> dict[str, JsonObject]:
    """Return name -> content of every schema file. `{OPTIMIZERS}` in a description are DeepSpeed's own."""
    own = ", ".join(each.name for each in OPTIMIZERS.values() if each.source == "deepspeed")
    names = {"{OPTIMIZERS}": own, "{SCHEDULES}": ", ".join(SCHEDULES)}
    found = {}
    for path in sorted(FOLDER.glob("*.json")):
        text = path.read_text("utf-8")
        for place, words in names.items():
            text = text.replace(place, words)
        found[path.name] = json.loads(text)
    return found


@cache
def root() -> Key:
    """Return the schema of the whole config, with every reference resolved."""
    spec = dict(files()[ROOT])
    spec["properties"] = {name: _inline(value) for name, value in spec["properties"].items()}
    return Key("", spec)


def _inline(spec: JsonObject) -> JsonObject:
    """Return a schema with `$ref` replaced by the content of the file; keys beside the reference win."""
    if "$ref" not in spec:
        return spec
    section = {key: value for key, value in files()[spec["$ref"]].items() if not key.startswith("$")}
    return section | {key: value for key, value in spec.items() if key != "$ref"}


def bundle() -> JsonObject:
    """Return the schema as one JSON Schema document, for an editor: each section is a definition."""
    sections = {name.removesuffix(".json"): dict(spec) for name, spec in files().items() if name != ROOT}
    definitions = {name: _without(spec, "$schema", "$id") for name, spec in sections.items()}
    top = _without(files()[ROOT], "$schema", "$id", "properties")
    properties = {
        name: spec | {"$ref": "#/$defs/" + spec["$ref"].removesuffix(".json")} if "$ref" in spec else spec
        for name, spec in files()[ROOT]["properties"].items()
    }
    return {"$schema": _DIALECT, **top, "properties": properties, "$defs": definitions}


def _without(spec: JsonObject, *names: str) -> JsonObject:
    return {key: value for key, value in spec.items() if key not in names}


@cache
def find(pointer: str) -> Key | None:
    """Return the key that a JSON pointer names, or None if the schema has none there."""
    key: Key | None = root()
    for step in pointer.split("/")[1:]:
        key = key.keys.get(step) if key is not None else None
    return key


def every_key(key: Key | None = None, pointer: str = "") -> Iterator[tuple[str, Key]]:
    """Yield all keys of the schema with their pointers."""
    for name, child in (key or root()).keys.items():
        yield f"{pointer}/{name}", child
        yield from every_key(child, f"{pointer}/{name}")


@cache
def aliases() -> dict[str, str]:
    """Return pointer of a key -> names that people write instead."""
    return {alias: pointer for pointer, key in every_key() for alias in key.spec.get("x-aliases", ())}


@cache
def places() -> dict[str, tuple[str, ...]]:
    """Return name of a key -> pointers at which it exists."""
    found: dict[str, list[str]] = {}
    for pointer, key in every_key():
        if not key.spec.get("deprecated"):
            found.setdefault(pointer.rsplit("/", 1)[1], []).append(pointer)
    return {name: tuple(pointers) for name, pointers in found.items()}


@dataclass(frozen=True)
class Signature:
    """The arguments of a schedule's class; `defaults` are given for DeepSpeed's own only."""

    params: tuple[str, ...]
    required: tuple[str, ...]
    defaults: JsonObject


@cache
def signatures() -> dict[str, dict[str, Signature]]:
    """Return the arguments of the schedule classes, by group and class name."""
    data: JsonObject = json.loads((FOLDER.parent / "signatures.json").read_text("utf-8"))
    data.pop("comment")
    return {
        group: {
            name: Signature(tuple(has["params"]), tuple(has["required"]), has.get("defaults", {}))
            for name, has in classes.items()
        }
        for group, classes in data.items()
    }


@cache
def torch_modules() -> tuple[str, ...]:
    """Return the names of the classes of torch.nn."""
    return tuple(json.loads((FOLDER.parent / "torch_modules.json").read_text("utf-8")))


def supported() -> tuple[str, str]:
    """Return the supported DeepSpeed versions: the first one, and the first one that is too new."""
    low, high = str(files()[ROOT]["x-supported"]).split(",")
    return low.removeprefix(">="), high.removeprefix("<")


def version_warning(installed: str | None = None) -> str | None:
    """Return a sentence if the rules were tested with another DeepSpeed than the installed one; else None."""
    if installed is None:
        try:
            installed = metadata.version("deepspeed")
        except metadata.PackageNotFoundError:
            return None
    low, high = supported()
    if _numbers(low) <= _numbers(installed) < _numbers(high):
        return None
    return f"the rules are tested with DeepSpeed {low} up to (not including) {high}, but {installed} is installed"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])
