"""Rules that hold a config against a model: what can be cut into how many parts."""

from __future__ import annotations

from collections.abc import Iterator

from harness.config.diagnostic import Severity
from harness.config.plans import planless_family
from harness.config.rule import Finding, rule
from harness.config.view import RunView
from harness.config.wording import counted

_TINY = "tiny-llama"


@rule(
    "DS901",
    "fewer-layers-than-stages",
    Severity.ERROR,
    claim="elsewhere",
    wrong='{"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4096, "pipeline": {"stages": 1000}}',
    right='{"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 8, "pipeline": {"stages": 2}}',
    model=_TINY,
)
def fewer_layers_than_stages(view: RunView) -> Iterator[Finding]:
    """The model has fewer decoder layers than the pipeline has stages, so some stages would be empty."""
    layers = view.model.layers if view.model is not None else None
    if view.target == "harness" and layers is not None and view.stages > layers:
        yield Finding(
            pointer="/pipeline/stages",
            message=f"{view.stages} stages, and the model has {counted(layers, 'decoder layer')}",
            hint=f"use at most {counted(layers, 'stage')}",
            deepspeed="builds empty stages",
            on_value=True,
        )


@rule(
    "DS902",
    "heads-do-not-divide",
    Severity.ERROR,
    claim="elsewhere",
    wrong='{"train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"autotp_size": 1009}}',
    right='{"train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"autotp_size": 2}}',
    model=_TINY,
)
def heads_do_not_divide(view: RunView) -> Iterator[Finding]:
    """Attention heads cannot be dealt out to the tensor-parallel ranks.

    Every rank takes the same number of query heads. Key-value heads may be fewer than ranks, if the ranks
    are a multiple of them: then several ranks hold one.
    """
    if view.target != "harness" or view.model is None or view.tensor == 1:
        return
    heads, kv_heads = view.model.heads, view.model.kv_heads
    if heads is not None and heads % view.tensor:
        message = f"{counted(heads, 'attention head')} cannot be divided by {view.tensor} tensor-parallel ranks"
    elif kv_heads and kv_heads % view.tensor and view.tensor % kv_heads:
        message = f"{counted(kv_heads, 'key-value head')} and {view.tensor} ranks do not divide each other"
    else:
        return
    fits = [size for size in range(2, heads + 1) if heads % size == 0][:4] if heads else []
    yield Finding(
        pointer="/tensor_parallel/autotp_size",
        message=message,
        hint="use " + ", ".join(map(str, fits)) if fits else "use 1",
        deepspeed="is not asked; the harness cuts the layers itself",
        on_value=True,
    )


@rule(
    "DS903",
    "padded-vocabulary",
    Severity.INFO,
    claim="elsewhere",
    wrong='{"train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"autotp_size": 8}}',
    right='{"train_micro_batch_size_per_gpu": 1}',
    model=_TINY,
)
def padded_vocabulary(view: RunView) -> Iterator[Finding]:
    """The vocabulary is no multiple of the tensor-parallel ranks.

    The harness adds rows until it is, and takes them away on export; the message says how many.
    """
    vocabulary = view.model.vocabulary if view.model is not None else None
    if view.target == "harness" and vocabulary is not None and vocabulary % view.tensor:
        rows = -vocabulary % view.tensor
        yield Finding(
            pointer="/tensor_parallel/autotp_size",
            message=f"a vocabulary of {vocabulary} over {view.tensor} ranks is padded by {counted(rows, 'row')}",
            deepspeed="is not asked; the harness cuts the layers itself",
            on_value=True,
        )


@rule(
    "DS904",
    "experts-do-not-divide",
    Severity.ERROR,
    claim="elsewhere",
    wrong='{"train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"autotp_size": 3},'
    ' "expert_parallel": {"enabled": true, "autoep_size": 3}}',
    right='{"train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"autotp_size": 2},'
    ' "expert_parallel": {"enabled": true, "autoep_size": 2}}',
    model="tiny-mixtral",
)
def experts_do_not_divide(view: RunView) -> Iterator[Finding]:
    """A layer's experts cannot be dealt out to the ranks.

    Every rank takes the same number of whole experts. Without `expert_parallel` each expert is cut instead,
    and their number does not matter.
    """
    experts = view.model.experts if view.model is not None else None
    if view.target == "harness" and experts and experts % view.expert:
        fits = [size for size in range(2, experts + 1) if experts % size == 0][:4]
        yield Finding(
            pointer="/expert_parallel/autoep_size",
            message=f"{counted(experts, 'expert')} cannot be divided by {view.expert} ranks",
            hint="use " + ", ".join(map(str, fits)) + ", with tensor_parallel.autotp_size the same",
            deepspeed="is not asked; the harness spreads the experts itself",
            on_value=True,
        )


@rule(
    "DS905",
    "no-tensor-parallel-plan",
    Severity.ERROR,
    claim="elsewhere",
    wrong='{"train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"autotp_size": 2}}',
    right='{"train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"autotp_size": 1}}',
    model=planless_family(),
)
def no_tensor_parallel_plan(view: RunView) -> Iterator[Finding]:
    """The model cannot be cut for tensor parallelism.

    Its family declares no plan in transformers and none comes with the harness, or the plan refuses what the
    model's config.json says. A plan is one file: `models/plans/MODEL_TYPE.json`.
    """
    refusal = view.model.plan_refusal if view.model is not None else None
    spreads_experts = view.expert > 1  # then the ranks may hold all else whole
    if view.target == "harness" and view.tensor > 1 and not spreads_experts and refusal is not None:
        yield Finding(
            pointer="/tensor_parallel/autotp_size",
            message=refusal,
            hint="set it to 1, or describe in models/plans how the model is cut",
            deepspeed="is not asked; the harness cuts the layers itself",
            on_value=True,
        )
