"""Replace "auto" and absent keys by values from the arguments, the model and the harness."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from harness.config.resolving.resolved import Filled
from harness.config.values.arguments import AutoValues
from harness.config.values.batch import ACCUMULATION, MICRO, TRAIN, bucket_elements, complete, stated_sizes
from harness.config.values.json_object import JsonObject
from harness.config.values.layout_keys import GRADIENT_BITS, TENSOR, size_fault
from harness.config.values.pointers import AUTO, bf16_section, lookup, put, whole
from harness.optimizers import DEFAULT, FLAGS


@dataclass
class Resolution:
    """The config being resolved, and the values filled in so far."""

    config: JsonObject
    values: AutoValues
    filled: list[Filled] = field(default_factory=list)

    def get(self, pointer: str) -> object:
        return lookup(self.config, pointer)

    def fill(self, pointer: str, value: object, source: str) -> None:
        """Write a value that was not in the file."""
        put(self.config, pointer, value)
        self.filled.append(Filled(pointer=pointer, value=value, source=source))


REDUCE_BUCKET = "/zero_optimization/reduce_bucket_size"
WARMUP_STEPS = "/scheduler/params/warmup_num_steps"
OF_DATA_AND_MODEL = {
    *(WARMUP_STEPS, "/scheduler/params/total_num_steps", REDUCE_BUCKET),
    *("/zero_optimization/stage3_prefetch_bucket_size", "/zero_optimization/stage3_param_persistence_threshold"),
}
"""Keys whose "auto" depends on the length of the data or the size of the model."""
_MEANINGFUL_AUTO = {"/data_types/keep_in_fp32_modules", TENSOR, GRADIENT_BITS}


def fill_batch(resolution: Resolution, batch_ranks: int) -> None:
    """Write all three batch sizes. If they disagree, a rule of the config check reports it.

    Args:
        batch_ranks: number of data-parallel ranks that read different samples.
    """
    sizes = stated_sizes(resolution.config, resolution.values)
    batch = complete(sizes.train, sizes.micro, sizes.accumulation, batch_ranks)
    if batch is None:
        return
    for pointer, size in {MICRO: batch.micro, ACCUMULATION: batch.accumulation}.items():
        if resolution.get(pointer) != size:
            resolution.fill(pointer, size, sizes.sources.get(pointer, sizes.train_name))
    if resolution.get(TRAIN) != batch.train:
        product = "micro-batch x accumulation x data parallel"
        resolution.fill(TRAIN, batch.train, product if sizes.train is None else sizes.train_name)


def fill_precision(resolution: Resolution) -> None:
    """Write bf16 and fp16 from the arguments, unless the file sets them."""
    for name, section in (("bf16", bf16_section(resolution.config)), ("fp16", "fp16")):
        pointer = f"/{section}/enabled"
        wanted = getattr(resolution.values, name)
        stated = resolution.get(pointer)
        if stated == AUTO or (stated is None and wanted and name in resolution.values.given):
            resolution.fill(pointer, wanted, resolution.values.source(name))


def fill_from_arguments(resolution: Resolution) -> None:
    """Write clipping, optimizer and scheduler from the arguments if the file has "auto"."""
    values = resolution.values
    # Without the key, DeepSpeed would clip at 1.0, whatever the argument says.
    if resolution.get("/gradient_clipping") is None:
        resolution.fill("/gradient_clipping", values.max_grad_norm, values.source("max_grad_norm"))
    for pointer, name, value in values.by_pointer:
        if resolution.get(pointer) == AUTO and pointer not in OF_DATA_AND_MODEL:
            resolution.fill(pointer, value, values.source(name))
    if resolution.get(WARMUP_STEPS) == 0:
        resolution.fill(WARMUP_STEPS, 1, "DeepSpeed refuses 0; 1 step has the same effect")
    if resolution.get("/scheduler/params/warmup_min_lr") == AUTO:
        resolution.fill("/scheduler/params/warmup_min_lr", 0, "default, as in HF")


def fill_steps(resolution: Resolution) -> None:
    """Write the scheduler's step counts if the file has "auto"."""
    values = resolution.values
    for pointer, name, value in values.by_pointer:
        if resolution.get(pointer) == AUTO and pointer in OF_DATA_AND_MODEL:
            resolution.fill(pointer, value, values.source(name))


def fill_optimizer(resolution: Resolution) -> None:
    """Write the optimizer of --optim if the file names none. The default stays absent, as the harness makes it."""
    stated = resolution.get("/optimizer/type")
    optim = resolution.values.optim
    optimizer = FLAGS[optim]
    if stated != AUTO and (resolution.get("/optimizer") is not None or optimizer is DEFAULT):
        return
    resolution.fill("/optimizer/type", optimizer.name, resolution.values.source("optim"))
    # `fill_from_arguments` comes later and replaces these.
    for name in optimizer.flags[optim]:
        if resolution.get(f"/optimizer/params/{name}") is None:
            put(resolution.config, f"/optimizer/params/{name}", AUTO)


def fill_checkpointing(resolution: Resolution) -> None:
    """Write the checkpointing interval from --gradient_checkpointing; if it is on, an interval in the file wins."""
    pointer = "/pipeline/activation_checkpoint_interval"
    wanted = resolution.values.gradient_checkpointing
    interval = resolution.get(pointer)
    if wanted is None or (interval is not None and size_fault(pointer, interval)):
        return
    if bool(whole(interval)) != wanted:
        resolution.fill(pointer, int(wanted), "--gradient_checkpointing")


def fill_from_model(resolution: Resolution) -> None:
    """Write ZeRO's "auto" bucket sizes from the model's hidden size, as HF and Accelerate do."""
    hidden = resolution.values.hidden_size
    if not hidden:
        return
    for key, value, source in (
        ("reduce_bucket_size", hidden * hidden, "hidden_size squared"),
        ("stage3_prefetch_bucket_size", int(0.9 * hidden * hidden), "0.9 x hidden_size squared"),
        ("stage3_param_persistence_threshold", 10 * hidden, "10 x hidden_size"),
    ):
        if resolution.get(f"/zero_optimization/{key}") == AUTO:
            resolution.fill(f"/zero_optimization/{key}", value, source)


def fill_bucket(resolution: Resolution, stage: int) -> None:
    """Write a bucket size for ZeRO from the model's size if the file has none."""
    # bf16 at stage 1 gets no value: its bucket size depends on a rank's parameters (`gradient_sums.py`).
    has_none = stage == 0 or (stage == 1 and resolution.get("/data_types/grad_accum_dtype") == "fp32")
    if has_none or not resolution.values.hidden_size or resolution.get(REDUCE_BUCKET) is not None:
        return
    # DeepSpeed's default is 5e8 gradients, and it allocates the whole bucket.
    size = bucket_elements(resolution.values.hidden_size)
    resolution.fill(REDUCE_BUCKET, size, "harness: hidden_size squared, within 4e6 and 5e8")


def fill_pipeline(resolution: Resolution, pp_size: int) -> None:
    """Write the number of stages, and the kind of activation checkpointing if the file does not set it."""
    if pp_size == 1 and not isinstance(resolution.get("/pipeline"), dict):
        return
    if resolution.get("/pipeline/stages") not in (None, pp_size):
        source = "--pipeline_parallel_size" if resolution.values.pipeline_parallel_size else "default"
        resolution.fill("/pipeline/stages", pp_size, source)
    # Where the file has none this is not noted as filled, as it replaces nothing.
    put(resolution.config, "/pipeline/stages", pp_size)
    if resolution.get("/pipeline/use_reentrant") is None:
        # Reentrant checkpointing computes no gradients for a layer whose inputs are integer ids.
        resolution.fill("/pipeline/use_reentrant", False, "harness")


def fill_zero_stage(resolution: Resolution, precision: str, stage: int) -> int:
    """Write the ZeRO stage and the gradient accumulation dtype for 16-bit precisions; return the stage."""
    if precision == "fp16" and stage == 0:
        resolution.fill(
            "/zero_optimization/stage", 1, "at stage 0 DeepSpeed clips fp16 by a norm that depends on the layout"
        )
        return 1
    pointer = "/data_types/grad_accum_dtype"
    masters = resolution.get(f"/{bf16_section(resolution.config)}/bf16_master_weights_and_grads")
    # What the file says stands, such as sums in bf16.
    if precision != "bf16" or masters or resolution.get(pointer) not in (None, AUTO):
        return stage
    resolution.fill(pointer, "fp32", "harness: a sum in bf16 loses small gradients")
    if stage == 0:
        resolution.fill("/zero_optimization/stage", 1, "for bf16 DeepSpeed uses the same optimizer at stages 0 and 1")
    return max(stage, 1)


def remove_autos(resolution: Resolution, pointer: str, section: JsonObject, keep: Collection[str] = ()) -> None:
    """Remove every remaining "auto" except the pointers in `keep`, so that DeepSpeed uses its defaults."""
    for key, value in list(section.items()):
        here = f"{pointer}/{key}"
        if isinstance(value, dict):
            remove_autos(resolution, here, value, keep)
        elif value == AUTO and here not in _MEANINGFUL_AUTO and here not in keep:
            del section[key]
            resolution.filled.append(Filled(pointer=here, value=None, source="left out: DeepSpeed's default"))
