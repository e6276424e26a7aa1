"""What each pipeline layer of a decoder costs to compute, counted from its modules and the config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from transformers import PretrainedConfig

from harness.config.model.shape import experts_of
from harness.parallel.pipeline.costs import LayerCost


def layer_costs(
    layers: Sequence[list[nn.Module]],
    config: PretrainedConfig,
    vocab_size: int,
    sequence_length: int,
    checkpointed: bool,
) -> list[LayerCost]:
    """Return the cost of each pipeline layer.

    Args:
        layers: the modules of the prologue, of each decoder layer, and of the epilogue.
        vocab_size: the number of logits.
        sequence_length: tokens in a sample.
        checkpointed: whether the activations of decoder layers are recomputed.
    """
    experts = experts_of(config.get_text_config(decoder=True).to_dict())
    first, *middle, last = (_weights(modules, *experts) for modules in layers)
    return [
        LayerCost(
            matmul_parameters=first.matrices,
            lookup_width=first.lookup_width,
            vector_parameters=first.vectors,
        ),
        *(
            LayerCost(
                matmul_parameters=weights.matrices,
                vector_parameters=weights.vectors,
                attention_width=_attention_width(config, index),
                sequence_length=sequence_length,
                checkpointed=checkpointed,
            )
            for index, weights in enumerate(middle)
        ),
        LayerCost(matmul_parameters=last.matrices, vector_parameters=last.vectors, logits=vocab_size),
    ]


@dataclass(frozen=True)
class _Weights:
    matrices: int
    vectors: int
    lookup_width: int


def _weights(modules: list[nn.Module], experts: int, chosen: int) -> _Weights:
    """Count the parameters by what is done with them: matrices multiply, tables are looked up, vectors scale.

    Of matrices that stand for `experts` experts, which are one tensor, a token meets the `chosen` ones.
    """
    tables = [child for module in modules for child in module.modules() if isinstance(child, nn.Embedding)]
    looked_up = {id(parameter) for table in tables for parameter in table.parameters()}
    rest = [p for module in modules for p in module.parameters() if id(p) not in looked_up]
    return _Weights(
        matrices=sum(
            p.numel() // experts * chosen if p.dim() > 2 and len(p) == experts else p.numel()
            for p in rest
            if p.dim() > 1
        ),
        vectors=sum(p.numel() for p in rest if p.dim() == 1),
        lookup_width=sum(table.embedding_dim for table in tables),
    )


def _attention_width(config: PretrainedConfig, index: int) -> int:
    """Return attention heads x head size of decoder layer `index`, as far as the config says."""
    text = config.get_text_config(decoder=True)
    layers = getattr(text, "per_layer_config", None) if hasattr(text, "num_hidden_layers") else None
    text = layers[index] if layers and index < len(layers) else text
    heads = getattr(text, "num_attention_heads", None)
    size = getattr(text, "head_dim", None) or (text.hidden_size // heads if heads else 0)
    return heads * size if heads else 0
