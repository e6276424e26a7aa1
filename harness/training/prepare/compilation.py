"""What torch.compile cannot compile in a run, found before the model is built."""

from __future__ import annotations

import torch

from harness.errors import UserError
from harness.training.prepare.trainable import TrainableModel
from harness.wording import one_of


def require_compilable(trainable: TrainableModel, backend: str) -> None:
    """Raise UserError for a backend that torch does not have, and for layers that cannot be compiled."""
    known = torch.compiler.list_backends(exclude_tags=())
    if backend not in known:
        raise UserError(f"compile.backend: torch has no backend {backend!r}; it has {one_of(known)}")
    if trainable.causal is None:
        raise UserError(
            "compile.enabled compiles the decoder layers of a HuggingFace model; for a list of layers remove it, and "
            "compile what you like in the layers themselves"
        )
    if trainable.traits.draws:
        raise UserError(
            "compile.enabled: the model draws random numbers in its layers, of which the compiler would make others; "
            "set its dropout rates and --neftune_noise_alpha to 0, or remove compile.enabled"
        )
