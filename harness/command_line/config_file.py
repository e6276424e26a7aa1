"""Read `--config FILE`: flags in YAML or JSON, or the `run.json` of a run, whose `arguments` repeat that run."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import Field, dataclass
from functools import cache
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from harness.arguments.themes.flags import ALIASES, default_of, require_one_name
from harness.command_line.other_programs import advice, is_section
from harness.config.values.json_file import regular_bytes
from harness.config.values.paths import usable_path
from harness.config.values.typed import takes
from harness.errors import UserError, UserErrors, headline

if TYPE_CHECKING:
    import yaml

MOST_BYTES, MOST_NODES = 2**20, 2**18  # a run.json has some 10,000 bytes; PyYAML parses a megabyte in seconds
ARGUMENTS, GIVEN = "arguments", "given"  # keys of run.json: all flags, and the names of those that were given

# JSON writes a character above U+FFFF as two escapes (a surrogate pair), which YAML does not join
_PAIR = re.compile(r"(?<!\\)((?:\\\\)*)(\\u[dD][89abAB][\da-fA-F]{2}\\u[dD][c-fC-F][\da-fA-F]{2})")
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$")


@dataclass(frozen=True)
class ConfigFlag:
    """A flag in a file, as words of a command line; `where` is `file:line: `, for messages."""

    where: str
    words: tuple[str, ...]


def read_config_file(file: str, known: Mapping[str, Field[object]]) -> list[ConfigFlag]:
    """Return the flags in a file. UserError if it cannot be read.

    A run.json lists all arguments; defaults that were not given are left out, so that they do not count as given.
    """
    import yaml

    try:
        path = usable_path(file)
    except ValueError as error:
        raise UserError(f"--config {file[:80]}: no file can have this name: {error}") from error
    if path.suffix == ".toml":
        _refuse_toml(path, known)
    try:
        text = regular_bytes(path, MOST_BYTES).decode()
        if path.suffix == ".json":
            # JSON is YAML, except for tabs between values and surrogate pairs. Reading it as YAML gives line numbers.
            text = _PAIR.sub(lambda pair: pair[1] + json.loads(f'"{pair[2]}"'), text.replace("\t", " "))
        root = yaml.compose(text, Loader=_loader())
    except (OSError, ValueError) as error:
        raise UserError(f"--config {file}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except yaml.MarkedYAMLError as error:
        line = 0 if error.problem_mark is None else error.problem_mark.line + 1
        raise UserError(f"{file}:{line}: is neither YAML nor JSON: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise UserError(f"--config {file}: is neither YAML nor JSON: {headline(error)}") from error
    except RecursionError as error:
        raise UserError(f"--config {file}: is nested too deeply to be read") from error
    if root is None:
        return []
    # A few lines of nested aliases ("billion laughs") expand to more values than memory holds.
    if (size := _expanded(root, {})) > MOST_NODES:
        what = (
            "one of its aliases contains itself"
            if size == inf
            else f"its aliases expand to more than {MOST_NODES:,} values"
        )
        raise UserError(f"--config {file}: {what}: write the values out")
    if not isinstance(root, yaml.MappingNode):
        raise UserError(f"--config {file}: give flags and their values, as `max_steps: 100`")
    parts = {key.value: value for key, value in root.value if key.value in (ARGUMENTS, GIVEN)}
    if isinstance(arguments := parts.get(ARGUMENTS), yaml.MappingNode):
        given = parts[GIVEN].value if isinstance(parts.get(GIVEN), yaml.SequenceNode) else []
        return list(_flags(file, arguments, known, of_run={str(name.value) for name in given}))
    return list(_flags(file, root, known))


def _expanded(node: yaml.Node, known: dict[int, float]) -> float:
    """Return the number of values of a node with its aliases expanded; inf if an alias contains itself."""
    if id(node) not in known:
        known[id(node)] = inf  # stays infinite for a node that contains itself
        inner = [] if isinstance(node.value, str) else node.value
        parts = [part for each in inner for part in (each if isinstance(each, tuple) else (each,))]
        known[id(node)] = 1 + sum(_expanded(part, known) for part in parts)
    return known[id(node)]


def _refuse_toml(path: Path, known: Mapping[str, Field[object]]) -> NoReturn:
    """Raise UserErrors for a TOML file, such as torchtitan's, with the flag to use instead of each of its keys."""
    try:
        root = tomllib.loads(regular_bytes(path, MOST_BYTES).decode())
    except (OSError, ValueError):
        root = {}
    lines = [f"--config {path}: TOML is not read: give flags in YAML or JSON, as `max_steps: 100`"]
    for name, value in root.items():
        keys = [f"{name}.{key}" for key in value] if isinstance(value, dict) else [name]
        lines += [f"{path}: {key}: {advice(key, known)}" for key in keys if key not in known]
    raise UserErrors(*lines)


def _flags(
    file: str,
    node: yaml.MappingNode,
    known: Mapping[str, Field[object]],
    *,
    of_run: Collection[str] | None = None,
    section: str = "",
) -> Iterator[ConfigFlag]:
    import yaml

    seen: set[str] = set()
    names: dict[str, str] = {}
    for key, value in node.value:
        if not isinstance(key.value, str):
            raise UserError(
                f"{file}:{key.start_mark.line + 1}: a key is not a name: give flags, such as `max_steps: 100`"
            )
        where = f"{file}:{key.start_mark.line + 1}: "
        name = section + str(key.value).removeprefix("--")
        own = name.replace("-", "_")
        if own in seen:
            raise UserError(f"{where}{name} is given twice")
        seen.add(own)
        if isinstance(value, yaml.MappingNode) and name not in known and is_section(name):
            yield from _flags(file, value, known, section=f"{name}.")
            continue
        item = known.get(own)
        try:
            plain = _plain(value)
            words = _words(name, plain, several=item is None or takes(item.type, list))
        except (yaml.MarkedYAMLError, TypeError, ValueError) as error:
            problem = error.problem if isinstance(error, yaml.MarkedYAMLError) else error
            raise UserError(f"{where}{name}: has a value that JSON does not have ({problem})") from error
        if plain is None:
            continue
        if of_run is not None and own not in of_run and item is not None and _same(plain, default_of(item)):
            continue
        if item is None and own.startswith("no_") and str(plain).lower() == "true":
            words = words[0].partition("=")[:1]  # on a command line, `--no_NAME` takes no value
        require_one_name(names, ALIASES.get(own, own), own, where)
        yield ConfigFlag(where, words)


@cache
def _loader() -> type[yaml.SafeLoader]:
    """Return a YAML loader that reads 1e-5 as a number (YAML 1.1 does not) and a date as text, as in JSON."""
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
        yaml_implicit_resolvers = {  # noqa: RUF012  # as PyYAML declares it
            first: [(tag, form) for tag, form in forms if not tag.endswith(":timestamp")]
            for first, forms in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+.0123456789"))
    return Loader


def _plain(node: yaml.Node) -> object:
    """Return a node's value, with scalars as written: `no`, `1e-5` and `2024-01-01` stay text for the flag's type."""
    import yaml

    if isinstance(node, yaml.ScalarNode):
        return None if node.tag.endswith(":null") else node.value
    if isinstance(node, yaml.SequenceNode) and all(isinstance(item, yaml.ScalarNode) for item in node.value):
        return [item.value for item in node.value]
    return yaml.SafeLoader("").construct_object(node, deep=True)


def _words(name: str, value: object, *, several: bool) -> tuple[str, ...]:
    if isinstance(value, list) and not any(isinstance(item, dict | list) for item in value):
        return (f"--{name}", *map(str, value)) if several else (f"--{name}={','.join(map(str, value))}",)
    return (f"--{name}={value if isinstance(value, str) else json.dumps(value)}",)


def _same(value: object, default: object) -> bool:
    if isinstance(default, bool):
        return str(value).lower() == str(default).lower()
    if isinstance(default, int | float):
        try:
            return float(str(value)) == default
        except ValueError:
            return False
    return bool(value == default)
