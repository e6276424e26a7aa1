"""Optimizers of bitsandbytes on the tensors that DeepSpeed updates.

bitsandbytes itself makes the step, on one piece of a tensor after the other (`blocks.py`), so one process gets its
numbers to the bit. Where ranks share blocks, they also agree on the scales of these blocks before they round. That is
one small all-reduce for each tensor that the optimizer updates.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeAlias

import bitsandbytes
import torch
import torch.distributed as dist
from bitsandbytes.functional import quantize_blockwise
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor
from torch.optim import Optimizer

from harness.config.values.json_object import JsonObject
from harness.deepspeed.flat_tensors import UpdatedTensor, parameter_slices, updated_tensors
from harness.deepspeed.optimizer_states import sub_groups_on_nvme
from harness.errors import UserError
from harness.extras.blockwise.blocks import BLOCK, Cells, StatePiece, pieces_of
from harness.extras.blockwise.states import (
    MOMENTS,
    OfPiece,
    States,
    TensorStates,
    dequantised,
    largest_of_blocks,
    nearest_codes,
)
from harness.parallel.tensor.shard import shard_of
from harness.topology.agreement import all_gather_object
from harness.topology.groups import Groups
from harness.training.engine.optimizer import ParameterGroup

DEVICES = ("cpu", "cuda", "xpu")
"""Devices for which bitsandbytes has these optimizers."""
DEFAULT_BETAS = (0.9, 0.999, 0.9999)
"""Of AdEMAMix, in bitsandbytes and in HuggingFace's Trainer."""


class LibrarySettings(Protocol):
    """Options of an optimizer of bitsandbytes for all its parameters."""

    optim_bits: int
    min_8bit_size: int


class LibraryOptimizer(Protocol):
    """An optimizer of bitsandbytes, which has no types."""

    args: LibrarySettings
    defaults: JsonObject
    optimizer_name: str
    param_groups: list[ParameterGroup]
    state: defaultdict[Tensor, OfPiece]

    def init_state(self, group: ParameterGroup, tensor: Tensor, group_index: int, index: int, /) -> None:
        """Make the state of a tensor."""

    def step(self) -> object:
        """Update the tensors of `param_groups`."""


NewMoments: TypeAlias = Callable[[Sequence[Tensor], Tensor, Tensor, ParameterGroup], None]
"""Changes moments in place as a step does, given the gradient and the weights before the step."""


def _of_adam(moments: Sequence[Tensor], gradient: Tensor, _: Tensor, group: ParameterGroup) -> None:
    first, second = moments
    first.mul_(group["betas"][0]).add_(gradient, alpha=1.0 - group["betas"][0])
    second.mul_(group["betas"][1]).addcmul_(gradient, gradient, value=1.0 - group["betas"][1])


def _of_ademamix(moments: Sequence[Tensor], gradient: Tensor, weights: Tensor, group: ParameterGroup) -> None:
    fast, slow, second = moments
    _of_adam((fast, second), gradient, weights, group)
    slow.mul_(group["betas"][2]).add_(gradient, alpha=1.0 - group["betas"][2])


def _of_lion(moments: Sequence[Tensor], gradient: Tensor, _: Tensor, group: ParameterGroup) -> None:
    moments[0].mul_(group["betas"][1]).add_(gradient, alpha=1.0 - group["betas"][1])


def _of_rmsprop(moments: Sequence[Tensor], gradient: Tensor, weights: Tensor, group: ParameterGroup) -> None:
    gradient = gradient.add(weights, alpha=group["weight_decay"])
    moments[0].mul_(group["betas"][0]).addcmul_(gradient, gradient, value=1.0 - group["betas"][0])


NEW_MOMENTS: Mapping[str, NewMoments] = {
    "adam": _of_adam,
    "ademamix": _of_ademamix,
    "lion": _of_lion,
    "rmsprop": _of_rmsprop,
}
"""How a step changes the moments, by the name of the algorithm in bitsandbytes."""


@dataclass(frozen=True, kw_only=True)
class SharedBlocks:
    """The parameters in a tensor with blocks that several ranks hold elements of.

    Attributes:
        offsets: name of a parameter -> index of its first block among those of all these parameters.
        count: number of blocks.
        groups: process groups whose ranks share blocks.
    """

    offsets: Mapping[str, int] = field(default_factory=dict)
    count: int = 0
    groups: Sequence[dist.ProcessGroup] = ()


class BlockwiseOptimizer(Optimizer):
    """An optimizer of bitsandbytes for parameters, or for the flat tensors into which ZeRO puts them.

    Attributes:
        pieces: tensor that is updated -> its pieces; set by `attach`.
        shared: tensor that is updated -> the blocks that it shares with other ranks.
    """

    def __init__(self, groups: list[ParameterGroup], library: LibraryOptimizer, names: Mapping[Tensor, str]) -> None:
        super().__init__(groups, library.defaults)
        self.pieces: dict[Tensor, list[StatePiece]] = {}
        self.shared: dict[Tensor, SharedBlocks] = {}
        self._library = library
        self._names = names
        self._least = library.args.min_8bit_size
        self._moments = MOMENTS[library.optimizer_name]
        self._device = torch.device("cpu")

    def attach(self, engine: DeepSpeedEngine, groups: Groups) -> None:
        """Find the blocks in the tensors that the engine updates; all ranks call it.

        Raises UserError if states are on NVMe, or ranks cannot share blocks.
        """
        if sub_groups_on_nvme(engine.optimizer):
            raise UserError(
                f"optimizer {self._name} keeps states that DeepSpeed cannot move to NVMe: set offload_optimizer.device "
                'to "cpu", or use another optimizer'
            )
        self.find_blocks(list(updated_tensors(engine.optimizer)), groups.tp_group, engine.device)

    def find_blocks(
        self, updated: Sequence[UpdatedTensor], tensor: dist.ProcessGroup | None, device: torch.device
    ) -> None:
        """Find the blocks in the tensors that are updated; all ranks call it.

        Args:
            tensor: tensor-parallel group.
            device: device for collectives.
        """
        self._device = device
        least = self._least if self._library.args.optim_bits == 8 else 2**63
        for each in updated:
            found = [pieces_of(self._names[local.parameter], local, least) for local in parameter_slices(each)]
            self.pieces[each.tensor] = [piece for pieces in found for piece in pieces]
        own = sorted({piece.name for pieces in self.pieces.values() for piece in pieces if piece.is_cut})
        cut = {name for theirs in all_gather_object(own) for name in theirs}
        if cut and tensor is not None:
            self._require_equal(updated, tensor)
        self.shared = {each.tensor: self._shared(each, cut, tensor) for each in updated}
        self.state = States(self.pieces, self._moments)

    @property
    def _name(self) -> str:
        return type(self._library).__name__

    def _require_equal(self, updated: Sequence[UpdatedTensor], tensor: dist.ProcessGroup) -> None:
        """Raise UserError if tensor-parallel ranks have other parameters in their tensors, as unequal shards may."""
        mine = [sorted(self._names[local.parameter] for local in parameter_slices(each)) for each in updated]
        if any(theirs != mine for theirs in all_gather_object(mine, tensor)):
            raise UserError(
                f"optimizer {self._name}: tensor-parallel ranks have shards of unequal sizes, and share blocks of "
                "8-bit states: use another optimizer, or set another tensor_parallel.autotp_size"
            )

    def _shared(self, updated: UpdatedTensor, cut: set[str], tensor: dist.ProcessGroup | None) -> SharedBlocks:
        """Return the shared blocks of a tensor, given the names of all parameters with cut blocks."""
        offsets: dict[str, int] = {}
        over: list[dist.ProcessGroup] = []
        count = 0
        for local in sorted(parameter_slices(updated), key=lambda each: self._names[each.parameter]):
            name = self._names[local.parameter]
            shard = shard_of(local.parameter)
            if name not in cut:
                continue
            if shard is not None and (shard.over_data or shard.padding):
                raise UserError(
                    f"optimizer {self._name}: the blocks of 8-bit states of {name} are cut between ranks that cannot "
                    f"share them: use another optimizer, or set optimizer.params.min_8bit_size above its size"
                )
            offsets[name] = count
            count += -(-torch.Size(local.shape if shard is None else shard.full_shape).numel() // BLOCK)
            for group in (local.group, None if shard is None else tensor):
                if group is not None and group not in over:
                    over.append(group)
        return SharedBlocks(offsets=offsets, count=count, groups=over)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the parameters with a gradient; return the result of `closure`."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if parameter in self.pieces:
                    self._update(parameter, group)
                elif self.pieces:  # a trial of what states there are: of a tensor too small for blocks
                    self._update_trial(parameter, group)
        return loss

    def _update_trial(self, parameter: Tensor, group: ParameterGroup) -> None:
        found = self._by_library(parameter, parameter.grad, group, {}, has_blocks=False)
        self.state[parameter] = {"step": found["step"], **{each.name: each.kept(found) for each in self._moments}}

    def _update(self, parameter: Tensor, group: ParameterGroup) -> None:
        """Update a tensor, which consists of pieces."""
        parameter.data = parameter.data.contiguous()
        assert parameter.grad is not None
        weights = parameter.data.view(-1)
        gradient = parameter.grad.reshape(-1)
        pieces = self.pieces[parameter]
        states = self.state[parameter]
        if not states.of_pieces:
            states.of_pieces = [self._begun(piece, weights[piece.place], group, states["step"]) for piece in pieces]
        if states.loaded:
            self._quantise_loaded(parameter, states)
        changed: list[_Changed] = []
        for piece, state in zip(pieces, states.of_pieces, strict=True):
            own = weights[piece.place]
            change = gradient[piece.place]
            if piece.is_cut:
                changed.append(self._update_cut(piece, own, change, group, state))
            else:
                self._by_library(own, change, group, state, has_blocks=self._has_blocks(piece))
        self._quantise_shared(parameter, changed)
        states["step"] += 1

    def _has_blocks(self, piece: StatePiece) -> bool:
        return bool(self._library.args.optim_bits == 8 and piece.size >= self._least)

    def _begun(self, piece: StatePiece, weights: Tensor, group: ParameterGroup, step: int) -> OfPiece:
        """Return a piece's states before the first step, as bitsandbytes makes them."""
        state = self._by_library(weights, None, group, {}, has_blocks=self._has_blocks(piece))
        if piece.is_cut:
            blocks = len(piece.cells(weights.device).blocks)
            for name in [name for name in state if name.startswith("absmax")]:
                state[name] = state[name].new_zeros(*state[name].shape[:-1], blocks)
        return {**state, "step": step}

    def _by_library(
        self, weights: Tensor, gradient: Tensor | None, group: ParameterGroup, state: OfPiece, *, has_blocks: bool
    ) -> OfPiece:
        """Have bitsandbytes update `weights` in place, and their state, which is also returned.

        Without a gradient only a state is made.
        """
        library = self._library
        tensor = weights.detach()
        tensor.grad = gradient
        library.args.min_8bit_size = 0 if has_blocks else 2**63
        library.param_groups = [{**group, "params": [tensor]}]
        library.state = defaultdict(dict, {tensor: state})
        if gradient is None:
            library.init_state(library.param_groups[0], tensor, 0, 0)
        else:
            library.step()
        found: OfPiece = library.state[tensor]
        library.state = defaultdict(dict)
        return found

    # Blocks that several ranks hold elements of.

    def _update_cut(
        self, piece: StatePiece, weights: Tensor, gradient: Tensor, group: ParameterGroup, state: OfPiece
    ) -> _Changed:
        """Update the weights of cut blocks, and return their new states in float32, which are not quantised yet."""
        cells = piece.cells(weights.device)
        spread = cells.spread(weights)
        change = cells.spread(gradient)
        kept = {name: cells.spread(value) for name, value in state.items() if name.startswith("state")}
        moments = [
            cells.spread(dequantised(each.kept(kept), each.scales(state), each.of_codes(state))[cells.places])
            for each in self._moments
        ]
        NEW_MOMENTS[self._library.optimizer_name](moments, change.float(), spread.float(), group)
        # The new weights depend on the old states alone: what bitsandbytes makes of copies of these is thrown away.
        scales = {name: value.clone() for name, value in state.items() if name.startswith("absmax")}
        self._by_library(spread, change, group, {**state, **kept, **scales}, has_blocks=True)
        weights.copy_(spread[cells.places])
        state["step"] += 1
        return _Changed(name=piece.name, cells=cells, state=state, values=moments)

    def _quantise_shared(self, parameter: Tensor, changed: Sequence[_Changed], *, loaded: bool = False) -> None:
        """Quantise new states of cut blocks with the scales of whole blocks; all ranks that share them call it.

        `loaded` states, from a checkpoint, are those of codes.
        """
        shared = self.shared[parameter]
        if not shared.count:
            return
        largest = torch.zeros(len(self._moments), shared.count, device=self._device)
        for each in changed:
            places = (shared.offsets[each.name] + each.cells.blocks).to(self._device)
            for row, values in zip(largest, each.values, strict=True):
                row[places] = values.view(-1, BLOCK).abs().amax(dim=1).to(self._device)
        for group in shared.groups:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        for each in changed:
            places = (shared.offsets[each.name] + each.cells.blocks).to(self._device)
            for moment, row, values in zip(self._moments, largest, each.values, strict=True):
                scales = row[places].to(values.device)
                of_codes = moment.of_codes(each.state)
                if loaded:
                    codes = nearest_codes(values, scales, of_codes)
                else:
                    # A block has a free place if other ranks hold elements of it. There stands its scale, which
                    # bitsandbytes takes for the largest element.
                    incomplete, free = each.cells.lacking
                    values[free] = scales[incomplete]
                    codes = quantize_blockwise(values, code=of_codes, blocksize=BLOCK)[0]
                moment.kept(each.state).copy_(codes[each.cells.places])
                moment.scales(each.state).copy_(scales)

    def _quantise_loaded(self, parameter: Tensor, states: TensorStates) -> None:
        """Quantise the states from a checkpoint; all ranks that share blocks call it."""
        loaded = [tensor.view(-1) for tensor in states.loaded.values()]
        changed: list[_Changed] = []
        for piece, state in zip(self.pieces[parameter], states.of_pieces, strict=True):
            values = [tensor[piece.place].to(parameter.device) for tensor in loaded]
            if piece.is_cut:
                cells = piece.cells(parameter.device)
                values = [cells.spread(each) for each in values]
                changed.append(_Changed(name=piece.name, cells=cells, state=state, values=values))
                continue
            for moment, own in zip(self._moments, values, strict=True):
                if self._has_blocks(piece):
                    scales = largest_of_blocks(own)
                    moment.scales(state).copy_(scales)
                    own = nearest_codes(own, scales, moment.of_codes(state))
                moment.kept(state).copy_(own)
        self._quantise_shared(parameter, changed, loaded=True)
        states.loaded.clear()


@dataclass(frozen=True, kw_only=True)
class _Changed:
    """New states of a piece with cut blocks.

    Attributes:
        state: the piece's state, which they are to be quantised into.
        values: the new moments in float32 [blocks * BLOCK], at the places of `cells`.
    """

    name: str
    cells: Cells
    state: OfPiece
    values: Sequence[Tensor]


def _made(
    kind: str, groups: list[ParameterGroup], options: JsonObject, names: Mapping[Tensor, str]
) -> BlockwiseOptimizer:
    """Return bitsandbytes' optimizer `kind` for the parameters in `groups`.

    `options` are those of its constructor; `names`: parameter -> its name. Raises UserError if the device has no such
    optimizer, or the constructor refuses an option.
    """
    device = next((parameter.device.type for group in groups for parameter in group["params"]), "cpu")
    if device not in DEVICES:
        raise UserError(f"optimizer {kind}: bitsandbytes has none on {device}: use another optimizer")
    if options.get("momentum"):
        raise UserError(f"optimizer {kind}: bitsandbytes has no momentum, and would ignore it: remove it")
    try:
        library = getattr(bitsandbytes.optim, kind)([torch.zeros(1)], **options)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise UserError(f"optimizer {kind}: {error}") from error
    if device == "cpu":
        library.is_paged = False  # bitsandbytes would warn that a CPU has no pages
    return BlockwiseOptimizer(groups, library, names)


def _made_ademamix(
    kind: str, groups: list[ParameterGroup], options: JsonObject, names: Mapping[Tensor, str]
) -> BlockwiseOptimizer:
    """Return AdEMAMix, whose third beta is bitsandbytes' own if `options` have two, as in HuggingFace's Trainer.

    Raises UserError as `_made`, and for schedules of alpha and of the third beta.
    """
    if scheduled := [name for name in ("t_alpha", "t_beta3") if options.get(name)]:
        raise UserError(f"optimizer {kind}: {scheduled[0]} is not supported: remove it")
    betas = options.get("betas", DEFAULT_BETAS)
    if len(betas) not in (2, 3):
        raise UserError(f"optimizer {kind}: betas are two or three numbers, not {len(betas)}")
    return _made(kind, groups, {**options, "betas": (*betas, *DEFAULT_BETAS[len(betas) :])}, names)


ADAM_8BIT = partial(_made, "Adam8bit")
PAGED_ADAM_8BIT = partial(_made, "PagedAdam8bit")
ADAMW_8BIT = partial(_made, "AdamW8bit")
PAGED_ADAMW_8BIT = partial(_made, "PagedAdamW8bit")
LION_8BIT = partial(_made, "Lion8bit")
PAGED_LION_8BIT = partial(_made, "PagedLion8bit")
PAGED_ADAMW = partial(_made, "PagedAdamW32bit")
PAGED_LION = partial(_made, "PagedLion32bit")
RMSPROP = partial(_made, "RMSprop32bit")
RMSPROP_8BIT = partial(_made, "RMSprop8bit")
ADEMAMIX = partial(_made_ademamix, "AdEMAMix")
ADEMAMIX_8BIT = partial(_made_ademamix, "AdEMAMix8bit")
PAGED_ADEMAMIX = partial(_made_ademamix, "PagedAdEMAMix")
PAGED_ADEMAMIX_8BIT = partial(_made_ademamix, "PagedAdEMAMix8bit")
