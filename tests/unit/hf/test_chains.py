"""Modules around the layers are called without the model's forward only where it adds nothing to their calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.ctrl.modeling_ctrl import positional_encoding

from harness.hf.forward.chains import Chains, find_chains
from harness.hf.forward.outer_forward import OuterForward
from harness.hf.skeleton import build_skeleton
from tests.support.models import config

HEAD = ("model.norm", "lm_head")
OF_BLOOM = ("transformer.word_embeddings", "transformer.word_embeddings_layernorm")


def outer_of(family: str, **changes: Any) -> OuterForward:
    return OuterForward(build_skeleton(config(family, **changes)), torch.device("cpu"))


@pytest.mark.parametrize(
    ("family", "changes", "chains"),
    [
        ("llama", {}, Chains(("model.embed_tokens",), HEAD)),
        ("bloom", {}, Chains(OF_BLOOM, ("transformer.ln_f", "lm_head"))),
        ("gpt2", {}, Chains(None, ("transformer.ln_f", "lm_head"))),  # it adds the embedding of the positions
        ("gemma2", {}, Chains(("model.embed_tokens",), None)),  # it bounds the logits
        ("gpt_neox", {"hidden_dropout": 0.1}, Chains(None, ("gpt_neox.final_layer_norm", "lm_head"))),  # in training
        ("mamba", {}, Chains(("backbone.embeddings",), None)),  # it casts the logits, which shows only in 16 bits
        ("granite", {"embedding_multiplier": 2.0, "logits_scaling": 2.0}, Chains()),
        ("gemma4_text", {}, Chains()),  # layers read what modules before them return
    ],
)
def test_a_chain_is_what_the_forward_calls_and_nothing_in_between(
    family: str, changes: dict[str, Any], chains: Chains
) -> None:
    assert outer_of(family, **changes).chains == chains


def test_a_tensor_that_was_written_to_between_two_modules_breaks_the_chain() -> None:
    outer = outer_of("llama")
    outer.model.get_submodule("lm_head").register_forward_pre_hook(lambda _module, given: (given[0].add_(1),))
    assert find_chains(outer) == Chains(("model.embed_tokens",), None)


def test_the_search_leaves_the_models_tables_as_they_were() -> None:
    model = build_skeleton(config("ctrl"))
    before = positional_encoding(model.config.n_positions, model.config.n_embd, torch.float32)
    outer = OuterForward(model, torch.device("cpu"))
    assert torch.equal(outer.model.transformer.pos_encoding, before)
