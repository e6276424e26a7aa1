"""The borders of the rules about the layout: ranks, sizes that are none, experts, sequence parallelism."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.config.said import refusals_of_run, said


def at(pointer: str, words: str, severity: str = "error") -> list[str]:
    return [f"{severity} {pointer}: {words}"] if words else []


def cut(stages: object = 1, tensor: object = 1) -> dict[str, Any]:
    sizes = {"pipeline": {"stages": stages}, "tensor_parallel": {"autotp_size": tensor}}
    return {"train_micro_batch_size_per_gpu": 1, **sizes}


STAGES, TENSOR = "/pipeline/stages", "/tensor_parallel/autotp_size"


@pytest.mark.parametrize(
    ("config", "options", "pointer", "words"),
    [
        pytest.param(cut(2), {"world_size": 4}, "", "", id="it divides"),
        pytest.param(
            cut(2),
            {"world_size": 3},
            STAGES,
            "3 ranks cannot be divided into copies of 2 pipeline stages x 1 tensor-parallel rank; "
            "start a multiple of 2 ranks, or change the layout",
            id="one rank too many",
        ),
        pytest.param(
            cut(1, 4),
            {"world_size": 2},
            TENSOR,
            "2 ranks cannot be divided into copies of 1 pipeline stage x 4 tensor-parallel ranks; "
            "start a multiple of 4 ranks, or change the layout",
            id="fewer ranks than a copy takes",
        ),
        pytest.param(cut(2), {}, "", "", id="ranks are not known"),
        pytest.param(cut(2), {"world_size": 3, "target": "deepspeed"}, "", "", id="without the harness"),
        pytest.param(cut(2), {"world_size": 3, "pipeline_parallel_size": 3}, "", "", id="a flag instead"),
        pytest.param(cut(1, 2), {"world_size": 3, "tensor_parallel_size": 1}, "", "", id="another flag instead"),
        pytest.param(
            cut(),
            {"world_size": 3, "pipeline_parallel_size": 2},
            STAGES,
            "3 ranks cannot be divided into copies of 2 pipeline stages x 1 tensor-parallel rank; "
            "start a multiple of 2 ranks, or change the layout",
            id="a flag that does not fit",
        ),
        pytest.param(cut("auto", "auto"), {"world_size": 3}, "", "", id="auto is one"),
    ],
)
def test_ranks_are_whole_copies(config: dict[str, Any], options: dict[str, Any], pointer: str, words: str) -> None:
    assert said(config, "DS311", **options) == at(pointer, words)


REMOVE = ", or remove the key"


@pytest.mark.parametrize(
    ("section", "name", "value", "words"),
    [
        ("pipeline", "stages", 0, "0, not a whole number of at least 1; write 1 or more" + REMOVE),
        ("pipeline", "stages", -2, "-2, not a whole number of at least 1; write 1 or more" + REMOVE),
        ("pipeline", "stages", 1.5, "1.5, not a whole number of at least 1; write 1 or more" + REMOVE),
        ("pipeline", "stages", True, "true, not a whole number of at least 1; write 1 or more" + REMOVE),
        ("pipeline", "stages", "2", '"2", not a whole number of at least 1; write 1 or more' + REMOVE),
        ("pipeline", "stages", [2], "[2], not a whole number of at least 1; write 1 or more" + REMOVE),
        ("pipeline", "stages", 2.0, ""),
        ("pipeline", "stages", "auto", ""),
        ("pipeline", "chunks_per_stage", 0, "0, not a whole number of at least 1; write 1 or more" + REMOVE),
        (
            "pipeline",
            "activation_checkpoint_interval",
            -1,
            "-1, not a whole number of at least 0; write 0 or more; 0 is off",
        ),
        ("pipeline", "activation_checkpoint_interval", 0, ""),
        ("tensor_parallel", "autotp_size", -1, "-1, not a whole number of at least 0; write 0 or more; 0 is off"),
        ("tensor_parallel", "autotp_size", 0, ""),
        ("tensor_parallel", "autotp_size", "x", ""),  # DeepSpeed itself refuses it
        ("expert_parallel", "autoep_size", 0, "0, not a whole number of at least 1; write 1 or more" + REMOVE),
    ],
)
def test_a_size_that_is_none_is_refused(section: str, name: str, value: object, words: str) -> None:
    config = {"train_micro_batch_size_per_gpu": 1, section: {name: value}}
    assert said(config, "DS315") == at(f"/{section}/{name}", f"{section}.{name} is {words}" if words else "")
    assert said(config, "DS315", target="deepspeed") == []


BOTH = {"context_parallel": {"size": 2}, "sequence_parallel_size": 4}


@pytest.mark.parametrize(
    ("config", "flag", "words"),
    [
        ({"sequence_parallel_size": 4}, None, ""),
        ({"sequence_parallel_size": 4}, 4, ""),
        ({"context_parallel": {"size": 2}}, 4, ""),
        (BOTH, None, "sequence_parallel_size is 4 and context_parallel.size is 2"),
        (BOTH, 2, "sequence_parallel_size is 4 and --context_parallel_size is 2"),
        (BOTH, 4, ""),
    ],
)
def test_the_sizes_of_the_context_agree(config: dict[str, Any], flag: int | None, words: str) -> None:
    config = {"train_micro_batch_size_per_gpu": 1, **config}
    remedy = "; remove sequence_parallel_size, or write the same number" * bool(words)
    assert said(config, "DS321", context_parallel_size=flag) == at("/sequence_parallel_size", words + remedy)
    assert said(config, "DS321", target="hf", context_parallel_size=flag) == []


@pytest.mark.parametrize(("size", "tensor", "heads"), [(4, 1, 0), (5, 1, 4), (2, 2, 0), (4, 2, 2)])
def test_context_ranks_have_heads(size: int, tensor: int, heads: int) -> None:
    config = {**cut(1, tensor), "sequence_parallel_size": size}
    found = said(config, "DS323", model="tiny-llama")
    assert bool(found) == bool(heads)
    assert not heads or f"{size} context ranks, but only {heads} attention heads" in found[0]


def test_a_window_takes_a_mask_of_all_pairs_unless_it_is_made_by_rows() -> None:
    long = {"train_micro_batch_size_per_gpu": 1, "context_parallel": {"size": 2}}
    (found,) = said(long, "DS325", model="tiny-mistral")
    assert "/context_parallel/size" in found and "the model has a window of 64 tokens" in found
    assert said({**long, "tiling": {"attention": 1024}}, "DS325", model="tiny-mistral") == []
    assert said(long, "DS325", model="tiny-llama") == said({**long, "context_parallel": {}}, "DS325") == []


def test_context_ranks_are_part_of_a_copy() -> None:
    config = {**cut(2), "context_parallel": {"size": 2}}
    words = "6 ranks cannot be divided into copies of 2 pipeline stages x 2 context ranks x 1 tensor-parallel rank; "
    words += "start a multiple of 4 ranks, or change the layout"
    assert said(config, "DS311", world_size=6) == at("/context_parallel/size", words)
    assert said(config, "DS311", world_size=8) == []


def test_layers_with_context_ranks_are_not_compiled() -> None:
    config = {**cut(), "context_parallel": {"size": 2}, "compile": {"enabled": True}}
    assert len(said(config, "DS322")) == 1
    assert said({**config, "context_parallel": {"size": 1}}, "DS322") == []


@pytest.mark.parametrize(
    ("section", "option", "words"),
    [
        (
            "tensor_parallel",
            {"tp_overlap_comm": True},
            "tp_overlap_comm is an option of AutoTP, which the harness does "
            "not use; remove it: the harness reads only autotp_size and sequence_parallel here",
        ),
        ("tensor_parallel", {"tp_overlap_comm": False}, ""),
        ("tensor_parallel", {"sequence_parallel": True}, ""),
        ("expert_parallel", {"enabled": True}, ""),
        (
            "expert_parallel",
            {"preset_model": "mixtral"},
            "preset_model is an option of AutoEP, which the harness does "
            "not use; remove it: the harness reads only autoep_size and token_pieces here",
        ),
        ("tensor_parallel", {"surprise": True}, ""),  # another rule's
    ],
)
def test_options_of_what_does_not_run_are_told(section: str, option: dict[str, Any], words: str) -> None:
    found = said({"train_micro_batch_size_per_gpu": 1, section: option}, "DS313")
    assert found == at(f"/{section}/{next(iter(option))}", words, "warning")


def experts(tensor: int, size: object, enabled: object = True) -> dict[str, Any]:
    return {**cut(1, tensor), "expert_parallel": {"enabled": enabled, "autoep_size": size}}


@pytest.mark.parametrize(
    ("config", "options", "shown"),
    [
        pytest.param(experts(2, 2), {}, (), id="as many"),
        pytest.param(experts(2, 1), {}, (), id="one is off"),
        pytest.param(experts(4, 2), {}, (2, 4), id="fewer"),
        pytest.param(experts(1, 2), {}, (), id="over data ranks"),
        pytest.param(experts(1, 2), {"world_size": 4}, (), id="over data ranks that are known"),
        pytest.param(experts(1, 4), {"world_size": 6}, (4, 1), id="more than data ranks divide"),
        pytest.param(experts(2, 4), {"world_size": 8}, (), id="over both"),
        pytest.param(experts(4, 2, False), {}, (), id="disabled"),
        pytest.param(experts(4, 2, "yes"), {}, (2, 4), id="as deepspeed reads it"),
        pytest.param(experts(4, 2), {"expert_parallel_size": 4}, (), id="a flag instead"),
        pytest.param(experts(4, 4), {"tensor_parallel_size": 8}, (4, 8), id="a flag that does not fit"),
        pytest.param(experts(4, 2), {"target": "deepspeed"}, (), id="without the harness"),
    ],
)
def test_experts_are_spread_over_tensor_parallel_ranks(
    config: dict[str, Any], options: dict[str, Any], shown: tuple[int, ...]
) -> None:
    words = ""
    if shown:
        expert, tensor = shown
        words = f"expert-parallel size {expert} is not a multiple of tensor-parallel size {tensor}; "
        words += f"set autoep_size to 1 or {tensor}"
        if "world_size" in options:
            words = f"expert-parallel size {expert} does not fit tensor-parallel size {tensor} x data-parallel size 6; "
            words += "set autoep_size to 1 or 2 or 3 or 6"
    assert said(config, "DS314", **options) == at("/expert_parallel/autoep_size", words)


@pytest.mark.parametrize(
    ("pointer", "config"),
    [
        ("/tensor_parallel/sequence_parallel", {"tensor_parallel": {"autotp_size": 2, "sequence_parallel": True}}),
        ("/compile/enabled", {"compile": {"enabled": True}}),
        ("/compile/backend", {"compile": {"backend": "eager"}}),
    ],
)
@pytest.mark.parametrize("target", ["harness", "hf", "deepspeed"])
def test_keys_of_the_harness_are_refused_elsewhere(pointer: str, config: dict[str, Any], target: str) -> None:
    words = f"{pointer.rsplit('/', 1)[1]} is a key of the harness; remove it, or train with the harness"
    assert said(config, "DS316", target=target) == at(pointer, words if target != "harness" else "")


@pytest.mark.parametrize(
    ("tensor", "on", "is_said"), [(1, True, True), (0, 1, True), (2, True, False), (1, "no", False)]
)
def test_sequence_parallel_needs_two_ranks(tensor: int, on: object, is_said: bool) -> None:
    config = {"tensor_parallel": {"autotp_size": tensor, "sequence_parallel": on}}
    words = "sequence_parallel has no effect: there is one tensor-parallel rank; "
    words += "set tensor_parallel.autotp_size to 2 or more, or remove it"
    pointer = "/tensor_parallel/sequence_parallel"
    assert said(config, "DS317") == at(pointer, words * is_said, "warning")
    assert said(config, "DS317", tensor_parallel_size=2) == []


BITS = "/gradient_compression/bits"
NOT_BITS = 'gradient_compression.bits is not 8, 4, 0 or auto; write 8, 4, 0 (off) or "auto"'


def compressed(bits: object, stage: int = 1, **zero: object) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **zero}, "gradient_compression": {"bits": bits}}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        pytest.param(compressed(8), "", id="8 bits"),
        pytest.param(compressed(4, 0), "", id="4 bits"),
        pytest.param(compressed("auto"), "", id="auto"),
        pytest.param(compressed(0, 3), "", id="off goes with everything"),
        pytest.param(compressed(16), NOT_BITS, id="16 bits"),
        pytest.param(compressed(False), NOT_BITS, id="a switch"),
        pytest.param(compressed(True), NOT_BITS, id="another switch"),
        pytest.param(compressed("8"), NOT_BITS, id="in quotes"),
        pytest.param(compressed(None), NOT_BITS, id="null"),
        pytest.param(compressed([8]), NOT_BITS, id="a list"),
        pytest.param(
            compressed(8, 2),
            "gradients cannot be compressed with ZeRO stage 2; set zero_optimization.stage to "
            "1 or 0, or remove gradient_compression",
            id="stage 2",
        ),
        pytest.param(
            compressed("auto", 3),
            "gradients cannot be compressed with ZeRO stage 3; set "
            "zero_optimization.stage to 1 or 0, or remove gradient_compression",
            id="auto at stage 3",
        ),
        pytest.param(
            compressed(8, offload_optimizer={"device": "cpu"}),
            "gradients cannot be compressed with an offloaded"
            " optimizer; remove offload_optimizer, or remove gradient_compression",
            id="offloaded",
        ),
        pytest.param(
            compressed(8, overlap_comm=True),
            "gradients cannot be compressed with overlap_comm; set overlap_comm"
            " to false, or remove gradient_compression",
            id="overlapped",
        ),
        pytest.param(
            compressed(8, contiguous_gradients=False),
            "gradients cannot be compressed with contiguous_gradients "
            "false; remove contiguous_gradients, or remove gradient_compression",
            id="not contiguous",
        ),
        pytest.param(compressed(8, 0, overlap_comm=True, contiguous_gradients=False), "", id="stage 0 has neither"),
    ],
)
def test_gradients_are_compressed_whole(config: dict[str, Any], words: str) -> None:
    assert said(config, "DS318") == at(BITS, words)
    assert said(config, "DS318", target="hf") == []


@pytest.mark.parametrize(
    ("zero", "words", "severity"),
    [
        ({"stage": 1}, "has no effect at ZeRO stage 1, which reduces once a step anyway", "warning"),
        ({"stage": 2}, "", ""),
        ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, "takes gradients from each micro-batch", "error"),
        ({"stage": 3}, "ZeRO stage 3 reduces gradients in each micro-batch", "error"),
    ],
)
def test_only_zero2_may_reduce_once_a_step(zero: dict[str, Any], words: str, severity: str) -> None:
    config = {"train_batch_size": 8, "zero_optimization": zero, "gradient_reduction": {"once_per_step": True}}
    found = said(config, "DS326")
    assert [each.split()[:2] for each in found] == ([[severity, "/gradient_reduction/once_per_step:"]] if words else [])
    assert all(words in each for each in found)
    assert said({**config, "gradient_reduction": {"once_per_step": False}}, "DS326") == []


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"world_size": 1}, "there is one data-parallel rank; remove it"),
        ({"world_size": 2}, ""),
        ({}, ""),
        ({"world_size": 2, "tensor_parallel_size": 2}, "there is one data-parallel rank; remove it"),
        ({"target": "hf"}, "only the harness knows it; remove it, or train with the harness"),
    ],
)
def test_compression_without_effect_is_told(options: dict[str, Any], why: str) -> None:
    words = f"gradient_compression has no effect: {why}" if why else ""
    assert said(compressed(8), "DS319", **options) == at(BITS, words, "warning")
    assert said(compressed(0), "DS319", **options) == []


@pytest.mark.parametrize(
    ("config", "arguments", "words"),
    [
        pytest.param({"gradient_clipping": 1}, {"max_grad_norm": 1.0}, "", id="equal as numbers"),
        pytest.param({"gradient_clipping": "auto"}, {"max_grad_norm": 0.5}, "", id="auto"),
        pytest.param(
            {"gradient_clipping": 1}, {"max_grad_norm": 0.5}, "--max_grad_norm is 0.5 and gradient_clipping is 1"
        ),
        pytest.param(
            {"train_micro_batch_size_per_gpu": 4},
            {"per_device_train_batch_size": 2},
            "--per_device_train_batch_size is 2 and train_micro_batch_size_per_gpu is 4",
            id="a size of the batch",
        ),
        pytest.param({"bf16": {"enabled": "yes"}}, {"bf16": True}, "", id="as deepspeed reads it"),
        pytest.param(
            {"bf16": {"enabled": False}}, {"bf16": True}, "--bf16 is True and bf16.enabled is False", id="bf16"
        ),
        pytest.param(
            {"bfloat16": {"enabled": False}},
            {"bf16": True},
            "--bf16 is True and bfloat16.enabled is False",
            id="old name",
        ),
        pytest.param({"optimizer": {"type": "adam"}}, {"optim": "adamw_torch"}, "", id="Adam decays as AdamW"),
        pytest.param(
            {"optimizer": {"type": "Lion"}},
            {"optim": "sgd"},
            "--optim is sgd and optimizer.type is Lion",
            id="optimizer",
        ),
        pytest.param(
            {"scheduler": {"type": "StepLR", "params": {"step_size": 1}}},
            {"lr_scheduler_type": "linear"},
            "--lr_scheduler_type is linear and scheduler.type is StepLR",
            id="a schedule of torch",
        ),
        pytest.param(
            {"scheduler": {"type": "WarmupLR", "params": {}}},
            {"lr_scheduler_type": "linear"},
            "--lr_scheduler_type is linear and scheduler.type is WarmupLR",
            id="schedule",
        ),
        pytest.param(
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}},
            {"warmup_steps": 1},
            "",
            id="no warm-up is one step",
        ),
        pytest.param(
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}},
            {"warmup_steps": 9},
            "--warmup_steps is 9 and scheduler.params.warmup_num_steps is 1",
            id="no warm-up is not nine",
        ),
        pytest.param(
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}},
            {"warmup_steps": 9},
            "--warmup_steps is 9 and scheduler.params.warmup_num_steps is 5",
            id="warm-up",
        ),
        pytest.param(
            {"optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.99]}}},
            {"adam_beta2": 0.95},
            "--adam_beta2 is 0.95 and optimizer.params.betas is [0.9, 0.99]",
            id="betas",
        ),
        pytest.param(
            {"optimizer": {"type": "AdamW", "params": {"betas": [0.8, 0.95]}}},
            {"adam_beta2": 0.95},
            "",
            id="the beta that was given is that of the file",
        ),
        pytest.param({"pipeline": {"stages": 2}}, {"pipeline_parallel_size": 1}, "", id="the layout is overridden"),
    ],
)
def test_file_and_argument_agree(config: dict[str, Any], arguments: dict[str, Any], words: str) -> None:
    remedy = 'or write "auto" in the file'
    if "scheduler.type" in words:  # no argument makes one of DeepSpeed's schedules
        remedy = "remove the flag, or remove scheduler from the file"
    found = refusals_of_run(config, **arguments)
    assert [item.removesuffix(remedy).rstrip(":, ") for item in found] == (
        [f"DS951 {words}; give one of them"] if words else []
    )
