"""The shape of the house, read from the sources with the standard library alone, in about a second.

Sizes of files and functions, imports one way and without cycles, no torch where configs are read, the
environment read in one place, no family of models named in code, no shared mutable state. An exception is a
line in a table here, with its reason.
"""

import ast
import gc
import importlib.util
import json
import os
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = sorted((ROOT / "harness").rglob("*.py"))
SOURCES = PRODUCT + sorted(p for top in ("scripts", "tests") for p in (ROOT / top).rglob("*.py"))

LONGEST_FILE, LONGEST_FUNCTION = 700, 80
MOST_ANY = 100  # lines of the product with a value of any type: what DeepSpeed, transformers and torch leave untyped

LAYERS = (
    "config",
    "topology",
    "deepspeed",
    "device",
    "parallel",
    "hf",
    "checkpoint",
    "arguments",
    "command_line",
    "resilience",
)
LAYERS += (
    "batches",
    "training",
    "verify",
    "data",
    "planner",
    "huggingface",
    "extras",
    "report",
    "installed",
    "preflight",
    "composition",
    "verify.trials",
    "dry_run",
)
LAYERS += ("train", "cli")

HEAVY = {"torch", "deepspeed", "transformers", "datasets", "numpy"}
# What planner and report measure inside a run, which has torch.
MEASURING = {*(f"harness.report.profile.{name}" for name in ("clocks", "memory", "spans")), "harness.planner.forecast"}

# Who reads the environment, besides harness/topology/env.py, and why.
ENVIRONMENT_READERS = {
    "harness/completion.py": "the line that a shell completes, in argcomplete's variables",
    "harness/checking/cli/render.py": "NO_COLOR, the terminal's word on colours",
    "harness/config/values/secrets.py": "passwords and tokens in it, which are kept out of what a run writes",
    "harness/preconditions.py": "the name and the home of a user id that the system does not know, before all else",
}

# Who seeds the global random generators, besides harness/parallel/generators.py, which puts them back, and why.
SEEDERS = {
    "harness/parallel/pipeline/staged_module.py": "initial weights of a user's own layers, before training",
    "harness/training/engine/build.py": "the generators that training starts with",
}

# What a process keeps in a module and changes, and why no object that is passed can hold it.
CHANGED_BY_A_PROCESS = {
    "harness.checkpoint.run_lock.HELD": "a forked child must find the locks to let go of",
    "harness.checkpoint.run_lock.MARK": "a forked child is another process, and needs another name",
    "harness.extras.fp8.product._LATEST": "layers of transformers do not know of each other, nor of a run",
    "harness.hf.counts._COUNTED": "a cache by a config, which cannot be hashed",
    "harness.parallel.collectives._OPEN": "DeepSpeed calls collectives with groups of its own of the same ranks",
    "harness.parallel.compiling._EAGER": "the functions that a decorator has marked",
    "harness.parallel.tensor.shared_input._LATEST": "layers of transformers do not know of each other, nor of a run",
    "harness.resilience.process.activity.ACTIVITY": "the watchdog reads it while any code runs or hangs",
    "harness.resilience.process.records.THIS_RANK": "an error anywhere says what this rank was doing",
    "harness.resilience.process.signals._OF_THREAD": "hooks of a fork are given no arguments",
}
CHANGES = {"add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "setdefault", "update"}

# `harness/` itself has files of three kinds, each like a folder: what all may use, what is made of the config, and the
# entry points, which are all others.
USED_BY_ALL = {"atomic", "errors", "records", "spelling", "wording"}
OF_CONFIGS = {"completion", "console", "preconditions", "quiet", "uncaught", "verb_parser"}

# Names of families that are words of their own as well.
ORDINARY_WORDS = {"beam", "git", "opt", "flint", "doge", "laguna"}


@pytest.fixture(scope="module", autouse=True)
def no_garbage() -> Iterator[None]:
    """Keep Python's collector out of the trees: to look through them takes three times as long as to make them."""
    gc.disable()
    yield
    tree.cache_clear()
    nodes.cache_clear()
    gc.enable()


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree(path)))


def module_name(path: Path) -> str:
    """The dotted name of a source file."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in PRODUCT}


def defined(path: Path) -> set[str]:
    """The names that a module defines or imports."""
    stored = {node.id for node in nodes(path) if is_stored(node)} | {n.name for n in nodes(path) if is_block(n)}
    imports = (node for node in nodes(path) if isinstance(node, ast.Import | ast.ImportFrom))
    return stored | {alias.asname or alias.name for node in imports for alias in node.names}


def where(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"


def imported(path: Path) -> Iterator[str]:
    """Full names of the modules that a file imports; `from package import module` gives the module."""
    package = module_name(path).split(".")
    package = package if path.name == "__init__.py" else package[:-1]
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield inner if inner in MODULES else base


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions at any depth, without a look into expressions, which hold none and are most of a file."""
    statements: list[ast.AST] = [tree(path)]
    for node in statements:  # it grows
        for block in ("body", "orelse", "finalbody", "handlers", "cases"):
            statements += getattr(node, block, [])
    return (n for n in statements if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))


def test_the_sources_are_found():
    assert {"harness.parallel.pipeline.partition", "harness.errors", "harness.hf"} <= set(MODULES)


def test_the_folders_at_the_top_are_the_packages():
    for name in ("models", "ds_configs"):
        assert (ROOT / "harness" / name).is_symlink()
        assert (ROOT / "harness" / name).resolve() == ROOT / name


def test_no_file_is_too_long():
    long = {str(p.relative_to(ROOT)): n for p in SOURCES if (n := len(p.read_text().splitlines())) >= LONGEST_FILE}
    assert long == {}


def test_no_function_is_too_long():
    long = {
        f"{where(path, f)} {f.name}": f.end_lineno - f.lineno + 1
        for path in SOURCES
        for f in functions(path)
        if f.end_lineno - f.lineno + 1 >= LONGEST_FUNCTION
    }
    assert long == {}


def test_values_have_types():
    lines = [
        where(path, node) for path in PRODUCT for node in nodes(path) if isinstance(node, ast.Name) and node.id == "Any"
    ]
    assert len(set(lines)) <= MOST_ANY, "give a protocol, JsonObject, or object where nothing is asked of the value"


def test_every_module_says_what_it_is_for():
    assert [str(p.relative_to(ROOT)) for p in SOURCES if tree(p).body and not ast.get_docstring(tree(p))] == []


def test_only_a_users_script_is_started_with_the_working_directory_in_its_path():
    """Else `own_python` starts it: a model's folder may hold a `torch.py`."""
    found = {str(path.relative_to(ROOT / "harness")) for path in PRODUCT if "sys.executable" in path.read_text()}
    says_where_it_is = {"report/provenance.py", "cluster/slurm.py"}
    assert found - says_where_it_is == {"topology/processes.py", "resilience/elastic.py"}


def test_imports_go_one_way():
    def layer(module: str) -> int | None:
        return max((at for at, part in enumerate(LAYERS) if f"{module}.".startswith(f"harness.{part}.")), default=None)

    upward = []
    for name, path in MODULES.items():
        for target in imported(path):
            ours, theirs = layer(name), layer(target)
            if ours is not None and theirs is not None and theirs > ours:
                upward.append(f"{name} imports {target}")
    assert upward == []


def test_no_import_goes_in_a_circle():
    """Imports for types alone count too, and those inside of functions."""
    graph = {
        name: {target for target in imported(path) if target in MODULES} - {name} for name, path in MODULES.items()
    }
    while leaves := {name for name, targets in graph.items() if not targets}:
        graph = {name: targets - leaves for name, targets in graph.items() if name not in leaves}
    assert graph == {}, "these modules import each other, or import such a module"


def folder_of(module: str) -> str:
    """The folder of a module; files of `harness/` itself are in one of its three kinds."""
    name = module.removeprefix("harness.")
    if "/" in (folder := str(MODULES[module].parent.relative_to(ROOT))):
        return folder
    return f"{folder}: {'used by all' if name in USED_BY_ALL else 'of configs' if name in OF_CONFIGS else 'entries'}"


def test_no_two_folders_import_each_other():
    """Nor do a folder and one inside it."""
    pairs = {
        (folder_of(name), folder_of(target))
        for name, path in MODULES.items()
        for target in imported(path)
        if target in MODULES
    }
    assert {(one, other) for one, other in pairs if one < other and (other, one) in pairs} == set()


def test_what_scripts_and_tests_import_of_the_project_is_there():
    """No type checker and no test runs the benchmarks."""
    modules = {module_name(path): path for path in SOURCES}
    found = [(path, n) for path in SOURCES for n in nodes(path) if isinstance(n, ast.ImportFrom)]
    found = [(path, node) for path, node in found if node.module in modules and node.module != "harness"]  # it is lazy
    there = {name: defined(modules[name]) for name in {node.module for _, node in found}}
    assert [
        f"{where(path, node)} {alias.name}"
        for path, node in found
        for alias in node.names
        if alias.name not in there[node.module] and f"{node.module}.{alias.name}" not in modules
    ] == []


def test_configs_are_read_without_torch():
    heavy = [
        f"{name} imports {target}"
        for name, path in MODULES.items()
        if name.startswith(("harness.config", "harness.planner", "harness.report")) and name not in MEASURING
        for target in imported(path)
        if target.split(".")[0] in HEAVY
    ]
    assert heavy == []


def test_the_environment_is_read_in_one_place():
    """Others may hand os.environ on as a whole to LaunchEnv, which lives there."""
    readers = set()
    for path in PRODUCT:
        calls = [node for node in nodes(path) if isinstance(node, ast.Call)]
        handed_on = {
            id(argument)
            for call in calls
            if isinstance(call.func, ast.Attribute) and call.func.attr in {"from_environ", "export"}
            for argument in call.args
        }
        for node in nodes(path):
            names = [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
            names += [node.attr] if isinstance(node, ast.Attribute) and id(node) not in handed_on else []
            if {"environ", "environb", "getenv", "putenv"} & set(names):
                readers.add(str(path.relative_to(ROOT)))
    assert readers - {"harness/topology/env.py"} == set(ENVIRONMENT_READERS)


def test_descriptors_are_not_waited_for_by_select():
    """It fails for those from 1,024 on, which a run of many files and ranks has."""
    calls = re.compile(r"\bselect\.(select|epoll)\(|from select import")
    assert [str(path.relative_to(ROOT)) for path in PRODUCT if calls.search(path.read_text(encoding="utf-8"))] == []


def test_global_generators_are_seeded_where_it_is_said():
    seeds = re.compile(r"\b(torch|cuda|random)\.(manual_seed\w*|seed|fork_rng)\(")
    found = {str(path.relative_to(ROOT)) for path in PRODUCT if seeds.search(path.read_text(encoding="utf-8"))}
    assert found == {*SEEDERS, "harness/parallel/generators.py"}


def test_nothing_mutable_is_shared():
    shared = []
    for path in PRODUCT:
        shared += [f"{where(path, n)} global" for n in nodes(path) if isinstance(n, ast.Global)]
        for node in tree(path).body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(
                node.value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp
            ):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [target.id for target in targets if isinstance(target, ast.Name)]
                shared += [f"{where(path, node)} {n}" for n in names if not n.isupper() and not n.startswith("__")]
    assert shared == []


def changed_names(path: Path) -> Iterator[str]:
    """Names of a module, its own or imported ones, whose values its functions change."""
    own = {name.id for node in tree(path).body if not is_block(node) for name in ast.walk(node) if is_stored(name)}
    homes = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in nodes(path)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("harness")
        for alias in node.names
        if alias.name.isupper()
    }
    homes |= {name: f"{module_name(path)}.{name}" for name in own}
    if homes.keys().isdisjoint(changed_in(nodes(path))):  # as in almost all modules
        return
    for function in functions(path):
        inside = list(ast.walk(function))
        local = {node.id for node in inside if is_stored(node)} | {n.arg for n in inside if isinstance(n, ast.arg)}
        yield from (homes[name] for name in changed_in(inside) if name in homes and name not in local)


def changed_in(found: Iterable[ast.AST]) -> Iterator[str]:
    """Names whose values are changed: by an assignment to an item or an attribute, or by a method."""
    for node in found:
        match node:
            case ast.Subscript(value=ast.Name(id=name), ctx=ast.Store() | ast.Del()):
                yield name
            case ast.Attribute(value=ast.Name(id=name), ctx=ast.Store() | ast.Del()):
                yield name
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=method)) if method in CHANGES:
                yield name


def is_stored(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def is_block(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)


def test_what_a_module_keeps_and_changes_is_listed():
    assert {name for path in PRODUCT for name in changed_names(path)} == set(CHANGED_BY_A_PROCESS)


def families() -> set[str]:
    """The causal decoders that transformers knows, without importing it."""
    spec = importlib.util.find_spec("transformers")
    assert spec is not None and spec.origin is not None
    source = Path(spec.origin).parent / "models/auto/modeling_auto.py"
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES":
            return {pair.elts[0].value for pair in node.value.args[0].elts}
    raise AssertionError(f"{source} has no list of causal decoders any more")


def words(text: str) -> str:
    """A name or a text as lower-case words between underscores: GPTNeoXBlock2 is _gpt_neo_x_block2_."""
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", text)
    return "_" + re.sub(r"[^a-z0-9]+", "_", snake.lower()) + "_"


def spoken(path: Path) -> Iterator[tuple[ast.AST, str]]:
    """Every identifier and every text of the code, docstrings left out: those may give examples."""
    docstrings = {
        id(node.body[0].value)
        for node in nodes(path)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in nodes(path):
        match node:
            case ast.Name(id=text) | ast.Attribute(attr=text) | ast.arg(arg=text) | ast.alias(name=text):
                yield node, text
            case ast.FunctionDef(name=text) | ast.ClassDef(name=text) | ast.keyword(arg=str(text)):
                yield node, text
            case ast.Constant(value=str(text)) if id(node) not in docstrings:
                yield node, text


def test_no_code_names_a_family():
    names = {words(family) for family in families() - ORDINARY_WORDS}
    assert len(names) > 150
    presets = {path.name for path in (ROOT / "models/presets").iterdir()}
    # one pattern; families are looked for between underscores that neighbours may share
    pattern = re.compile("|".join(sorted((re.escape(n[:-1]) + "(?=_)" for n in names), key=len, reverse=True)))
    said = [(path, node, text) for path in PRODUCT for node, text in spoken(path)]
    of_families = {text for text in {text for *_, text in said} - presets if pattern.search(words(text))}
    assert [f"{where(path, node)} {text[:60]!r}" for path, node, text in said if text in of_families] == []


def test_no_two_classes_have_one_name():
    classes = [(path, node) for path in PRODUCT for node in tree(path).body if isinstance(node, ast.ClassDef)]
    names = Counter(node.name for _, node in classes)
    twice = {node.name for _, node in classes if names[node.name] > 1}
    assert twice == {"Trainer", "TrainingArguments"}, "the core's, and those with all parts"


def test_every_folder_is_explained():
    """In the table of docs/how-it-works.md, by itself; README has a row for those at the top."""
    folders = {path.parent.relative_to(ROOT) for path in PRODUCT if "__pycache__" not in path.parts} - {Path("harness")}
    page, readme = (ROOT / "docs/how-it-works.md").read_text(), (ROOT / "README.md").read_text()
    assert [str(folder) for folder in sorted(folders) if f"`{folder}/`" not in page] == []
    assert [
        folder.name for folder in sorted(folders) if len(folder.parts) == 2 and f"| `{folder.name}/` |" not in readme
    ] == []


def test_the_order_of_imports_is_told_as_it_is_held():
    """In docs/how-it-works.md as in the contract of pyproject.toml, with every folder at the top."""
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    layers = [[name.strip().removeprefix("harness.") for name in layer.split("|")] for layer in contract["layers"]]
    page = (ROOT / "docs/how-it-works.md").read_text()
    told = [
        [name.strip() for name in names.split(",")]
        for names in re.search(r"holds the code to this order.*?```\n(.*?)```", page, re.S)[1].split("->")
    ]
    stated = {name for names in told for name in names}

    def places(names: list[str]) -> list[int]:
        return [
            at
            for at, layer in enumerate(layers)
            if any(of == name or (of.startswith(f"{name}.") and of not in stated) for of in layer for name in names)
        ]

    at = [places(names) for names in told]
    assert all(at) and all(max(above) < min(below) for above, below in pairwise(at))
    assert {p.name for p in (ROOT / "harness").iterdir() if (p / "__init__.py").is_file()} <= stated


def test_every_json_that_travels_is_json():
    files = [p for top in ("ds_configs", "models") for p in (ROOT / top).rglob("*.json")]
    assert len(files) > 10
    for path in files:
        assert isinstance(json.loads(path.read_text(encoding="utf-8")), dict), path


def test_every_model_preset_is_a_decoder():
    known = families()
    for path in (ROOT / "models/presets").iterdir():
        assert json.loads((path / "config.json").read_text())["model_type"] in known, path


@pytest.mark.parametrize("path", sorted((ROOT / "ds_configs").glob("*.json")), ids=lambda p: p.stem)
def test_every_preset_is_found_by_its_name_and_passes_check(path):
    from harness.checking import check
    from harness.config.text.document import load

    assert [str(finding) for finding in check(load(path.stem))] == []


@pytest.mark.parametrize(
    "script", ["scripts/demo", "scripts/test", "scripts/test_core", "scripts/check", "scripts/install", ".ci/run"]
)
def test_a_command_can_be_run(script):
    assert os.access(ROOT / script, os.X_OK)
