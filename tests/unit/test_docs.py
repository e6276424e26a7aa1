"""README and docs: what is generated is current, and what they name exists."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.arguments import TrainingArguments
from harness.arguments.themes.lora import LoraArguments
from harness.arguments.themes.preferences import PreferenceArguments
from harness.arguments.themes.script import ScriptArguments
from harness.checking import check
from harness.checking.registry import by_code
from harness.checking.rules.rule import Finding, Rule, rule
from harness.checking.rules.view import RunView
from harness.cli import VERBS
from harness.config.text.diagnostic import Severity
from harness.config.text.document import from_text, load

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
WRITTEN = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.glob("*.md")]
WRITTEN += [*DOCS.glob("contributing/*.md"), *DOCS.glob("recipes/*.md")]
FREE_CODE = "DS112"  # of the rule that docs/contributing/rule.md makes up
LONGEST_PARAGRAPH = 90  # words
MADE_BY_THE_BUILD = {"planner.html"}  # of the site, by scripts/site/hooks.py
MADE_UP = {"ds_configs/zero1.json", "models/plans/mymodel.json"}

# Flags of other programs that the pages show: deepspeed, torchrun, srun, sbatch, pip, mkdocs, hf.
FLAGS_OF_OTHERS = {
    *("num_accelerators", "hostfile", "include", "master_port", "module", "nnodes", "nproc_per_node"),
    *("quiet", "rdzv_backend", "rdzv_endpoint", "nodes", "signal", "strict"),
}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(path: Path, language: str) -> list[str]:
    """The fenced blocks of a page in a language, without their indentation."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^\1```$", path.read_text(encoding="utf-8"), re.M | re.S)
    return [textwrap.dedent(text) for _, text in found]


def run_script(name: str, *arguments: object) -> None:
    command = [sys.executable, str(ROOT / "scripts" / name), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_page_is_in_the_table_of_contents() -> None:
    def leaves(node: Any) -> Iterator[str]:
        if isinstance(node, str):
            yield node
        for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
            yield from leaves(child)

    listed = set(leaves(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    assert pages - listed == {page for page in pages if re.fullmatch(r"rules/DS\d+\.md", page)}


def test_generated_pages_and_pictures_are_current(tmp_path: Path) -> None:
    run_script("write_flags.py", tmp_path / "flags.md")
    run_script("write_verbs.py", tmp_path / "verbs.md")
    run_script("draw_layouts.py", tmp_path)
    assert {path.name for path in tmp_path.glob("*.svg")} > {"ways.svg", "zero-bubble-v.svg"}
    for name in sorted(path.name for path in tmp_path.iterdir()):
        kept = DOCS / name if name.endswith(".md") else DOCS / "images" / name
        assert (tmp_path / name).read_text() == kept.read_text(), f"{kept}: run the script that writes it"


@cache
def known_flags() -> set[str]:
    kinds = (ScriptArguments, TrainingArguments, LoraArguments, PreferenceArguments)
    flags = {item.name for kind in kinds for item in fields(kind)}
    sources = [path.read_text() for top in ("harness", "scripts") for path in (ROOT / top).rglob("*.py")]
    parsers = "".join(source for source in sources if "add_argument" in source)
    of_verbs = re.findall(r"`--([a-z][\w-]*)`", (DOCS / "verbs.md").read_text(encoding="utf-8"))  # from their parsers
    return flags | {flag.replace("-", "_") for flag in [*re.findall(r"\"--([a-z][\w-]*)\"", parsers), *of_verbs]}


@pytest.mark.parametrize("path", WRITTEN, ids=name_of)
def test_every_flag_rule_and_file_that_a_page_names_exists(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    flags = set(re.findall(r"(?<![\w-])--([a-z][a-z_0-9]*)(?![\w-])", text))
    assert flags - known_flags() - FLAGS_OF_OTHERS == set()
    assert [code for code in re.findall(r"DS\d{3}", text) if code != FREE_CODE and by_code(code) is None] == []
    for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text):
        assert target in MADE_BY_THE_BUILD or (path.parent / target).exists(), f"{name_of(path)} links to {target}"
    for named in re.findall(r"`((?:scripts|docs|tests|harness|models|ds_configs|examples)/[\w./-]+)`", text):
        assert (ROOT / named).exists() or "NAME" in named or named in MADE_UP, f"{name_of(path)} names {named}"


def test_the_changelog_links_to_no_file() -> None:
    """The site shows it in another folder, where such a link leads nowhere."""
    assert re.findall(r"\]\((?!https?:)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("path", WRITTEN, ids=name_of)
def test_no_paragraph_is_too_long_to_be_read_once(path: Path) -> None:
    text = re.sub(r"```.*?```|<!--.*?-->|^ *\|[^\n]*$", "", path.read_text(encoding="utf-8"), flags=re.S | re.M)
    paragraphs = re.split(r"\n\s*\n|\n\s*(?:[-*]|\d+\.) ", text)
    assert [words[:60] for words in paragraphs if len(words.split()) > LONGEST_PARAGRAPH] == []


@pytest.mark.parametrize("path", WRITTEN, ids=name_of)
def test_every_command_that_a_page_names_exists(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"```.*?```|`[^`\n]+`", text, re.S))
    assert set(re.findall(r"(?:^|`|\$ )ds-harness ([a-z][\w-]*)", code, re.M)) <= set(VERBS)
    for module in re.findall(r"python -m ([\w.]+)", text):
        assert find_spec(module) is not None, f"{name_of(path)} names {module}"


@pytest.mark.parametrize("path", WRITTEN, ids=name_of)
def test_code_and_json_of_a_page_can_be_read(path: Path) -> None:
    for code in blocks(path, "python"):
        ast.parse(code)
    for text in blocks(path, "json"):
        json.loads(text if text.lstrip().startswith("{") else f"{{{text}}}")


def test_the_start_page_has_a_picture_and_the_planner_and_a_command_that_fits_a_phone() -> None:
    page = (DOCS / "index.md").read_text()
    assert "](images/" in page and "](planner.html)" in page
    assert max(map(len, page.split("```")[1].splitlines())) <= 42  # characters


@pytest.mark.parametrize("path", sorted({*DOCS.glob("recipes/*.md")} - {DOCS / "recipes/index.md"}), ids=name_of)
def test_a_recipe_has_a_command_its_output_and_a_picture(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert re.findall(r"^```(\w*)\n.*?^```$", text, re.M | re.S).count("") >= 2
    assert re.search(r"^!\[.+\]\(\.\./images/", text, re.M)


@pytest.mark.parametrize("path", [ROOT / "README.md", DOCS / "layouts.md"], ids=name_of)
def test_the_table_of_presets_is_the_folder(path: Path) -> None:
    listed = re.findall(r"^\| `(\w+)` \|.*D\)|^\| `(\w+)` \|.*\| any \|", path.read_text(), re.M)
    assert {first or second for first, second in listed} == {file.stem for file in (ROOT / "ds_configs").glob("*.json")}


def test_every_preset_is_a_leaf_of_the_tree_that_chooses_one() -> None:
    page = (DOCS / "which-layout.md").read_text(encoding="utf-8")
    presets = {file.stem for file in (ROOT / "ds_configs").glob("*.json")}
    assert set(re.findall(r"(?:yes|no) ─> (\w+)", page)) == presets
    assert set(re.findall(r"^\| `(\w+)`", page, re.M)) == presets


def test_readme_is_short_and_begins_with_the_users_own_model_and_file() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert 100 <= len(lines) <= 171
    first = next(iter(re.findall(r"```\n(.*?)```", "\n".join(lines), re.S)))
    assert {"--model_name_or_path", "--train_file", "--output_dir"} <= set(first.split())


def test_readme_counts_the_families_of_the_table() -> None:
    readme, table = (ROOT / "README.md").read_text(), (DOCS / "models.md").read_text()
    (all_in_stages,) = re.findall(r"^\| all \| \*\*(\d+)\*\*", table, re.M)
    (families,) = re.findall(r"each of the (\d+) families", table)
    assert f"[{all_in_stages} of {families} families](docs/models.md)" in readme


@cache
def spoken() -> list[str]:
    """Every text of the product's code; a NUL stands for what an f-string fills in."""
    texts = []
    for path in (path for top in ("harness", "models") for path in (ROOT / top).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                texts.append("".join(p.value if isinstance(p, ast.Constant) else "\0" for p in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return texts


@pytest.mark.parametrize("message", blocks(DOCS / "troubleshooting.md", "text"), ids=lambda text: text.strip()[:50])
def test_a_message_of_the_troubleshooting_page_is_one_that_users_see(message: str) -> None:
    parts = [part.strip() for part in re.split(r"<.*?>", " ".join(message.split()))]
    wanted = ".*".join(re.escape(part) for part in parts if part)
    assert any(re.search(wanted, text, re.S) for text in spoken()), message


def test_the_rule_of_the_contributing_page_works() -> None:
    (source,) = blocks(DOCS / "contributing/rule.md", "python")
    assert FREE_CODE in source and by_code(FREE_CODE) is None, "give the page another free code"
    names: dict[str, Any] = {"rule": rule, "Severity": Severity, "Finding": Finding, "RunView": RunView}
    exec(compile("from __future__ import annotations\n" + source, "rule.md", "exec"), names)
    made = next(value for value in names.values() if isinstance(value, Rule))
    assert len(list(made.check(RunView.of(from_text(made.wrong))))) == 1
    assert list(made.check(RunView.of(from_text(made.right)))) == []


def test_the_preset_of_the_contributing_page_passes_the_check(tmp_path: Path) -> None:
    (source,) = blocks(DOCS / "contributing/preset.md", "json")
    (tmp_path / "zero1.json").write_text(source)
    assert [str(finding) for finding in check(load(str(tmp_path / "zero1.json")))] == []


def test_the_plan_of_the_contributing_page_is_a_tested_one() -> None:
    (source,) = blocks(DOCS / "contributing/plan.md", "json")
    assert json.loads(source) == json.loads((ROOT / "models/plans/gpt2.json").read_text())
