"""The states of a tensor as bitsandbytes keeps them, which a checkpoint reads and writes in float32."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from harness.config.values.json_object import JsonObject
from harness.extras.blockwise.blocks import BLOCK, StatePiece

OfPiece: TypeAlias = JsonObject
"""The state of a piece: `step`, and `state1` as 8-bit codes with `qmap1` and `absmax1`, or in float32; `state2` too."""


@dataclass(frozen=True)
class Moment:
    """A value that an optimizer keeps for each weight.

    Attributes:
        name: its name in checkpoints, that of the same moment elsewhere.
        number: 1 or 2, of the state of bitsandbytes that holds it.
        row: its row, if that state holds several moments.
    """

    name: str
    number: int
    row: int | None = None

    def kept(self, state: OfPiece) -> Tensor:
        """Return its 8-bit codes, or its values in float32."""
        return self._of(state[f"state{self.number}"])

    def scales(self, state: OfPiece) -> Tensor:
        """Return the scale of each block."""
        return self._of(state[f"absmax{self.number}"])

    def of_codes(self, state: OfPiece) -> Tensor:
        """Return the values [256] of codes."""
        found: Tensor = state[f"qmap{self.number}"]
        return found

    def _of(self, tensor: Tensor) -> Tensor:
        return tensor if self.row is None else tensor[self.row]


MOMENTS: Mapping[str, Sequence[Moment]] = {
    "adam": (Moment("exp_avg", 1), Moment("exp_avg_sq", 2)),
    "ademamix": (Moment("exp_avg", 1, row=0), Moment("exp_avg_slow", 1, row=1), Moment("exp_avg_sq", 2)),
    "lion": (Moment("exp_avg", 1),),
    "rmsprop": (Moment("square_avg", 1),),
}
"""What each algorithm of bitsandbytes keeps, by its name there."""


class TensorStates(JsonObject):
    """The states of a tensor that the optimizer updates: `step`, and those of each piece.

    Moments (`exp_avg`) are there under the names of other optimizers, too: as float32 tensors in the host's memory,
    dequantised when they are asked for. From these values the same codes are made again.

    Attributes:
        of_pieces: the states by piece, in the order of `pieces`.
        loaded: moments from a checkpoint, by name, that the next step quantises.
    """

    def __init__(
        self,
        shape: torch.Size,
        pieces: Sequence[StatePiece],
        moments: Sequence[Moment],
        loaded: JsonObject | None = None,
    ) -> None:
        given = loaded or {"step": 0}
        super().__init__(step=given["step"])
        self.of_pieces: list[OfPiece] = []
        self.loaded: dict[str, Tensor] = {each.name: given[each.name].cpu() for each in moments if each.name in given}
        self._shape, self._pieces, self._moments = shape, pieces, moments

    def __missing__(self, name: str) -> Tensor:
        if name in self.loaded:
            return self.loaded[name]
        moment = next((each for each in self._moments if each.name == name), None)
        if moment is None:
            raise KeyError(name)
        whole = torch.zeros(self._shape.numel())
        for piece, state in zip(self._pieces, self.of_pieces, strict=True):
            whole[piece.place] = values_to_save(piece, state, moment).cpu()
        return whole.view(self._shape)

    def get(self, name: str, default: object = None) -> object:
        try:
            return self[name]
        except KeyError:
            return default

    def values(self) -> list[object]:  # type: ignore[override]  # a list is enough for all who ask
        """Return the step and the tensors in memory, of which a dry run counts the bytes."""
        return [self["step"], *self.loaded.values(), *(chain.from_iterable(map(_kept, self.of_pieces)))]


def _kept(state: OfPiece) -> Iterator[Tensor]:
    """Yield the tensors that a piece has for itself."""
    return (value for name, value in state.items() if isinstance(value, Tensor) and not name.startswith("qmap"))


class States(defaultdict[Tensor, JsonObject]):
    """The states of an optimizer by tensor. Those of a checkpoint wait in the host's memory for the next step."""

    def __init__(self, pieces: Mapping[Tensor, Sequence[StatePiece]], moments: Sequence[Moment]) -> None:
        super().__init__()
        self._pieces, self._moments = pieces, moments

    def __missing__(self, tensor: Tensor) -> TensorStates:
        found = TensorStates(tensor.shape, self._pieces[tensor], self._moments)
        super().__setitem__(tensor, found)
        return found

    def __setitem__(self, tensor: Tensor, loaded: JsonObject) -> None:
        super().__setitem__(tensor, TensorStates(tensor.shape, self._pieces[tensor], self._moments, loaded))


def dequantised(codes: Tensor, scales: Tensor, values: Tensor) -> Tensor:
    """Return the float32 values [n] of the codes [n] of blocks with these scales; `values` [256] are those of codes."""
    return values[codes.int()] * scales.repeat_interleave(BLOCK)[: len(codes)]


def largest_of_blocks(values: Tensor) -> Tensor:
    """Return the largest absolute element of each block of values [n]."""
    return pad(values.abs(), (0, -len(values) % BLOCK)).view(-1, BLOCK).amax(dim=1)


def nearest_codes(values: Tensor, scales: Tensor, of_codes: Tensor) -> Tensor:
    """Return the codes [n] nearest to the values [n] of blocks with these scales; `of_codes` [256] are their values.

    Of the values of codes these are the same codes. bitsandbytes' own search on a CPU misses some of the smallest.
    """
    scale = scales.repeat_interleave(BLOCK)[: len(values)]
    normalised = torch.where(scale > 0, values / scale, 0.0)
    return torch.bucketize(normalised, (of_codes[1:] + of_codes[:-1]) / 2).to(torch.uint8)


def values_to_save(piece: StatePiece, state: OfPiece, moment: Moment) -> Tensor:
    """Return the values [length] of a piece's moment, from which quantising makes the same codes and scales.

    The codes of a signed state have 1, but no -1: a block whose largest element is negative would get a smaller scale
    from its dequantised values. So elements with the least code get minus the scale, which has the same code.
    """
    kept = moment.kept(state)
    if kept.dtype != torch.uint8:
        return kept
    values = moment.of_codes(state).clone()
    scales = moment.scales(state)
    if values[0] < 0:
        values[0] = -1.0
    if not piece.is_cut:
        return dequantised(kept, scales, values)
    saved: Tensor = values[kept.int()] * scales[piece.cells(kept.device).places // BLOCK]
    return saved
