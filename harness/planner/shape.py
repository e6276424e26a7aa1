"""The sizes of a decoder that decide its memory and its speed, as plain numbers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """One decoder layer.

    Attributes:
        hidden: width of the hidden state.
        heads: number of query heads, 0 without attention.
        query, key, value: widths of the projections: heads x head size.
        low_rank: widths of compressed queries and keys/values, 0 without; `rope`: width of the shared rotary key.
        ffn: width of the dense feed-forward network, 0 without; `gated`: it has two input matrices instead of one.
        experts, top_k, expert_ffn, shared_ffn: sizes of a mixture of experts, 0 without.
        window: most tokens that a token attends to; 0 means all before it.
        more: number of matrix elements that the widths above do not explain; negative if they explain too many.
        vectors: number of elements of norms and biases.
        norms: number of norms over the hidden state; `plain_norms`: they are written in single operations that the
            harness does not fuse; `native_norms`: each is one kernel of torch (LayerNorm).
    """

    hidden: int
    heads: int
    kv_heads: int
    query: int
    key: int
    value: int
    output: int
    q_rank: int = 0
    kv_rank: int = 0
    rope: int = 0
    ffn: int = 0
    gated: bool = True
    experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    window: int = 0
    more: int = 0
    vectors: int = 0
    norms: int = 2
    plain_norms: bool = False
    native_norms: bool = False

    @cached_property
    def attention_matrices(self) -> tuple[tuple[int, int], ...]:
        """(inputs, outputs) of the projections into attention; the output projection is (`output`, `hidden`)."""
        if not self.kv_rank:
            return ((self.hidden, self.query + self.key + self.value),)
        queries = (
            ((self.hidden, self.q_rank), (self.q_rank, self.query)) if self.q_rank else ((self.hidden, self.query),)
        )
        up = self.key - self.rope * self.heads + self.value
        return (*queries, (self.hidden, self.kv_rank + self.rope), (self.kv_rank, up))

    @property
    def into_ffn(self) -> int:
        """Number of input matrices of the feed-forward network."""
        return 2 if self.gated else 1

    @cached_property
    def attention_parameters(self) -> int:
        """Number of parameters of the projections."""
        return sum(rows * columns for rows, columns in self.attention_matrices) + self.output * self.hidden

    @property
    def dense_ffn(self) -> int:
        """Width of the feed-forward network for every token: the dense one and shared experts."""
        return self.ffn + self.shared_ffn

    @cached_property
    def expert_parameters(self) -> int:
        """Number of parameters of all routed experts."""
        return self.experts * (self.into_ffn + 1) * self.hidden * self.expert_ffn

    @cached_property
    def matrix_parameters(self) -> int:
        """Number of parameters of all matrices, all experts included."""
        dense = (self.into_ffn + 1) * self.hidden * self.dense_ffn
        return self.attention_parameters + dense + self.expert_parameters + self.hidden * self.experts + self.more

    @property
    def parameters(self) -> int:
        """Number of parameters of the whole layer."""
        return self.matrix_parameters + self.vectors

    @property
    def active_parameters(self) -> int:
        """Number of parameters of the matrices that one token is multiplied with."""
        unused = self.expert_parameters * (self.experts - self.top_k) // self.experts if self.experts else 0
        return self.matrix_parameters - unused


@dataclass(frozen=True, kw_only=True, eq=False)  # compared by identity: results are cached by shape
class DecoderShape:
    """A decoder: its layers, and the embedding and the head around them.

    Attributes:
        position_rows: rows of a learned table of positions, 0 without.
        tied: whether the head is the embedding table.
        outer_vectors: number of elements of norms, biases and everything else outside the layers; negative if a table
            is narrower than the hidden state.
        guessed: whether the sizes of this family, or of these keys, were never compared with a model.
    """

    layers: tuple[LayerShape, ...]
    vocab: int
    position_rows: int = 0
    tied: bool = False
    outer_vectors: int = 0
    guessed: bool = False

    @property
    def hidden(self) -> int:
        """Width of the hidden state."""
        return self.layers[0].hidden

    @property
    def prologue_parameters(self) -> int:
        """Number of parameters of the embedding tables."""
        return (self.vocab + self.position_rows) * self.hidden

    @property
    def epilogue_parameters(self) -> int:
        """Number of parameters of the last norm and the head, also if it is tied."""
        return self.vocab * self.hidden + self.outer_vectors

    @property
    def parameters(self) -> int:
        """Number of parameters of the whole model; a tied table counts once."""
        tied = self.vocab * self.hidden if self.tied else 0
        return (
            self.prologue_parameters + sum(layer.parameters for layer in self.layers) + self.epilogue_parameters - tied
        )

    def flops_per_token(self, sequence: int, *, frozen: bool = False) -> float:
        """Return the FLOPs of forward and backward for one token, without recomputation.

        6 for each matrix parameter (Kaplan et al. 2020, section 2.1), 4 if it is frozen and has no gradient, and
        6 x context x (query + output) for attention. With a causal mask a token attends to half of the sequence on
        average.
        """
        matrices = sum(layer.active_parameters for layer in self.layers)
        matrices += self.vocab * self.hidden
        attention = sum(context(layer, sequence) * (layer.query + layer.output) for layer in self.layers)
        return (4.0 if frozen else 6.0) * matrices + 6.0 * attention


def context(layer: LayerShape, sequence: int) -> float:
    """Return the number of tokens that a token attends to on average: half of the sequence, or the window."""
    if not 0 < layer.window < sequence:
        return sequence / 2
    return layer.window - layer.window**2 / (2 * sequence)
