"""Linear layers and an embedding whose weights are split over a tensor-parallel group.

After Shoeybi et al. 2019 (arXiv 1909.08053), section 3. Shapes: x [..., in], y [..., out], weight [out, in], size =
number of ranks in the group. A column-parallel layer holds rows of the weight, so it computes a part of y. A
row-parallel layer holds columns of it, so it takes a part of x. One after the other they need a single sum.

Each can be used by itself in any model. Created like the layer it replaces, on ranks with the same RNG state, it holds
exactly that layer's values. Without a group it is that layer. All can be made from modules on the meta device.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Self, TypedDict, Unpack

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.parallel.comm import TensorParallel, gather_from_group, group_size, reduce_from_group, split_to_group
from harness.parallel.tensor.sequence import SequenceShare
from harness.parallel.tensor.shard import Shard, cut_parameter, shard_of, share_of
from harness.parallel.tensor.shared_input import copy_once
from harness.parallel.weight_gradients import linear


class FactoryOptions(TypedDict, total=False):
    """Keyword arguments of a new layer: its tensor-parallel group, and device and dtype of this rank's shard."""

    group: dist.ProcessGroup | None
    device: torch.device | str | None
    dtype: torch.dtype | None


class Cut(TypedDict, total=False):
    """The shard of a whole layer's weight that a rank holds; by default an equal share."""

    shard: Shard | None
    weight_transposed: bool


class _CutLinear(nn.Linear):
    """A linear layer with a sharded weight; `dim` is the split dimension of a weight [out, in]."""

    dim: ClassVar[int]
    group: dist.ProcessGroup | None
    weight: nn.Parameter
    weight_transposed: bool

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, **options: Unpack[FactoryOptions]
    ) -> None:
        # Whole first, then cut: so it draws the same random numbers as the layer that it replaces, on every rank.
        whole = nn.Linear(in_features, out_features, bias, options.get("device"), options.get("dtype"))
        self._adopt(whole, options.get("group"))

    @classmethod
    def from_linear(cls, linear: nn.Module, group: dist.ProcessGroup | None, **cut: Unpack[Cut]) -> Self:
        """Return this rank's part of a whole layer."""
        layer = cls.__new__(cls)
        cls._adopt(layer, linear, group, **cut)
        return layer

    def _adopt(
        self,
        linear: nn.Module,
        group: dist.ProcessGroup | None,
        shard: Shard | None = None,
        weight_transposed: bool = False,
    ) -> None:
        weight = linear.get_parameter("weight")
        bias = _bias_of(linear)
        _begin(self, linear, group, weight_transposed)
        shard = shard or _equal_share(weight, 1 - self.dim if weight_transposed else self.dim, group)
        self.widths = shard.widths
        self.weight = cut_parameter(weight, shard)
        if bias is not None and self.dim == 0:
            # The same pieces as of the weight, in the bias's only dimension.
            bias = cut_parameter(bias, replace(shard, full_shape=(shard.full_shape[shard.dim],), dim=0))
        self.register_parameter("bias", bias)

    def extra_repr(self) -> str:
        """Return this rank's and the full sizes, for `print(model)`."""
        # The weight itself may be empty, as ZeRO-3 gathers it on use.
        shard = shard_of(self.weight)
        cut, full = ("out", self.out_features) if self.dim == 0 else ("in", self.in_features)
        local = full if shard is None else shard.length
        sizes = {"in": self.in_features, "out": self.out_features, cut: f"{local} of {full}"}
        text = ", ".join(f"{name}={size}" for name, size in sizes.items())
        return f"{text}, bias={self.bias is not None}"


class ColumnParallelLinear(_CutLinear):
    """y = x A^T + b with A and b split over the outputs.

    Per rank: x [..., in] whole; weight [out / size, in], or [in, out / size] with `weight_transposed`
    (transformers' Conv1D); bias [out / size]. The result is this rank's [..., out / size], or with
    `gather_output` the whole [..., out]. If the size does not divide the outputs, the first ranks hold one more.
    The gradient of x is summed over the group. Raises ValueError for fewer outputs than ranks.
    """

    dim = 0
    overlaps = False

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        gather_output: bool = False,
        **options: Unpack[FactoryOptions],
    ) -> None:
        super().__init__(in_features, out_features, bias, **options)
        self.gather_output = gather_output

    @classmethod
    def from_linear(
        cls, linear: nn.Module, group: dist.ProcessGroup | None, *, gather_output: bool = False, **cut: Unpack[Cut]
    ) -> Self:
        """Return this rank's part of a whole layer."""
        layer = super().from_linear(linear, group, **cut)
        layer.gather_output = gather_output
        return layer

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's y [..., out / size], or with `gather_output` the whole y [..., out], of x [..., in]."""
        weight = self.weight.t() if self.weight_transposed else self.weight
        # f of Megatron: the identity forward, an all-reduce of the gradient backward, shared by query, key and value.
        x, products = copy_once(x, self.group)
        y = linear(self, x, weight, self.bias, products if self.overlaps else None)
        return gather_from_group(y, self.group, self.widths) if self.gather_output else y


class SharedColumnLinear(nn.Linear):
    """Computes some of the outputs of y = x A^T + b, with A and b replicated.

    `pieces` are the (start, stop) ranges of this rank's outputs. The gradient of x is all-reduced. The gradients of A
    and b are partial; the caller must sum them.
    """

    group: dist.ProcessGroup | None
    pieces: list[tuple[int, int]]
    weight_transposed: bool

    @classmethod
    def from_linear(
        cls,
        linear: nn.Module,
        group: dist.ProcessGroup | None,
        *,
        pieces: list[tuple[int, int]],
        weight_transposed: bool,
    ) -> SharedColumnLinear:
        """Return a layer that shares the parameters of a whole one."""
        layer = cls.__new__(cls)
        _begin(layer, linear, group, weight_transposed)
        layer.pieces = pieces
        layer.weight = linear.get_parameter("weight")
        layer.register_parameter("bias", _bias_of(linear))
        return layer

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of `pieces`, y [..., widths of all pieces], of x [..., in]."""
        weight = self.weight.t() if self.weight_transposed else self.weight
        own = torch.cat([weight[start:stop] for start, stop in self.pieces])
        bias = None if self.bias is None else torch.cat([self.bias[start:stop] for start, stop in self.pieces])
        return linear(self, copy_once(x, self.group)[0], own, bias)


class RowParallelLinear(_CutLinear):
    """y = x A^T + b with A split over the inputs.

    Per rank: x [..., in / size], this rank's part, as a column-parallel layer leaves it, or with
    `input_is_parallel=False` the whole [..., in], from which the layer takes its part; weight [out, in / size],
    or [in / size, out] with `weight_transposed`; bias [out], whole, added once, after the sum over the group.
    The result [..., out] is whole, or with `sequence` this rank's share of the tokens. Shares are as a column-parallel
    layer's. Raises ValueError for fewer inputs than ranks.
    """

    dim = 1
    sequence: SequenceShare | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        input_is_parallel: bool = True,
        **options: Unpack[FactoryOptions],
    ) -> None:
        super().__init__(in_features, out_features, bias, **options)
        self.input_is_parallel = input_is_parallel

    @classmethod
    def from_linear(
        cls, linear: nn.Module, group: dist.ProcessGroup | None, *, input_is_parallel: bool = True, **cut: Unpack[Cut]
    ) -> Self:
        """Return this rank's part of a whole layer."""
        layer = super().from_linear(linear, group, **cut)
        layer.input_is_parallel = input_is_parallel
        return layer

    def forward(self, x: Tensor) -> Tensor:
        """Return the whole y [..., out], or with `sequence` y of this rank's share of the tokens.

        `x` is this rank's [..., in / size], or with `input_is_parallel=False` the whole [..., in].
        """
        if not self.input_is_parallel:
            x = split_to_group(x, self.group, self.widths)
        weight = self.weight.t() if self.weight_transposed else self.weight
        if group_size(self.group) == 1:
            return linear(self, x, weight, self.bias)
        # The bias is added after the all-reduce, which would otherwise sum it once per rank.
        y = linear(self, x, weight)
        y = reduce_from_group(y, self.group) if self.sequence is None else self.sequence.scatter(y)
        return y if self.bias is None else y + self.bias


class VocabParallelEmbedding(nn.Embedding):
    """An embedding whose rows are split over the group: ids [...] -> whole vectors [..., embedding_dim].

    Per rank: weight [num_embeddings / size, embedding_dim], with one row more on the first ranks if the size does not
    divide. Each rank looks up the ids that it holds and returns zeros for the others; the results are summed. An id
    outside the vocabulary raises RuntimeError. A subclass of nn.Embedding whose forward does more with a row (scales
    it, say) keeps its own forward: see `from_embedding`.
    """

    group: dist.ProcessGroup | None
    weight: nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx, device=device, dtype=dtype)
        self._cut(group, None)

    @classmethod
    def from_embedding(
        cls, embedding: nn.Embedding, group: dist.ProcessGroup | None, *, shard: Shard | None = None
    ) -> VocabParallelEmbedding:
        """Return this rank's rows of a whole embedding.

        An instance of a subclass becomes a subclass of both. Its forward must treat each row by itself, because the
        other rows are on other ranks.
        """
        whole = type(embedding)
        kind: Any = cls if whole is nn.Embedding else type(f"{cls.__name__}{whole.__name__}", (cls, whole), {})
        layer: VocabParallelEmbedding = kind.__new__(kind)
        # Copy the dicts, so that replacing the weight here leaves the original module whole.
        layer.__dict__.update({k: v.copy() if isinstance(v, dict) else v for k, v in embedding.__dict__.items()})
        layer._cut(group, shard)
        return layer

    def _cut(self, group: dist.ProcessGroup | None, shard: Shard | None) -> None:
        shard = shard or _equal_share(self.weight, 0, group)
        self.group = group
        self.rows = shard.length
        self.first_row = shard.pieces[0][0]
        if self.padding_idx is not None:
            local = self.padding_idx - self.first_row
            # torch zeroes the gradient of this row, so only the rank that holds it may set an index.
            self.padding_idx = local if 0 <= local < self.rows else None
        self.weight = cut_parameter(self.weight, shard)

    def forward(self, ids: Tensor) -> Tensor:
        """Return whole vectors [..., embedding_dim] of ids [...]; RuntimeError for an id outside the vocabulary."""
        if group_size(self.group) == 1:
            return super().forward(ids)
        inside = (ids >= 0) & (ids < self.num_embeddings)
        torch._assert_async(inside.all(), "an input id is outside the vocabulary")  # noqa: SLF001  # no public name
        local = ids - self.first_row
        elsewhere = (local < 0) | (local >= self.rows)
        # Row 0 stands in for ids of other ranks; its vectors become zeros before the all-reduce.
        vectors = super().forward(local.masked_fill(elsewhere, 0))
        return reduce_from_group(vectors.masked_fill(elsewhere.unsqueeze(-1), 0.0), self.group)

    def extra_repr(self) -> str:
        """Return this rank's rows, all rows and the width, for `print(model)`."""
        return f"{self.rows} of {self.num_embeddings}, {self.embedding_dim}"


def overlap_sums(module: nn.Module) -> None:
    """Overlap weight gradients of column-parallel layers with the all-reduce of their input's gradient.

    Not for ZeRO-3, which releases a weight before its gradient would be computed.
    """
    for layer in module.modules():
        if isinstance(layer, ColumnParallelLinear):
            layer.overlaps = True


def _equal_share(weight: Tensor, dim: int, group: dist.ProcessGroup | None) -> Shard:
    place = TensorParallel.of(group)
    return share_of(tuple(weight.shape), dim, place.rank, place.size)


def _begin(
    layer: _CutLinear | SharedColumnLinear, linear: nn.Module, group: dist.ProcessGroup | None, weight_transposed: bool
) -> None:
    # nn.Linear's own would allocate and initialise a whole weight.
    nn.Module.__init__(layer)
    shape = linear.get_parameter("weight").shape
    layer.out_features, layer.in_features = reversed(shape) if weight_transposed else shape
    layer.group = group
    layer.weight_transposed = weight_transposed
    layer.train(linear.training)


def _bias_of(linear: nn.Module) -> nn.Parameter | None:
    return None if linear.bias is None else linear.get_parameter("bias")
