"""A list of layers of your own in two pipeline stages: a small network learns the sine.

torchrun --nproc_per_node 2 examples/own_layers.py --output_dir runs/own-layers
"""

import argparse

import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from harness import Trainer, TrainingArguments

WIDTH = 64
LAYERS = [  # a LayerSpec is built on its own stage only; modules and functions work too
    LayerSpec(nn.Linear, 1, WIDTH),
    torch.tanh,
    LayerSpec(nn.Linear, WIDTH, WIDTH),
    torch.tanh,
    LayerSpec(nn.Linear, WIDTH, 1),
]
CONFIG = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 16,
    "pipeline": {"stages": 2, "partition": "parameters"},
    "zero_optimization": {"stage": 1},
}


def mean_squares(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the mean over the samples of a micro-batch."""
    return (outputs - labels).square().mean()


def main() -> None:
    """Train, then print the loss on points that were not seen."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output_dir", default="runs/own-layers")
    parser.add_argument("--max_steps", type=int, default=100)
    parser.add_argument("--local_rank", type=int)  # the deepspeed launcher adds it
    args = parser.parse_args()

    points = torch.linspace(-3, 3, 1025).unsqueeze(1)
    pairs = list(zip(points, points.sin(), strict=True))
    arguments = TrainingArguments(
        deepspeed_config=CONFIG,
        output_dir=args.output_dir,
        max_steps=args.max_steps,
        learning_rate=1e-2,
        save_steps=0,
        logging_steps=25,
    )
    trainer = Trainer(LAYERS, arguments, train_dataset=pairs[::2], eval_dataset=pairs[1::2], loss_fn=mean_squares)
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
