"""The exchange of heads, as layers outside of it see it."""

from __future__ import annotations

import torch

from harness.context_parallel.attention import SharedAttention
from harness.parallel.context.sequence_shards import ALONE
from tests.support.models import model_of


def test_a_layer_that_exchanges_nothing_is_one_graph_also_after_an_exchange() -> None:
    """As in a run with `compile` that has tried a layer in tiles of queries before."""
    model = model_of("llama", num_hidden_layers=1)
    ids = torch.arange(24).view(2, 12)
    with SharedAttention(context=ALONE, length=12).active():
        wanted = model(ids).logits
    (layer,) = model.model.layers
    layer.compile(backend="eager", fullgraph=True)  # which refuses a break
    assert torch.equal(model(ids).logits, wanted)
