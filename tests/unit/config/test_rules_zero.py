"""The borders of the rules about ZeRO and offloading: at which stage a key acts, and what excludes what."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.config.said import said

CPU, NVME = {"device": "cpu"}, {"device": "nvme", "nvme_path": "/local"}


def zero(stage: object, **more: object) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **more}}


def at(pointer: str, words: str, severity: str = "error") -> list[str]:
    return [f"{severity} /{pointer}: {words}"] if words else []


@pytest.mark.parametrize(
    ("stage", "key", "value", "stages"),
    [
        (2, "stage3_max_live_parameters", 1e8, "3"),
        (3, "stage3_max_live_parameters", 1e8, None),
        (2, "stage3_max_live_parameters", "auto", None),
        (2, "stage3_max_live_parameters", None, None),
        (0, "zero_quantized_weights", True, "3"),
        (0, "zero_quantized_weights", False, None),
        (3, "round_robin_gradients", True, "1 and 2"),
        (1, "round_robin_gradients", True, None),
        ("2", "sub_group_size", 1000, "3"),
        ("auto", "sub_group_size", 1000, "3"),
    ],
)
def test_a_key_of_another_stage_is_told(stage: object, key: str, value: object, stages: str | None) -> None:
    number = 0 if stage == "auto" else stage
    words = (
        f"{key} has an effect at ZeRO stage {stages} only, but the stage is {number}; remove it, or change the stage"
    )
    assert said(zero(stage, **{key: value}), "DS503") == (
        at(f"zero_optimization/{key}", words, "warning") if stages else []
    )


BELOW_3 = "offload_param works at ZeRO-3 only, but the stage is {}; set stage to 3, or remove offload_param"


@pytest.mark.parametrize(
    ("stage", "device", "target", "words"),
    [
        (2, "cpu", "harness", at("zero_optimization/offload_param", BELOW_3.format(2))),
        (0, "nvme", "harness", at("zero_optimization/offload_param", BELOW_3.format(0))),
        (1, "cpu", "deepspeed", at("zero_optimization/offload_param", BELOW_3.format(1), "warning")),
        (3, "cpu", "harness", []),
        (2, "none", "harness", []),
        (2, "auto", "harness", []),
        (2, "tape", "harness", []),  # another rule's
    ],
)
def test_parameters_are_offloaded_at_stage_3(stage: int, device: str, target: str, words: list[str]) -> None:
    assert said(zero(stage, offload_param={"device": device}), "DS501", target=target) == words


def test_the_old_switch_of_offloaded_parameters_counts() -> None:
    assert len(said(zero(2, cpu_offload_param=True), "DS501")) == 1
    assert said(zero(2, cpu_offload_param=False), "DS501") == []


@pytest.mark.parametrize(
    ("section", "stage", "path", "is_said"),
    [
        ("offload_optimizer", 3, None, True),
        ("offload_optimizer", 3, "auto", True),
        ("offload_param", 3, None, True),
        ("offload_param", 3, "/local", False),
        ("offload_optimizer", 2, None, False),  # it is not offloaded there at all
    ],
)
def test_nvme_needs_a_folder(section: str, stage: int, path: str | None, is_said: bool) -> None:
    words = f"{section} uses NVMe, but nvme_path is missing; add nvme_path, a folder on the NVMe device"
    found = said(zero(stage, **{section: {"device": "nvme", "nvme_path": path}}), "DS502")
    assert found == (at(f"zero_optimization/{section}/device", words) if is_said else [])


@pytest.mark.parametrize(
    ("ratio", "stage", "shown"),
    [(0.5, 2, "0.5"), (0.5, 3, ""), (1.0, 2, ""), (1, 0, ""), (0, 1, "0.0"), ("0.5", 2, "0.5"), ("auto", 2, "")],
)
def test_a_part_of_the_optimizer_is_offloaded_at_stage_3(ratio: object, stage: int, shown: str) -> None:
    found = said(zero(stage, offload_optimizer={"device": "cpu", "ratio": ratio}), "DS504", target="deepspeed")
    words = f"offload_optimizer.ratio {shown} works at ZeRO-3 only, but the stage is {stage}"
    pointer = "zero_optimization/offload_optimizer/ratio"
    assert found == (at(pointer, f"{words}; set stage to 3, or remove ratio") if shown else [])


@pytest.mark.parametrize(
    ("config", "words"),
    [
        pytest.param(
            zero(3, compute_grad_norm=False),
            "compute_grad_norm is false at ZeRO stage 3; use stage 1 or 2, or remove it",
        ),
        pytest.param(
            zero(0, compute_grad_norm=False),
            "compute_grad_norm is false at ZeRO stage 0; use stage 1 or 2, or remove it",
        ),
        pytest.param(
            zero(2, compute_grad_norm=False),
            "compute_grad_norm is false and gradients are clipped at 1.0; set gradient_clipping to 0",
            id="an absent clipping clips",
        ),
        pytest.param(
            {**zero(2, compute_grad_norm=False), "gradient_clipping": 0.5},
            "compute_grad_norm is false and gradients are clipped at 0.5; set gradient_clipping to 0",
        ),
        pytest.param({**zero(2, compute_grad_norm=False), "gradient_clipping": 0}, "", id="nothing is clipped"),
        pytest.param({**zero(1, compute_grad_norm=False), "gradient_clipping": "auto"}, "", id="clipping is left open"),
        pytest.param(zero(3, compute_grad_norm="true"), "", id="on, as deepspeed reads it"),
        pytest.param(zero(3, compute_grad_norm="auto"), "", id="auto"),
        pytest.param(zero(3), "", id="absent"),
    ],
)
def test_the_gradient_norm_is_needed(config: dict[str, Any], words: str) -> None:
    assert said(config, "DS505", target="deepspeed") == at("zero_optimization/compute_grad_norm", words)


@pytest.mark.parametrize(
    ("config", "whom"),
    [
        pytest.param(zero(3), "ZeRO-3", id="stage 3"),
        pytest.param(zero(2), "", id="stage 2"),
        pytest.param(zero(2, zenflow={}, offload_optimizer=CPU), "ZenFlow", id="ZenFlow"),
        pytest.param({"compile": {"deepcompile": True}}, "DeepCompile", id="DeepCompile"),
        pytest.param({**zero(3), "compile": {"deepcompile": True}}, "ZeRO-3", id="one reason is enough"),
        pytest.param({**zero(3), "gradient_allreduce_op": "mean"}, "", id="the mean"),
    ],
)
def test_summed_gradients_are_refused_by_what_averages(config: dict[str, Any], whom: str) -> None:
    words = f'gradient_allreduce_op sum does not work with {whom}; use "mean"' if whom else ""
    assert said({"gradient_allreduce_op": "sum", **config}, "DS506") == at("gradient_allreduce_op", words)


@pytest.mark.parametrize(
    ("config", "names"),
    [
        pytest.param({**zero(2), "prescale_gradients": True}, ["prescale_gradients"], id="prescaled"),
        pytest.param({**zero(3), "gradient_predivide_factor": 2}, ["gradient_predivide_factor"], id="divided before"),
        pytest.param(
            {**zero(2), "gradient_predivide_factor": 2.0, "prescale_gradients": True},
            ["gradient_predivide_factor", "prescale_gradients"],
            id="both",
        ),
        pytest.param({**zero(2), "gradient_predivide_factor": 1.0}, [], id="divided by 1"),
        pytest.param({**zero(1), "prescale_gradients": True}, [], id="stage 1 scatters nothing"),
        pytest.param({**zero(2, reduce_scatter=False), "prescale_gradients": True}, [], id="without reduce_scatter"),
        pytest.param({**zero(2, reduce_scatter="auto"), "prescale_gradients": True}, ["prescale_gradients"], id="auto"),
    ],
)
def test_gradients_are_not_scaled_before_they_are_scattered(config: dict[str, Any], names: list[str]) -> None:
    stage = config["zero_optimization"]["stage"]
    words = "{0} does not work with reduce_scatter at ZeRO stage {1}; remove {0}, or set {2}.reduce_scatter to false"
    found = sorted(said(config, "DS507"))
    assert found == [f"error /{name}: {words.format(name, stage, 'zero_optimization')}" for name in names]


@pytest.mark.parametrize(("stage", "is_said"), [(0, False), (1, True), (3, True)])
def test_the_first_zero_1_is_gone(stage: int, is_said: bool) -> None:
    words = "legacy_stage1 selects an implementation that DeepSpeed has removed; remove it"
    assert said(zero(stage, legacy_stage1=True), "DS508") == at("zero_optimization/legacy_stage1", words * is_said)
    assert said(zero(stage, legacy_stage1=False), "DS508") == []


@pytest.mark.parametrize(
    ("size", "ranks", "stage", "is_said"),
    [
        (3, 8, 3, True),
        (4, 8, 3, False),
        (8, 8, 3, False),
        (16, 8, 3, False),  # one group holds all there are
        (3, 8, 2, False),
        (3, None, 3, False),
        (1, 7, 3, False),
    ],
)
def test_groups_of_the_second_copy_divide_the_ranks(size: int, ranks: int | None, stage: int, is_said: bool) -> None:
    config = {"train_micro_batch_size_per_gpu": 1, **zero(stage, zero_hpz_partition_size=size)}
    words = f"{ranks} data-parallel ranks cannot be divided into groups of {size}; use the number of ranks on a host"
    found = said(config, "DS510", world_size=ranks)
    assert found == at("zero_optimization/zero_hpz_partition_size", words * is_said)


OFFLOAD = "offload_optimizer to {} works at ZeRO stage {}, but the stage is {}; change the stage"


@pytest.mark.parametrize(
    ("stage", "device", "words"),
    [
        (0, "cpu", OFFLOAD.format("cpu", "1 to 3", 0)),
        (1, "cpu", ""),
        (0, "nvme", OFFLOAD.format("nvme", "3", 0)),
        (2, "nvme", OFFLOAD.format("nvme", "3", 2) + ', or set the device to "cpu"'),
        (3, "nvme", ""),
        (0, "none", ""),
        (0, "auto", ""),
    ],
)
def test_the_optimizer_is_offloaded_where_zero_can(stage: int, device: str, words: str) -> None:
    found = said(zero(stage, offload_optimizer={"device": device, "nvme_path": "/local"}), "DS512")
    assert found == at("zero_optimization/offload_optimizer", words, "warning")


@pytest.mark.parametrize(
    ("stage", "value", "device", "is_said"),
    [(1, False, "cpu", True), (2, False, "cpu", True), (3, False, "cpu", False), (2, True, "cpu", False)],
)
def test_an_offloaded_optimizer_wants_contiguous_gradients(stage: int, value: bool, device: str, is_said: bool) -> None:
    words = "contiguous_gradients false has no effect with an offloaded optimizer; remove it" * is_said
    found = said(zero(stage, contiguous_gradients=value, offload_optimizer={"device": device}), "DS509")
    assert found == at("zero_optimization/contiguous_gradients", words, "warning")
