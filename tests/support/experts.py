"""Mixtures of experts as families write them, each calling its parts as tokens choose; inputs [..., WIDTH]."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

WIDTH, EXPERTS = 8, 4


class Residual(nn.Module):
    """A layer whose output is added to its input."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x)


class Routed(nn.Module):
    """A router; `chosen` gives each expert that a token chose, with where and by how much."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH)
        return self.mix(rows, self.gate(rows).softmax(-1)).view_as(x)

    def mix(self, rows: Tensor, shares: Tensor) -> Tensor:
        """The sum over the chosen experts."""
        raise NotImplementedError


def chosen(shares: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Expert, its rows, their weights [rows, 1]."""
    first = shares.argmax(-1)
    for expert in first.unique().tolist():
        at = first == expert
        yield expert, at, shares[at, expert, None]


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)

    def forward(self, rows: Tensor) -> Tensor:
        return self.down(self.act(self.up(rows)))


class Listed(Routed):
    """Experts in a ModuleList: which of them is called depends on the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def mix(self, rows: Tensor, shares: Tensor) -> Tensor:
        total = torch.zeros_like(rows)
        for expert, at, share in chosen(shares):
            total[at] = self.experts[expert](rows[at]) * share
        return total


class ByRow(Routed):
    """One module, called once for each chosen expert."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(WIDTH, WIDTH)

    def mix(self, rows: Tensor, shares: Tensor) -> Tensor:
        total = torch.zeros_like(rows)
        for _, at, share in chosen(shares):
            total[at] = self.shared(rows[at]) * share
        return total


class StackedExperts(nn.Module):
    """All experts' weights in one parameter; only the activation function is called for each."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) * 0.3)
        self.act = nn.Tanh()

    def forward(self, rows: Tensor, shares: Tensor) -> Tensor:
        total = torch.zeros_like(rows)
        for expert, at, share in chosen(shares):
            total[at] = self.act(rows[at] @ self.weight[expert]) * share
        return total


class Stacked(Routed):
    def __init__(self) -> None:
        super().__init__()
        self.experts = StackedExperts()

    def mix(self, rows: Tensor, shares: Tensor) -> Tensor:
        return self.experts(rows, shares)


class Holder(nn.Module):
    """Holds weights that its parent reads and hands to it (dbrx)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS * WIDTH, WIDTH) * 0.3)
        self.act = nn.Tanh()

    def forward(self, rows: Tensor, weight: Tensor) -> Tensor:
        return self.act(rows @ weight)


class HolderExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Holder()

    def forward(self, rows: Tensor, shares: Tensor) -> Tensor:
        total = torch.zeros_like(rows)
        for expert, at, share in chosen(shares):
            total[at] = self.mlp(rows[at], self.mlp.weight.view(EXPERTS, WIDTH, WIDTH)[expert]) * share
        return total


class ReadByParent(Routed):
    def __init__(self) -> None:
        super().__init__()
        self.experts = HolderExperts()

    def mix(self, rows: Tensor, shares: Tensor) -> Tensor:
        return self.experts(rows, shares)
