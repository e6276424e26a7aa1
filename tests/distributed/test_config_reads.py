"""Each key of DeepSpeed's that the check silently accepts is read after the parser, in one of several runs."""

from __future__ import annotations

import pytest

from harness.checking.schema import every_key
from tests.distributed.config_reads import Reads, reads
from tests.support.ranks import run_ranks
from tests.unit.config.deepspeed_models import MODELS, attribute
from tests.unit.config.test_every_key import acts

pytestmark = [pytest.mark.ranks, pytest.mark.thorough]

# Keys that none of these runs can show, by their beginnings: who acts on them, and where that is tested.
ELSEWHERE = {
    "/bf16/immediate_grad_update": "the harness adds each gradient at once, whatever it says",
    "/zero_optimization/stage": "the parser, which chooses the optimizer: test_losses",
    "/zero_optimization/cpu_offload": "the parser, to offload_optimizer and offload_param: DS105",
    "/zero_optimization/zenflow": "nobody: refused, or without effect",
    "/zero_optimization/stage3_gather_": "save_model, which gathers in any case: test_trainer",
    "/zero_optimization/gather_16bit_": "save_model, which gathers in any case: test_trainer",
    "/zero_optimization/offload_param/nvme_path": "needs NVMe, which is refused for parameters: DS108",
    "/zero_optimization/offload_param/buffer_": "needs NVMe, which is refused for parameters: DS108",
    "/zero_optimization/offload_optimizer/nvme_path": "needs libaio: test_nvme",
    "/zero_optimization/offload_optimizer/buffer_count": "needs libaio: test_nvme",
    "/zero_optimization/offload_optimizer/pipeline_": "needs libaio: test_nvme",
    "/comms_logger/enabled": "the parser; the harness prints the summary: test_profiling",
    "/tensorboard/": "the harness writes there: test_recorder",
    "/csv_monitor/": "the harness writes there: test_recorder",
    "/wandb/": "the harness, where wandb is installed",
    "/comet/": "the harness, where comet_ml is installed",
    "/tensor_parallel/": "the harness: test_every_key",
    "/compile/": "the harness: test_every_key",
}
ATTRIBUTES = {
    "/steps_per_print": "steps_per_print",
    "/gradient_clipping": "gradient_clipping",
    "/prescale_gradients": "prescale_gradients",
    "/gradient_predivide_factor": "gradient_predivide_factor",
    "/gradient_allreduce_op": "gradient_allreduce_op",
    "/communication_data_type": "communication_data_type",
    "/wall_clock_breakdown": "wall_clock_breakdown",
    "/memory_breakdown": "memory_breakdown",
    "/dump_state": "dump_state",
    "/disable_python_gc": "disable_python_gc",
    "/log_level": "log_level",
    "/torch_autocast/enabled": "torch_autocast_enabled",
    "/torch_autocast/dtype": "torch_autocast_dtype",
    "/torch_autocast/lower_precision_safe_modules": "torch_autocast_lower_precision_safe_modules",
    "/data_types/grad_accum_dtype": "grad_accum_dtype",
    "/data_types/param_dtype": "param_dtype",
    "/data_types/buffer_dtype": "buffer_dtype",
    "/data_types/keep_in_fp32_modules": "keep_in_fp32_modules",
    "/optimizer/type": "optimizer_name",
    "/optimizer/params": "optimizer_params",
    "/scheduler/type": "scheduler_name",
    "/scheduler/params": "scheduler_params",
}
"""Keys that DeepSpeed's parser keeps as attributes of its whole config."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Reads:
    """What one rank reads in all of the runs."""
    (of_rank,) = run_ranks(1, reads, str(tmp_path_factory.mktemp("runs")), timeout_s=300, process_group=False)
    return of_rank


def test_each_key_of_deepspeeds_models_is_read(found: Reads) -> None:
    unread = []
    for pointer, key in every_key():
        section, name = pointer.rsplit("/", 1)
        if key.is_section or section not in MODELS or not acts(pointer) or pointer.startswith(tuple(ELSEWHERE)):
            continue
        model = attribute(MODELS[section])
        field = next(field for field, info in model.model_fields.items() if name in (field, info.alias))
        if field not in found.get(model.__name__, set()):
            unread.append(pointer)
    assert not unread


def test_so_is_each_key_that_the_parser_keeps_as_an_attribute(found: Reads) -> None:
    read = found["DeepSpeedConfig"]
    assert not [pointer for pointer, name in ATTRIBUTES.items() if name not in read]
    assert found["DeepSpeedFlopsProfilerConfig"] >= {
        key.name for pointer, key in every_key() if pointer.startswith("/flops_profiler/")
    }


def test_what_is_tested_elsewhere_is_a_key() -> None:
    known = [pointer for pointer, _ in every_key()]
    assert all(any(pointer.startswith(start) for pointer in known) for start in ELSEWHERE)
