"""Remedies keep the file's order and layout, settle at once, and never make a config worse."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.checking import check, resolve
from harness.checking.cli.fix import diff, fix
from harness.checking.registry import RULES
from harness.config import AutoValues
from harness.config.text.diagnostic import ConfigError, Severity
from harness.config.text.document import from_text

MENDED = [rule for rule in RULES if rule.claim != "elsewhere" and rule.code not in ("DS001", "DS004", "DS951")]

SEED = """{
  "train_micro_batch_size_per_gpu": 16,
  "gradient_accumulation_steps": 8,
  "steps_per_print": 10,
  "pipeline": {
    "activation_checkpointing": true,
    "partition_activations": true,
    "contiguous_memory_optimization": true
  },
  "zero_optimization": {
    "stage": 3,
    "overlap_comm": true,
    "contiguous_gradients": true,
    "sub_group_size": 1e9,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto"
  }
}
"""


def fixed(text: str, *, unsafe: bool = True) -> str:
    return fix(from_text(text), unsafe=unsafe).text


def errors(text: str) -> list[str]:
    return [d.code for d in check(from_text(text)) if d.severity is Severity.ERROR]


@pytest.mark.parametrize("rule", MENDED, ids=lambda rule: rule.code)
def test_fixing_settles_and_brings_no_new_error(rule):
    once = fixed(rule.wrong)
    assert fixed(once) == once
    assert set(errors(once)) <= set(errors(rule.wrong))
    offered = any(d.edits and d.code == rule.code for d in check(from_text(rule.wrong), **rule.options))
    if offered and once != rule.wrong:
        assert rule.code not in {d.code for d in check(from_text(once))}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('{"zero_optimisation": {"stage": 3}}', '{"zero_optimization": {"stage": 3}}'),
        ('{"a_comment": 1, "amp": {"enabled": false}}', '{"a_comment": 1}'),
        ('{"amp": {"enabled": false}, "train_batch_size": 8}', '{"train_batch_size": 8}'),
        ('{"train_batch_size": 8, // samples\n}', '{"train_batch_size": 8\n}'),
        ('{"bf16": {"enabled": "true"}}', '{"bf16": {"enabled": true}}'),
        ('{"fp16": {"enabled": True\n}}', '{"fp16": {"enabled": true\n}}'),
        (
            '{\n  "optimizer": {\n    "type": "AdamW",\n    "eps": 1e-8\n  }\n}',
            '{\n  "optimizer": {\n    "type": "AdamW"\n  }\n}',
        ),
    ],
)
def test_the_rest_of_the_text_stays_as_it_is(before, after):
    result = fixed(before)
    if "eps" in before:  # moved into a section that is not there yet
        assert json.loads(result)["optimizer"]["type"] == "AdamW"
    else:
        assert result == after


def parsed(data: dict) -> str:
    """Everything that DeepSpeed's parser makes of a config, or that it refuses it."""
    from deepspeed.runtime.config import DeepSpeedConfig

    try:
        read = vars(DeepSpeedConfig(data))
    except Exception:
        return "refused"
    return repr(plain({name: value for name, value in read.items() if name != "_param_dict"}))


def plain(value: object) -> object:
    """A parsed value as comparable data; deprecated names, which the parser has replaced, are left out."""
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items() if name not in ("cpu_offload", "cpu_offload_param")}
    inner = getattr(value, "__dict__", None)
    return plain(inner) if isinstance(inner, dict) and type(value).__module__.startswith("deepspeed") else repr(value)


IGNORED = [
    '{"train_batch_size": 8, "gradient_acumulation_steps": 2}',
    '{"train_batch_size": 8, "gradient_cliping": 0.3}',
    '{"train_batch_size": 8, "zero_optimisation": {"stage": 3}}',
    '{"train_batch_size": 8, "pipeline": {"partition_activations": true}}',
    '{"train_batch_size": 8, "prescale_gradients": False\n}',
    '{"train_batch_size": 8, "steps_per_print": "10"}',
]


# DS503 removes keys that are parsed and not read; what the engine refuses does not train
SEEN = [rule.wrong for rule in MENDED if rule.code != "DS503" and rule.claim != "engine"]


@pytest.mark.parametrize("text", [*IGNORED, *SEEN])
def test_a_safe_fix_leaves_what_deepspeed_does_as_it_is(text):
    once = fixed(text, unsafe=False)
    before = parsed(from_text(text).data)
    assert before in ("refused", parsed(from_text(once).data))
    assert text not in IGNORED or once == text


@pytest.mark.parametrize("text", IGNORED)
def test_an_unsafe_fix_makes_the_key_act(text):
    data = from_text(fixed(text)).data
    assert data != from_text(text).data
    assert parsed(data) != parsed(from_text(text).data) or "steps_per_print" in data or "pipeline" in data


def test_a_remedy_that_another_key_excludes_is_left_to_the_user():
    text = '{"train_batch_size": 8, "gradient_cliping": 0.5, "gradient_clipping": 1.0}'
    assert fixed(text) == text
    (found,) = check(from_text(text))
    assert "keep one" in found.hint


def test_the_seed_of_many_articles_is_taken_apart_completely():
    found = {(d.code, d.pointer) for d in check(from_text(SEED))}
    assert found == {
        ("DS101", "/pipeline/activation_checkpointing"),
        ("DS102", "/pipeline/partition_activations"),
        ("DS102", "/pipeline/contiguous_memory_optimization"),
    }


def test_fixing_the_seed_leaves_one_decision_to_the_user():
    text = fixed(SEED)
    assert errors(text) == ["DS702"]
    data = json.loads(text)
    data["activation_checkpointing"]["number_checkpoints"] = 4
    decided = from_text(json.dumps(data))
    assert {d.severity for d in check(decided)} == {Severity.WARNING}  # one tensor-parallel rank shares nothing out
    run = resolve(decided, AutoValues(world_size=2, hidden_size=64))
    assert (run.zero_stage, run.activation_checkpoint_interval, run.train_batch) == (3, 1, 256)
    assert "auto" not in json.dumps(run.config)


def test_the_diff_shows_what_changed():
    shown = diff("f.json", '{"a": 1}\n', '{"b": 1}\n')
    assert '-{"a": 1}' in shown and '+{"b": 1}' in shown


NAMES = ["train_batch_size", "fp16", "enabled", "zero_optimisation", "stage", "stages", "amp", "loss_scale", "pipeline"]
VALUES = st.recursive(
    st.sampled_from([None, True, "true", "auto", 0, 1, 2.5, 8, "x"]),
    lambda value: st.dictionaries(st.sampled_from(NAMES), value, max_size=4),
    max_leaves=10,
)


@given(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=5), st.sampled_from([None, 1]))
def test_any_config_settles(data, indent):
    text = json.dumps(data, indent=indent)
    once = fixed(text)
    assert fixed(once) == once
    try:
        resolve(from_text(once), AutoValues())
    except ConfigError as error:
        assert error.diagnostics
