"""Determine whether a model's forward, around its decoder layers, only calls modules one after the other.

In most decoders the first layer's hidden state is the embedding of the token ids, and the logits are the head's output
for the normed last hidden state. Then a pipeline layer calls these modules itself, and the model's own forward need not
run. Anything else that the forward does with a tensor between two modules (a scale, a dropout, a cast) shows: the next
module, the first layer or the caller receives another tensor than the previous module returned.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from harness.hf.forward.payload import Tokens
from harness.hf.forward.placeholders import ForwardRun, PlaceholderForward
from harness.hf.layers.call import Call, LayerInputs
from harness.hf.layers.dry_run import CANNOT_RUN
from harness.parallel.generators import own_generators

Chain: TypeAlias = tuple[str, ...]
"""Names of modules; each takes only the tensor that the previous one returns."""
BATCH, SEQUENCE = 2, 8


@dataclass(frozen=True)
class Chains:
    """The modules before and after the decoder layers if they form a chain, else None.

    Attributes:
        prologue: its first module takes the token ids; the last one returns the first layer's hidden state.
        epilogue: its first module takes the last layer's hidden state; the last one returns the logits.
    """

    prologue: Chain | None = None
    epilogue: Chain | None = None


class ChainProbe(ForwardRun):
    """A run in which every module and layer returns a new tensor, and whose path is followed."""

    def __init__(self, forward: PlaceholderForward, dtype: torch.dtype) -> None:
        super().__init__(self._at_layer, dtype)
        self._depth = len(forward.layers)
        self._chain: list[str] | None = []
        self._prologue: list[str] | None = None
        self._made = torch.zeros(BATCH, SEQUENCE, dtype=torch.long, device=forward.device)
        # Draws of the forward must not advance the run's generators.
        with torch.no_grad(), own_generators(0, forward.device):
            logits = forward.run(Tokens(self._made), self)
        self._follow(logits)
        # An empty chain counts as none: without modules there is nothing to call.
        prologue, epilogue = (tuple(chain) if chain else None for chain in (self._prologue, self._chain))
        self.chains = Chains(prologue, epilogue)

    def module_output(self, module: str, like: Tensor, arguments: Call) -> Tensor:
        """Return a new tensor of the shape of `like` (any shape)."""
        args, kwargs = arguments
        self._follow(args[0] if len(args) == 1 and not kwargs else None)
        if self._chain is not None:
            self._chain.append(module)
        self._made = super().module_output(module, like, arguments)
        return self._made

    def _at_layer(self, index: int, _inputs: LayerInputs, hidden: Tensor) -> Tensor:
        if index == 0:
            self._follow(hidden)
            self._prologue = self._chain
        if index == self._depth - 1:
            # A copy: `hidden` itself may have been written to, or be the tensor that the prologue returned.
            self._chain = []
            self._made = hidden.clone()
            return self._made
        return hidden

    def _follow(self, given: object) -> None:
        """Break the chain unless `given` is the last tensor made, or a view of all of it, and was never written to."""
        made = self._made
        same = (
            isinstance(given, Tensor)
            and (given.dtype, given.shape, given.stride()) == (made.dtype, made.shape, made.stride())
            and given.storage_offset() == made.storage_offset()
            # torch has no public names for the id of a storage without an address, nor for a tensor's version.
            and given.untyped_storage()._cdata == made.untyped_storage()._cdata  # noqa: SLF001
            # Of a tensor made here, so any write in place came from the forward.
            and given._version == 0  # noqa: SLF001
        )
        if not same:
            self._chain = None


def find_chains(forward: PlaceholderForward) -> Chains:
    """Return the chains that hold in training and evaluation, in float32 and bfloat16."""
    # A dropout shows only in training, and a cast only in one of the dtypes.
    found: set[Chains] = set()
    training = forward.model.training
    buffers = [(module, dict(module.named_buffers(recurse=False))) for module in forward.model.modules()]
    for mode in (True, False):
        forward.model.train(mode)
        for dtype in (torch.float32, torch.bfloat16):
            probe = Chains()
            # A forward that cannot run with placeholders is not a chain.
            with suppress(*CANNOT_RUN):
                probe = ChainProbe(forward, dtype).chains
            found.add(probe)
    forward.model.train(training)
    # CTRL's forward casts its table of positions to the dtype of its input and keeps the result, which bfloat16 rounds.
    for module, before in buffers:
        for name, buffer in before.items():
            setattr(module, name, buffer)
    prologues = {chains.prologue for chains in found}
    epilogues = {chains.epilogue for chains in found}
    return Chains(prologues.pop() if len(prologues) == 1 else None, epilogues.pop() if len(epilogues) == 1 else None)
