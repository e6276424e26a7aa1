"""A user's own metrics of an evaluation: `compute_metrics` of all predictions and labels, as in HuggingFace."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist

from harness.config.values.json_object import JsonObject
from harness.errors import UserError
from harness.resilience.process.activity import inside
from harness.training.engine.losses import Labels, Outputs
from harness.training.engine.outputs import Preprocess

if TYPE_CHECKING:
    from transformers.trainer_utils import EvalPrediction


@dataclass(frozen=True, kw_only=True)
class OwnMetrics:
    """What the user computes.

    Attributes:
        compute: of an EvalPrediction, makes numbers by name; None for none.
        preprocess: of logits and labels of a micro-batch, makes what is kept of the logits.
    """

    compute: Callable[[EvalPrediction], Mapping[str, object]] | None = None
    preprocess: Preprocess | None = None

    def of(self, predictions: Outputs, labels: Labels, prefix: str) -> JsonObject:
        """Return the metrics by names that begin with the prefix; all ranks call it and get those of rank 0.

        An exception on rank 0 is raised there; a UserError on the others.
        """
        if self.compute is None:
            return {}
        from transformers.trainer_utils import EvalPrediction

        sent: list[JsonObject | None] = [None]
        try:
            with inside("compute_metrics"):  # on all ranks: the others wait for rank 0
                if dist.get_rank() == 0:
                    found = self.compute(EvalPrediction(predictions=predictions, label_ids=labels))
                    sent = [_named(found, prefix)]
        finally:
            dist.broadcast_object_list(sent, src=0)
        if sent[0] is None:
            raise UserError("compute_metrics failed on rank 0")
        return sent[0]


def _named(found: object, prefix: str) -> JsonObject:
    if not isinstance(found, Mapping):
        raise UserError(f"compute_metrics returned {type(found).__name__}: it must return a dict of numbers by name")
    from transformers.trainer_utils import denumpify_detensorize

    plain = denumpify_detensorize(dict(found))
    named = {str(name): value for name, value in plain.items()}
    return {name if name.startswith(f"{prefix}_") else f"{prefix}_{name}": value for name, value in named.items()}
