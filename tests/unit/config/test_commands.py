"""The verbs as a user meets them: exit codes, formats, quick and without heavy imports."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from harness.checking.schema import version_warning
from harness.cli import VERBS, main

ROOT = Path(__file__).resolve().parents[3]
WRONG = '{\n  "train_batch_size": 8,\n  "zero_optimisation": {"stage": 3},\n  "fp16": {"enabled": "maybe"}\n}\n'


@pytest.fixture
def wrong(tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text(WRONG, "utf-8")
    return str(path)


def test_the_presets_are_checked_clean_even_strictly(capsys):
    assert main(["check", str(ROOT / "ds_configs"), "--strict"]) == 0
    assert "no problems found" in capsys.readouterr().out


def test_text_shows_the_line_the_reason_and_the_remedy(wrong, capsys):
    assert main(["check", wrong]) == 1
    out = capsys.readouterr().out
    assert "error[DS201]" in out and "warning[DS101]" in out
    assert f"{wrong}:3:3" in out
    assert '3 |   "zero_optimisation": {"stage": 3},' in out
    assert "  |   ^^^^^^^^^^^^^^^^^^^" in out
    assert "= help: did you mean zero_optimization?" in out
    assert "1 error, 1 warning in 1 file" in out
    assert "\x1b" not in out  # no colour where nobody sees it


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("value", "coloured"), [(None, True), ("", True), ("1", False), ("0", False)])
@pytest.mark.parametrize("words", [["check"], ["check", "--fix", "--unsafe-fixes"], ["resolve"]], ids=" ".join)
def test_no_color_holds_for_all_that_is_printed_in_colours(words, value, coloured, wrong, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.delenv("NO_COLOR", raising=False)
    if value is not None:
        monkeypatch.setenv("NO_COLOR", value)
    assert main([words[0], wrong, *words[1:]]) == 1
    assert ("\x1b[" in terminal.getvalue()) == coloured


def test_json_has_the_documented_fields(wrong, capsys):
    main(["check", wrong, "--format", "json"])
    found = json.loads(capsys.readouterr().out)
    fields = {"file", "code", "severity", "pointer", "line", "column", "message", "hint", "deepspeed"}
    assert all(item.keys() == fields for item in found)
    assert {(item["code"], item["pointer"], item["line"]) for item in found} == {
        ("DS101", "/zero_optimisation", 3),
        ("DS201", "/fp16/enabled", 4),
    }


@pytest.mark.parametrize(
    "text",
    [
        WRONG,
        '{"train_batch_size": 8, "lr_scheduler": {"type": "cosine"}}',  # the right name would bring an error
        '{"train_batch_size": 8, // eight\n "fp16": {"enabled": True\n}}',
    ],
)
def test_no_fix_is_offered_that_would_not_be_applied(text, tmp_path, capsys):
    path = tmp_path / "ds_config.json"
    path.write_text(text, "utf-8")
    main(["check", str(path), "--fix", "--unsafe-fixes"])
    assert "fixes available" not in capsys.readouterr().out
    path.write_text('{"train_batch_size": 8, "zero_optimisation": {"stage": 3}}', "utf-8")
    main(["check", str(path)])
    assert "fixes available: 1 with --fix --unsafe-fixes" in capsys.readouterr().out


def test_a_config_is_checked_for_a_run_in_fp8(tmp_path, capsys):
    path = tmp_path / "ds_config.json"
    path.write_text('{"train_batch_size": 8, "fp16": {"enabled": true}}', "utf-8")
    assert main(["check", str(path)]) == 0
    assert main(["check", str(path), "--fp8", "rowwise"]) == 1
    assert "error[DS410]: --fp8 rowwise needs bf16, but this run computes in fp16" in capsys.readouterr().out
    path.write_text('{"train_batch_size": 8, "bf16": {"enabled": true}}', "utf-8")
    assert main(["check", str(path), "--fp8", "rowwise", "--model", "tiny-llama"]) == 0
    assert "compute capability 8.9 or more" in capsys.readouterr().out
    assert main(["check", str(path), "--fp8", "no", "--model", "tiny-llama"]) == 0
    assert "fp8" not in capsys.readouterr().out


def test_a_check_for_preferences_says_what_they_need(tmp_path, capsys):
    path = tmp_path / "ds_config.json"
    path.write_text('{"train_batch_size": 8}', "utf-8")
    assert main(["check", str(path), "--preference", "dpo"]) == 0
    assert "a sample is two sequences" in (said := capsys.readouterr().out) and "without gradients comes first" in said
    assert main(["check", str(path), "--preference", "orpo"]) == 0
    assert "a sample is two sequences" in (said := capsys.readouterr().out) and "without gradients" not in said


def test_github_gets_workflow_commands(wrong, capsys):
    main(["check", wrong, "--format", "github"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"::warning file={wrong},line=3,col=3,title=DS101::")
    assert lines[1].startswith("::error ")


def test_sarif_names_every_rule_and_place(wrong, capsys):
    main(["check", wrong, "--format", "sarif"])
    log = json.loads(capsys.readouterr().out)
    (run,) = log["runs"]
    assert log["version"] == "2.1.0"
    known = {rule["id"] for rule in run["tool"]["driver"]["rules"]}
    assert {result["ruleId"] for result in run["results"]} == {"DS101", "DS201"} <= known
    region = run["results"][0]["locations"][0]["physicalLocation"]["region"]
    assert region == {"startLine": 3, "startColumn": 3, "endColumn": 22}


def test_strict_lets_warnings_fail(tmp_path):
    path = tmp_path / "c.json"
    path.write_text('{"train_batch_size": 8, "frobnicate": 1}')
    assert main(["check", str(path)]) == 0
    assert main(["check", str(path), "--strict"]) == 1


def test_the_target_decides_what_auto_means(tmp_path, capsys):
    path = tmp_path / "c.json"
    path.write_text('{"train_micro_batch_size_per_gpu": "auto"}')
    assert main(["check", str(path)]) == 0
    assert main(["check", str(path), "--target", "hf"]) == 0
    assert main(["check", str(path), "--target", "deepspeed"]) == 1
    path.write_text('{"train_micro_batch_size_per_gpu": 1, // one\n}')
    assert main(["check", str(path)]) == 0
    assert main(["check", str(path), "--target", "hf"]) == 1


def test_the_number_of_ranks_and_the_model_are_held_against_the_layout(tmp_path, capsys):
    assert main(["check", "pipeline_3d", "--world_size", "8", "--model", "tiny-llama"]) == 0
    assert main(["check", "pipeline_3d", "--world_size", "6"]) == 1
    assert "DS311" in capsys.readouterr().out
    assert main(["check", "pipeline_3d", "--model", str(tmp_path)]) == 1
    assert "config.json" in capsys.readouterr().err


def test_directories_and_globs_are_searched(tmp_path, capsys):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "one.json").write_text('{"train_batch_size": 8}')
    (tmp_path / "two.json").write_text('{"train_batch_size": 8}')
    assert main(["check", str(tmp_path)]) == 0
    assert "2 files" in capsys.readouterr().out
    assert main(["check", str(tmp_path / "**" / "*.json"), str(tmp_path / "two.json")]) == 0
    assert "2 files" in capsys.readouterr().out
    assert main(["check", str(tmp_path / "*.yaml")]) == 1
    assert "no file matches" in capsys.readouterr().err


def test_fix_writes_the_file_shows_the_diff_and_settles(wrong, capsys):
    assert main(["check", wrong, "--fix"]) == 1
    assert Path(wrong).read_text("utf-8") == WRONG  # the misspelt section would begin to act
    assert "fixes available: 1 with --fix --unsafe-fixes" in capsys.readouterr().out
    assert main(["check", wrong, "--fix", "--unsafe-fixes"]) == 1  # "maybe" is for the user to decide
    assert '+  "zero_optimization": {"stage": 3},' in capsys.readouterr().err
    text = Path(wrong).read_text("utf-8")
    assert text == WRONG.replace("zero_optimisation", "zero_optimization")
    main(["check", wrong, "--fix"])
    assert Path(wrong).read_text("utf-8") == text


def test_explain_prints_a_page_or_the_list(capsys):
    assert main(["explain", "DS101"]) == 0
    assert "zero_optimisation" in capsys.readouterr().out
    assert main(["explain"]) == 0
    assert "misspelt-key" in capsys.readouterr().out
    assert main(["explain", "DS000"]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_schema_prints_the_whole_or_a_section(capsys):
    assert main(["schema"]) == 0
    assert "$defs" in json.loads(capsys.readouterr().out)
    assert main(["schema", "pipeline"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "pipeline"


def test_resolve_prints_where_each_value_comes_from(capsys):
    assert main(["resolve", "zero3", "--world_size", "2", "--learning_rate", "1e-4", "--hidden_size", "64"]) == 0
    out = capsys.readouterr().out
    assert "hidden_size squared" in out and '"auto"' not in out
    assert main(["resolve", "pipeline_3d", "--world_size", "3"]) == 1
    assert "DS311" in capsys.readouterr().err


def test_help_and_unusable_arguments(capsys):
    assert main(["--help"]) == 0
    assert main(["frobnicate"]) == 2
    assert main([]) == 2
    for verb in VERBS:
        with pytest.raises(SystemExit) as ended:
            main([verb, "--help"])
        assert ended.value.code == 0
        assert "example:" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main(["check"])
    assert ended.value.code == 2


def test_nothing_heavy_is_imported():
    heavy = "torch deepspeed transformers pydantic numpy jsonschema"
    code = f"""if True:
        import sys
        from harness.cli import main
        main(["check", "zero3"])
        sys.exit(" ".join(name for name in "{heavy}".split() if name in sys.modules) or None)
    """
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("raw", [b"\xff\xfe", b'{"a": "\x00"}', b"{" * 5000, b'{"a": "\\ud800"}', b"\xef\xbb\xbf{}"])
def test_any_bytes_on_standard_input_end_without_a_traceback(raw):
    command = [sys.executable, "-m", "harness.cli", "check", "-"]
    done = subprocess.run(command, cwd=ROOT, input=raw, capture_output=True, check=False)
    assert done.returncode in (0, 1)
    assert b"Traceback" not in done.stderr


def test_another_deepspeed_is_told():
    assert version_warning("0.19.8") is None
    assert "0.20.1" in version_warning("0.20.1")
    assert "0.18.0" in version_warning("0.18.0")
