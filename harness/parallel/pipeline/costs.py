"""What a pipeline layer costs to compute, in FLOPs per token, forward and backward together.

The figures only have to be right in proportion: they decide where a pipeline is cut. Sources: Kaplan et al.
2020, Scaling Laws for Neural Language Models (section 2.1: 2 FLOPs a parameter and token forward, twice that
backward); Narayanan et al. 2021, Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM (appendix: attention, logit layer, recomputation). What moves memory and hardly computes
(look-ups, norms, softmax over the vocabulary) is counted by the elements it moves. Left out: what is paid
once a step and not once a token (the optimizer, the dense gradient of an embedding table).
"""

from dataclasses import dataclass

# A device computes this many FLOPs while it moves one element to or from memory: about 10 on one CPU core,
# some hundreds on an accelerator. The boundaries do not hang on it: what is weighed by it is small next to
# the matmuls.
FLOPS_PER_MOVE = 64.0

# Look-up: read the row and write it; backward, read the gradient and add it to the table's.
MOVES_PER_LOOKUP = 4
# Norm or bias: read and write; backward, read input and gradient, write both gradients.
MOVES_PER_VECTOR = 6
# Cross entropy: widen, find the maximum, sum the exponentials; backward, read, scale, write the gradient.
MOVES_PER_LOGIT = 6


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """What one token meets in a pipeline layer, counted before any tensor-parallel cut.

    matmul_parameters: weights that each token is multiplied with, a tied head's included; of a mixture of
        experts only the experts that a token is sent to.
    lookup_width: elements fetched from embedding tables, the sum of the tables' widths.
    vector_parameters: elements of norms, biases and the like.
    attention_width: attention heads x head size; 0 in a layer without attention.
    sequence_length: tokens that one token attends to.
    logits: size of the vocabulary in the layer that computes the loss, 0 in the others.
    checkpointed: whether the layer's forward runs again before its backward.
    """

    matmul_parameters: int = 0
    lookup_width: int = 0
    vector_parameters: int = 0
    attention_width: int = 0
    sequence_length: int = 0
    logits: int = 0
    checkpointed: bool = False

    def flops_per_token(self, flops_per_move: float = FLOPS_PER_MOVE) -> float:
        """Forward and backward, and the second forward where the layer is checkpointed.

        A matmul costs 2 FLOPs a parameter forward and 4 backward. Attention multiplies a query with every key
        and a probability with every value: 2 x 2 x width x length forward, and twice that backward.
        """
        matmuls = 6 * self.matmul_parameters
        attention = 12 * self.attention_width * self.sequence_length
        moves = (
            MOVES_PER_LOOKUP * self.lookup_width
            + MOVES_PER_VECTOR * self.vector_parameters
            + MOVES_PER_LOGIT * self.logits
        )
        once = matmuls + attention + moves * flops_per_move
        return once * 8 / 6 if self.checkpointed else float(once)
