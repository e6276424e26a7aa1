"""How much of the token exchange is hidden by computation, over links of several speeds.

    OMP_NUM_THREADS=1 python scripts/bench/expert_overlap.py [--rounds 3]

A layer of eight experts and a shared one runs on two ranks, which are threads of this process. There tokens arrive at
once. So a link is simulated: by a rank's clock, what is sent arrives no earlier than it would over a link of that
speed. The clock counts the processor seconds of the rank and the time in which it would have waited for the link, so
that other work on the machine does not count. Forward and backward of the layer run in turns: everything after the
tokens; the shared expert while they are exchanged; and that with the tokens in two or four pieces. Writes
results/expert_overlap.json: seconds, and the share of them in which a rank waited.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from harness.extras.expert_exchange import early_modules, exchange  # noqa: E402
from harness.extras.expert_exchange.exchange import exchange_tokens  # noqa: E402
from harness.parallel.collectives import start_all_to_all  # noqa: E402
from harness.parallel.comm import ALONE, TensorParallel  # noqa: E402
from harness.parallel.plans.apply import cut  # noqa: E402
from harness.parallel.plans.experts import expert_parallel_plan  # noqa: E402
from harness.parallel.token_exchange import Neighbours  # noqa: E402
from scripts.bench.report import RESULTS, write_report  # noqa: E402
from tests.support.threads import run_threads  # noqa: E402

SHAPE: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 512, "intermediate_size": 512, "moe_intermediate_size": 512,
    "num_hidden_layers": 1, "first_k_dense_replace": 0, "num_attention_heads": 4, "num_key_value_heads": 4,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 2, "n_group": 1, "topk_group": 1,
    "kv_lora_rank": 64, "q_lora_rank": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64,
}  # fmt: skip
RANKS, TOKENS = 2, 512
OF_RANK = threading.local()
"""What a rank has for itself: `link`."""
SPEEDS = (None, 2e8, 5e7)  # bytes a second; None: as fast as memory
WAYS = {
    "after the tokens": (False, 1),
    "shared expert beside": (True, 1),
    "in 2 pieces": (True, 2),
    "in 4 pieces": (True, 4),
}


class Link:
    """A link of one speed in the place of memory, with the clock of this rank.

    Attributes:
        waited: seconds in which this rank would have waited for it.
    """

    def __init__(self, speed: float | None) -> None:
        self.speed, self.waited, self._free = speed, 0.0, 0.0

    def now(self) -> float:
        """Return what the clock says, in seconds."""
        return time.thread_time() + self.waited

    def start(self, x: Tensor, sizes: Any, group: Any) -> Callable[[], Tensor]:
        """Begin an exchange, which takes its time on the link after the one before it."""
        rank = dist.get_rank(group)
        rows = sum(n for other, n in enumerate(sizes[rank]) if other != rank)
        wait = start_all_to_all(x, sizes, group)
        took = 0.0 if self.speed is None else rows * x.shape[1] * x.element_size() / self.speed
        self._free = due = max(self._free, self.now()) + took

        def arrive() -> Tensor:
            arrived = wait()
            self.waited += max(due - self.now(), 0.0)
            return arrived

        return arrive


def measure(rank: int, models: dict[str, list[Any]], rounds: int) -> list[dict[str, Any]]:
    """Time a layer in all ways in turns; called on both ranks."""
    place = TensorParallel(group=dist.group.WORLD, rank=rank, size=RANKS)
    layers = {}
    for way, (_, pieces) in WAYS.items():
        model, neighbours = models[way][rank], Neighbours(ranks=place, pieces=pieces, exchange=exchange_tokens)
        cut(model, "", expert_parallel_plan(model, tp_size=1), ALONE, model.config, neighbours=neighbours)
        layers[way] = model.model.layers[0].mlp
    inputs = torch.randn(1, TOKENS, SHAPE["hidden_size"], generator=torch.Generator().manual_seed(rank))
    found: list[dict[str, Any]] = []
    for speed in SPEEDS:
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        waited: dict[str, list[float]] = {way: [] for way in WAYS}
        for turn in range(rounds + 1):
            for way, (early, _) in WAYS.items():
                dist.barrier()
                early_modules.WITHOUT_GAIN = set() if early else {"cpu"}
                link = OF_RANK.link = Link(speed)
                x = inputs.clone().requires_grad_()
                dist.barrier()
                begun = link.now()
                layers[way](x).square().sum().backward()
                if turn:  # the first warms up
                    seconds[way].append(link.now() - begun)
                    waited[way].append(link.waited)
        for way in WAYS:
            found.append(
                {
                    "bytes_per_second": speed,
                    "way": way,
                    "seconds": round(median(seconds[way]), 4),
                    "of_the_first": round(median(seconds[way]) / median(seconds["after the tokens"]), 3),
                    "waited": round(median(waited[way]) / median(seconds[way]), 3),
                }
            )
    return found


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS / "expert_overlap.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    exchange.start_all_to_all = lambda x, sizes, group: OF_RANK.link.start(x, sizes, group)
    config = AutoConfig.for_model("deepseek_v3", **SHAPE)
    models = {way: [AutoModelForCausalLM.from_config(config) for _ in range(RANKS)] for way in WAYS}
    rows = run_threads(RANKS, lambda rank: measure(rank, models, args.rounds))[0]
    load = [round(each, 1) for each in os.getloadavg()]
    write_report(args.output, {"load_average": load, "tokens": TOKENS, "rows": rows}, what=str(__doc__))
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
