"""A model in memory keeps its own modules; what its trained copy could not keep is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from harness.errors import UserError
from harness.hf.skeleton import ModelSource
from harness.parallel.comm import TensorParallel
from harness.training.prepare.trainable import model_source
from tests.support.layers import prepare


def tiny() -> Any:
    sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2)
    sizes |= dict(num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=32)
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING["llama"](**sizes, tie_word_embeddings=False))


def own_forward(module: nn.Module) -> None:
    module.forward = lambda hidden: hidden  # type: ignore[method-assign]


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "forward hook": lambda module: module.register_forward_hook(lambda *_: None),
    "forward pre-hook": lambda module: module.register_forward_pre_hook(lambda *_: None),
    "backward hook": lambda module: module.register_full_backward_hook(lambda *_: None),
    "forward set on the instance": own_forward,
    "parametrized": lambda module: parametrizations.weight_norm(module.down_proj),  # type: ignore[arg-type]
    "hook on its gradient": lambda module: module.down_proj.weight.register_hook(lambda grad: grad),  # type: ignore
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_would_be_lost_is_refused_by_name(what: str) -> None:
    model = tiny()
    CHANGES[what](model.model.layers[1].mlp)
    with pytest.raises(UserError, match=rf"^model\.layers\.1\.mlp.*{what}"):
        ModelSource.of_model(model)


def test_a_loss_of_the_models_own_is_refused() -> None:
    model = tiny()
    model.loss_function = lambda logits, labels, **_: logits.mean()
    with pytest.raises(UserError, match="has a loss_function of its own"):
        ModelSource.of_model(model)


def test_hooks_of_transformers_are_no_obstacle() -> None:
    model = tiny()
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    model(torch.zeros(1, 4, dtype=torch.long), output_hidden_states=True)
    assert ModelSource.of_model(model).model is model


def test_the_skeleton_is_the_model_itself_on_meta() -> None:
    model = tiny()
    model.model.layers[0].requires_grad_(False)
    model.lm_head.weight = model.model.embed_tokens.weight
    model.model.layers[1].mlp = nn.Linear(16, 16)
    model.eval()
    skeleton: Any = ModelSource.of_model(model).skeleton()
    assert skeleton.training and not model.training
    assert all(parameter.is_meta for parameter in skeleton.parameters())
    assert not any(parameter.requires_grad for parameter in skeleton.model.layers[0].parameters())
    assert skeleton.lm_head.weight is skeleton.model.embed_tokens.weight
    assert type(skeleton.model.layers[1].mlp) is nn.Linear


def test_a_replaced_module_is_not_split() -> None:
    model = tiny()
    model.model.layers[1].mlp = nn.Linear(16, 16)
    with pytest.raises(UserError, match=r"model\.layers\.1\.mlp is a Linear .*autotp_size to 1"):
        prepare(ModelSource.of_model(model), TensorParallel(rank=0, size=2))


def test_a_saved_buffer_that_no_layer_would_hold_is_refused_by_name() -> None:
    model = tiny()
    model.model.statistics = nn.BatchNorm1d(4, affine=False)
    with pytest.raises(UserError, match=r"model\.statistics\.running_mean is saved with the model but belongs to no"):
        prepare(ModelSource.of_model(model))


def test_what_is_no_model_is_told() -> None:
    for wrapper in (nn.DataParallel(tiny()), torch.compile(tiny(), backend="eager")):
        with pytest.raises(UserError, match="give the model inside"):
            model_source(wrapper)  # type: ignore[arg-type]
    for other in (None, nn.Linear(2, 2)):
        with pytest.raises(UserError, match="is not a model"):
            model_source(other)  # type: ignore[arg-type]
