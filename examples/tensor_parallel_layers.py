"""Tensor-parallel layers alone, without Trainer or DeepSpeed: an MLP over two ranks is the whole MLP.

torchrun --nproc_per_node 2 examples/tensor_parallel_layers.py
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness import ColumnParallelLinear, RowParallelLinear

WIDTH, INNER = 32, 99  # the inner width need not be divisible by the number of ranks


class ParallelMLP(nn.Module):
    """Each rank holds some of the inner channels; one sum over the group gives the whole output."""

    def __init__(self, whole: nn.Sequential, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.up = ColumnParallelLinear.from_linear(whole[0], group)
        self.down = RowParallelLinear.from_linear(whole[2], group)

    def forward(self, x: Tensor) -> Tensor:
        """Return the same as the whole MLP: x (..., WIDTH) on every rank, the result too."""
        return self.down(nn.functional.gelu(self.up(x)))


def main() -> None:
    """Compare outputs and gradients with those of the whole MLP, on every rank."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same weights and samples on every rank
    whole = nn.Sequential(nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH))
    parts = ParallelMLP(whole, dist.group.WORLD)
    x = torch.randn(4, WIDTH)
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    outputs, expected = parts(mine), whole(theirs)
    outputs.square().sum().backward()
    expected.square().sum().backward()

    torch.testing.assert_close(outputs, expected)
    torch.testing.assert_close(mine.grad, theirs.grad)
    rows = parts.up.weight.shape[0]
    start = 0 if dist.get_rank() == 0 else INNER - rows  # two ranks: the first rows, the last rows
    torch.testing.assert_close(parts.up.weight.grad, whole[0].weight.grad[start : start + rows])
    print(f"rank {dist.get_rank()} holds {rows} of {INNER} inner channels: outputs and gradients agree")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
