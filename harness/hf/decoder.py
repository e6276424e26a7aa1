"""A HuggingFace causal decoder as a list of pipeline layers, with HuggingFace's own modules inside.

The list is: one `Prologue` (token ids -> hidden state), one `DecoderLayer` for each layer of the model (hidden
state -> hidden state), one `Epilogue` (hidden state -> logits). Which module belongs where, and what travels beside the
hidden state (`forward/payload.py`), is found by running the model's own forward (`forward/outer_forward.py`). Each
pipeline layer holds its modules under their names in the model. So the pipeline name of a parameter is the index of its
layer followed by its HuggingFace name: `3.model.layers.2.self_attn.q_proj.weight`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from harness.errors import UserError
from harness.hf.context.plan import MakeShardedLayer, TokenSplitSupport
from harness.hf.context.sequence import SharedSequence, own_tokens
from harness.hf.forward.chains import Chain
from harness.hf.forward.outer_forward import HiddenShape, OuterForward
from harness.hf.forward.payload import CarriedTensor, ForwardOutput, PayloadSpec, StagePayload, Tokens
from harness.hf.forward.routers import RouterCapture
from harness.hf.layers.call import LayerInputs
from harness.hf.weights.layer_weights import WeightSource, materialise
from harness.parallel.context.masks import MaskRows
from harness.parallel.context.sequence_shards import ContextParallel, TokenRows
from harness.parallel.dropout import expect_shapes, has_dropout
from harness.parallel.pipeline.staged_module import SharedLayerSpec
from harness.parallel.plans.plan import wildcard
from harness.parallel.plans.sequence import share_sequence
from harness.parallel.tensor.sequence import widths_of
from harness.parallel.tensor.shard import shard_of
from harness.parallel.tiles import LossTiles
from harness.parallel.values import Value


@dataclass(frozen=True, kw_only=True)
class EmbeddingNoise:
    """A forward hook of the token embedding that adds NEFTune's noise.

    It draws within the prologue, with a keyed RNG, so the noise is the same in every layout.

    Attributes:
        module: name of the embedding in the model.
        alpha: the noise is uniform up to alpha / sqrt(tokens of a sample x width).
    """

    module: str
    alpha: float

    def __call__(self, module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
        """Return the embedding's output [batch, sequence, width], in training with noise."""
        if not module.training:
            return output
        most = self.alpha / (output.shape[1] * output.shape[2]) ** 0.5
        # A method that fills a tensor: the keyed RNG does not intercept `torch.rand`.
        return output + output.detach().new_zeros(output.shape).uniform_(-most, most)


def embedding_noise(model: PreTrainedModel, alpha: float | None) -> EmbeddingNoise | None:
    """Return the noise for a model; None without `alpha`. Raises UserError if its embedding cannot be found."""
    if not alpha:
        return None
    try:
        embedding = model.get_input_embeddings()
    except NotImplementedError:
        embedding = None
    name = next((name for name, module in model.named_modules() if module is embedding), None)
    if name is None:
        raise UserError(f"--neftune_noise_alpha: {type(model).__name__} does not say which module embeds tokens")
    return EmbeddingNoise(module=name, alpha=alpha)


@dataclass(frozen=True, kw_only=True)
class Blueprint:
    """The inputs for building a pipeline layer of a model.

    Attributes:
        outer: the model's forward around its layers.
        cut: shards a layer's modules, on meta, for this tensor-parallel rank.
        source: fills the weights.
        device, dtype: device and dtype of the parameters.
        finish: called with each layer once it has its weights (ZeRO-3 partitions them there).
        capture: collects router logits from the layers; the epilogue then returns (logits, router loss).
        kept: names of the parameters that stay in float32 for any `dtype`.
        buffers: name -> dtype of floating buffers.
        noise: added to the token embeddings in training.
        sequence: how ranks share the hidden state between the layers; None if each rank has all of it.
        context: this rank among the context ranks, if there are any; its logits are those of its shard.
        plan: which modules can compute a subset of the tokens; None without context ranks and tiles in layers.
        shard_layer: has a layer run on a shard; None where no layer can.
        loss_tiles: lets the epilogue compute the loss in tiles of tokens.
        tile_block: has a feed-forward block or norm compute a tile of tokens at a time; None for all tokens at once.
    """

    outer: OuterForward
    cut: Callable[[nn.Module], None]
    source: WeightSource
    device: torch.device
    dtype: torch.dtype
    finish: Callable[[nn.Module], None]
    capture: RouterCapture | None = None
    kept: frozenset[str] = frozenset()
    buffers: Mapping[str, torch.dtype] = field(default_factory=dict)
    noise: EmbeddingNoise | None = None
    sequence: SharedSequence | None = None
    context: ContextParallel | None = None
    plan: TokenSplitSupport | None = None
    shard_layer: MakeShardedLayer | None = None
    loss_tiles: LossTiles | None = None
    tile_block: Callable[[nn.Module], None] | None = None

    @property
    def schema(self) -> PayloadSpec:
        """The tensors that layers pass on: the states that the model's forward needs, and router logits."""
        schema = self.outer.schema
        if self.capture is None:
            return schema
        depth = len(self.outer.layers)
        # Sorted, because a set's order may differ between ranks, and names are never sent.
        logits = [(self.capture.state_name(index), index) for index in sorted(self.capture.layers)]
        carried = (CarriedTensor(name=name, made=index, used=depth) for name, index in logits)
        return replace(schema, states=(*schema.states, *carried))


class ModelLayer(nn.Module):
    """A pipeline layer that holds modules of the model under their own names.

    Args:
        modules: name in the model -> module on meta.
        leaves: returns the names of the modules that ZeRO-3 must gather as a unit; called only under ZeRO-3.
    """

    recompute = False  # whether activation checkpointing may apply (`staged_module.is_recomputed`)

    def __init__(
        self, blueprint: Blueprint, modules: Mapping[str, nn.Module], leaves: Callable[[], Iterable[str]] = tuple
    ) -> None:
        super().__init__()
        # Copy, so that the modules in `outer` stay whole and on meta and a layer can be built again.
        for name, module in copy.deepcopy(dict(modules)).items():
            _nest(self, name, module)
        whole = copy.deepcopy(self)
        # Shard while on meta: a whole layer of a large model may not fit in memory.
        blueprint.cut(self)
        materialise(self, blueprint.device, blueprint.dtype, blueprint.kept, blueprint.buffers)
        blueprint.source.fill(self, whole)
        # Set only after the deep copies above, which would otherwise copy the whole model.
        self.leaves = leaves
        blueprint.finish(self)
        self.outer = blueprint.outer
        self.schema = blueprint.schema
        self.sequence = blueprint.sequence

    def __call__(self, value: Value) -> Value:
        # torch's backward hooks ignore tensors inside a tuple, so ZeRO-3 would reduce a leaf module's gradients before
        # they exist. Hence each tensor is an argument of its own.
        output: Value = super().__call__(*value) if isinstance(value, tuple) else super().__call__(value)
        return output

    def called(self, chain: Chain, value: Tensor) -> Tensor:
        """Call the modules of a chain one after the other, starting with `value`; return the last output."""
        for name in chain:
            value = self.get_submodule(name)(value)
        return value

    def compiled_parts(self) -> Sequence[nn.Module]:
        """Return the modules that torch.compile compiles separately."""
        return ()


class Prologue(ModelLayer):
    """Token ids [batch, sequence], or a tuple of token ids and position ids -> hidden state [batch, sequence, width].

    Like every layer's, the output includes the other tensors that later layers need (`forward/payload.py`).

    Attributes:
        chain: names of the modules, if they are just called one after the other; if None, the model's forward runs up
            to its first layer.
    """

    def __init__(self, blueprint: Blueprint) -> None:
        super().__init__(blueprint, blueprint.outer.prologue)
        self.names = list(blueprint.outer.prologue)
        self.chain = blueprint.outer.chains.prologue
        self.passes_tokens = not self.schema.bare
        # A prologue that draws random numbers computes all tokens, so that they need no cut.
        self.takes_shard = blueprint.plan is not None and blueprint.plan.prologue and not self.outer.uses_rng
        if blueprint.noise is not None:
            self.get_submodule(blueprint.noise.module).register_forward_hook(blueprint.noise)

    def forward(self, *inputs: Tensor) -> Value:
        """Return the first layer's input for ids, or ids and position ids, each [batch, sequence]."""
        # Without a payload, as most models need none and packing it takes time on the host.
        if self.chain is not None and self.sequence is None:
            hidden = self.called(self.chain, inputs[0])
            # Copies, for the same reason as below.
            return (hidden, *map(torch.clone, inputs)) if self.passes_tokens or len(inputs) > 1 else hidden
        tokens = Tokens.of(inputs)
        own = tokens
        if self.sequence is not None:
            self.sequence.require_enough(tokens)
            own = own_tokens(tokens, self.outer, self.sequence.context) if self.takes_shard else tokens
        if self.chain is not None:
            payload = StagePayload(hidden=self.called(self.chain, own.ids))
        else:
            payload = self.outer.enter(own, {name: self.get_submodule(name) for name in self.names}, self.training)
        if self.passes_tokens or tokens.positions is not None:
            # Copy: the cache finds layer inputs by the memory of the ids, which the caller may reuse for other ids.
            copies = Tokens(*(tensor.clone() for tensor in tokens.tensors()))
            payload = replace(payload, tokens=copies)
        if self.sequence is not None:
            payload = self.sequence.split(payload, tokens)
        return self.schema.close(0, payload)


class DecoderLayer(ModelLayer):
    """One decoder layer: hidden state -> hidden state, both [batch, sequence, width]."""

    recompute = True

    def __init__(self, blueprint: Blueprint, index: int) -> None:
        outer = blueprint.outer
        name = outer.layer_names[index]
        tiled = _tiled_blocks(blueprint, index)
        super().__init__(blueprint, {name: outer.layers[index]}, partial(_leaves, outer, index, tiled))
        self.index = index
        self.name = name
        self.is_plain = self.schema.bare and not self.schema.replayed and self.sequence is None
        captures = blueprint.capture is not None and index in blueprint.capture.layers
        self.capture = blueprint.capture if captures else None
        # A rank draws the whole layer's dropout and keeps its shard: these widths tell where an unequal one starts.
        shards = [shard for parameter in self.parameters() if (shard := shard_of(parameter)) is not None]
        self.splits = sorted({shard.widths for shard in shards if shard.unequal and not shard.copied})
        layer = self.get_submodule(name)
        gathered = None if blueprint.plan is None else blueprint.plan.blocks_of(outer.layers[index])
        self.context_layer = None
        if blueprint.shard_layer is not None and self.sequence is not None and gathered is not None:
            self.context_layer = blueprint.shard_layer(layer, gathered, index, self.sequence.context)
        # With sequence parallelism alone every layer can. Else one that cannot runs on all tokens on every rank.
        self.takes_shard = self.sequence is not None and (
            blueprint.shard_layer is None or self.context_layer is not None
        )
        self.share = None
        if self.takes_shard and self.sequence is not None and self.sequence.group is not None:
            # For the analysis of gradients (`parallel/tensor/gradient_analysis.py`).
            self.works_on_share = True
            # A reduce-scatter inside these blocks would split the tokens of one tile, or of all context ranks.
            apart = [*(self.context_layer.gathered if self.context_layer else ()), *map(layer.get_submodule, tiled)]
            self.share = share_sequence(layer, self.sequence.group, apart)
        # Last of the hooks: they need the inputs that those of `share_sequence` have joined.
        if self.context_layer is not None:
            self.context_layer.gather_blocks()
        # Tiles replace the forward itself, so the hooks above run once per block, not once per tile.
        if blueprint.tile_block is not None:
            for block in tiled:
                blueprint.tile_block(layer.get_submodule(block))

    def compiled_parts(self) -> Sequence[nn.Module]:
        return [self.get_submodule(self.name)]

    def forward(self, *value: Tensor) -> Value:
        """Return the next layer's input. The hidden state [batch, sequence, width] comes first in both."""
        # Only the hidden state is passed on, without even position ids: as in `Prologue`, without a payload.
        if self.is_plain and len(value) == 1:
            (hidden,) = value
            shape = HiddenShape(hidden.shape[0], hidden.shape[1], hidden.dtype)
            inputs = self.outer.inputs.of_shape[shape][self.index]
            if self.outer.uses_rng:
                self._expect(inputs, hidden)
            layer = self.get_submodule(self.name)
            # Nearly every model passes the hidden state by position.
            output = layer(hidden, *inputs.args, **inputs.kwargs) if inputs.key is None else inputs.apply(layer, hidden)
            state: Tensor = output[0] if isinstance(output, (tuple, list)) else output
            return state
        payload = self.schema.open(self.index, value)
        if self.sequence is None:
            hidden, inputs = self.outer.arguments(self.index, payload)
            self._expect(inputs, hidden)
            passed = self._run(payload, hidden, inputs)
        else:
            whole, inputs = self.outer.arguments(self.index, self.sequence.as_whole(payload))
            on = self._on_share if self.takes_shard else self._on_all_tokens
            passed = on(self.sequence, payload, inputs, whole)
        return self.schema.close(self.index + 1, passed)

    def _on_share(
        self, sequence: SharedSequence, payload: StagePayload, inputs: LayerInputs, whole: Tensor
    ) -> StagePayload:
        """Run the layer on this rank's tokens; `inputs` and the shape of `whole` are for all tokens."""
        self._expect(inputs, whole, sequence)
        with ExitStack() as forward:
            if self.share is not None:
                forward.enter_context(self.share.forward_of(payload.hidden, sequence.shard_length(payload)))
            if self.context_layer is not None:
                inputs = forward.enter_context(self.context_layer.forward_of(inputs, whole.shape[0], whole.shape[1]))
            return self._run(payload, payload.hidden, inputs)

    def _on_all_tokens(
        self, sequence: SharedSequence, payload: StagePayload, inputs: LayerInputs, whole: Tensor
    ) -> StagePayload:
        """Run the layer on all tokens, but pass on only this rank's tokens."""
        joined = sequence.join_all(payload)
        # A mask made for a few queries at a time (`MaskRows`) must be whole here.
        args, kwargs = tree_map_only(MaskRows, MaskRows.whole, (inputs.args, dict(inputs.kwargs)))
        inputs = LayerInputs(args, kwargs, inputs.key)
        self._expect(inputs, joined.hidden)
        passed = self._run(joined, joined.hidden, inputs)
        rows = sequence.rows(whole)
        own = replace(passed, hidden=sequence.share(rows.own(passed.hidden)))
        if self.capture is None:
            return own
        name = self.capture.state_name(self.index)
        return own.with_state(name, torch.stack([rows.own(logits) for logits in passed.states[name]]))

    def _expect(self, inputs: LayerInputs, whole: Tensor, sequence: SharedSequence | None = None) -> None:
        """Tell the keyed RNG the shapes that the layer would draw if it were not cut.

        Args:
            whole: has the shape of the hidden state of the whole sequence.
            sequence: how ranks share it, where they do.
        """
        splits = list(self.splits)
        tokens = None
        if sequence is not None:
            widths = sequence.context.widths(whole.shape[1])
            if self.share is not None:
                splits.append(widths_of(widths[sequence.context.rank], self.share.group))
            if self.context_layer is not None:
                tokens = sequence.context.rank, widths
        expect_shapes(lambda: self.outer.facts.drawn_shapes(self.index, inputs, whole), splits, tokens)

    def _run(self, payload: StagePayload, hidden: Tensor, inputs: LayerInputs) -> StagePayload:
        """Run the layer; return the payload for the next layer."""
        layer = self.get_submodule(self.name)
        if self.capture is None:
            output = inputs.apply(layer, hidden)
        else:
            output, taken = self.capture.run(layer, lambda: inputs.apply(layer, hidden))
            payload = payload.with_state(self.capture.state_name(self.index), taken)
        return self.outer.after(self.index, inputs, output, payload)


class Epilogue(ModelLayer):
    """Hidden state [batch, sequence, width] -> logits [batch, sequence, vocabulary or vocabulary shard].

    With a router loss it returns (logits, router loss).

    Attributes:
        chain: names of the modules, if they are just called one after the other; if None, the model's forward runs from
            its last layer on.
    """

    def __init__(self, blueprint: Blueprint) -> None:
        # Every tile calls the modules, so ZeRO-3 gathers the epilogue as one leaf.
        super().__init__(blueprint, blueprint.outer.epilogue, lambda: [""] if blueprint.loss_tiles is not None else [])
        self.tiles = blueprint.loss_tiles
        self.names = list(blueprint.outer.epilogue)
        # An epilogue with dropout computes all tokens, so that its random numbers need no cut.
        self.context = blueprint.context
        stays = blueprint.plan is not None and blueprint.plan.epilogue
        self.takes_shard = stays and not any(map(has_dropout, blueprint.outer.epilogue.values()))
        self.capture = blueprint.capture
        self.chain = blueprint.outer.chains.epilogue
        self.is_plain = self.sequence is None and self.context is None and self.tiles is None and self.capture is None

    def forward(self, *value: Tensor) -> Value:
        """Return the logits [batch, sequence, vocabulary or its shard], or with tiles the summed loss (a scalar).

        `value` begins with the hidden state [batch, sequence, width]. With a router loss (a scalar), returns both.
        """
        if self.chain is not None and self.is_plain:
            return self.called(self.chain, value[0])
        payload = self.schema.open(len(self.outer.layers), value)
        rows = None
        if self.sequence is not None:
            rows = self.sequence.rows(self.sequence.as_whole(payload).hidden)
            payload = self._joined(self.sequence, payload)
        elif self.context is not None and self.takes_shard:
            # Every rank has computed all tokens in all layers, so each takes its own here.
            # Without ids, which are those of all tokens, as the epilogue was tried on a shard.
            payload = replace(payload, hidden=self.context.own(payload.hidden), tokens=None)
        if self.tiles is not None and self.tiles.loss is not None:
            total = self.tiles.sum(
                payload.hidden, lambda hidden: self._logits(replace(payload, hidden=hidden, tokens=None))
            )
            # The model's own forward computes the router loss, and logits too: here for a single token.
            one = replace(payload, hidden=payload.hidden[:, :1])
            return total if self.capture is None else (total, self._router_loss(rows, one)[1])
        if self.capture is None:
            return self._own(self._logits(payload))
        logits, router_loss = self._router_loss(rows, payload)
        return self._own(logits), router_loss

    def _left(self, payload: StagePayload, **options: object) -> ForwardOutput:
        """Run the model's forward from its last layer on, with `options` as further arguments; return its output."""
        modules = {name: self.get_submodule(name) for name in self.names}
        return self.outer.leave(payload, modules, self.training, **options)

    def _logits(self, payload: StagePayload) -> Tensor:
        """Return the logits [batch, tokens, vocabulary or vocabulary shard] of the hidden state."""
        logits: Tensor = self._left(payload).logits if self.chain is None else self.called(self.chain, payload.hidden)
        return logits

    def _router_loss(self, rows: TokenRows | None, payload: StagePayload) -> tuple[Tensor, Tensor]:
        """Return the logits of the tokens in `payload` and the router loss of all tokens."""
        assert self.capture is not None
        taken = [payload.states[self.capture.state_name(index)] for index in sorted(self.capture.layers)]
        # The loss is not linear in the tokens: it multiplies means over all of them.
        if rows is not None:
            taken = [torch.stack([rows.join(logits) for logits in layer]) for layer in taken]
        return self.capture.finish(self.outer.model, taken, partial(self._left, payload))

    def _own(self, logits: Tensor) -> Tensor:
        """Return the logits of this rank's shard: cut from the whole sequence's, unless the layers ran on a shard."""
        return logits if self.context is None or self.takes_shard else self.context.own(logits)

    def _joined(self, sequence: SharedSequence, payload: StagePayload) -> StagePayload:
        """Return the payload for the epilogue: the hidden state and tokens of this rank's shard, or of all ranks."""
        if not self.takes_shard:
            return sequence.join_all(payload)
        tokens = None if payload.tokens is None else own_tokens(payload.tokens, self.outer, sequence.context)
        return replace(sequence.join(payload), tokens=tokens)


def decoder_layers(blueprint: Blueprint) -> list[LayerSpec]:
    """Return the pipeline layers: prologue, decoder layers, epilogue. Raises UserError if a tie cannot be kept."""
    outer = blueprint.outer
    middle = [(DecoderLayer, blueprint, index) for index in range(len(outer.layers))]
    kinds: list[tuple[object, ...]] = [(Prologue, blueprint), *middle, (Epilogue, blueprint)]
    ties = {index: tie for tie in find_ties(outer) for index in tie.names}
    return [
        SharedLayerSpec(ties[i].key, *kind, tied_weight_attr=ties[i].names[i]) if i in ties else LayerSpec(*kind)
        for i, kind in enumerate(kinds)
    ]


def unequal_shares(outer: OuterForward, cut: Callable[[nn.Module], None]) -> frozenset[str]:
    """Return the names, with * for numbers, of parameters that `cut` splits into unequal shards.

    To find out, one layer of each kind is sharded on meta. Raises UserError if a layer cannot be cut.
    """
    kinds: dict[Hashable, tuple[str, nn.Module]] = {}
    for name, layer in zip(outer.layer_names, outer.layers, strict=True):
        kinds.setdefault(tuple((own, tuple(p.shape)) for own, p in layer.named_parameters()), (name, layer))
    found = set()
    for name, layer in kinds.values():
        # Under its name in the model, by which a plan knows its modules.
        trial = nn.Module()
        _nest(trial, name, copy.deepcopy(layer))
        cut(trial)
        shards = ((own, shard_of(parameter)) for own, parameter in trial.named_parameters())
        found |= {wildcard(own) for own, shard in shards if shard is not None and shard.unequal}
    return frozenset(found)


@dataclass(frozen=True)
class Tie:
    """Parameters shared by several pipeline layers: index of a layer -> their names in it, in the same order."""

    key: str
    names: dict[int, list[str]]


def find_ties(outer: OuterForward) -> list[Tie]:
    """Return the parameters that two or more pipeline layers share (a tied head, a shared block).

    Raises UserError if a layer shares different parameters with different layers: DeepSpeed ties a layer only once.
    """
    places: dict[int, dict[int, str]] = {}  # a parameter's id -> pipeline layer -> its name there
    layers = [{name: layer} for name, layer in zip(outer.layer_names, outer.layers, strict=True)]
    for index, modules in enumerate([outer.prologue, *layers, outer.epilogue]):
        for prefix, module in modules.items():
            for name, parameter in module.named_parameters():
                places.setdefault(id(parameter), {}).setdefault(index, f"{prefix}.{name}")
    # Layers that share -> layer -> names: all that the same layers share is one tie.
    groups: dict[tuple[int, ...], dict[int, list[str]]] = {}
    for names in places.values():
        for index, name in names.items():
            if len(names) > 1:
                groups.setdefault(tuple(names), {}).setdefault(index, []).append(name)
    tied = [index for group in groups for index in group]
    if len(tied) != len(set(tied)):
        raise UserError(
            f"{outer.described} ties a layer's weights to several others, so it cannot be split into stages"
        )
    return [Tie(f"tied{number}", names) for number, names in enumerate(groups.values())]


def _leaves(outer: OuterForward, index: int, tiled: Collection[str]) -> list[str]:
    """Return the names of the modules that ZeRO-3 must gather as a unit in layer `index`, including `tiled` blocks."""
    # A block is called once per tile, so as in the epilogue it is one leaf, and leaves inside of it are none.
    found = {name for name in outer.facts.zero3_leaves(index) if not any(name.startswith(f"{b}.") for b in tiled)}
    # Unless the layer itself is a leaf, where ZeRO-3 does not look further.
    if "" not in found:
        found |= set(tiled)
    return [f"{outer.layer_names[index]}.{name}".rstrip(".") for name in sorted(found)]


def _tiled_blocks(blueprint: Blueprint, index: int) -> list[str]:
    """Return the names of the blocks in decoder layer `index` that are computed in tiles."""
    if blueprint.tile_block is None or blueprint.plan is None:
        return []
    layer = blueprint.outer.layers[index]
    capture = blueprint.capture
    named = ((name, layer.get_submodule(name)) for name in sorted(blueprint.plan.alone_in(layer)))
    # A router must be called once, because its logits are captured from one call.
    return [name for name, block in named if capture is None or not capture.has_router(block, name)]


def _nest(root: nn.Module, name: str, module: nn.Module) -> None:
    """Register `module` in `root` under a dotted name; create empty modules along the path."""
    *path, leaf = name.split(".")
    for part in path:
        if part not in dict(root.named_children()):
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    root.add_module(leaf, module)
