"""Prepare a causal language model for a layout: its pipeline layers, their costs, and the form of its logits.

Read `assemble` first: it plans tensor parallelism, opens the weights, runs the model's forward without its layers, and
lists the pipeline layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import build_glob_alternation

from harness.config.model.facts import experts_of
from harness.errors import UserError
from harness.hf.adapters import Adapters, plain_name
from harness.hf.context.plan import UNSPLIT, TokenSplit
from harness.hf.context.sequence import SharedSequence
from harness.hf.decoder import Blueprint, decoder_layers, embedding_noise, unequal_shares
from harness.hf.forward.outer_forward import OuterForward
from harness.hf.forward.routers import FindRouters, RouterCapture
from harness.hf.layers.attention import on_any_device
from harness.hf.locate import PLANS
from harness.hf.skeleton import ModelSource, build_skeleton, foreign_modules, too_few_key_heads, with_key_per_head
from harness.hf.weights.conversion import (
    CheckpointFormat,
    ParameterRef,
    Unconverted,
    default_form,
    open_checkpoint,
    untie,
)
from harness.hf.weights.layer_weights import (
    CheckpointReader,
    Initialiser,
    MemoryReader,
    ModelWeights,
    NoValues,
    WeightSource,
    read_by_transformers,
)
from harness.parallel.comm import TensorParallel
from harness.parallel.context.sequence_shards import ContextParallel
from harness.parallel.pipeline.partition import LayerCost
from harness.parallel.plans.apply import cut
from harness.parallel.plans.experts import expert_parallel_plan, run_where_aligned
from harness.parallel.plans.plan import Plan, plan_for
from harness.parallel.tiles import LossTiles
from harness.parallel.token_exchange import NO_NEIGHBOURS, Neighbours
from harness.parallel.zero import Zero3Partition


def layer_costs(
    layers: Sequence[list[nn.Module]],
    config: PretrainedConfig,
    vocab_size: int,
    sequence_length: int,
    checkpointed: bool,
) -> list[LayerCost]:
    """Return the cost of each pipeline layer.

    Args:
        layers: the modules of the prologue, of each decoder layer, and of the epilogue.
        vocab_size: number of logits.
        sequence_length: tokens per sample.
        checkpointed: whether activation checkpointing recomputes decoder layers.
    """
    experts = experts_of(config.get_text_config(decoder=True).to_dict())
    first, *middle, last = (_weights(modules, *experts) for modules in layers)
    return [
        LayerCost(matmul_parameters=first.matrices, lookup_width=first.lookup_width, vector_parameters=first.vectors),
        *(
            LayerCost(
                matmul_parameters=weights.matrices,
                vector_parameters=weights.vectors,
                attention_width=_attention_width(config, index),
                sequence_length=sequence_length,
                checkpointed=checkpointed,
            )
            for index, weights in enumerate(middle)
        ),
        LayerCost(matmul_parameters=last.matrices, vector_parameters=last.vectors, logits=vocab_size),
    ]


@dataclass(frozen=True)
class _Weights:
    matrices: int
    vectors: int
    lookup_width: int


def _weights(modules: list[nn.Module], experts: int, chosen: int) -> _Weights:
    """Count parameters by use: matrix products, look-ups, elementwise operations.

    Of a tensor that stacks the matrices of `experts` experts, only `chosen` experts count: a token uses no others.
    """
    # By class, as a head has a matrix of the same shape: its product costs time, a look-up hardly any.
    tables = [child for module in modules for child in module.modules() if isinstance(child, nn.Embedding)]
    looked_up = {id(parameter) for table in tables for parameter in table.parameters()}
    rest = [p for module in modules for p in module.parameters() if id(p) not in looked_up]
    return _Weights(
        matrices=sum(
            p.numel() // experts * chosen if p.dim() > 2 and len(p) == experts else p.numel()
            for p in rest
            if p.dim() > 1
        ),
        vectors=sum(p.numel() for p in rest if p.dim() == 1),
        lookup_width=sum(table.embedding_dim for table in tables),
    )


def _attention_width(config: PretrainedConfig, index: int) -> int:
    """Return attention heads x head size of decoder layer `index`; 0 if the config does not state them."""
    text = config.get_text_config(decoder=True)
    # The length of this list is `num_hidden_layers`: transformers raises if the config has another name for it.
    layers = getattr(text, "per_layer_config", None) if hasattr(text, "num_hidden_layers") else None
    text = layers[index] if layers and index < len(layers) else text
    heads = getattr(text, "num_attention_heads", None)
    size = getattr(text, "head_dim", None) or (text.hidden_size // heads if heads else 0)
    return heads * size if heads else 0


def dtypes_in_16_bits(model: PreTrainedModel, dtype: torch.dtype) -> tuple[frozenset[str], dict[str, torch.dtype]]:
    """Return names of parameters that `from_pretrained(dtype=dtype)` keeps in float32, and name -> dtype of buffers.

    Both are found by building the model with `dtype` as the default dtype. Parameters and saved buffers that the class
    declares to keep in float32 come from that declaration.
    """
    if dtype == torch.float32:
        return frozenset(), {}
    parameters = [name for name, _ in model.named_parameters()]
    in_fp32 = _kept(model, parameters, dtype)
    try:
        built = build_skeleton(model.config, dtype)
    except UserError:
        # A class of the user's own, which transformers cannot build from a config.
        return in_fp32, {}
    made = {name: tensor.dtype for name, tensor in (*built.named_parameters(), *built.named_buffers())}
    in_fp32 |= {name for name in parameters if made.get(plain_name(name)) == torch.float32}
    names = [name for name, buffer in model.named_buffers() if buffer.is_floating_point()]
    buffers = {name: made[plain_name(name)] for name in names if plain_name(name) in made}
    # The declaration acts while a file is loaded, so it does not reach buffers that no file has.
    kept = _kept(model, buffers.keys() & model.state_dict().keys(), dtype)
    return in_fp32, buffers | dict.fromkeys(kept, torch.float32)


def _kept(model: PreTrainedModel, names: Iterable[str], dtype: torch.dtype) -> frozenset[str]:
    patterns = list(model._get_dtype_plan(dtype))  # noqa: SLF001  # `from_pretrained` uses it
    if not patterns:
        return frozenset()
    found, _, _ = build_glob_alternation(patterns)
    return frozenset(name for name in names if found.search(plain_name(name)))


@dataclass(frozen=True, kw_only=True)
class CausalModel:
    """A decoder sharded for one rank; only its skeleton is built.

    Attributes:
        layers: the pipeline layers, to be built stage by stage.
        source: the model's config and weights as read.
        outer: the model's forward around its layers.
        vocab_size: number of logits, without padding.
        local_logits: whether the epilogue returns only this rank's shard of the vocabulary.
        form: how the model is written as a HuggingFace checkpoint.
        unequal: names, with * for numbers, of parameters whose tensor-parallel shards have unequal sizes.
        router: collects router logits for the model's own router loss; the epilogue then returns (logits, router
            loss).
        in_fp32: names of the parameters that the family keeps in float32 in a 16-bit model.
        shares_sequence: whether sequence parallelism splits the tokens over tensor-parallel ranks.
        apart: how a subset of the tokens is computed at a time, by context ranks and tiles.
        experts: the data-parallel ranks that hold other whole experts; None if all experts are sharded.
        loss_tiles: lets the epilogue compute the loss in tiles; None if it returns logits.
    """

    layers: list[LayerSpec]
    source: ModelSource
    outer: OuterForward
    vocab_size: int
    local_logits: bool
    form: CheckpointFormat
    unequal: frozenset[str] = frozenset()
    router: RouterCapture | None = None
    in_fp32: frozenset[str] = frozenset()
    shares_sequence: bool = False
    apart: TokenSplit = UNSPLIT
    experts: Neighbours | None = None
    loss_tiles: LossTiles | None = None

    @property
    def layer_names(self) -> list[str]:
        """Class names of the pipeline layers, for `pipeline.partition` type:REGEX."""
        return ["Prologue", *(type(layer).__name__ for layer in self.outer.layers), "Epilogue"]

    def parameter_counts(self, *, trained: bool = False) -> list[int]:
        """Return each pipeline layer's number of (trained) parameters; a tied parameter counts in each of them."""
        return [
            sum(p.numel() for module in modules for p in module.parameters() if p.requires_grad or not trained)
            for modules in self._modules()
        ]

    def size(self, *, trained: bool = False) -> int:
        """Return the model's number of (trained) parameters; tied parameters count once."""
        parameters = {id(p): p for modules in self._modules() for module in modules for p in module.parameters()}
        return sum(p.numel() for p in parameters.values() if p.requires_grad or not trained)

    def costs(self, sequence_length: int, checkpointed: bool) -> list[LayerCost]:
        """Return the cost of each pipeline layer; a tied head costs as much as an untied one."""
        return layer_costs(self._modules(), self.source.config, self.vocab_size, sequence_length, checkpointed)

    def _modules(self) -> list[list[nn.Module]]:
        outer = self.outer
        return [list(outer.prologue.values()), *([layer] for layer in outer.layers), list(outer.epilogue.values())]


def assemble(
    source: ModelSource,
    *,
    tensor: TensorParallel,
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
    finish: Callable[[nn.Module], None],
    experts: Neighbours | None = None,
    adaptation: Adapters | None = None,
    routers: FindRouters | None = None,
    part: Zero3Partition | None = None,
    whole_logits: bool = False,
    keep_fp32: bool = False,
    noise_alpha: float | None = None,
    sequence_parallel: bool = False,
    apart: TokenSplit = UNSPLIT,
) -> CausalModel:
    """Prepare the model of `source` for this rank. Raises UserError for a model that cannot be cut as asked.

    Args:
        tensor: this rank's place in its tensor-parallel group.
        device, dtype, seed: of the parameters; the seed initialises them if the source has no weights.
        finish: called with each layer once it has its weights (ZeRO-3 partitions them).
        experts: the data-parallel ranks that hold other whole experts; None if all experts are sharded.
        adaptation: adapters that are trained instead of the weights.
        routers: finds the routers whose loss is added; None to add no router loss.
        part: the partition of a parameter that `finish` keeps (ZeRO-3); only it is read or initialised.
        whole_logits: whether each rank computes all logits.
        keep_fp32: whether parameters that the family keeps in float32 stay float32.
        noise_alpha: scale of NEFTune's noise on the embeddings.
        sequence_parallel: whether tensor-parallel ranks split the tokens between the layers.
        apart: how a subset of the tokens is computed at a time, by context ranks and tiles.
    """
    model = source.skeleton()
    plan = _plan(source, model, tensor, experts)
    base, form = _weight_source(source, model, seed, part)  # before adapters rename parameters
    vocab_size = _vocab_size(model)
    if adaptation is not None:
        adaptation.inject(model, keep_ties=isinstance(source.weights, Path))
    values: ModelWeights = base if source.has_values else NoValues()
    weights: WeightSource = values if adaptation is None else adaptation.weights(values, seed)
    in_fp32, buffers = dtypes_in_16_bits(model, dtype)  # before `_examine` takes out the layers and their buffers
    noise = embedding_noise(model, noise_alpha)
    outer, router = _examine(source, model, device, routers)
    outer.uses_rng |= noise is not None  # a hook, which the analysis of the model's own forward does not see
    _cast_buffers(model, buffers)
    if adaptation is None:  # with adapters the layers hold parameters under other names
        _require_all_held(outer, form)
    local_logits = not whole_logits and _logits_may_be_local(outer, plan, vocab_size, tensor.size)
    cut_layer = partial(_cut, plan, tensor, experts or NO_NEIGHBOURS, source.config, dtype, local_logits, adaptation)
    blueprint = Blueprint(
        outer=outer,
        cut=cut_layer,
        source=weights,
        device=device,
        dtype=dtype,
        finish=finish,
        capture=router,
        kept=in_fp32 if keep_fp32 else frozenset(),
        buffers=buffers,
        noise=noise,
    )
    blueprint = _computing_apart(blueprint, tensor if sequence_parallel else None, apart, whole_logits=whole_logits)
    return CausalModel(
        layers=decoder_layers(blueprint),
        source=source,
        outer=outer,
        vocab_size=vocab_size,
        local_logits=local_logits,
        form=form,
        unequal=unequal_shares(outer, cut_layer),
        router=router,
        in_fp32=in_fp32,
        shares_sequence=sequence_parallel,
        apart=apart,
        experts=experts,
        loss_tiles=blueprint.loss_tiles,
    )


def _vocab_size(model: PreTrainedModel) -> int:
    """Return the number of logits: the rows of the head, or of the embedding if the model has no head."""
    ends = (model.get_output_embeddings(), model.get_input_embeddings())
    return next(end.get_parameter("weight").shape[0] for end in ends if end is not None)


def _cast_buffers(model: PreTrainedModel, dtypes: Mapping[str, torch.dtype]) -> None:
    """Cast buffers outside the pipeline layers, such as rotary tables, to the dtypes given by name."""
    # Only now, as the analysis of the forward ran in fp32. Those on meta belong to pipeline layers.
    for path, module in model.named_modules():
        for key, buffer in list(module.named_buffers(recurse=False)):
            kind = dtypes.get(f"{path}.{key}" if path else key, buffer.dtype)
            if kind != buffer.dtype and not buffer.is_meta:
                setattr(module, key, buffer.to(kind))


def _examine(
    source: ModelSource, model: PreTrainedModel, device: torch.device, routers: FindRouters | None
) -> tuple[OuterForward, RouterCapture | None]:
    """Analyse the model's forward around its layers; also return a capture of router logits if `routers` finds any."""
    if source.prepare is not None:
        source.prepare(model)
    # Find the head first: `OuterForward` replaces it by a placeholder.
    head = next((name for name, module in model.named_modules() if module is model.get_output_embeddings()), None)
    # The analysis runs in fp32 and on meta, where flash-attention cannot run.
    with on_any_device(model):
        try:
            # In memory a user may have changed buffers that `_init_weights` would compute otherwise.
            outer = OuterForward(model, device, source.weights if isinstance(source.weights, Mapping) else {})
        except UserError as error:
            # `analyze` chains the error of a forward that fails; a model that cannot be cut has no cause.
            does_not_run = error.__cause__ is not None
            if does_not_run and (changed := with_key_per_head(source.config)) is not None:
                raise too_few_key_heads(source.config, changed) from error
            raise
        return outer, None if routers is None else routers(outer, head)


def _computing_apart(
    blueprint: Blueprint, tensor: TensorParallel | None, apart: TokenSplit, *, whole_logits: bool
) -> Blueprint:
    """Return the blueprint of a model that computes a subset of the tokens at a time.

    `tensor` is the tensor-parallel group if sequence parallelism splits the tokens over it, else None.
    """
    outer = blueprint.outer
    plan = apart.plan
    blueprint = replace(blueprint, sequence=_shared_sequence(outer, tensor, apart))
    if not apart.is_any:
        return blueprint
    # As of every plan that a trial has made.
    assert plan.sharded_layers is not None and plan.tiling is not None
    shares = apart.context is not None or apart.attention_tile > 0
    # A rank that computes all tokens needs whole masks.
    if not plan.whole:
        outer.mask_queries = apart.attention_tile
    return replace(
        blueprint,
        context=apart.context,
        plan=plan if shares or apart.block_tile else None,
        shard_layer=plan.sharded_layers(outer) if shares and not plan.whole else None,
        loss_tiles=plan.tiling.loss_tiles(outer, apart, whole_logits=whole_logits),
        tile_block=partial(plan.tiling.tile_block, tokens=apart.block_tile) if apart.block_tile else None,
    )


def _shared_sequence(outer: OuterForward, tensor: TensorParallel | None, apart: TokenSplit) -> SharedSequence | None:
    """Return how the tokens are shared between the layers: over context ranks, tensor-parallel ranks, or both."""
    if tensor is not None and outer.schema.replayed:
        raise UserError(
            f"tensor_parallel.sequence_parallel: {outer.described} passes on more than a hidden state from layer to "
            "layer: remove it"
        )
    group = None if tensor is None else tensor.group
    context = apart.context
    # The layer that runs on a shard also cuts queries into tiles: here its shard is the whole sequence.
    if context is None and apart.attention_tile:
        context = ContextParallel()
    # Then only the epilogue works on a shard.
    if apart.plan.whole:
        context = None
    return SharedSequence(group, context or ContextParallel()) if group is not None or context is not None else None


def _require_all_held(outer: OuterForward, form: CheckpointFormat) -> None:
    """Raise UserError for a saved tensor that belongs to no pipeline layer."""
    modules = {**outer.prologue, **dict(zip(outer.layer_names, outer.layers, strict=True)), **outer.epilogue}
    held = {f"{name}.{key}".lstrip(".") for name, module in modules.items() for key in module.state_dict()}
    leaves = (leaf for lazy in form.tensors.values() for leaf in lazy.leaves())
    if lost := next((leaf.name for leaf in leaves if isinstance(leaf, ParameterRef) and leaf.name not in held), None):
        raise UserError(
            f"{outer.described}: {lost} is saved with the model but belongs to no pipeline layer (it is a buffer "
            "of a module without parameters), so the model cannot be split into stages"
        )


def _cut(
    plan: Plan | None,
    tensor: TensorParallel,
    neighbours: Neighbours,
    config: PretrainedConfig,
    dtype: torch.dtype,
    local_logits: bool,
    adaptation: Adapters | None,
    layer: nn.Module,
) -> None:
    """Shard a layer by the plan. Run its experts one by one if grouped matrix products do not support them."""
    if plan is not None:
        text = config.get_text_config(decoder=True)
        if adaptation is None:
            cut(layer, "", plan, tensor, text, local_logits=local_logits, neighbours=neighbours)
        else:
            adaptation.cut(layer, plan, tensor, text, local_logits=local_logits, neighbours=neighbours)
    run_where_aligned(layer, dtype)


def _weight_source(
    source: ModelSource, model: PreTrainedModel, seed: int, part: Zero3Partition | None
) -> tuple[ModelWeights, CheckpointFormat]:
    """Return the source of the weights, and the form in which they are written at the end.

    Parameters that the config ties but the checkpoint stores with different values are untied in the skeleton.
    """
    initialiser = Initialiser(model=model, seed=seed, part=part)
    if source.weights is None:
        return initialiser, default_form(model)
    if not isinstance(source.weights, Path):
        return MemoryReader(tensors=source.weights), default_form(model)
    try:
        checkpoint = open_checkpoint(source.weights, model)
    except Unconverted as reason:
        return read_by_transformers(source.weights, reason), default_form(model)
    untie(model, checkpoint.untied)
    reader = CheckpointReader(tensors=checkpoint.tensors, initialiser=initialiser, part=part)
    return reader, checkpoint.form


def _plan(
    source: ModelSource, model: PreTrainedModel, tensor: TensorParallel, experts: Neighbours | None
) -> Plan | None:
    """Return the model's plan; None if nothing is sharded. Raises UserError if the family has no plan."""
    if tensor.size == 1 and (experts is None or experts.ranks.size == 1):
        return None
    # A model in memory may hold modules put in by hand, about which the plan of its family says nothing.
    built = model if source.model is None else build_skeleton(source.config)
    for name, module in foreign_modules(model, built):
        raise UserError(
            f"{name} is a {type(module).__name__} that a {source.config.model_type} model does not have there, so it "
            "cannot be split: set tensor_parallel.autotp_size to 1"
        )
    if experts is None:
        return plan_for(model, PLANS)
    return expert_parallel_plan(model, PLANS, tp_size=tensor.size)


def _logits_may_be_local(outer: OuterForward, plan: Plan | None, vocab_size: int, size: int) -> bool:
    """Return whether the operations after the head (scaling, soft-capping) can run on a shard of the vocabulary.

    Only then may a rank keep its shard of the logits. A trial on random numbers decides: the result for a part must
    equal that part of the result for the whole vocabulary.
    """
    head: nn.Module | None = None if plan is None else outer.epilogue.get(plan.head or "")
    if plan is None or plan.head is None or not plan.splits_head or head is None:
        return False
    if head.get_parameter("weight").shape[0] != vocab_size:
        return False
    part = vocab_size // size
    # The same numbers on every rank, as all must decide alike.
    generator = torch.Generator().manual_seed(0)
    output: Tensor = torch.randn(1, 2, vocab_size, generator=generator).to(outer.device)
    whole = outer.finish(plan.head, output).logits
    local = outer.finish(plan.head, output[..., :part]).logits
    return whole.shape == output.shape and torch.equal(whole[..., :part], local)
