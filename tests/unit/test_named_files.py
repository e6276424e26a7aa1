"""What docstrings and comments name exists: files, folders, modules and flags."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from functools import cache
from pathlib import Path

import deepspeed
import pytest

from tests.unit.test_docs import FLAGS_OF_OTHERS, ROOT, WRITTEN, known_flags, name_of

OF_OTHERS = {"run_clm.py", "integrations/deepspeed.py"}  # files of transformers
FLAGS_IN_CODE = FLAGS_OF_OTHERS | {"mpi", "deepspeed"}  # of srun, of scripts for the HF Trainer
SOURCES = [path for top in ("harness", "scripts", "examples", "tests") for path in sorted((ROOT / top).rglob("*.py"))]


@cache
def files() -> frozenset[str]:
    """Every file of the project, and of DeepSpeed, whose modules comments name."""
    own = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    package = Path(deepspeed.__file__).parent
    return frozenset([*own, *(str(path.relative_to(package)) for path in package.rglob("*.py"))])


@cache
def tails() -> frozenset[str]:
    """Every file and folder by every end of its path, as docstrings shorten it."""
    found = set()
    for name in files():
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
    return any(f"{path}.py" in files() or f"{path}/__init__.py" in files() for path in tried[:3])


@cache
def said(path: Path) -> str:
    """The docstrings and comments of a module."""
    source = path.read_text(encoding="utf-8")
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    docstrings = [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return "\n".join([*docstrings, *(token.string for token in tokens if token.type == tokenize.COMMENT)])


def missing(text: str) -> list[str]:
    """What a text names of the project that is not there. NAMES in capitals stand for what a user writes."""
    named = set(re.findall(r"(?<![\w/.*{<-])((?:[\w-]+/)*[\w-]+\.py)\b", text)) - OF_OTHERS
    below = r"`((?:harness|scripts|tests|models|ds_configs|examples|docs)/[\w./-]+)`"
    named |= set(re.findall(below, text))
    modules = {name for name in re.findall(r"\b(harness(?:\.\w+)+)\b", text) if not is_module(name)}
    return sorted({name for name in named if not re.search("[A-Z]{3}", name) and name not in tails()} | modules)


@pytest.mark.parametrize("top", ["harness", "scripts", "examples", "tests"])
def test_what_docstrings_and_comments_name_exists(top: str) -> None:
    paths = [path for path in SOURCES if path.is_relative_to(ROOT / top)]
    stale = {f"{name_of(path)}: {name}" for path in paths for name in missing(said(path))}
    assert stale == set()


def test_flags_that_docstrings_and_comments_name_exist() -> None:
    stale = set()
    for path in SOURCES:
        if path.is_relative_to(ROOT / "harness"):
            flags = {
                flag for text in said(path) for flag in re.findall(r"(?<![\w-])--([a-z][a-z_0-9]*)(?![\w-])", text)
            }
            stale |= {f"{name_of(path)}: --{flag}" for flag in flags - known_flags() - FLAGS_IN_CODE}
    assert stale == set()


@pytest.mark.parametrize("path", WRITTEN, ids=name_of)
def test_the_files_that_a_page_names_exist(path: Path) -> None:
    shown = "\n".join(re.findall(r"`([\w./-]+\.py)`", path.read_text(encoding="utf-8")))
    assert missing(shown) == []
