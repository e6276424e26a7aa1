"""Rules that compare a config with a model: whether it has enough layers, heads and experts."""

from __future__ import annotations

from collections.abc import Iterator

from harness.checking.rules.rule import Finding, rule
from harness.checking.rules.view import RunView
from harness.config.model.plans import planless_family
from harness.config.model.sharding import Heads
from harness.config.text.diagnostic import Severity
from harness.config.values.layout_keys import TENSOR
from harness.wording import counted

_TINY = "tiny-llama"


@rule("DS901", "fewer-layers-than-stages", Severity.ERROR, claim="elsewhere", model=_TINY)
def fewer_layers_than_stages(view: RunView) -> Iterator[Finding]:
    """The model has fewer decoder layers than the pipeline has stages, so some stages would be empty.

    If the schedule gives each stage several model chunks, each chunk needs a layer.

    Wrong: {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4096, "pipeline": {"stages": 1000}}
    Right: {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 8, "pipeline": {"stages": 2}}
    """
    layers = view.model.layers if view.model is not None else None
    if view.target == "harness" and layers is not None and layers < 1:
        yield Finding(
            pointer="",
            message=f"the model's config.json has {layers} decoder layers",
            hint="give a model with at least one",
        )
    elif view.target == "harness" and layers is not None and view.chunks.per_stage > 1 and view.chunks.count > layers:
        yield Finding(
            pointer="/pipeline/schedule",
            message=f"{view.pp_size} pipeline stages of {view.chunks.per_stage} model chunks, but the model has only "
            f"{counted(layers, 'decoder layer')}",
            hint=f"use at most {counted(layers, 'model chunk')} in all, or a schedule with one a stage",
            deepspeed="does nothing with the schedule, and runs 1F1B",
            on_value=True,
        )
    elif view.target == "harness" and layers is not None and view.pp_size > layers:
        yield Finding(
            pointer="/pipeline/stages",
            message=f"{view.pp_size} pipeline stages, but the model has only {counted(layers, 'decoder layer')}",
            hint=f"use at most {counted(layers, 'stage')}",
            deepspeed="builds empty stages",
            on_value=True,
        )


@rule("DS902", "fewer-heads-than-ranks", Severity.ERROR, claim="elsewhere", model=_TINY)
def fewer_heads_than_ranks(view: RunView) -> Iterator[Finding]:
    """The model has fewer attention heads than a tensor-parallel group has ranks, so some ranks would have none.

    There may be fewer key-value heads than ranks: then several ranks hold the same one.

    Wrong: {"train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"autotp_size": 1009}}
    Right: {"train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"autotp_size": 2}}
    """
    heads = view.model.heads if view.model is not None else None
    if view.target == "harness" and heads is not None and view.tp_size > heads:
        yield Finding(
            pointer=TENSOR,
            message=f"{view.tp_size} tensor-parallel ranks, but the model has only {counted(heads, 'attention head')}",
            hint=f"set tensor_parallel.autotp_size to {heads} and expert_parallel.autoep_size to {heads}"
            if view.ep_size > 1
            else f"set tensor_parallel.autotp_size to at most {heads}",
            deepspeed="does nothing here: the harness splits the layers itself",
            on_value=True,
        )


@rule("DS903", "unequal-shares", Severity.WARNING, claim="elsewhere", model=_TINY)
def unequal_shares(view: RunView) -> Iterator[Finding]:
    """Attention heads, intermediate columns or experts cannot be divided equally among the ranks.

    Results do not change, but in every layer all ranks wait for the one with the largest share; the message says how
    large that is. Query heads stay on the same rank as their key-value head.

    Wrong: {"train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"autotp_size": 3}}
    Right: {"train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"autotp_size": 4}}
    """
    model = view.model
    if view.target != "harness" or model is None or (view.tp_size == 1 and view.ep_size == 1):
        return
    largest = []
    if model.heads is not None and model.heads >= view.tp_size:
        kv_heads = model.kv_heads if model.kv_heads and model.heads % model.kv_heads == 0 else model.heads
        shares = Heads(query=model.heads, key_value=kv_heads).queries(view.tp_size)
        largest.append((model.heads, max(stop - start for start, stop in shares), "attention heads"))
    if view.ep_size == 1 and model.intermediate is not None:
        largest.append((model.intermediate, -(-model.intermediate // view.tp_size), "intermediate columns"))
    unequal = [f"{most} of {total} {what}" for total, most, what in largest if most * view.tp_size > total]
    if model.experts is not None and model.experts > view.ep_size > 1 and model.experts % view.ep_size:
        most = -(-model.experts // view.ep_size)
        yield Finding(
            pointer="/expert_parallel/autoep_size",
            message=f"{view.ep_size} expert-parallel ranks get unequal shares: the largest is {most} of "
            f"{model.experts} experts",
            hint="use a size that divides them evenly: all ranks wait for the one with the largest share",
            deepspeed="does nothing here: the harness distributes the experts itself",
            on_value=True,
        )
    if unequal:
        yield Finding(
            pointer=TENSOR,
            message=f"{view.tp_size} tensor-parallel ranks get unequal shares: the largest is {' and '.join(unequal)}",
            hint="use a size that divides them evenly: all ranks wait for the one with the largest share",
            deepspeed="does nothing here: the harness splits the layers itself",
            on_value=True,
        )


@rule("DS904", "fewer-experts-than-ranks", Severity.ERROR, claim="elsewhere", model="tiny-mixtral")
def fewer_experts_than_ranks(view: RunView) -> Iterator[Finding]:
    """A layer has fewer experts than there are ranks to share them, so some ranks would have none.

    Every rank takes whole experts. Without `expert_parallel` each rank takes a part of every expert instead, and the
    number of experts does not matter.

    Wrong: {"train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"autotp_size": 1009},
           "expert_parallel": {"enabled": true, "autoep_size": 1009}}
    Right: {"train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"autotp_size": 2},
           "expert_parallel": {"enabled": true, "autoep_size": 2}}
    """
    experts = view.model.experts if view.model is not None else None
    if view.target == "harness" and experts and experts < view.ep_size:
        hint = f"set autoep_size to {experts // view.tp_size * view.tp_size}"
        if view.tp_size == 1:
            hint = f"set autoep_size to at most {experts}"
        elif view.tp_size > experts:
            hint = "remove expert_parallel, so that each expert is split"
        yield Finding(
            pointer="/expert_parallel/autoep_size",
            message=f"{view.ep_size} expert-parallel ranks, but the model has only {counted(experts, 'expert')}",
            hint=hint,
            deepspeed="does nothing here: the harness distributes the experts itself",
            on_value=True,
        )


@rule("DS905", "no-tensor-parallel-plan", Severity.ERROR, claim="elsewhere", model=planless_family())
def no_tensor_parallel_plan(view: RunView) -> Iterator[Finding]:
    """The model cannot be sharded for tensor parallelism.

    Its family declares no plan in transformers and has no plan file in the harness, or its plan does not support this
    config.json. A plan file is `models/plans/MODEL_TYPE.json`.

    Wrong: {"train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"autotp_size": 2}}
    Right: {"train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"autotp_size": 1}}
    """
    refusal = view.model.plan_refusal if view.model is not None else None
    spreads_experts = view.ep_size > 1  # then every rank may hold the other weights whole
    if view.target == "harness" and view.tp_size > 1 and not spreads_experts and refusal is not None:
        yield Finding(
            pointer=TENSOR,
            message=refusal,
            hint="set tensor_parallel.autotp_size to 1, or add a plan file for the family to models/plans",
            deepspeed="does nothing here: the harness splits the layers itself",
            on_value=True,
        )


@rule("DS906", "no-expert-parallel-plan", Severity.ERROR, claim="elsewhere", model=_TINY)
def no_expert_parallel_plan(view: RunView) -> Iterator[Finding]:
    """The model has no experts, or the harness cannot distribute them whole among ranks.

    A plan says which modules are experts. The model's family declares it in transformers (`base_model_ep_plan`), or the
    harness has a plan file for it: `models/plans/MODEL_TYPE.json`.

    Wrong: {"train_micro_batch_size_per_gpu": 1, "expert_parallel": {"enabled": true, "autoep_size": 2}}
    Right: {"train_micro_batch_size_per_gpu": 1, "expert_parallel": {"enabled": true, "autoep_size": 1}}
    """
    refusal = view.model.expert_plan_refusal if view.model is not None else None
    if view.target == "harness" and view.ep_size > 1 and refusal is not None:
        yield Finding(
            pointer="/expert_parallel/autoep_size",
            message=refusal,
            hint="remove expert_parallel, so that each expert is split",
            deepspeed="looks for the modules by patterns of its presets",
            on_value=True,
        )
