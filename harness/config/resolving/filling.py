"""Fill in "auto" and absent keys with values of the arguments, of the model, and of the harness."""

from __future__ import annotations

from dataclasses import dataclass, field

from harness.config.resolving.resolved import Filled
from harness.config.values.arguments import OPTIMIZERS, AutoValues
from harness.config.values.batch import ACCUMULATION, MICRO, TRAIN, bucket_elements, complete, stated_sizes
from harness.config.values.json_object import JsonObject
from harness.config.values.layout_keys import GRADIENT_BITS, size_fault
from harness.config.values.pointers import AUTO, bf16_section, lookup, put, whole


@dataclass
class Resolution:
    """The config that is being filled, and the values filled in so far."""

    config: JsonObject
    values: AutoValues
    filled: list[Filled] = field(default_factory=list)

    def get(self, pointer: str) -> object:
        """Return the value at a pointer; None if it is absent."""
        return lookup(self.config, pointer)

    def fill(self, pointer: str, value: object, source: str) -> None:
        """Write a value that was not in the file."""
        put(self.config, pointer, value)
        self.filled.append(Filled(pointer=pointer, value=value, source=source))


REDUCE_BUCKET = "/zero_optimization/reduce_bucket_size"
_MEANINGFUL_AUTO = {"/data_types/keep_in_fp32_modules", "/tensor_parallel/autotp_size", GRADIENT_BITS}


def fill_batch(run: Resolution, readers: int) -> None:
    """Write all three batch sizes; if they do not agree, a rule reports it.

    Args:
        readers: number of data-parallel ranks that read different samples.
    """
    sizes = stated_sizes(run.config, run.values)
    batch = complete(sizes.train, sizes.micro, sizes.accumulation, readers)
    if batch is None:
        return
    for pointer, size in {MICRO: batch.micro, ACCUMULATION: batch.accumulation}.items():
        if run.get(pointer) != size:
            run.fill(pointer, size, sizes.sources.get(pointer, sizes.train_name))
    if run.get(TRAIN) != batch.train:
        product = "micro-batch x accumulation x data parallel"
        run.fill(TRAIN, batch.train, product if sizes.train is None else sizes.train_name)


def fill_precision(run: Resolution) -> None:
    """Write bf16 and fp16 by the arguments, unless the file sets them."""
    for name, section in (("bf16", bf16_section(run.config)), ("fp16", "fp16")):
        pointer, wanted = f"/{section}/enabled", getattr(run.values, name)
        stated = run.get(pointer)
        if stated == AUTO or (stated is None and wanted and name in run.values.given):
            if run.get(f"/{section}") is None:
                run.config.pop(section, None)
            run.fill(pointer, wanted, run.values.source(name))


def fill_from_arguments(run: Resolution) -> None:
    """Write clipping, optimizer and scheduler by the arguments if the file has "auto"."""
    values = run.values
    if run.get("/gradient_clipping") is None:  # absent, DeepSpeed would clip at 1.0 whatever the argument says
        run.fill("/gradient_clipping", values.max_grad_norm, values.source("max_grad_norm"))
    for pointer, name, value in values.by_pointer:
        if run.get(pointer) == AUTO:
            run.fill(pointer, value, values.source(name))
    if run.get("/scheduler/params/warmup_num_steps") == 0:
        run.fill("/scheduler/params/warmup_num_steps", 1, "DeepSpeed refuses 0; 1 step has the same effect")
    if run.get("/scheduler/params/warmup_min_lr") == AUTO:
        run.fill("/scheduler/params/warmup_min_lr", 0, "default, as in HF")


def fill_optimizer(run: Resolution) -> None:
    """Write the optimizer of --optim if the file names none; AdamW stays absent, because the harness builds its own."""
    stated, (kind, parameters) = run.get("/optimizer/type"), OPTIMIZERS[run.values.optim]
    if stated != AUTO and (run.get("/optimizer") is not None or kind == "AdamW"):
        return
    run.fill("/optimizer/type", kind, run.values.source("optim"))
    for name in parameters:
        if run.get(f"/optimizer/params/{name}") is None:
            put(run.config, f"/optimizer/params/{name}", AUTO)


def fill_checkpointing(run: Resolution) -> None:
    """Write the checkpointing interval by --gradient_checkpointing; if that is on, an interval in the file wins."""
    pointer, wanted = "/pipeline/activation_checkpoint_interval", run.values.gradient_checkpointing
    interval = run.get(pointer)
    if wanted is None or (interval is not None and size_fault(pointer, interval)):
        return
    if bool(whole(interval)) != wanted:
        run.fill(pointer, int(wanted), "--gradient_checkpointing")


def fill_from_model(run: Resolution) -> None:
    """Write ZeRO's bucket sizes by the model's hidden size, as HF and Accelerate do."""
    hidden = run.values.hidden_size
    if not hidden:
        return
    for key, value, source in (
        ("reduce_bucket_size", hidden * hidden, "hidden_size squared"),
        ("stage3_prefetch_bucket_size", int(0.9 * hidden * hidden), "0.9 x hidden_size squared"),
        ("stage3_param_persistence_threshold", 10 * hidden, "10 x hidden_size"),
    ):
        if run.get(f"/zero_optimization/{key}") == AUTO:
            run.fill(f"/zero_optimization/{key}", value, source)


def fill_bucket(run: Resolution, stage: int) -> None:
    """Write a bucket size for ZeRO by the model's size if the file has none; DeepSpeed's default is 5e8 gradients.

    bf16 at stage 1 gets none, because its optimizer has no buckets.
    """
    has_none = stage == 0 or (stage == 1 and run.get("/data_types/grad_accum_dtype") == "fp32")
    if has_none or not run.values.hidden_size or run.get(REDUCE_BUCKET) is not None:
        return
    run.fill(REDUCE_BUCKET, bucket_elements(run.values.hidden_size), "harness: hidden_size squared, within 4e6 and 5e8")


def fill_pipeline(run: Resolution, pp_size: int) -> None:
    """Write the number of stages, and the kind of recomputation if the file does not set it."""
    if pp_size == 1 and not isinstance(run.get("/pipeline"), dict):
        return
    if run.get("/pipeline/stages") not in (None, pp_size):
        source = "--pipeline_parallel_size" if run.values.pipeline_parallel_size else "default"
        run.fill("/pipeline/stages", pp_size, source)
    put(run.config, "/pipeline/stages", pp_size)
    if run.get("/pipeline/use_reentrant") is None:
        # reentrant checkpointing computes no gradients for a layer whose input is integer ids
        run.fill("/pipeline/use_reentrant", False, "harness")


def fill_zero_stage(run: Resolution, precision: str, stage: int) -> int:
    """Write the ZeRO stage and the dtype of gradient sums for a 16-bit precision; return the stage.

    Gradients in bf16 are accumulated in float32 unless the file says otherwise. fp16 runs at stage 1 instead of 0.
    """
    if precision == "fp16" and stage == 0:
        run.fill("/zero_optimization/stage", 1, "at stage 0 DeepSpeed clips fp16 by a norm that depends on the layout")
        return 1
    pointer, section = "/data_types/grad_accum_dtype", bf16_section(run.config)
    masters = run.get(f"/{section}/bf16_master_weights_and_grads")
    if precision != "bf16" or masters or run.get(pointer) not in (None, AUTO):
        return stage
    run.fill(pointer, "fp32", "harness: a sum in bf16 loses small gradients")
    if stage == 0:
        run.fill("/zero_optimization/stage", 1, "for bf16 DeepSpeed uses the same optimizer at stages 0 and 1")
    return max(stage, 1)


def remove_autos(run: Resolution, pointer: str, section: JsonObject) -> None:
    """Remove every "auto" that is left, so that DeepSpeed uses its defaults."""
    for key, value in list(section.items()):
        here = f"{pointer}/{key}"
        if isinstance(value, dict):
            remove_autos(run, here, value)
        elif value == AUTO and here not in _MEANINGFUL_AUTO:
            del section[key]
            run.filled.append(Filled(pointer=here, value=None, source="left out: DeepSpeed's default"))
