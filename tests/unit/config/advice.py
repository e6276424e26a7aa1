"""Do what a finding's hint says: read it as an instruction and change the config, one way for each alternative.

Hints are written in a few forms ("remove it", "set KEY to VALUE", "use A, B or C", "did you mean NAME?"), several of
them joined by ", or ". What no change of the file can do (start other ranks, install a package) is left out.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from harness.checking import schema
from harness.checking.schema import signatures
from harness.config.values.pointers import lookup, put

Config = dict[str, Any]
_ELSEWHERE = re.compile(
    r"train with(out)? |run on an accelerator|run with --fix|start a multiple|change the layout|pip install|"
    r"give one of them|keep one|keep bf16|add a plan file|expand the template|put it in quotes|write a value|"
    r"write the value|write the same|an absolute|use the number of ranks|use a size that|write \{ |"
    r"\d+ micro-batches|a class of|.* is set as well|remove the flag|write PACKAGE"
)
_SAMPLES = {"integer": 8, "number": 1.0, "string": "x", "object": {}, "array": [], "boolean": True}
_BY_NAME: dict[str, Any] = {
    "nvme_path": "/local_nvme",
    "random_ltd_schedule": {
        "min_value": 16,
        "max_value": 64,
        "schedule_type": "fixed_linear",
        "schedule_config": {"require_steps": 10, "seq_per_step": 8},
    },
    "schedule_config": {"require_steps": 10, "seq_per_step": 8},
    "schedule_type": "fixed_linear",
    "autotp_size": 2,
    "total_num_steps": 100,
}


class Unread(Exception):
    """A hint, or a part of it, in none of the known forms."""


def alternatives(hint: str, pointer: str, config: Config) -> list[list[Config]]:
    """Return for each alternative of a hint the configs that it leads to: one for each value that it names."""
    found = []
    words = re.sub(r" \([^)]*\)", "", hint).split("; ")[0]
    words = re.sub(r": (?!\{).*", "", words)  # the reason
    for part in _parts(words):
        if not _ELSEWHERE.match(part):
            found.append([_applied(change, config) for change in _changes(part, pointer, config)])
    return found


def _parts(words: str) -> Iterator[str]:
    """Split a hint at ", or ", but not within a list of values."""
    verbs = "remove|set|use|write|replace|add|move|train|change|run|a class|a micro-batch|enable"
    first, *others = re.split(rf", or (?=(?:{verbs}|\w+_\w+ to ))", words)
    verb = first.split(" ")[0]
    yield first
    for other in others:
        yield other if re.match(verbs, other) else f"{verb} {other}"


def _applied(changes: list[tuple[str, Any]], config: Config) -> Config:
    changed = copy.deepcopy(config)
    for pointer, value in changes:
        parent, name = pointer.rsplit("/", 1)
        section = lookup(changed, parent) if parent else changed
        if isinstance(section, list):
            section[int(name)] = value
        elif value is REMOVED:
            if isinstance(section, dict):
                section.pop(name, None)
        else:
            put(changed, pointer, value)
    return changed


REMOVED = object()


Change = list[tuple[str, Any]]


def _removal(match: re.Match[str], pointer: str, config: Config) -> Iterator[Change]:
    name = match[1]
    if name in ("it", "the key"):
        yield [(pointer, REMOVED)]
    elif name == "the section":
        yield [(pointer.rsplit("/", 1)[0], REMOVED)]
    else:
        added = match[2].split(" and ") if match[2] else []
        yield [(_place(name, pointer, config), REMOVED), *((_place(each, pointer, config), 1) for each in added)]


def _setting(match: re.Match[str], pointer: str, config: Config) -> Iterator[Change]:
    place = _place(match[1], pointer, config)
    for value in _values(match[2]):
        more = [(_place(match[3], pointer, config), next(_values(match[4])))] if match[3] else []
        yield [(place, value), *more]


def _switching(match: re.Match[str], pointer: str, config: Config) -> Iterator[Change]:
    yield [(_place(match[1], pointer, config), True)]


def _section(match: re.Match[str], pointer: str, config: Config) -> Iterator[Change]:
    yield [(f"/{match[1]}", REMOVED), (f"/{match[2]}/enabled", True)]


def _move(match: re.Match[str], pointer: str, config: Config) -> Iterator[Change]:
    yield [(pointer, REMOVED), ("/" + match[1].replace(".", "/"), lookup(config, pointer))]


def _meaning(match: re.Match[str], pointer: str, config: Config) -> Iterator[Change]:
    renamed = [(pointer, REMOVED), (f"{pointer.rsplit('/', 1)[0]}/{match[1]}", lookup(config, pointer))]
    yield [(pointer, match[1])] if pointer.endswith("/type") else renamed


def _additions(match: re.Match[str], pointer: str, config: Config) -> Iterator[Change]:
    yield [_added(name, pointer, config, match[0]) for name in re.split(", | and ", match[1])]


def _no_parameters(match: re.Match[str], pointer: str, config: Config) -> Iterator[Change]:
    yield [(f"{pointer}/params" if not pointer.endswith("/type") else f"{pointer.rsplit('/', 1)[0]}/params", {})]


def _stages(match: re.Match[str], pointer: str, config: Config) -> Iterator[Change]:
    for stage in _values(match[1]) if match.lastindex else (1, 2, 3):
        if match.lastindex or _acts_at(pointer, stage):
            yield [("/zero_optimization/stage", stage)]


def _others(match: re.Match[str], pointer: str, config: Config) -> Iterator[Change]:
    """Another optimizer or schedule, with parameters of its own."""
    section = pointer.split("/")[1]
    for name in _values(match[1]):
        known = signatures()["deepspeed_schedulers"].get(name) or signatures()["torch_schedulers"].get(name)
        params = {each: _BY_NAME.get(each, 0.001) for each in known.required} if known is not None else {}
        yield [(f"/{section}/type", name), (f"/{section}/params", params)]


def _micro_batches(match: re.Match[str], pointer: str, config: Config) -> Iterator[Change]:
    yield from ([("/train_micro_batch_size_per_gpu", value)] for value in _values(match[1]))


def _modern(match: re.Match[str], pointer: str, config: Config) -> Iterator[Change]:
    """The new name of a deprecated key."""
    value = {"device": "cpu"} if match[1].startswith("offload_") else lookup(config, pointer)
    yield [(pointer, REMOVED), (f"{pointer.rsplit('/', 1)[0]}/{match[1]}", value)]


def _value_here(match: re.Match[str], pointer: str, config: Config) -> Iterator[Change]:
    yield from ([(pointer, value)] for value in _values(match[1]))


_FORMS: dict[str, Callable[[re.Match[str], str, Config], Iterator[Change]]] = {
    r"remove (it|the key|the section|[\w.]+)(?:, and set (\w+ and \w+)| from the file| .*|,.*)?": _removal,
    r"replace (\w+) with (\w+)": _section,
    r"move it to ([\w.]+)": _move,
    r"did you mean (\S+)\?": _meaning,
    r'add "params": \{\}': _no_parameters,
    r"add ([\w ,]+?)(?: to [\w.]+|, (?:a|as|the) .*)?": _additions,
    r"change the stage.*": _stages,
    r"use (?:ZeRO-|stage |ZeRO stage )(.+?)(?: with the pipeline)?": _stages,
    r"set ([\w.]+) to (.+?)(?: as well| to get .*|, which .*)?(?:,? and (?:set )?([\w.]+) to (.+))?": _setting,
    r"(?:set|enable) ([\w.]+)(?: as well| too)?": _switching,
    r"use (.+) with its own parameters": _others,
    r"(?:use )?a micro-batch of (.+)": _micro_batches,
    r"use (offload_\w+|bf16|pin_memory|stage3_\w+|chunks_per_stage)": _modern,
    r"(?:use|write) (?:train_batch_size |the schedule )?(?:at most (?=\d+ \w+))?"
    r"(.+?)(?: stages?|, which .*| if .*)?": _value_here,
}


def _changes(part: str, pointer: str, config: Config) -> Iterator[Change]:
    """Yield the changes of one alternative."""
    for form, change in _FORMS.items():
        if match := re.fullmatch(form, part):
            yield from change(match, pointer, config)
            return
    raise Unread(part)


def _added(name: str, pointer: str, config: Config, part: str) -> tuple[str, Any]:
    """Return where a missing key goes, and an example of a value."""
    to = re.search(r" to ([\w.]+)$|, as \"?(auto|a number)", part)
    if to and to[2]:
        return _place(name, pointer, config), "auto" if to[2] == "auto" else 1
    inside = f"{pointer}/{name}"
    if to:
        place = f"/{to[1].replace('.', '/')}/{name}"
    elif schema.find(inside) or isinstance(lookup(config, pointer), dict):
        place = inside
    else:
        place = _place(name, pointer, config)
    key = schema.find(place)
    return place, _BY_NAME.get(name, _SAMPLES[key.types[0]] if key is not None and key.types else 8)


def _acts_at(pointer: str, stage: int) -> bool:
    key = schema.find(pointer)
    return key is None or stage in key.spec.get("x-stages", [stage])


def _place(name: str, pointer: str, config: Config) -> str:
    """Return the pointer of a key that a hint names: in full, or beside the finding, or by the only place it has."""
    path = "/" + name.replace(".", "/")
    if "." in name and schema.find("/" + name.split(".", maxsplit=1)[0]):
        return path
    parent = pointer.rsplit("/", 1)[0]
    while True:
        is_parameter = parent.endswith("/params") and "." not in name
        if schema.find(parent + path) or lookup(config, parent + path) is not None or is_parameter:
            return parent + path
        if not parent:
            break
        parent = parent.rsplit("/", 1)[0]
    first, *rest = name.split(".")
    places = schema.places().get(first, ())
    if not places:
        raise Unread(name)
    return "/".join([min(places, key=len), *rest])


def _values(words: str) -> Iterator[Any]:
    """Yield every value that a hint names; for "at least 1" and the like an example."""
    plain: dict[str, list[Any]] = {
        "a relative path": ["logs"],
        "true or false": [True, False],
        "a whole number": [8],
        "a number": [1.0],
        "a number, without quotes": [1.0],
        "a string": ["x"],
        "a list": [[]],
        "a list of numbers": [[1.0]],
        "a number or a list": [1.0],
        "a list or a string": [[]],
        "an object": [{}],
    }
    if words in plain:
        yield from plain[words]
    elif match := re.search(r"(?:at least|above|more than|at most|less than) (\S+?)(?: and .*)?$", words):
        number = json.loads(match[1])
        yield number + (1 if re.search("above|more than", words) else -0.5 if "less than" in words else 0)
    elif match := re.fullmatch(r"a list of ([a-z0-9]+(?:, | or ).*)", words):
        yield from ([each] for each in re.split(", | or ", match[1]))
    elif match := re.match(r"a list of (\d+) numbers", words):
        yield [0.5] * int(match[1])
    elif match := re.fullmatch(r"(\d+) or more", words):
        yield int(match[1])
    else:
        for word in re.split(r", | or ", words.removeprefix("one of ")):
            if word != "type:REGEX":
                yield _value(word)


def _value(word: str) -> Any:
    try:
        return json.loads(word)
    except ValueError:
        if not re.fullmatch(r"[\w.:-]+", word):
            raise Unread(word) from None
        return word
