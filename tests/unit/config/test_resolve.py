"""Every "auto" is filled as documented, and what cannot run is refused with both sides named."""

from __future__ import annotations

import pytest

from harness.checking import resolve
from harness.config import AutoValues
from harness.config.resolving.resolve import complete, resolve_before_data
from harness.config.text.diagnostic import ConfigError
from harness.config.text.document import load
from harness.config.values.config_file import PRESETS

AUTOS = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto")


def resolved(config, **values):
    """Resolve a config whose batch sizes are "auto" where it does not give them."""
    return resolve(AUTOS | config, AutoValues(**values))


def test_an_empty_config_takes_the_batch_from_the_arguments():
    run = resolved({}, world_size=4)
    assert (run.micro_batch, run.accumulation, run.train_batch) == (8, 1, 32)
    assert (run.pp_size, run.tp_size, run.dp_size) == (1, 1, 4)


def test_the_batch_counts_data_parallel_ranks_only():
    config = {"pipeline": {"stages": 2}, "tensor_parallel": {"autotp_size": 2}, "train_batch_size": 32}
    run = resolved(config | {"gradient_accumulation_steps": 4}, world_size=8)
    assert (run.dp_size, run.micro_batch) == (2, 4)


LAYOUTS = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 2)]  # pipeline, tensor, data


@pytest.mark.parametrize(("pipeline", "tensor", "data"), LAYOUTS)
@pytest.mark.parametrize("config", [{}, AUTOS])
def test_the_layout_changes_neither_micro_batch_nor_accumulation(config, pipeline, tensor, data):
    cut = {"pipeline": {"stages": pipeline}, "tensor_parallel": {"autotp_size": tensor}}
    world = pipeline * tensor * data
    run = resolved(config | cut, world_size=world)
    assert (run.micro_batch, run.accumulation, run.train_batch) == (8, 1, 8 * data)
    given = frozenset({"gradient_accumulation_steps"})
    run = resolved(config | cut, world_size=world, gradient_accumulation_steps=3, given=given)
    assert (run.micro_batch, run.accumulation, run.train_batch) == (8, 3, 24 * data)


@pytest.mark.parametrize(("pipeline", "tensor", "data"), LAYOUTS)
def test_a_fixed_global_batch_is_the_same_in_every_layout(pipeline, tensor, data):
    cut = {"pipeline": {"stages": pipeline}, "tensor_parallel": {"autotp_size": tensor}}
    values = {"world_size": pipeline * tensor * data, "per_device_train_batch_size": 2}
    by_flag = resolved(AUTOS | cut, **values, global_batch_size=16, given=frozenset({"global_batch_size"}))
    in_file = resolved(AUTOS | cut | {"train_batch_size": 16}, **values)
    for run in (by_flag, in_file):
        assert (run.micro_batch, run.accumulation, run.train_batch) == (2, 8 // data, 16)


def test_two_sizes_make_the_third():
    given = frozenset({"global_batch_size", "gradient_accumulation_steps"})
    run = resolved(AUTOS, world_size=2, global_batch_size=16, gradient_accumulation_steps=4, given=given)
    assert (run.micro_batch, run.accumulation, run.train_batch) == (2, 4, 16)
    alone = resolve({"train_batch_size": 12}, AutoValues(world_size=2))  # as DeepSpeed has it
    assert (alone.micro_batch, alone.accumulation) == (6, 1)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"global_batch_size": 10, "per_device_train_batch_size": 4}, ("8 or 12", "micro-batch of 1, 2 or 5")),
        ({"global_batch_size": 3, "world_size": 2, "per_device_train_batch_size": 1}, ("2 or 4",)),
        ({"global_batch_size": 8, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}, ("6",)),
    ],
)
def test_a_global_batch_that_does_not_divide_is_refused_with_values_that_do(values, says):
    given = frozenset(values) - {"world_size"}
    with pytest.raises(ConfigError, match=f"--global_batch_size {values['global_batch_size']} is not") as caught:
        resolved(AUTOS, **values, given=given)
    assert all(words in str(caught.value) for words in says), str(caught.value)


def test_a_value_that_deepspeed_converts_is_read_as_deepspeed_reads_it():
    run = resolved(
        {"bf16": {"enabled": 1}, "zero_optimization": {"stage": "2"}, "tensor_parallel": {"autotp_size": "1"}}
    )
    assert (run.precision, run.zero_stage, run.tp_size) == ("bf16", 2, 1)
    assert resolved({"zero_optimization": True}).zero_stage == 1
    assert resolved({"pipeline": {"stages": 1, "partition": "best"}}).partition == "balanced"


def test_flags_override_the_layout():
    run = resolved({"pipeline": {"stages": 4}}, world_size=4, pipeline_parallel_size=2, tensor_parallel_size=2)
    assert (run.pp_size, run.tp_size, run.dp_size) == (2, 2, 1)
    assert run.config["pipeline"]["stages"] == 2


def test_experts_are_dealt_among_ranks_of_a_stage_or_not_at_all():
    config = {"tensor_parallel": {"autotp_size": 2}, "expert_parallel": {"enabled": True, "autoep_size": 2}}
    assert resolved(config, world_size=2).ep_size == 2
    assert "expert_parallel" not in resolved(config, world_size=2).config
    off = config | {"expert_parallel": {"enabled": False, "autoep_size": 2}}
    assert resolved(off, world_size=2).ep_size == 1
    assert resolved(off, world_size=2, expert_parallel_size=2).ep_size == 2
    assert resolved(config, world_size=2, tensor_parallel_size=1).ep_size == 2
    with pytest.raises(ConfigError, match="expert-parallel size 2 does not fit tensor-parallel size 1 x data-parallel"):
        resolved(config, world_size=3, tensor_parallel_size=1)


def test_clipping_is_always_written_out():
    assert resolved({}, max_grad_norm=0.5).config["gradient_clipping"] == 0.5
    assert resolved({"gradient_clipping": "auto"}).config["gradient_clipping"] == 1.0


def test_tensor_parallel_and_schema_are_not_handed_on():
    config = resolved({"tensor_parallel": {"autotp_size": 2}, "$schema": "x"}, world_size=2).config
    assert not {"tensor_parallel", "$schema"} & config.keys()


def test_the_input_is_left_alone():
    config = {"bf16": {"enabled": "auto"}}
    resolved(config, bf16=True)
    assert config == {"bf16": {"enabled": "auto"}}


def test_optimizer_and_scheduler_are_filled_as_hf_does():
    names = ("lr", "betas", "eps", "weight_decay")
    config = {
        "optimizer": {"type": "AdamW", "params": dict.fromkeys(names, "auto")},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_num_steps": "auto", "total_num_steps": "auto"},
        },
    }
    run = resolved(config, learning_rate=1e-3, max_steps=50)
    assert run.config["optimizer"]["params"] == {
        "lr": 1e-3,
        "betas": [0.9, 0.999],
        "eps": 1e-8,
        "weight_decay": 0.0,
    }
    assert run.config["scheduler"]["params"] == {"warmup_num_steps": 1, "total_num_steps": 50}


def test_zero_buckets_follow_the_hidden_size_and_the_rest_is_left_to_deepspeed():
    keys = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    config = {"zero_optimization": {"stage": 3, **dict.fromkeys(keys, "auto"), "sub_group_size": "auto"}}
    run = resolved(config, hidden_size=64)
    assert [run.config["zero_optimization"][key] for key in keys] == [4096, 3686, 640]
    assert "sub_group_size" not in run.config["zero_optimization"]
    assert run.zero_stage == 3


@pytest.mark.parametrize(
    ("config", "values", "code", "says"),
    [
        ({"pipeline": {"stages": 2}}, {"world_size": 3}, "DS311", "3 ranks"),
        ({"train_batch_size": 7}, {"world_size": 2}, "DS302", "train_batch_size 7"),
        ({"gradient_clipping": 1.0}, {"max_grad_norm": 0.5, "given": {"max_grad_norm"}}, "DS951", "0.5"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, {}, "DS401", "both"),
        ({"pipeline": {"stages": 2, "partition": "fair"}}, {"world_size": 2}, "DS604", "fair"),
        *(
            ({"pipeline": {"stages": stages}}, {}, "DS315", "pipeline.stages is")
            for stages in (0, -1, 1.5, True, "2", None)
        ),
        ({"pipeline": {"activation_checkpoint_interval": -1}}, {}, "DS315", "interval is -1"),
        ({"tensor_parallel": {"autotp_size": -1}}, {}, "DS315", "autotp_size is -1"),
        ({"expert_parallel": {"enabled": True, "autoep_size": 0}}, {}, "DS315", "autoep_size is 0"),
        (
            {"pipeline": {"stages": 2}, "zero_optimization": {"stage": 3}},
            {"world_size": 2},
            "DS601",
            "ZeRO-3",
        ),
        ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, {}, "DS501", "ZeRO-3 only"),
        ({"train_batch_size": "8"}, {}, "DS201", '"8"'),
        ({"gradient_clippin": 0.5}, {}, "DS101", "did you mean gradient_clipping?"),  # the file alone is asked
    ],
)
def test_what_cannot_run_is_refused(config, values, code, says):
    with pytest.raises(ConfigError) as caught:
        resolved(config, **values)
    assert [d.code for d in caught.value.diagnostics] == [code]
    assert says in str(caught.value)


@pytest.mark.parametrize("path", sorted(PRESETS.glob("*.json")), ids=lambda path: path.stem)
def test_a_correct_config_is_resolved_the_same_without_the_check(path):
    values = AutoValues(world_size=16, hidden_size=64)
    unchecked = complete(resolve_before_data(load(path), values, check=None), values)
    assert unchecked == resolve(load(path), values)
    quoted = {"train_batch_size": 8, "tensor_parallel": {"autotp_size": "2"}, "zero_optimization": {"stage": "1"}}
    run = resolve_before_data(quoted, values, check=None)
    assert (run.tp_size, run.zero_stage) == (2, 1)
