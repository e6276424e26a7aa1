"""Shard a module for one tensor-parallel rank by a plan.

`cut` walks one pipeline layer or a whole model, and replaces every module and parameter that the plan names by this
rank's shard. Names are relative to the whole model. It works on the meta device, before any weight exists, and on
modules with weights. A parameter shared by several modules (tied embeddings) stays shared. Every sharded parameter
carries its `Shard`.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from transformers import PretrainedConfig

from harness.config.model.sharding import Heads, Range
from harness.errors import UserError
from harness.parallel.comm import TensorParallel
from harness.parallel.plans.experts import EXPERT_PARAMETER, EXPERTS, cut_experts, ep_dispatch_experts
from harness.parallel.plans.heads import Attention, attention_at, attention_below, attentions_in, blocks_of, deal
from harness.parallel.plans.plan import ADVICE, WORDS, InputRule, Plan, PlanRule, is_layer, wildcard
from harness.parallel.plans.styles import STYLE_FUNCTIONS, cut_bare_parameter, cut_head_parameters
from harness.parallel.plans.target import PlanTarget
from harness.parallel.tensor.gradient_analysis import Values, sum_partial_gradients
from harness.parallel.tensor.layers import ColumnParallelLinear, SharedColumnLinear
from harness.parallel.tensor.shard import shard_of, sum_of
from harness.parallel.token_exchange import NO_NEIGHBOURS, Neighbours
from harness.parallel.values import Keyword, Positional


def cut(
    module: nn.Module,
    prefix: str,
    plan: Plan,
    tensor: TensorParallel,
    config: PretrainedConfig,
    *,
    local_logits: bool = False,
    neighbours: Neighbours = NO_NEIGHBOURS,
) -> None:
    """Shard `module` in place by `plan`; with one tensor-parallel rank, nothing changes.

    Args:
        prefix: the name of `module` in the model, "" for the model itself.
        config: the model's config, for its heads and sizes.
        local_logits: let the head return only this rank's shard of the vocabulary, if the plan splits the head
            (`plan.splits_head`).
        neighbours: the data-parallel ranks over which whole experts are distributed.

    Raises UserError if the ranks cannot share heads or widths, or a style does not fit a module. The first forward of
    `module` raises it if the plan would give wrong gradients.
    """
    if tensor.size == 1 and neighbours.ranks.size == 1:
        return
    # The list keeps the old modules alive: otherwise a new parameter might reuse the id of an old one.
    modules = list(module.named_modules())
    attentions = attentions_in([(_join(prefix, name), child) for name, child in modules], config)
    cut_context = _CutContext(
        module=module,
        prefix=prefix,
        plan=plan,
        tensor=tensor,
        config=config,
        attentions=attentions,
        neighbours=neighbours,
    )
    shared = _replace_modules(cut_context, modules, local_head=local_logits)
    _cut_bare_parameters(cut_context)
    # With one tensor-parallel rank, only experts are cut.
    if tensor.size == 1:
        return
    # Modules that no rule names may have shared a whole parameter with a sharded one (a head's bias).
    for name, param in list(module.named_parameters(remove_duplicate=False)):
        if id(param) in shared:
            owner, _, own_name = name.rpartition(".")
            setattr(module.get_submodule(owner), own_name, shared[id(param)])
    for name, child in module.named_modules():
        _require_a_cut(child, _join(prefix, name), plan)
        cut_head_parameters(child, attentions.get(_join(prefix, name)), tensor)
    _adapt_modules(cut_context, local_logits=local_logits)


@dataclass(frozen=True, kw_only=True)
class _CutContext:
    """The arguments of `cut` with the model's attention modules by name."""

    module: nn.Module
    prefix: str
    plan: Plan
    tensor: TensorParallel
    config: PretrainedConfig
    attentions: Mapping[str, Attention]
    neighbours: Neighbours

    def attention_at(self, name: str) -> Attention | None:
        """Return the attention of the module or parameter `name`."""
        return attention_at(name, self.attentions, self.tensor.size)

    def target(self, name: str, module: nn.Module, rule: PlanRule, *, local_output: bool = False) -> PlanTarget:
        """Return the argument of a style function for the module or parameter `name`, to which `rule` applies."""
        return PlanTarget(
            name=_join(self.prefix, name),
            module=module,
            owner=self.module.get_submodule(name.rpartition(".")[0]),
            attention=self.attention_at(_join(self.prefix, name)),
            rule=rule,
            tensor=self.tensor,
            config=self.config,
            local_output=local_output,
            neighbours=self.neighbours,
        )


def _replace_modules(
    cut_context: _CutContext, modules: Iterable[tuple[str, nn.Module]], *, local_head: bool
) -> dict[int, nn.Parameter]:
    """Replace every module that a rule names by this rank's shard; return id of a whole parameter -> its shard."""
    shared: dict[int, nn.Parameter] = {}
    for name, child in modules:
        full_name = _join(cut_context.prefix, name)
        rule = cut_context.plan.rule_of(full_name)
        if rule is None:
            continue
        # Split outputs give the whole input a partial gradient, which `all_reduce` alone would not sum.
        if rule.style == "all_reduce" and _splits_own_outputs(child, full_name, cut_context.plan):
            rule = replace(rule, style="moe_tp_experts")
        target = cut_context.target(name, child, rule, local_output=local_head and full_name == cut_context.plan.head)
        new = ep_dispatch_experts(target) if rule.style == EXPERTS else STYLE_FUNCTIONS[rule.style](target)
        if new is not child:
            _keep_shared(child, new, shared)
            cut_context.module.set_submodule(name, new)
    return shared


def _adapt_modules(cut_context: _CutContext, *, local_logits: bool) -> None:
    """Adapt the modules around sharded ones: the sizes they read, their inputs, and sums of partial gradients."""
    plan = cut_context.plan
    tensor = cut_context.tensor
    for name, child in cut_context.module.named_modules():
        full_name = _join(cut_context.prefix, name)
        pattern = wildcard(full_name)
        _divide_attributes(child, full_name, plan, tensor, cut_context.attention_at(full_name))
        if full_name in cut_context.attentions:
            _repeat_borrowed_keys_less(child, cut_context.attentions[full_name].heads, tensor)
        inside = attention_below(full_name, cut_context.attentions)
        _cut_inputs(child, full_name, plan.inputs.get(pattern, {}), tensor, inside, cut_context.config)
        # Each layer by itself too: a checkpoint around a layer hides it from a walk over the graph of the whole model.
        if child is cut_context.module or is_layer(pattern):
            names = {_join(full_name, name) for name, _ in child.named_modules()}
            local = local_logits and plan.splits_head and plan.head in names
            kind = Values.SPLIT if local else Values.WHOLE
            whole = child is cut_context.module
            sum_partial_gradients(child, full_name, tensor, output_kind=kind, takes_payload=whole)


def _repeat_borrowed_keys_less(attention: nn.Module, heads: Heads, tensor: TensorParallel) -> None:
    """Set `num_key_value_groups` of an attention with an earlier layer's keys to this rank's query heads per key."""
    if heads.key_value >= tensor.size or not isinstance(getattr(attention, "num_key_value_groups", None), int):
        return
    columns = [child for child in attention.children() if isinstance(child, (ColumnParallelLinear, SharedColumnLinear))]
    # A layer that gathers its projections (for a norm over all heads) computes all heads on every rank.
    if any(isinstance(column, ColumnParallelLinear) and column.gather_output for column in columns):
        return
    # If ranks share a key/value head, sharding the key projection has set the number (`_repeat_less`). A layer that
    # borrows its keys has no such projection.
    shards = [shard_of(column.weight) for column in columns]
    if columns and not any(shard is None or shard.copied for shard in shards):
        start, stop = heads.queries(tensor.size)[tensor.rank]
        attention.num_key_value_groups = stop - start  # type: ignore[assignment]


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name


def _keep_shared(old: nn.Module, new: nn.Module, shared: dict[int, nn.Parameter]) -> None:
    """Make `new` share its shard if `old` shared the whole parameter with an earlier module."""
    for name, param in old.named_parameters(recurse=False):
        local = getattr(new, name)
        first = shared.setdefault(id(param), local)
        # As two parameters they would be trained apart.
        if shard_of(first) != shard_of(local):
            raise ValueError(f"{name} of {type(old).__name__} is shared with a module that is split differently")
        setattr(new, name, first)


def _cut_bare_parameters(cut_context: _CutContext) -> None:
    """Shard every parameter that a rule names directly, unless it was sharded with its module."""
    for name, param in list(cut_context.module.named_parameters()):
        full_name = _join(cut_context.prefix, name)
        rule = cut_context.plan.rule_of(full_name)
        if rule is None or shard_of(param) is not None:
            continue
        *path, own_name = name.split(".")
        owner, *above = [cut_context.module.get_submodule(".".join(path[:depth])) for depth in range(len(path), -1, -1)]
        if rule.style == EXPERT_PARAMETER:
            setattr(owner, own_name, cut_experts(param, cut_context.target(name, owner, rule)))
        else:
            cut_bare_parameter(cut_context.target(name, owner, rule), own_name, above)


def _splits_own_outputs(module: nn.Module, name: str, plan: Plan) -> bool:
    rules = (plan.rule_of(f"{name}.{own}") for own, _ in module.named_parameters(recurse=False))
    return any(rule is not None and rule.style.endswith("colwise") for rule in rules)


def _require_a_cut(module: nn.Module, name: str, plan: Plan) -> None:
    """Raise UserError if the plan all-reduces the output of `module` although nothing in it is sharded."""
    rule = plan.rule_of(name)
    if rule is None or rule.style not in ("all_reduce", "moe_tp_experts"):
        return
    # The sum would count the whole output once per rank.
    if not any(shard_of(param) for param in module.parameters()):
        raise UserError(
            f"the tensor-parallel style {rule.style} needs a module that is split, but {name} is whole: {ADVICE}"
        )


def _divide_attributes(
    module: nn.Module, name: str, plan: Plan, tensor: TensorParallel, attention: Attention | None
) -> None:
    words = plan.attributes.get(wildcard(name), {})
    # Sums come last: their terms are attributes that must already be divided.
    for attribute, word in sorted(words.items(), key=lambda pair: pair[1] not in WORDS):
        *path, own = attribute.split(".")
        # Layers of one name may be of several kinds.
        if not hasattr(module, path[0] if path else own):
            continue
        owner: Any = module
        for step in path:
            # Several modules share a config: this one gets a copy.
            setattr(owner, step, copy.copy(getattr(owner, step)))
            owner = getattr(owner, step)
        value = getattr(owner, own)
        if word in WORDS:
            setattr(owner, own, _own_value(value, word, f"{name}.{attribute}", plan, tensor, attention))
        else:
            setattr(owner, own, sum_of(word, [module]))


def _own_value(
    value: int, word: str, name: str, plan: Plan, tensor: TensorParallel, attention: Attention | None
) -> int:
    heads = attention.heads if attention is not None else None
    # Fewer heads than ranks: neighbouring ranks use the same one.
    if word == "share" and value < tensor.size and (tensor.size % value == 0 or (heads and heads.key_value == value)):
        return 1
    blocks = plan.blocks_in(name.rpartition(".")[0]) if heads is not None and value % heads.query == 0 else 1
    if heads is not None:
        heads = blocks_of(heads, blocks, name)
    start, stop = deal(value // blocks, tensor.size, name, heads=heads)[tensor.rank]
    return (stop - start) * blocks


def _cut_inputs(
    module: nn.Module,
    name: str,
    rules: Mapping[str, InputRule],
    tensor: TensorParallel,
    attention: Attention | None,
    config: PretrainedConfig,
) -> None:
    """Make `module` receive only this rank's shard of the inputs that `rules` name, by position or keyword."""
    if not rules:
        return
    positions = {name: place for place, name in enumerate(inspect.signature(module.forward).parameters)}
    runs = {key: getattr(config, rule.run) if rule.run else None for key, rule in rules.items()}
    heads = attention.heads if attention is not None else None

    def own(key: str, x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        run = runs[key] or x.shape[rules[key].dim]
        return own_part(x, rules[key], run, deal(run, tensor.size, f"{key}, given to {name}", heads=heads)[tensor.rank])

    def before_forward(_module: nn.Module, args: Positional, kwargs: Keyword) -> tuple[Positional, Keyword]:
        given = list(args)
        kwargs = dict(kwargs)
        for key in rules:
            if key in kwargs:
                kwargs[key] = own(key, kwargs[key])
            elif positions[key] < len(given):
                given[positions[key]] = own(key, given[positions[key]])
        return tuple(given), kwargs

    module.register_forward_pre_hook(before_forward, with_kwargs=True)


def own_part(x: Tensor, rule: InputRule, run: int, own_range: Range) -> Tensor:
    """Return this rank's share of every `run` entries of `x` [..., runs * run, ...] along `rule.dim`."""
    dim = rule.dim % x.ndim
    start, stop = own_range
    runs: Tensor = x.unflatten(dim, (-1, run))
    return runs.narrow(dim + 1, start, stop - start).flatten(dim, dim + 1)
