"""A causal decoder for the text part of a vision-language model, if transformers has no class for it.

In such a family only the whole model has a head. The decoder combines the text model with that head, so for text its
logits are those of the whole model, with the scale and the soft cap of the config.
"""

from __future__ import annotations

import importlib
from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast


class TextDecoder(PreTrainedModel, GenerationMixin):
    """A text model and a head; a class for a family also has the family's own base class."""

    base_model_prefix = "model"
    text_model: ClassVar[type[PreTrainedModel]]

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.model = self.text_model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()  # type: ignore[no-untyped-call]  # transformers has no types there

    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, **options: object
    ) -> CausalLMOutputWithPast:
        """Return logits [batch, sequence, vocabulary] of ids [batch, sequence]."""
        kept = cast("int", options.pop("logits_to_keep", 0))
        output = self.model(input_ids, attention_mask=attention_mask, **options)
        # 0, the default, keeps all: -0 is 0.
        logits = self.lm_head(output.last_hidden_state[:, -kept:])
        logits = logits * getattr(self.config, "output_multiplier", 1) / getattr(self.config, "logits_scaling", 1)
        if (cap := getattr(self.config, "final_logit_softcapping", None)) is not None:
            logits = torch.tanh(logits / cap) * cap
        return CausalLMOutputWithPast(logits=logits, past_key_values=output.past_key_values)


def decoder_of_part(kind: type[PretrainedConfig], wholes: list[str]) -> type[PreTrainedModel] | None:
    """Return a causal class for the config class of a text part; None if the whole models have no plain head.

    Args:
        wholes: class names of the whole models.
    """
    module = importlib.import_module(kind.__module__.replace(".configuration_", ".modeling_"))
    known = [each for each in vars(module).values() if isinstance(each, type) and issubclass(each, PreTrainedModel)]
    models = [each for each in known if each.config_class is kind and each.__name__.endswith("TextModel")]
    ties = [each._tied_weights_keys or {} for each in known if each.__name__ in wholes]  # noqa: SLF001  # no other name
    tied = next((found["lm_head.weight"] for found in ties if "lm_head.weight" in found), None)
    if len(models) != 1 or tied is None:
        return None
    own = {
        "config_class": kind,
        "text_model": models[0],
        "_tied_weights_keys": {"lm_head.weight": "model." + ".".join(tied.split(".")[-2:])},
        "_tp_plan": {"lm_head": "colwise_gather_output"},
        # transformers looks in this module for the implementations of attention and experts.
        "__module__": module.__name__,
    }
    return type("TextDecoder", (TextDecoder, *models[0].__bases__), own)
