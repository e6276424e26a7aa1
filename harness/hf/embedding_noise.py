"""NEFTune (arXiv 2310.05914): noise on what the token embedding gives in training, as HuggingFace adds it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from transformers import PreTrainedModel

from harness.errors import UserError


@dataclass(frozen=True, kw_only=True)
class EmbeddingNoise:
    """A forward hook of the token embedding.

    Its numbers come from the draws of the layer that it runs in, so they are the same in every layout.

    Attributes:
        module: name of the embedding in the model.
        alpha: the noise is uniform up to alpha / sqrt(tokens of a sample x width).
    """

    module: str
    alpha: float

    def __call__(self, module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
        """Return the embedding's output, in training with noise."""
        if not module.training:
            return output
        most = self.alpha / (output.shape[1] * output.shape[2]) ** 0.5
        return output + output.detach().new_zeros(output.shape).uniform_(-most, most)


def embedding_noise(model: PreTrainedModel, alpha: float | None) -> EmbeddingNoise | None:
    """Return the noise for a model, None without `alpha`. UserError if its embedding cannot be found."""
    if not alpha:
        return None
    try:
        embedding = model.get_input_embeddings()
    except NotImplementedError:
        embedding = None
    name = next((name for name, module in model.named_modules() if module is embedding), None)
    if name is None:
        raise UserError(f"--neftune_noise_alpha: {type(model).__name__} does not say which module embeds tokens")
    return EmbeddingNoise(module=name, alpha=alpha)
