"""What pages, docstrings, comments and messages name exists: files, folders, modules and flags."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Callable
from functools import cache
from pathlib import Path

import deepspeed
import pytest

from tests.unit.test_docs import DOCS, FLAGS_OF_OTHERS, MADE_UP, ROOT, WRITTEN, known_flags, name_of

OF_OTHERS = {"run_clm.py", "integrations/deepspeed.py", "my_script.py", "models/mine"}  # of transformers, of users
OF_OTHERS |= {"output_dir/README.md"}  # of runs
OF_OTHERS |= {"tsv_format.py", "test_tsv_format.py"}  # of who adds a format
OWN = r"(?:harness|scripts|tests|models|ds_configs|examples|docs|\.ci|\.github)/"
NAMES = (
    r"(?<![\w/.*{<-])((?:\.?[\w-]+/)*\.?[\w-]+\.py)\b",  # of Python, by any end of its path
    r"(?<![\w/.*{<-])((?:[\w-]+/)*[\w-]+\.md)\b",
    rf"(?<![\w/.*{{<-])({OWN}[\w./-]*+)(?![*{{<\0])",  # whatever is below a folder at the top
)
ADVICE = r"write a plan in \S+"  # names a file that is not there yet
PAGES = [*WRITTEN, *DOCS.glob("rules/*.md"), ROOT / "CHANGELOG.md", ROOT / "SECURITY.md"]
PAGES += [path for path in sorted((ROOT / ".github").rglob("*")) if path.is_file()]
FLAGS_IN_CODE = FLAGS_OF_OTHERS | {"mpi", "deepspeed", "ddp_timeout"}  # of srun, of scripts for the HF Trainer
SOURCES = [path for top in ("harness", "scripts", "examples", "tests") for path in sorted((ROOT / top).rglob("*.py"))]


@cache
def tails() -> frozenset[str]:
    """Every file and folder of the project, and of DeepSpeed, by every end of its path, as docstrings shorten it."""
    own = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    package = Path(deepspeed.__file__).parent
    found = set()
    for name in (*own, *(str(path.relative_to(package)) for path in package.rglob("*.py"))):
        parts = name.split("/")
        found |= {"/".join(parts[start:]) for start in range(len(parts))}
        folders = parts[:-1]
        ends = [(start, end) for end in range(1, len(folders) + 1) for start in range(end)]
        found |= {"/".join(folders[start:end]) + slash for start, end in ends for slash in ("", "/")}
    return frozenset(found)


def is_module(dotted: str) -> bool:
    """Whether a dotted name is a module of the project, or at most two names deep in one."""
    parts = dotted.split(".")
    tried = ["/".join(parts[:length]) for length in range(len(parts), max(len(parts) - 3, 0), -1)]
    return any(f"{path}.py" in tails() or f"{path}/__init__.py" in tails() for path in tried[:3])


KINDS = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@cache
def said(path: Path) -> str:
    """The docstrings and comments of a module."""
    source = path.read_text(encoding="utf-8")
    docstrings = [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(source)) if isinstance(node, KINDS)]
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return "\n".join([*docstrings, *(token.string for token in tokens if token.type == tokenize.COMMENT)])


def printed(path: Path) -> str:
    """The sentences among a module's texts, such as errors and help; a NUL stands for what an f-string fills in."""
    texts = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            texts.append("".join(p.value if isinstance(p, ast.Constant) else "\0" for p in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.append(node.value)
    return "\n".join(text for text in texts if " " in text.strip())


def missing(text: str) -> list[str]:
    """What a text names of the project that is not there. NAMES in capitals stand for what a user writes."""
    text = re.sub(ADVICE, "", text)
    named = {name.rstrip(".-") for pattern in NAMES for name in re.findall(pattern, text)} - OF_OTHERS - MADE_UP
    named = {name for name in named if name.endswith(".md") or not re.search("[A-Z]{3}", name)}
    modules = {name for name in re.findall(r"\b(harness(?:\.\w+)+)\b", text) if not is_module(name)}
    return sorted((named - tails()) | modules)


def unknown_flags(text: str) -> list[str]:
    """The flags that a text names, and nothing takes."""
    named = set(re.findall(r"(?<![\w-])--([a-z][a-z_0-9]*)(?![\w-])", text))
    return sorted(f"--{flag}" for flag in named - known_flags() - FLAGS_IN_CODE)


def stale(top: str, read: Callable[[Path], str], find: Callable[[str], list[str]] = missing) -> set[str]:
    """What `find` says of what `read` reads from the modules in a folder; only those with a suspect word are parsed."""
    suspects = [path for path in SOURCES if path.is_relative_to(ROOT / top) and find(path.read_text(encoding="utf-8"))]
    return {f"{name_of(path)}: {name}" for path in suspects for name in find(read(path))}


def test_a_name_is_found_with_and_without_backticks_and_with_a_leading_dot() -> None:
    text = "`.ci/gone`, ds_configs/gone.json and docs/gone.md. See harness/gone.py, GONE.md"
    gone = {".ci/gone", "ds_configs/gone.json", "docs/gone.md", "harness/gone.py", "GONE.md"}
    assert set(missing(text)) == gone
    assert missing("`.ci/run`, ds_configs/zero2.json, docs/data.md, README.md, docs/rules/, tests/e2e/test_*.py") == []


@pytest.mark.parametrize("top", ["harness", "scripts", "examples", "tests"])
def test_what_docstrings_and_comments_name_exists(top: str) -> None:
    assert stale(top, said) == set()


def test_flags_that_docstrings_and_comments_name_exist() -> None:
    assert unknown_flags("--max_steps and --no_such_flag") == ["--no_such_flag"]
    assert stale("harness", said, unknown_flags) == set()


@pytest.mark.parametrize("top", ["harness", "scripts"])
def test_the_files_that_messages_name_exist(top: str) -> None:
    assert stale(top, printed) == set()


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_the_files_that_a_page_names_exist(path: Path) -> None:
    assert missing(path.read_text(encoding="utf-8")) == []
