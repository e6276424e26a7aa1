"""The account of a step on a GPU: what sums of gradients, norm, clipping and update move, and in how many kernels."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama import modeling_llama

from harness.arguments import TrainingArguments
from harness.arguments.themes.lora import LoraArguments
from harness.arguments.themes.script import ScriptArguments
from harness.cli import main
from harness.command_line import parse
from harness.dry_run.command import dry_run_plan
from harness.extras.fusing.fused import Rotation
from harness.planner.hardware import load_hardware
from harness.planner.layer_time import AS_ONE, HOST_ZERO_3, NARROW, rounding_seconds
from harness.planner.model_config import decoder_of
from harness.planner.update_traffic import update_traffic
from harness.planner.workload import Strategy, Workload
from harness.preflight import check_inputs
from harness.topology.env import LaunchEnv
from scripts.bench.step_account import operations as parts
from scripts.bench.step_account.account import HOST, Account, account
from scripts.bench.step_account.fusion import Fusion

LAYERS, HIDDEN, WIDE, VOCABULARY, TOKENS = 1, 64, 128, 512, 128
LLAMA: dict[str, Any] = {
    **dict(model_type="llama", architectures=["LlamaForCausalLM"], hidden_size=HIDDEN, intermediate_size=WIDE),
    **dict(num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2, vocab_size=VOCABULARY),
    **dict(max_position_embeddings=TOKENS, tie_word_embeddings=False),
}
MEASURED = {  # scripts/bench/results/gpu.json
    **LLAMA,
    **dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32),
    **dict(num_key_value_heads=8, vocab_size=32768, max_position_embeddings=4096),
}
EXPERTS = {**LLAMA, "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 4}

WORK = Workload(shape=decoder_of(LLAMA, "tiny"), sequence=TOKENS)


def of(
    tmp_path: Path,
    sections: dict[str, Any],
    *flags: str,
    model: dict[str, Any] = LLAMA,
    ranks: int = 1,
    rank: int = 0,
    fusion: Fusion | None = None,
    tokens: int = TOKENS,
) -> Account:
    """Return the account of a step in bf16 on an H100, of two micro-batches by default."""
    whole = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "bf16": {"enabled": True}}
    (tmp_path / "model").mkdir(exist_ok=True)
    (tmp_path / "model" / "config.json").write_text(json.dumps(model))
    (tmp_path / "ds.json").write_text(json.dumps({**whole, "gradient_clipping": 1.0, **sections}))
    words = ["--deepspeed_config", f"{tmp_path}/ds.json", "--model_name_or_path", f"{tmp_path}/model", *flags]
    words += ["--block_size", str(tokens), "--output_dir", f"{tmp_path}/out", "--max_steps", "10"]
    kinds = [ScriptArguments, TrainingArguments, LoraArguments]
    script, args, lora = parse(kinds, words, prog="account", description="", epilog="")
    env = LaunchEnv(rank=rank, world_size=ranks)
    plan = dry_run_plan(script, args, check_inputs(script, args, env, lora), lora)
    return account(plan, env, load_hardware("h100"), fusion)


def zero(stage: int, **more: object) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **more}}


BELOW_ZERO_2: dict[str, dict[str, Any]] = {
    "ZeRO-0": dict(sections=zero(0)),
    "ZeRO-1, tied weights": dict(sections=zero(1), ranks=2, model={**LLAMA, "tie_word_embeddings": True}),
    "experts": dict(sections=zero(1), model=EXPERTS),
    "LoRA": dict(sections=zero(1), flags=("--use_peft", "--lora_r", "8")),
    "deferred weight gradients": dict(
        sections={**zero(1), "pipeline": {"stages": 2, "schedule": "zero-bubble"}},
        model={**LLAMA, "num_hidden_layers": 2},
        ranks=2,
        rank=1,
        divided_by=1,
    ),
}


FIRST = "ZeRO-1, tied weights"
OTHERS = [name for name in BELOW_ZERO_2 if name != FIRST]


@pytest.mark.parametrize("name", [FIRST, *(pytest.param(name, marks=pytest.mark.thorough) for name in OTHERS)])
def test_below_zero_2_a_gradient_costs_10_bytes_and_the_update_reads_it_twice(tmp_path: Path, name: str) -> None:
    case = dict(BELOW_ZERO_2[name])
    own = 1 / case.pop("divided_by", case.get("ranks", 1))  # share of the parameters that the rank updates
    found = of(tmp_path, case.pop("sections"), *case.pop("flags", ()), **case)
    traffic = update_traffic(WORK, Strategy(zero_stage=1, flat_sums=True))
    assert found.bytes_per_parameter == pytest.approx(traffic.later, rel=1e-3) and traffic.later == 10
    by_part = {part: cost.bytes / found.parameters for part, cost in found.parts.items()}
    assert by_part[parts.SUMS] == pytest.approx(traffic.first + traffic.later, rel=1e-3)
    update = by_part[parts.NORM] + by_part[parts.CLIP] + by_part[parts.OPTIMIZER] + 6 * own  # 6: the copy of weights
    assert update == pytest.approx(own * traffic.own, rel=0.02)
    if own == case.get("ranks", 1) == 1:
        assert by_part[parts.WEIGHTS] == pytest.approx(6, rel=1e-3) and found.parts[parts.REDUCTION].kernels == 0
    kernels = {part: found.parts[part].kernels for part in (parts.ZEROING, parts.CLIP, parts.NORM)}
    assert kernels[parts.ZEROING] == 0  # the first gradient of a step is written over the sums
    assert by_part[parts.CLIP] < 0.1 and kernels[parts.CLIP] < 20  # numbers alone: the fused optimizer clips
    assert kernels[parts.NORM] < 20


@pytest.mark.parametrize(
    ("stage", "sums", "reduction", "norm", "clip"),
    [
        pytest.param(2, 9, 25, 10, 4, id="ZeRO-2", marks=pytest.mark.thorough),
        pytest.param(3, 6, 30, 10, 4, id="ZeRO-3"),
    ],
)
def test_from_zero_2_on_deepspeed_moves_no_more_than_when_this_was_counted(
    tmp_path: Path, stage: int, sums: float, reduction: float, norm: float, clip: float
) -> None:
    found = of(tmp_path, zero(stage), ranks=2)
    by_part = {part: cost.bytes / found.parameters for part, cost in found.parts.items()}
    assert 0 < found.bytes_per_parameter < sums + 0.1
    for part, most in ((parts.REDUCTION, reduction), (parts.NORM, norm), (parts.CLIP, clip), (parts.OPTIMIZER, 14)):
        assert 0 < by_part[part] < most + 0.1, part
    assert sum(found.parts[part].kernels for part in (parts.NORM, parts.CLIP, parts.OPTIMIZER)) < 80
    hooks = 2 * HOST_ZERO_3 * load_hardware("h100").dispatch_seconds if stage == 3 else 0.0
    assert hooks < found.parts[HOST].seconds < hooks + 0.02


@pytest.mark.thorough
def test_norms_move_what_the_planner_counts_and_a_tenth_of_it_in_one_kernel_each(tmp_path: Path) -> None:
    counts = 2 * (2 * LAYERS + 1) * TOKENS * HIDDEN  # elements of the norms of two micro-batches
    beside_products = (parts.NORMS, parts.ELEMENTWISE, parts.ROTARY, parts.RESIDUALS)
    for fusion, passes, most, of_layer in ((None, NARROW, 160, 100), ("kernels", AS_ONE, 20, 25)):
        step = of(tmp_path, zero(0), fusion=fusion).parts
        found = step[parts.NORMS]
        # In one kernel, a layer's second norm also reads the other term of its sum, and writes the sum.
        of_sums = 4 * LAYERS / (2 * LAYERS + 1) if fusion else 0
        assert found.bytes / counts == pytest.approx(sum(passes["norm"][0]) + of_sums, rel=0.08), fusion
        assert found.kernels < most
        assert (
            sum(step[part].kernels for part in beside_products) <= of_layer * LAYERS * 2 * 2
        )  # micro-batches, directions


@pytest.mark.thorough
def test_fp8_takes_a_step_of_the_measured_llama_below_223_ms_and_the_planner_counts_its_rounding(
    tmp_path: Path,
) -> None:
    sections, batches, tokens = {**zero(1), "gradient_accumulation_steps": 4}, 4, 4096

    def with_layers(count: int) -> Account:
        model = {**MEASURED, "num_hidden_layers": count}
        return of(tmp_path, sections, "--fp8", "rowwise", model=model, fusion="kernels", tokens=tokens)

    one, two = with_layers(1), with_layers(2)  # all layers are alike; sixteen take a minute to trace
    each = two.total.seconds - one.total.seconds
    assert one.total.seconds + (MEASURED["num_hidden_layers"] - 1) * each < 0.223
    # of each micro-batch: four inputs, and gradients of four sets of outputs; once a step: seven weights by rows, and
    # four sets of weights by columns
    assert one.parts[parts.ROUNDING].kernels == batches * (4 + 4) + 7 + 4
    work = Workload(shape=decoder_of(MEASURED, "measured"), sequence=tokens, precision="fp8", kernels="fused")
    strategy = Strategy(accumulation=batches, zero_stage=1)
    predicted = rounding_seconds(load_hardware("h100"), work, strategy, work.shape.layers[0], tokens)
    counted = one.parts[parts.ROUNDING].seconds / batches
    assert predicted.forward + predicted.backward == pytest.approx(counted, rel=0.02)


def plain_rotation(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rotated, _ = modeling_llama.apply_rotary_pos_emb(x, x, cos, sin)
    return rotated


@pytest.mark.parametrize("rotate", [Rotation.apply, plain_rotation], ids=["fused", "transformers"])
def test_a_rotation_is_one_whatever_it_is_called_forwards_and_backwards(rotate: Callable[..., Tensor]) -> None:
    x, angles = torch.ones(1, 2, 4, 8, requires_grad=True), torch.ones(1, 4, 8)
    gradient = torch.ones_like(x)
    with parts.StepRecorder(load_hardware("h100")) as recorder:
        rotate(x, angles, angles).backward(gradient)
    assert {each.part for each in recorder.recorded} == {parts.ROTARY}
    assert {each.backward for each in recorder.recorded} == {False, True}


def test_the_table_of_angles_belongs_to_the_rotation() -> None:
    config = LlamaConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=1)
    table, hidden, positions = modeling_llama.LlamaRotaryEmbedding(config), torch.ones(1, 4, 8), torch.arange(4)[None]
    with parts.StepRecorder(load_hardware("h100")) as recorder:
        table(hidden, positions)
    assert {each.part for each in recorder.recorded} == {parts.ROTARY}


def test_a_list_of_tensors_takes_a_gpu_few_kernels() -> None:
    tensors = [torch.empty(2**20, device="meta") for _ in range(147)]
    assert parts.kernels_of("_foreach_norm", (tensors, 2.0)) == ceil(147 * 16 / 320) + 1
    assert parts.kernels_of("_foreach_mul_", ([torch.empty(4, device="meta")] * 147, 2.0)) == 2
    assert parts.kernels_of("mul", (tensors[0], 2.0)) == 1


def test_the_script_prints_what_programs_rely_on(tmp_path: Path) -> None:
    found = of(tmp_path, zero(1)).as_json()
    assert set(found) == {"milliseconds", "kernels", "bytes_per_parameter", "parts"}
    assert found["milliseconds"] == pytest.approx(sum(part["milliseconds"] for part in found["parts"].values()))
    assert found["kernels"] == sum(part["kernels"] for part in found["parts"].values())
    assert list(found["parts"]) == [*parts.PARTS, HOST]


@pytest.mark.thorough
def test_compressed_gradients_go_to_the_rank_that_sums_them(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"train_micro_batch_size_per_gpu": 1, "gradient_compression": {"bits": 8}, **zero(1)}))
    words = ["dry-run", "--rank", "0", "--world_size", "2", "--json", "--device", "cpu", "--deepspeed_config"]
    assert main([*words, str(config), "--model_name_or_path", "tiny-llama", "--max_steps", "2"]) == 0
    sent = {(each["group"], each["operation"]) for each in json.loads(capfd.readouterr().out)["messages"]}
    assert ("data", "all_to_all") in sent and ("data", "reduce_scatter") not in sent
