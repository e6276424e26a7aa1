"""Turn a HuggingFace decoder or a user's list of layers into the pipeline layers that the engine takes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TypeAlias

import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from harness.arguments import TrainingArguments
from harness.batches.collate import MicroBatch
from harness.config.model.facts import require_countable
from harness.config.values.json_object import JsonObject
from harness.config.values.secrets import without_secret_texts
from harness.console import warn
from harness.deepspeed.pipeline import Layer
from harness.errors import UserError
from harness.hf.adapters import Adapters
from harness.hf.causal import CausalModel, assemble
from harness.hf.context.plan import UNSPLIT, TokenSplit
from harness.hf.decoder import DecoderLayer
from harness.hf.layers.attention import attention_of, require_available, require_sdpa_backend, with_attention
from harness.hf.skeleton import ModelSource, read_source
from harness.parallel.comm import TensorParallel
from harness.parallel.context.sequence_shards import ALONE, ContextParallel
from harness.parallel.pipeline.partition import LayerCost
from harness.parallel.pipeline.staged_module import first_names
from harness.parallel.token_exchange import Neighbours
from harness.parallel.values import Value
from harness.parallel.zero import Zero3Partition
from harness.topology.groups import Groups
from harness.training.engine.build import layer_finisher, zero3_partition
from harness.training.engine.losses import CausalLoss, LogitsLoss, Loss, LossFunction, MeanLoss, RouterLoss
from harness.training.engine.spec import EngineSpec, LayerTraits, can_keep_fp32, keeps_wanted, obstacle
from harness.training.parts import Parts, PlanTokens, needed
from harness.wording import counted, one_of

UNSHAPING = frozenset(
    [
        *("_name_or_path", "architectures", "transformers_version", "dtype", "torch_dtype", "chunk_size_feed_forward"),
        *("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation"),
        *("use_cache", "output_attentions", "output_hidden_states", "return_dict"),
    ]
)
"""Config entries that do not change the computation in training."""

Model: TypeAlias = str | ModelSource | PretrainedConfig | PreTrainedModel | nn.Sequential | Sequence[Layer]


@dataclass(frozen=True, kw_only=True)
class TrainableModel:
    """A model as pipeline layers.

    Attributes:
        layers: the layers, not yet built; each stage builds its own.
        names: class name of each layer.
        parameters: number of parameters of each layer.
        trained: number of trained parameters of each layer.
        costs: relative compute cost of each layer.
        loss: the loss of a micro-batch.
        causal: the decoder; None for a list of layers.
        example: inputs of a micro-batch for a user's layers; None without training data.
        kernels: a line for the user on the kernels that were chosen; it may be empty.
    """

    layers: Sequence[Layer]
    names: list[str]
    parameters: list[int]
    trained: list[int]
    costs: list[float]
    loss: Loss
    causal: CausalModel | None = None
    example: Value | None = None
    kernels: str = ""

    def size(self, *, trained: bool = False) -> int:
        """Return the number of (trained) parameters of the model; a decoder's tied parameters count once."""
        if self.causal is not None:
            return self.causal.size(trained=trained)
        return sum(self.trained if trained else self.parameters)

    @property
    def reads_tokens(self) -> bool:
        """Whether the inputs are token ids, so that tokens per second and perplexity make sense."""
        if self.causal is not None:
            return True
        ids = self.example
        # A collator may return inputs in lists.
        while isinstance(ids, tuple | list) and ids:
            ids = ids[0]
        return isinstance(ids, Tensor) and ids.dim() > 1 and not ids.is_floating_point()

    @property
    def speed_unit(self) -> str:
        return "tokens" if self.reads_tokens else "samples"

    @property
    def summary(self) -> str:
        """Kinds and sizes of the layers as text, to recognise a checkpoint of another model."""
        kinds = ", ".join(dict.fromkeys(self.names))
        return f"{len(self.names)} layers ({kinds}) and {sum(self.parameters):,} parameters"

    @property
    def traits(self) -> LayerTraits:
        """The layers' traits; a user's layers are assumed to use dropout."""
        if self.causal is None:
            return LayerTraits(example=self.example)
        # If layers pass states, or the sequence is split, each tensor-parallel rank passes on its own part.
        local = bool(self.causal.outer.schema.states) or self.causal.shares_sequence
        return LayerTraits(local_states=local, uses_rng=self.causal.outer.uses_rng, tiles=self.causal.loss_tiles)

    @cached_property
    def _first_names(self) -> dict[str, str]:
        return first_names(self.layers)

    def stored_name(self, name: str) -> str:
        """Return a parameter's name in a checkpoint, the same in every layout; a tied one takes its first name."""
        return self.saved_name(self._first_names.get(name, name))

    @property
    def shaping_config(self) -> JsonObject:
        """Config entries of a decoder that change the computation, to recognise another model of equal size."""
        if self.causal is None:
            return {}
        return shaping(self.causal.source.config)

    def saved_name(self, name: str) -> str:
        """Return a parameter's name in an exported model: for a decoder, without the index of its pipeline layer."""
        return name.partition(".")[2] if self.causal is not None else name


def shaping(config: PretrainedConfig) -> JsonObject:
    """Return the config entries that change the computation in training."""
    # The result is written into checkpoints.
    content = without_secret_texts(config.to_dict())
    return {name: value for name, value in content.items() if name not in UNSHAPING}


def model_source(model: Model) -> ModelSource | None:
    """Return a decoder's config and weights; None for a list of layers. Raises UserError for anything else."""
    if isinstance(model, str):
        return read_source(model)
    if isinstance(model, PretrainedConfig):
        require_countable(model.to_dict(), "the model's config")
        return ModelSource(name=model.model_type, config=model, weights=None)
    if isinstance(model, PreTrainedModel):
        return ModelSource.of_model(model)
    if isinstance(model, ModelSource):
        return model
    # DistributedDataParallel keeps the model it wraps as `module`, torch.compile as `_orig_mod`.
    inner = next((name for name in ("module", "_orig_mod") if isinstance(getattr(model, name, None), nn.Module)), None)
    if inner is not None and not isinstance(model, Sequence | nn.Sequential):
        raise UserError(f"the model is wrapped in a {type(model).__name__}: give the model inside, its .{inner}")
    if not isinstance(model, Sequence | nn.Sequential):
        raise UserError(
            f"a {type(model).__name__} is not a model: give a HuggingFace decoder, its directory or config, or a list "
            "of layers with loss_fn"
        )
    return None


def trainable_decoder(
    source: ModelSource,
    spec: EngineSpec,
    groups: Groups,
    sequence_length: int,
    adaptation: Adapters | None = None,
    own_loss: LogitsLoss | None = None,
    *,
    parts: Parts,
) -> TrainableModel:
    """Prepare the decoder of `source`. Raises UserError if it cannot be cut for the layout.

    Args:
        sequence_length: tokens per sample, for the costs of layers.
        own_loss: a user's loss of the whole logits, replacing the cross entropy.
        parts: those that fuse operations, compute in fp8, find routers, and determine how a sequence can be split.
    """
    args = spec.args
    config = with_attention(source.config, args.attn_implementation)
    require_available(config, groups.device, spec.dtype)
    require_sdpa_backend(spec.args.sdpa_backend, config, groups.device)
    source = replace(source, config=_with_router_loss(config, args))
    # With `part`, each rank loads only its ZeRO-3 partition. A model in memory is broadcast from rank 0 instead.
    part = zero3_partition(spec, groups) if source.weights is None or isinstance(source.weights, Path) else None
    finish, kernels = _finisher(source, spec, groups, part, parts)
    routers = None
    if getattr(source.config, "output_router_logits", False):
        routers = needed(parts.routers, "--output_router_logits", "harness.extras")
    causal = assemble(
        source,
        tensor=TensorParallel.of(groups.tp_group),
        device=groups.device,
        dtype=spec.dtype,
        seed=spec.args.seed,
        finish=finish,
        experts=_neighbours(spec, groups, parts),
        adaptation=adaptation,
        routers=routers,
        part=part,
        whole_logits=own_loss is not None,
        keep_fp32=can_keep_fp32(spec.resolved),
        noise_alpha=args.neftune_noise_alpha,
        sequence_parallel=spec.resolved.sequence_parallel,
        apart=_token_split(source, spec, groups, parts.plan_tokens),
    )
    _require_kept(causal.in_fp32, spec, groups.rank)
    _require_gradients(causal, spec)
    tiling = causal.apart.plan.tiling
    # `warn` prints on every rank that calls it.
    if groups.rank == 0 and tiling is not None:
        for reason in tiling.idle_tiles(causal.apart, causal.outer.layers, attention_of(source.config)):
            warn(f"model type {source.config.model_type!r}: {reason}")
    if args.output_router_logits and causal.router is None:
        raise UserError(f"--output_router_logits: model type {source.config.model_type!r} has no router loss")
    checkpointed = spec.resolved.activation_checkpoint_interval > 0
    return TrainableModel(
        layers=causal.layers,
        names=causal.layer_names,
        parameters=causal.parameter_counts(),
        trained=causal.parameter_counts(trained=True),
        costs=[cost.flops_per_token() for cost in causal.costs(sequence_length, checkpointed)],
        loss=_decoder_loss(causal, spec, groups, own_loss),
        causal=causal,
        kernels=kernels,
    )


def _neighbours(spec: EngineSpec, groups: Groups, parts: Parts) -> Neighbours | None:
    """Return the ranks over which whole experts are distributed; None if experts are sharded like other layers."""
    if spec.resolved.ep_size == 1:
        return None
    ranks = TensorParallel.of(groups.ep_group)
    # Tensor-parallel ranks hold all experts, and see the same tokens: nothing is exchanged.
    if ranks.size == 1:
        return Neighbours()
    exchange = needed(parts.token_exchange, "expert_parallel over data-parallel ranks", "harness.extras")
    return Neighbours(ranks=ranks, pieces=spec.resolved.token_pieces, exchange=exchange)


def _token_split(source: ModelSource, spec: EngineSpec, groups: Groups, plan_tokens: PlanTokens | None) -> TokenSplit:
    """Return how the run splits the tokens of a sequence over context ranks and into tiles."""
    resolved, group = spec.resolved, groups.cp_group
    if group is None and not (resolved.loss_tile or resolved.feed_forward_tile or resolved.attention_tile):
        return UNSPLIT
    return TokenSplit(
        plan=needed(plan_tokens, "a split sequence", "harness.verify")(source.config),
        context=None if group is None else ContextParallel.of(group),
        loss_tile=resolved.loss_tile,
        block_tile=resolved.feed_forward_tile,
        attention_tile=resolved.attention_tile,
    )


def _finisher(
    source: ModelSource, spec: EngineSpec, groups: Groups, part: Zero3Partition | None, parts: Parts
) -> tuple[Callable[[nn.Module], None], str]:
    """Return a function that has a loaded layer compute as the arguments ask and, under ZeRO-3, partitions it.

    Also returns a line for the user on the kernels that were chosen; it may be empty.
    """
    args, steps, line = spec.args, [layer_finisher(spec, groups, part)], ""
    # In the layers that it compiles, torch.compile fuses more than the harness.
    compiles = spec.resolved.compile_backend is not None
    own = args.fused_kernels and not (compiles and groups.device.type == "cpu")
    liger = args.use_liger_kernel if source.has_values else False
    fusing = needed(parts.fusing, "--use_liger_kernel", "harness.extras") if liger else parts.fusing
    if fusing is not None and (own or liger):
        fuse, line = fusing(source, groups.device, own=own, liger=liger)
        steps.insert(0, partial(_outside_compiled, fuse) if compiles and liger is not True else fuse)
    if args.fp8 != "no":
        steps.insert(0, needed(parts.fp8, "--fp8", "harness.extras")(spec, groups.device, source.config))

    def finish(layer: nn.Module) -> None:
        # ZeRO-3's partitioning comes last: afterwards this rank has no whole parameters to change.
        for step in steps:
            step(layer)

    return finish, line


def _outside_compiled(fuse: Callable[[nn.Module], None], layer: nn.Module) -> None:
    """Fuse a layer that torch.compile leaves alone, such as the final norm and the head."""
    if not isinstance(layer, DecoderLayer):
        fuse(layer)


def _require_gradients(causal: CausalModel, spec: EngineSpec) -> None:
    """Raise UserError if nothing is trained, or trained parameters would get no gradient."""
    trained = causal.parameter_counts(trained=True)
    if not any(trained):
        raise UserError("nothing to train: every parameter of the model has requires_grad=False")
    if spec.resolved.config.get("pipeline", {}).get("use_reentrant") and not trained[0]:
        raise UserError(
            "pipeline.use_reentrant: true: trained parameters of the first layer would get no gradient, because its "
            "input does not require one; set it to false"
        )


def _with_router_loss(config: PretrainedConfig, args: TrainingArguments) -> PretrainedConfig:
    """Apply the arguments' router-loss settings. Raises UserError for a coefficient of a disabled router loss."""
    # Copies, because the config may be the user's own object.
    if args.output_router_logits is not None:
        config = copy.deepcopy(config)
        config.output_router_logits = args.output_router_logits
    if args.router_aux_loss_coef is not None:
        if not getattr(config, "output_router_logits", False):
            raise UserError("--router_aux_loss_coef has no effect without --output_router_logits")
        config = copy.deepcopy(config)
        config.router_aux_loss_coef = args.router_aux_loss_coef
    return config


def _require_kept(names: Set[str], spec: EngineSpec, rank: int) -> None:
    """Raise UserError if a bf16 run cannot keep the parameters in float32 that transformers keeps so.

    Only warns in fp16, or if the config says to keep none.
    """
    resolved = spec.resolved
    if not names or can_keep_fp32(resolved):
        return
    number, example = counted(len(names), "parameter"), f"({min(names)}, ...)"
    if resolved.precision == "bf16" and keeps_wanted(resolved):
        raise UserError(
            f"DeepSpeed cannot keep {number} {example} in float32, as transformers does, together with "
            f"{obstacle(resolved)}: remove that, or set data_types.keep_in_fp32_modules to [] to compute them in bf16"
        )
    if rank == 0:
        what = f"{number} that transformers keeps in float32 {example}"
        warn(f"{what} will be computed in {resolved.precision}")


def _decoder_loss(causal: CausalModel, spec: EngineSpec, groups: Groups, own_loss: LogitsLoss | None) -> Loss:
    ranks = causal.apart.context or ALONE
    loss: CausalLoss | LogitsLoss
    if own_loss is not None:
        loss = replace(own_loss, context=ranks)
    else:
        group = groups.tp_group if causal.local_logits else None
        loss = CausalLoss(vocab_size=causal.vocab_size, group=group, context=ranks)
    if causal.router is None:
        return loss
    factor = spec.args.router_aux_loss_coef
    return RouterLoss(causal=loss, coefficient=causal.router.coefficient if factor is None else factor)


def trainable_layers(
    layers: Sequence[Layer], loss_fn: LossFunction | None, sample: MicroBatch | None
) -> TrainableModel:
    """Prepare a user's layers; LayerSpecs are built on the meta device to count parameters.

    Raises UserError without a loss, or for objects that are not layers.
    """
    if loss_fn is None:
        raise UserError("a list of layers needs loss_fn(outputs, labels), the mean loss over the samples it is given")
    # The list itself stands for "none is wrong": None would not do, as it may be a wrong layer.
    wrong = next((layer for layer in layers if not callable(layer) and not isinstance(layer, LayerSpec)), layers)
    if not layers or wrong is not layers:
        what = "is empty" if not layers else f"contains a {type(wrong).__name__}"
        raise UserError(f"a model given as layers is a list of modules, LayerSpecs and functions, but this one {what}")
    counted = [_on_meta(layer) for layer in layers]
    return TrainableModel(
        layers=list(layers),
        names=[module_name(layer) for layer in counted],
        parameters=[_parameters(module, 0) for module in counted],
        trained=[_parameters(module, 0, trained=True) for module in counted],
        costs=[
            LayerCost(matmul_parameters=_parameters(m, 2), vector_parameters=_parameters(m, 1, 1)).flops_per_token()
            for m in counted
        ],
        loss=MeanLoss(loss_fn),
        example=None if sample is None else sample[0],
    )


def require_compilable(trainable: TrainableModel, backend: str, options: JsonObject | None = None) -> None:
    """Raise UserError for an unknown backend or options of torch.compile, and for models it cannot compile."""
    # With those tagged debug, such as eager and aot_eager, which torch omits by default: people find faults with them.
    known = torch.compiler.list_backends(exclude_tags=())
    if backend not in known:
        raise UserError(f"compile.backend: torch has no backend {backend!r}; it has {one_of(known)}")
    try:
        # torch checks the options here, and compiles nothing yet.
        torch.compile(lambda: None, backend=backend, **options or {})
    except (TypeError, RuntimeError) as error:
        # torch appends some hundred names.
        said = str(error).partition(", known options")[0]
        raise UserError(f"compile.mode, compile.kwargs: torch.compile refuses them: {said}") from None
    if trainable.causal is None:
        raise UserError(
            "compile.enabled compiles the decoder layers of a HuggingFace model; for a list of layers remove it, and "
            "compile what you like in the layers themselves"
        )
    # Inductor replaces torch's random functions by a kernel of its own (its fallback_random is off by default): other
    # numbers than those that KeyedRng keeps equal in all layouts.
    if trainable.traits.uses_rng:
        raise UserError(
            "compile.enabled: the model uses dropout or other random numbers, which torch.compile would change; "
            "set its dropout rates and --neftune_noise_alpha to 0, or remove compile.enabled"
        )


def module_name(layer: object) -> str:
    """Return the name of a layer's class or of a function."""
    return type(layer).__name__ if isinstance(layer, nn.Module) else getattr(layer, "__name__", type(layer).__name__)


def _on_meta(layer: Layer) -> object:
    if isinstance(layer, LayerSpec):
        with torch.device("meta"):
            return layer.build()
    return layer


def _parameters(module: object, least: int, most: int = 99, *, trained: bool = False) -> int:
    if not isinstance(module, nn.Module):
        return 0
    counted = [p for p in module.parameters() if p.requires_grad or not trained]
    return sum(p.numel() for p in counted if least <= p.dim() <= most)
