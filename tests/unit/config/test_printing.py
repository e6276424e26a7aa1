"""A finding as it is shown: underlined in its line, escaped for each format, counted, with its remedy."""

from __future__ import annotations

import json
from urllib.parse import unquote

import pytest

from harness.checking.cli.render import render, sarif, summary, text_block
from harness.config.text.diagnostic import ConfigError, Diagnostic, Edit, Severity
from harness.config.text.document import Document
from harness.config.text.parser import parse
from harness.config.values.pointers import name_of
from harness.wording import all_of, counted, one_of

ERROR, WARNING, INFO = Severity.ERROR, Severity.WARNING, Severity.INFO


def finding(severity: Severity = ERROR, **more: object) -> Diagnostic:
    stated: dict[str, object] = {"code": "DS101", "message": "unknown key x", "file": "f.json"}
    return Diagnostic(**{**stated, "severity": severity, **more})


def block(text: str, **more: object) -> list[str]:
    return text_block(finding(**more), text, colour=False).splitlines()


def test_the_place_is_underlined() -> None:
    assert block('{\n\t"x": 1\n}', line=2, column=2, length=3) == [
        "error[DS101]: unknown key x",
        " --> f.json:2:2",
        "  |",
        '2 |  "x": 1',
        "  |  ^^^",
    ]


def test_the_gutter_is_as_wide_as_the_number_of_the_line() -> None:
    lines = block("\n" * 99 + "x", line=100, hint="remove it", deepspeed="ignores it")
    assert lines[1].startswith("   --> ") and lines[2] == "    |" and lines[3] == "100 | x"
    assert lines[5:] == ["    = deepspeed: ignores it", "    = help: remove it"]


@pytest.mark.parametrize(
    ("text", "line"),
    [pytest.param("", 1, id="no text"), pytest.param("{\n   \n}", 2, id="a blank line")],
)
def test_nothing_is_underlined_where_there_is_nothing(text: str, line: int) -> None:
    assert len(block(text, line=line)) == 2


@pytest.mark.parametrize("column", [1, 81, 500, 990])
def test_of_a_long_line_the_part_around_the_finding_is_shown(column: int) -> None:
    text = "".join(chr(33 + number % 90) for number in range(1000))
    shown, mark = (line.partition(" | ")[2] for line in block(text, column=column, length=5)[3:5])
    assert len(shown) <= 160 and len(mark) <= 160
    assert shown[mark.index("^") :][: mark.count("^")] == text[column - 1 : column + 4]


def test_what_a_terminal_would_act_on_is_escaped_everywhere() -> None:
    evil = "\x1b[2J\r"
    lines = block(f'{{"{evil}": 1}}', message=evil, hint=evil, deepspeed=evil, file=f"{evil}.json")
    assert all(line.isprintable() for line in lines)
    assert lines[0] == "error[DS101]: \\x1b[2J\\r"
    annotation = render([finding(message=evil, hint=evil)], "github", {}, colour=False, files=1)
    assert annotation.isprintable()


def test_colours_are_those_of_the_severity() -> None:
    shades = {severity: text_block(finding(severity), "x", colour=True) for severity in Severity}
    assert [shade.split("m")[0] for shade in shades.values()] == ["\x1b[1;31", "\x1b[1;33", "\x1b[1;36"]
    assert "\x1b[31m^\x1b[0m" in shades[ERROR]


@pytest.mark.parametrize(
    ("findings", "files", "line"),
    [
        pytest.param([], 1, "1 file checked, no problems found", id="nothing"),
        pytest.param([], 0, "0 files checked, no problems found", id="no file"),
        pytest.param([ERROR], 1, "1 error in 1 file", id="one"),
        pytest.param(
            [INFO, ERROR, WARNING, ERROR], 3, "2 errors, 1 warning, 1 hint in 3 files", id="the gravest first"
        ),
        pytest.param([INFO, INFO], 2, "2 hints in 2 files", id="hints alone"),
    ],
)
def test_findings_are_counted(findings: list[Severity], files: int, line: str) -> None:
    assert summary([finding(severity) for severity in findings], files) == line


EDIT = (Edit(start=0, end=1, new=""),)


@pytest.mark.parametrize(
    ("remedies", "line"),
    [
        ([], None),
        ([((), True)], None),
        ([(EDIT, True), (EDIT, True)], "fixes available: 2 with --fix"),
        ([(EDIT, False)], "fixes available: 1 with --fix --unsafe-fixes"),
        ([(EDIT, False), (EDIT, True)], "fixes available: 1 with --fix, 1 with --fix --unsafe-fixes"),
    ],
)
def test_remedies_are_counted_by_the_flag_that_applies_them(
    remedies: list[tuple[tuple[Edit, ...], bool]], line: str | None
) -> None:
    findings = [finding(edits=edits, is_safe=is_safe) for edits, is_safe in remedies]
    last = render(findings, "text", {}, colour=False, files=1).splitlines()[-1]
    assert last.startswith("fixes available") == (line is not None)
    assert line is None or last == line


def test_an_annotation_escapes_what_separates_its_parts() -> None:
    odd = finding(INFO, file="a,b:c%.json", message="50% of\nit", hint="x")
    (line,) = render([odd], "github", {}, colour=False, files=1).splitlines()
    assert line == "::notice file=a%2Cb%3Ac%25.json,line=1,col=1,title=DS101::50%25 of\\nit; x"


@pytest.mark.parametrize("name", ["a.json", "/etc/my config #1.json", "50%.json", "ü.json", "<stdin>"])
def test_the_address_of_a_file_is_an_address(name: str) -> None:
    (run,) = sarif([finding(INFO, file=name, line=3, column=2, length=4, hint="remove it")])["runs"]
    (result,) = run["results"]
    place = result["locations"][0]["physicalLocation"]
    assert unquote(place["artifactLocation"]["uri"]) == name
    assert not set(' #<>"') & set(place["artifactLocation"]["uri"])
    assert place["region"] == {"startLine": 3, "startColumn": 2, "endColumn": 6}
    assert (result["level"], result["message"]["text"]) == ("note", "unknown key x; remove it")


def test_no_findings_are_an_empty_list_in_json() -> None:
    assert json.loads(render([], "json", {}, colour=False, files=1)) == []


@pytest.mark.parametrize(
    ("pointer", "name"),
    [
        ("", ""),
        ("/a", "a"),
        ("/zero_optimization/stage", "zero_optimization.stage"),
        ("/a~1b/c~0d", "a/b.c~d"),
        ("/~01", "~1"),
        ("/", '""'),
        ("/fp16/", 'fp16.""'),
    ],
)
def test_a_pointer_is_named_as_it_is_written(pointer: str, name: str) -> None:
    assert name_of(pointer) == name


def test_an_error_is_a_line_for_each_finding() -> None:
    both = ConfigError([finding(line=3, column=4, hint="remove it"), finding(file="", message="\x1b")])
    assert str(both).splitlines() == ["f.json:3:4: DS101 unknown key x; remove it", "DS101 \\x1b"]


@pytest.mark.parametrize(
    ("text", "offset", "place"),
    [
        ("", 0, (1, 1)),
        ("ab", 2, (1, 3)),
        ("a\nb", 1, (1, 2)),
        ("a\nb", 2, (2, 1)),
        ("a\n\n", 3, (3, 1)),
        ("a\r\nb", 3, (2, 1)),
        ("ü\nü", 2, (2, 1)),
    ],
)
def test_lines_and_columns_count_from_one(text: str, offset: int, place: tuple[int, int]) -> None:
    assert Document("f.json", text, parse("{}")).line_column(offset) == place


def test_counts_and_choices_are_words() -> None:
    assert [counted(number, "stage") for number in (0, 1, 2, -1, 1000)] == [
        *("0 stages", "1 stage", "2 stages", "-1 stages", "1,000 stages")
    ]
    assert counted(2, "batch", "batches") == "2 batches"
    assert [one_of(choices) for choices in ([1], [1, 2], ["a", "b", "c"])] == ["1", "1 or 2", "a, b or c"]
    assert [all_of(items) for items in (["a"], (1, 2, 3))] == ["a", "1, 2 and 3"]
