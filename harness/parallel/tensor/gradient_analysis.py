"""Find the parameters with partial gradients (`partial_gradients.py`) in the autograd graph.

Plans name such parameters (`replicated_with_grad_allreduce`), but may miss some. The autograd graph misses none: on the
way from an output to the inputs, a sum over the group leads into a region of split values, and a copy to the group
leads out of it. Gradients of all parameters reached inside are partial; if the input is reached there, the plan is
wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from harness.errors import UserError
from harness.parallel.comm import GATHERS_SHARES, INTO_SPLIT, OUT_OF_SPLIT, SPLITS_SEQUENCE, TensorParallel
from harness.parallel.tensor.partial_gradients import GradientSum, sum_gradient, sums_gradient
from harness.parallel.tensor.shard import shard_of
from harness.parallel.values import Keyword, Positional

SHARE_REMEDY = "remove tensor_parallel.sequence_parallel, which this layer may not allow"


class Values(Enum):
    """The values that a rank has at a point of the graph: all, only its heads or columns, or only its tokens."""

    WHOLE = auto()
    SPLIT = auto()
    SHARE = auto()


@dataclass
class ReachedParameters:
    """The result of a walk through the graph.

    Attributes:
        whole: unsharded parameters used on whole values.
        partial: unsharded parameters used on split values or on a shard of the tokens.
        bare: sharded parameters used outside a region of split values, not through the layer that sums.
        input_is_partial: whether the input is used on values of another kind than its own, or a partial gradient is
            taken for a whole one.
    """

    whole: set[nn.Parameter] = field(default_factory=set)
    partial: set[nn.Parameter] = field(default_factory=set)
    bare: set[nn.Parameter] = field(default_factory=set)
    input_is_partial: bool = False


@dataclass(frozen=True)
class GivenTensors:
    """The input tensors of a module.

    Attributes:
        direct: its arguments, which are whole, or a shard of the tokens if the layer runs on one.
        left: tensors that an earlier layer left for this one, in a mapping or behind the hidden state. They may be keys
            and values of this rank's heads, so they may be of any kind.
    """

    direct: Sequence[Tensor] = ()
    left: Sequence[Tensor] = ()

    @classmethod
    def of(cls, args: Positional, kwargs: Keyword) -> GivenTensors:
        """Return the tensors of a call; collect them before the call, as a layer may add to a mapping."""
        direct: list[Tensor] = []
        left: list[Tensor] = []
        for value in (*args, *kwargs.values()):
            tensors = list(_tensors(value))
            known = len(tensors)
            # Of a tuple, the first is the hidden state; all of a mapping was left by earlier layers.
            if isinstance(value, Mapping | tuple):
                known = 1 if isinstance(value, tuple) else 0
            direct += tensors[:known]
            left += tensors[known:]
        return cls(direct, left)


NOTHING_GIVEN = GivenTensors()


def walk(
    outputs: Iterable[Tensor], inputs: GivenTensors = NOTHING_GIVEN, *, kind: Values = Values.WHOLE
) -> ReachedParameters:
    """Walk the autograd graph from `outputs`, whose values are of `kind`, back to `inputs` and to all leaves."""
    stops = {x.grad_fn for x in inputs.direct if x.grad_fn is not None}
    left = {x.grad_fn for x in inputs.left if x.grad_fn is not None} - stops
    of_any_kind = {id(x) for x in inputs.left}
    reached = ReachedParameters()
    seen = set()
    # A node may be reached with values of several kinds, and each must be followed, so the kind is part of `seen`.
    ahead = [(x.grad_fn, x.output_nr, kind) for x in outputs]
    while ahead:
        node, place, here = ahead.pop()
        if node is None or (node, place, here) in seen:
            continue
        seen.add((node, place, here))
        leaf: Tensor | None = getattr(node, "variable", None)
        if node in left or id(leaf) in of_any_kind:
            continue
        if node in stops or (leaf is not None and not isinstance(leaf, nn.Parameter)):
            # An input reached from split values gets a partial gradient, which nothing outside would sum.
            reached.input_is_partial |= here is Values.SPLIT or (kind is Values.SHARE and here is not kind)
            continue
        if leaf is not None and shard_of(leaf) is None:
            (reached.whole if here is Values.WHOLE else reached.partial).add(leaf)
        elif leaf is not None and here is not Values.SPLIT:
            reached.bare.add(leaf)
        if node.name() == GATHERS_SHARES:
            # Output 1 is for column-parallel layers and sums partial gradients; output 0 takes whole gradients.
            reached.input_is_partial |= (here is Values.SPLIT) != (place == 1)
        here = _before(node.name(), here)
        ahead += [(parent, number, here) for parent, number in node.next_functions]
    return reached


def _before(name: str, kind: Values) -> Values:
    """Return the kind of a node's inputs, given the kind of its outputs."""
    if name == GATHERS_SHARES:
        return Values.SHARE
    if name in INTO_SPLIT:
        return Values.SPLIT
    if name == SPLITS_SEQUENCE or (kind is Values.SPLIT and name in OUT_OF_SPLIT):
        return Values.WHOLE
    return kind


def sum_partial_gradients(
    module: nn.Module,
    name: str,
    tensor: TensorParallel,
    *,
    output_kind: Values = Values.WHOLE,
    takes_payload: bool = False,
) -> None:
    """Find partial gradients in the first forward of `module` with gradients, and sum them from then on.

    That forward raises UserError, naming `name`, if no sum can make a gradient right: if a parameter is used on both
    whole and split values, if an input goes to split values without a copy to the group, or if a sharded parameter is
    used without the layer that sums its output (for example by a fused kernel).

    A reentrant activation checkpoint inside `module` hides what it recomputes from the graph; one around it does not.

    Args:
        output_kind: kind of the first output, unless `module.works_on_share` is set.
        takes_payload: whether the positional arguments after the first are tensors left by earlier layers.
    """

    given = [NOTHING_GIVEN]

    def before_forward(_module: nn.Module, args: Positional, kwargs: Keyword) -> None:
        given[0] = GivenTensors.of((args,) if takes_payload else args, kwargs)

    def after_forward(_module: nn.Module, _args: Positional, output: object) -> None:
        inputs = given[0]
        # Otherwise the inputs would stay in memory until the next forward.
        given[0] = NOTHING_GIVEN
        if not torch.is_grad_enabled():
            return
        # Once is enough: later forwards build the same graph.
        for handle in handles:
            handle.remove()
        kind = Values.SHARE if getattr(module, "works_on_share", False) else output_kind
        reached = walk(_tensors(_first(output)), inputs, kind=kind)
        names = {id(param): own for own, param in module.named_parameters()}
        misused = (reached.partial & reached.whole) | reached.bare
        mixed = sorted(names.get(id(param), "a parameter") for param in misused)
        if mixed or reached.input_is_partial:
            what = f"{', '.join(mixed)} is" if mixed else "its input is"
            remedy = "set tensor_parallel.autotp_size to 1, or correct the plan"
            raise UserError(
                f"the tensor-parallel plan of {name or type(module).__name__} gives wrong gradients: {what} used by "
                f"split and by whole layers: {SHARE_REMEDY if kind is Values.SHARE else remedy}"
            )
        for param in reached.partial:
            if not sums_gradient(param):
                sum_gradient(param, GradientSum(tensor.group))

    handles: tuple[RemovableHandle, ...] = (
        module.register_forward_pre_hook(before_forward, with_kwargs=True),
        module.register_forward_hook(after_forward),
    )


def _first(output: object) -> object:
    """Return the hidden state or the logits; other outputs (attention weights) may be split or whole."""
    if isinstance(output, Mapping):
        output = tuple(output.values())
    return output[0] if isinstance(output, (tuple, list)) and output else output


def _tensors(value: object) -> Iterator[Tensor]:
    """Yield all tensors in nested tuples, lists and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list, Mapping)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(item)
