"""Find out by trial on a tiny copy which parts of a model can compute a shard of the tokens. No family is named.

Each block of a layer runs on all tokens, and on a shard with the arguments that a rank would have. The block can work
on a shard if both runs have the same output there, and call transformers' attention interface with the same mask and
options. In the trial a function that computes each token alone replaces attention, because real attention runs on
exchanged heads and sees all tokens. The layer around its blocks, and the modules before and after the layers, are tried
in the same way.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import PretrainedConfig, PreTrainedModel

from harness.context_parallel import tiles
from harness.context_parallel.arguments import SplitArguments
from harness.context_parallel.attention import SharedAttention
from harness.context_parallel.layer import sharded_layers
from harness.errors import UserError, text_of
from harness.hf.context.plan import TokenSplitSupport, kind_of_layer, named_blocks
from harness.hf.context.sequence import own_tokens
from harness.hf.forward.outer_forward import OuterForward
from harness.hf.forward.payload import StagePayload, Tokens
from harness.hf.layers.attention import attention_of, on_any_device
from harness.hf.layers.call import LayerInputs, LayerOutput, same
from harness.hf.layers.dry_run import CANNOT_RUN
from harness.hf.skeleton import ModelSource
from harness.parallel.context.sequence_shards import ContextParallel, TokenRows
from harness.parallel.generators import own_generators
from harness.parallel.values import Argument
from harness.verify.tiny_copy import shrink, tiny_ids, tiny_model

TOLERANCE = 1e-5  # of the largest entry: sums over other numbers of rows in another order
TRIED = ContextParallel(rank=1, size=3)  # a shard that is neither at the beginning nor at the end


def token_split_support(config: PretrainedConfig) -> TokenSplitSupport:
    """Return the plan that trials on a tiny copy give, cached. If no copy runs, all modules need all tokens."""
    tried = _Tried(json.dumps(config.to_dict(), sort_keys=True, default=str), attention_of(config), config)
    return replace(_plan(tried), sharded_layers=sharded_layers, tiling=tiles)


@dataclass(frozen=True)
class _Tried:
    """A config to try, as a cache key: two are equal if content and attention implementation are."""

    said: str
    attention: str | None
    config: PretrainedConfig = field(compare=False)


@lru_cache(maxsize=16)
def _plan(tried: _Tried) -> TokenSplitSupport:
    try:
        model = tiny_model(shrink(tried.config)).eval()
        with own_generators(0), on_any_device(model):
            return _trial(model)
    except (UserError, *CANNOT_RUN) as error:
        return TokenSplitSupport(obstacle=f"could not be tried on a tiny copy ({text_of(error, 200)})")


@torch.no_grad()
def _trial(model: PreTrainedModel) -> TokenSplitSupport:
    outer = OuterForward(ModelSource.of_model(model).skeleton(), torch.device("cpu"))
    ids = tiny_ids(model)
    rows = TokenRows(context=TRIED, batch=ids.shape[0], length=ids.shape[1])
    prologue, epilogue = (
        {name: model.get_submodule(name) for name in part} for part in (outer.prologue, outer.epilogue)
    )
    entered = replace(outer.enter(Tokens(ids), prologue, training=False), tokens=Tokens(ids))
    if outer.schema.replayed:
        return _trial_of_replayed(model, outer, rows, entered, epilogue)
    before = _agree(
        lambda: outer.enter(own_tokens(Tokens(ids), outer, TRIED), prologue, training=False).hidden,
        rows,
        entered.hidden,
    )
    split = SplitArguments.of(outer)
    gathered: dict[Hashable, frozenset[str] | None] = {}
    alone: dict[Hashable, frozenset[str]] = {}
    attending = set()
    for index, name in enumerate(outer.layer_names):
        layer = model.get_submodule(name)
        state, inputs = outer.arguments(index, replace(entered, hidden=torch.randn_like(entered.hidden)))
        trial = _LayerTrial(layer, rows, *split.split(index, inputs, TRIED, rows.length))
        kind = kind_of_layer(layer)
        found = trial.blocks(state, inputs)
        known = gathered.setdefault(kind, frozenset())
        gathered[kind] = None if found is None or known is None else known | found
        alone[kind] = alone.get(kind, trial.alone) & trial.alone
        if trial.attends:
            attending.add(kind)
    known_kinds = {kind: names for kind, names in gathered.items() if names is not None}
    return TokenSplitSupport(
        gathered=known_kinds,
        alone=alone,
        attending=frozenset(attending & known_kinds.keys()),
        prologue=before,
        obstacle=_obstacle(outer, rows, replace(entered, hidden=torch.randn_like(entered.hidden)), epilogue),
    )


def _trial_of_replayed(
    model: PreTrainedModel,
    outer: OuterForward,
    rows: TokenRows,
    payload: StagePayload,
    epilogue: dict[str, nn.Module],
) -> TokenSplitSupport:
    """Try a model that passes on more than a hidden state; `payload` is that of its first layer.

    Its layers run one after the other, because later ones need the states of earlier ones. All of them compute all
    tokens, but some of their blocks may compute a tile at a time.
    """
    alone: dict[Hashable, frozenset[str]] = {}
    for index, name in enumerate(outer.layer_names):
        layer = model.get_submodule(name)
        hidden, inputs = outer.arguments(index, payload)
        trial = _LayerTrial(layer, rows, inputs, {})
        kind = kind_of_layer(layer)
        trial.blocks(hidden, inputs)
        alone[kind] = alone.get(kind, trial.alone) & trial.alone
        hidden, inputs = outer.arguments(index, payload)  # again: a layer may change its arguments
        payload = outer.after(index, inputs, inputs.apply(layer, hidden), payload)
    return TokenSplitSupport(alone=alone, obstacle=_obstacle(outer, rows, payload, epilogue), whole=True)


def _obstacle(outer: OuterForward, rows: TokenRows, payload: StagePayload, modules: dict[str, nn.Module]) -> str:
    """Return why the modules after the layers cannot compute a shard of the tokens; "" if they can."""
    if outer.schema.names(len(outer.layers)):
        return "reads outputs of earlier layers after its last one"
    if payload.hidden.shape[:2] != (rows.batch, rows.length):
        return "passes on hidden states that do not begin with [batch, tokens]"
    payload = replace(payload, states={})
    logits = outer.leave(payload, modules, training=False).logits
    own = StagePayload(hidden=rows.own(payload.hidden))  # without ids, as tiles have none
    agrees = _agree(lambda: outer.leave(own, modules, training=False).logits, rows, logits)
    return "" if agrees else "combines several tokens after its last layer"


@dataclass(kw_only=True)
class _Asked(SharedAttention):
    """Stands in for attention: computes each token by itself, and records masks and options of each call."""

    asked: list[object] = field(default_factory=list)

    def attend(
        self,
        function: Callable[..., tuple[Tensor, object]],  # noqa: ARG002  # stands in for it
        module: nn.Module,  # noqa: ARG002
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *args: Argument,
        **kwargs: Argument,
    ) -> tuple[Tensor, None]:
        given = (*map(self._for_all_tokens, args), *map(self._for_all_tokens, kwargs.values()))
        self.asked.append((self._for_all_tokens(attention_mask), given))
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
        start, stop = self.context.token_range(self.length)
        if any(x.shape[2] != stop - start for x in (query, key, value)):
            raise RuntimeError("attention gives keys other than those of its tokens")
        return (value * torch.tanh((query * key).sum(-1, keepdim=True))).transpose(1, 2).contiguous(), None


class _LayerTrial:
    """Tries a layer on a shard.

    Args:
        rows: cuts tensors to the shard.
        inputs: the layer's arguments for the shard.
        whole: those arguments that were cut, for all tokens, by the `id` of their cut parts.

    Attributes:
        alone: its blocks and norms that compute each token by itself, known after `blocks`.
        attends: whether its attention can run on exchanged heads, known after `blocks`.
    """

    def __init__(self, layer: nn.Module, rows: TokenRows, inputs: LayerInputs, whole: Mapping[int, Tensor]) -> None:
        self.layer = layer
        self.rows = rows
        self.inputs = inputs
        self.whole = whole
        self.calls: dict[str, list[tuple[object, Argument, list[object]]]] = {}
        self.alone: frozenset[str] = frozenset()
        self.attends = False

    def blocks(self, hidden: Tensor, inputs: LayerInputs) -> frozenset[str] | None:
        """Return the names of the blocks that need all tokens; None if the layer itself does.

        Args:
            hidden: the layer's hidden state for all tokens, [batch, tokens, width]; inputs: its other arguments.
        """
        blocks = dict(named_blocks(self.layer, least=1))
        try:
            output = self._run(blocks, hidden, inputs, stands_in=True)
        except CANNOT_RUN:  # its attention reads other keys than those of its tokens
            self.calls.clear()
            try:
                output = self._run(blocks, hidden, inputs, stands_in=False)
            except CANNOT_RUN:
                return None
        repeated = {name for name, calls in self.calls.items() if len(calls) > 1}
        once = self.calls.keys() - repeated
        gathered = frozenset(name for name in once if not self._works(blocks[name], *self.calls[name][0]))
        self.alone = frozenset(name for name in once - gathered if self._is_alone(blocks[name], *self.calls[name][0]))
        self.attends = any(self.calls[name][0][2] for name in once - gathered)
        if repeated:
            return None
        with _returning({blocks[name]: self._own(self.calls[name][0][1]) for name in gathered}):
            wanted = [record for name in self.calls if name not in gathered for record in self.calls[name][0][2]]
            works = self._agrees(lambda: self.inputs.apply(self.layer, self.rows.own(hidden).clone()), output, wanted)
        return gathered if works else None

    def _run(
        self, blocks: Mapping[str, nn.Module], hidden: Tensor, inputs: LayerInputs, *, stands_in: bool
    ) -> LayerOutput:
        """Run the layer on all tokens and record the calls of its blocks; return its output.

        Args:
            stands_in: whether `_Asked` replaces attention.
        """
        own = {id(tensor): name for name, tensor in self.whole.items()}  # ids of whole arguments -> of cut ones
        cut = {id(tensor): tensor for tensor in tree_leaves((self.inputs.args, dict(self.inputs.kwargs)))}
        shares = {whole: cut[part] for whole, part in own.items() if part in cut}
        asked = _Asked(context=ContextParallel(), length=self.rows.length)
        handles = []
        for name, block in blocks.items():
            handles.append(
                block.register_forward_pre_hook(partial(self._before, name, shares, asked), with_kwargs=True)
            )
            handles.append(block.register_forward_hook(partial(self._after, name, asked)))
        try:
            with asked.active() if stands_in else nullcontext():
                return inputs.apply(self.layer, hidden.clone())
        finally:
            for handle in handles:
                handle.remove()

    def _is_alone(self, block: nn.Module, given: Argument, _output: Argument, asked: list[object]) -> bool:
        """Return whether tiles of a block that works on a shard are exact and save memory."""
        first = next((leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)), None)
        takes_rows = first is not None and first.dim() > 2 and first.shape[:2] == (self.rows.batch, self.rows.tokens)
        # tiles save no memory in a single matrix product
        return takes_rows and not asked and (any(True for _ in block.children()) or _is_norm(block))

    def _before(
        self,
        name: str,
        shares: Mapping[int, Tensor],
        asked: _Asked,
        _module: nn.Module,
        *given: Argument,
    ) -> None:
        def own(tensor: Tensor) -> Tensor:
            return shares[id(tensor)] if id(tensor) in shares else self.rows.own(tensor).clone()

        self.calls.setdefault(name, []).append((tree_map_only(Tensor, own, given), len(asked.asked), []))

    def _after(self, name: str, asked: _Asked, _module: nn.Module, _args: object, output: Argument) -> None:
        given, first, _ = self.calls[name][-1]
        kept = tree_map_only(Tensor, torch.clone, output)
        self.calls[name][-1] = (given, kept, asked.asked[first:])

    def _works(self, block: nn.Module, given: Argument, output: Argument, asked: list[object]) -> bool:
        """Return whether a block's output for a shard equals that shard of its output for all tokens."""
        return self._agrees(lambda: block(*given[0], **given[1]), output, asked)

    def _agrees(self, run: Callable[[], Argument], output: Argument, wanted: list[object]) -> bool:
        asked = _Asked(context=self.rows.context, length=self.rows.length, whole=self.whole)
        with asked.active():
            agrees = _agree(run, self.rows, output)
        return agrees and same(asked.asked, wanted)

    def _own(self, output: Argument) -> Argument:
        return tree_map_only(Tensor, self.rows.own, output)


def _is_norm(module: nn.Module) -> bool:
    return all(parameter.dim() == 1 for parameter in module.parameters())


class _returning:  # a context manager
    """Lets modules return given outputs."""

    def __init__(self, outputs: Mapping[nn.Module, Argument]) -> None:
        self.outputs = outputs

    def __enter__(self) -> None:
        for module, output in self.outputs.items():
            module.forward = partial(_return, output)

    def __exit__(self, *_: object) -> None:
        for module in self.outputs:
            del module.forward


def _return(output: Argument, *_args: object, **_kwargs: object) -> Argument:
    return output


def _agree(run: Callable[[], Argument], rows: TokenRows, whole: Argument) -> bool:
    """Return whether the output of `run`, for a shard, equals that shard of `whole`."""
    try:
        found = tree_leaves(run())
    except CANNOT_RUN:
        return False
    wanted = tree_leaves(tree_map_only(Tensor, rows.own, whole))
    return len(found) == len(wanted) and all(map(_close, found, wanted))


def _close(found: object, wanted: object) -> bool:
    if not isinstance(wanted, Tensor) or not isinstance(found, Tensor):
        return not isinstance(wanted, Tensor) and not isinstance(found, Tensor)
    if found.shape != wanted.shape:
        return False
    if not wanted.is_floating_point():
        return torch.equal(found, wanted)
    scale = wanted.abs().max() if wanted.numel() else wanted.new_zeros(())
    return bool(((found - wanted).abs() <= TOLERANCE * scale).all())
