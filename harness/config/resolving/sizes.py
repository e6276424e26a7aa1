"""The sizes of a run: pipeline stages, tensor-parallel ranks, ranks that share out experts, and the batch."""

from __future__ import annotations

from harness.config.resolving.resolution import Resolution
from harness.config.values.batch import complete, misfit
from harness.config.values.pointers import AUTO, put
from harness.wording import counted

MICRO, ACCUMULATION, TRAIN = (
    "/train_micro_batch_size_per_gpu",
    "/gradient_accumulation_steps",
    "/train_batch_size",
)


def layout(run: Resolution) -> tuple[int, int, int]:
    """Pipeline, tensor and data-parallel size."""
    values = run.values
    stated, cut = run.number("/pipeline/stages"), run.number("/tensor_parallel/autotp_size")
    pipeline = values.pipeline_parallel_size if values.pipeline_parallel_size is not None else stated or 1
    tensor = values.tensor_parallel_size if values.tensor_parallel_size is not None else cut or 1
    if min(pipeline, tensor, values.world_size) < 1:
        shape = f"{counted(pipeline, 'pipeline stage')} x {counted(tensor, 'tensor-parallel rank')}"
        message = f"a layout of {shape} on {counted(values.world_size, 'rank')}"
        run.refuse("DS311", "", message, "use sizes of at least 1")
        return 1, 1, max(1, values.world_size)
    if values.world_size % (pipeline * tensor):
        cuts = f"{counted(pipeline, 'pipeline stage')} x {counted(tensor, 'tensor-parallel rank')}"
        message = f"{counted(values.world_size, 'rank')} cannot be divided into {cuts}"
        pointer = "/pipeline/stages" if pipeline > 1 else "/tensor_parallel/autotp_size"
        run.refuse("DS311", pointer, message, f"start a multiple of {pipeline * tensor} ranks, or change the layout")
    if pipeline > 1 or isinstance(run.get("/pipeline"), dict):
        _write_pipeline(run, pipeline)
    return pipeline, tensor, max(1, values.world_size // (pipeline * tensor))


def _write_pipeline(run: Resolution, stages: int) -> None:
    """Write the number of stages that runs, and how layers are recomputed where the file does not say."""
    if not isinstance(run.get("/pipeline"), dict | None):
        return  # no object: refused elsewhere
    if run.get("/pipeline/stages") not in (None, stages):
        source = "--pipeline_parallel_size" if run.values.pipeline_parallel_size else "default"
        run.fill("/pipeline/stages", stages, source)
    put(run.config, "/pipeline/stages", stages)
    if run.get("/pipeline/use_reentrant") is None:
        # reentrant checkpointing has no gradient where a layer's input is integer ids
        run.fill("/pipeline/use_reentrant", False, "harness")


def experts(run: Resolution, tensor: int) -> int:
    """The ranks over which whole experts are spread: those of a tensor-parallel group, or 1."""
    asked = run.number("/expert_parallel/autoep_size") if run.get("/expert_parallel/enabled") is True else None
    size = run.values.expert_parallel_size or asked or 1
    if size not in (1, tensor):
        run.refuse(
            "DS314",
            "/expert_parallel/autoep_size",
            f"expert-parallel size {size} differs from tensor-parallel size {tensor}",
            f"set tensor_parallel.autotp_size to {size}, or autoep_size to {tensor}",
        )
    return size


def batch(run: Resolution, data_parallel: int) -> None:
    """Write all three batch sizes: micro-batch and accumulation depend on no other size of the layout.

    Where the global batch is fixed, by `--global_batch_size` or train_batch_size, the accumulation follows from it.
    """
    train = _stated(run, TRAIN, "global_batch_size")
    micro = _stated(run, MICRO, "per_device_train_batch_size")
    accumulation = _stated(run, ACCUMULATION, "gradient_accumulation_steps")
    sources = {
        MICRO: "--per_device_train_batch_size" if "per_device_train_batch_size" in run.values.given else None,
        ACCUMULATION: "--gradient_accumulation_steps" if "gradient_accumulation_steps" in run.values.given else None,
    }
    from_arguments = run.get(MICRO) == AUTO or "global_batch_size" in run.values.given
    if micro is None and (train is None or (accumulation is None and from_arguments)):
        micro = run.values.per_device_train_batch_size
        sources[MICRO] = run.values.source("per_device_train_batch_size")
    if accumulation is None and train is None:
        accumulation = run.values.gradient_accumulation_steps
        sources[ACCUMULATION] = run.values.source("gradient_accumulation_steps")
    result = complete(train, micro, accumulation, data_parallel)
    if result is None or not result.fits(data_parallel):
        name = "--global_batch_size" if "global_batch_size" in run.values.given else "train_batch_size"
        run.refuse("DS302", TRAIN, *misfit(name, train, micro, accumulation, data_parallel))
        return
    fixed = "--global_batch_size" if "global_batch_size" in run.values.given else "train_batch_size"
    for pointer, size in {MICRO: result.micro, ACCUMULATION: result.accumulation}.items():
        if run.get(pointer) != size:
            run.fill(pointer, size, sources[pointer] or fixed)
    if run.get(TRAIN) != result.train:
        source = fixed if train is not None else "micro-batch x accumulation x data parallel"
        run.fill(TRAIN, result.train, source)


def _stated(run: Resolution, pointer: str, name: str) -> int | None:
    """The size that was given as an argument or stands in the file; the two must agree."""
    in_file = run.number(pointer)
    if name not in run.values.given:
        return in_file
    argument: int | None = getattr(run.values, name)
    if argument is None:
        return in_file
    run.must_agree(pointer, name, in_file, argument)
    return argument
