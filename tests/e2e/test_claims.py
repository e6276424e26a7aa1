"""Every rule says what DeepSpeed does with its wrong example; here DeepSpeed does it."""

from __future__ import annotations

import re

import pytest

from harness.checking.registry import RULES
from tests.e2e import deepspeed_verdicts
from tests.support.ranks import run_ranks
from tests.unit.config.test_rules import findings

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.on_host("DeepSpeed is asked on a CPU with gloo: what it says depends on the device"),
]

# DeepSpeed compiles its own Adam, Lamb and the CPU Adam on first use; the right neighbours of these rules need one
COMPILED = {
    "DS502",
    "DS801",
    "DS802",
    "DS804",
    "DS806",
    "DS807",
    "DS105",
    "DS106",
    "DS501",
    "DS504",
    "DS509",
    "DS951",
    "DS513",
    "DS514",
    "DS515",
}


def _engine_runs() -> list[str]:
    """Which examples go through the engine: the wrong ones of its rules, and their right neighbours."""
    wrong = [f"{rule.code}-wrong" for rule in RULES if rule.claim in ("engine", "runs")]
    right = [f"{rule.code}-right" for rule in RULES if rule.claim in ("engine", "runs")]
    return [run for run in wrong + right if run.split("-")[0] not in COMPILED] + [
        f"{rule.code}-wrong" for rule in RULES if rule.claim == "engine" and rule.code in COMPILED
    ]


@pytest.fixture(scope="module")
def verdicts() -> dict:
    """DeepSpeed's verdicts on all examples, from one rank."""
    (found,) = run_ranks(1, deepspeed_verdicts.verdicts, set(_engine_runs()), timeout_s=300, process_group=False)
    return found


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_deepspeed_does_what_the_rule_says(rule, verdicts):
    wrong, right = verdicts[rule.code]["wrong"], verdicts[rule.code]["right"]
    assert wrong["parser"]["ok"] == (rule.claim != "refuses"), wrong
    assert right["parser"]["ok"], right
    if "engine" in wrong:
        assert wrong["engine"]["ok"] == (rule.claim == "runs"), wrong
    if "engine" in right:
        assert right["engine"]["ok"], right


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.claim in ("refuses", "engine")], ids=lambda r: r.code)
def test_the_error_it_names_is_the_one_deepspeed_raises(rule, verdicts):
    stage = "parser" if rule.claim == "refuses" else "engine"
    raised = verdicts[rule.code]["wrong"][stage]["error"]
    for item in findings(rule, rule.wrong):
        named = re.search(r"raises (\w+Error)", item.deepspeed)
        if item.code == rule.code and named is not None:
            assert named.group(1) == raised


def test_a_misspelt_section_leaves_zero_off(verdicts):
    assert verdicts["DS101"]["wrong"]["parser"]["stage"] == 0
    assert verdicts["DS101"]["right"]["parser"]["stage"] == 3


def test_an_auto_stage_is_stage_0(verdicts):
    assert verdicts["DS305"]["wrong"]["parser"]["stage"] == 0


def test_an_absent_gradient_clipping_clips_at_1(verdicts):
    assert verdicts["DS103"]["wrong"]["parser"]["clipping"] == 1.0


def test_cpu_offload_still_offloads(verdicts):
    assert verdicts["DS105"]["wrong"]["parser"]["offload"].endswith("cpu")


@pytest.mark.parametrize("code", ["DS701", "DS702"])
def test_contiguous_activations_fail_when_checkpointing_is_configured(code, verdicts):
    assert verdicts[code]["wrong"]["checkpointing"]["error"] == "AssertionError"
    assert verdicts[code]["right"]["checkpointing"]["ok"]


def test_the_pipeline_engine_refuses_zero_2(verdicts):
    assert verdicts["DS601"]["wrong"]["pipeline"]["error"] == "AssertionError"
    assert verdicts["DS601"]["right"]["pipeline"]["ok"]


def test_reentrant_checkpointing_has_no_gradient_behind_an_embedding(verdicts):
    assert not verdicts["DS602"]["wrong"]["pipeline"]["ok"]
    assert verdicts["DS602"]["right"]["pipeline"]["ok"]


def test_the_pipeline_engine_switches_overlap_off(verdicts):
    assert verdicts["DS605"]["wrong"]["pipeline"] == {"ok": True, "overlap_comm": False}
