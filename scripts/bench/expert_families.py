"""For which families experts that are distributed over data-parallel ranks give the gradients of the whole model.

    python scripts/bench/expert_families.py [FAMILY ...]

Without arguments, all families for causal language modelling whose config declares `base_model_ep_plan`, and those
whose plan file names experts. A tiny copy of each runs whole, and on two ranks that hold half of its experts and see
one row of its batch each. The ranks are threads of this process. Adds to results/expert_families.json, for each family,
the largest difference of the logits or of the gradient of any tensor, relative to that tensor's largest entry and
added over the ranks; or why it does not run.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import transformers  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers import CONFIG_MAPPING, PretrainedConfig  # noqa: E402
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: E402

from harness.errors import UserError  # noqa: E402
from harness.extras.expert_exchange.exchange import exchange_tokens  # noqa: E402
from harness.hf.locate import PLANS  # noqa: E402
from harness.parallel.comm import ALONE, TensorParallel  # noqa: E402
from harness.parallel.plans.apply import cut  # noqa: E402
from harness.parallel.plans.experts import expert_parallel_plan  # noqa: E402
from harness.parallel.tensor.shard import shard_of  # noqa: E402
from harness.parallel.token_exchange import Neighbours  # noqa: E402
from harness.verify.tiny_copy import shrink, tiny_config, tiny_ids, tiny_model  # noqa: E402
from scripts.bench.report import RESULTS, write_report  # noqa: E402
from tests.support.threads import run_threads  # noqa: E402

RANKS, OUTPUT = 2, RESULTS / "expert_families.json"
GEMMA4 = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 64}
QWEN4 = {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 256, "indexer_budget": 64}
QWEN4 |= {"indexer_compress_ratio": 4, "head_dim": 64}
FIELDS: dict[str, dict[str, Any]] = {
    "gemma4": {"text_config": GEMMA4},
    "gemma4_text": GEMMA4,
    "hunyuan_v1_moe": {"num_experts": 8, "moe_topk": 2},
    "qwen4_exp": {"text_config": QWEN4},
    "qwen4_exp_text": QWEN4,
}
"""Fields of families whose configs have no experts, or do not run, by default."""


def families() -> list[str]:
    """Return all families that have a plan for experts, in order."""
    planned = []
    for family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        config = CONFIG_MAPPING[family]
        parts = [config, *(part for part in config.sub_configs.values() if isinstance(part, type))]
        if any(getattr(part, "base_model_ep_plan", None) for part in parts):
            planned.append(family)
    return sorted([*planned, "dbrx"])


def backward(model: Any, ids: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=ids, use_cache=False).logits
    wanted = torch.randn(logits.shape[1:], generator=torch.Generator().manual_seed(2))
    (logits * wanted).sum().backward()
    return logits.detach()


def measure(config: PretrainedConfig) -> float:
    """Return the largest relative difference between the whole model and one whose experts are distributed."""
    whole, *parts = (tiny_model(config) for _ in range(1 + RANKS))
    ids = torch.cat([tiny_ids(whole, seed) for seed in range(RANKS)])[:RANKS]
    logits = backward(whole, ids)
    plans = [expert_parallel_plan(part, PLANS, tp_size=1) for part in parts]

    def rank(number: int) -> Tensor:
        place = TensorParallel(group=dist.group.WORLD, rank=number, size=RANKS)
        neighbours = Neighbours(ranks=place, exchange=exchange_tokens)
        text = config.get_text_config(decoder=True)
        cut(parts[number], "", plans[number], ALONE, text, neighbours=neighbours)
        return backward(parts[number], ids[number : number + 1])

    found = torch.cat(run_threads(RANKS, rank))
    worst = ((found - logits).abs().max() / logits.abs().max()).item()
    named = [dict(part.named_parameters()) for part in parts]
    trained = {name: param.grad for name, param in whole.named_parameters() if param.grad is not None}
    least = 1e-7 * max(grad.abs().max().item() for grad in trained.values())  # of gradients made of rounding
    for name, grad in trained.items():
        total = torch.zeros_like(grad)
        for own in named:
            param = own[name]
            part, shard = torch.zeros_like(param) if param.grad is None else param.grad, shard_of(param)
            if shard is None:
                total += part
            else:
                shard.put(part, total)
        worst = max(worst, (total - grad).abs().max().item() / max(grad.abs().max().item(), least))
    if not any(shard_of(param) for param in parts[0].parameters()):
        raise UserError("no experts are distributed")
    return worst


def main() -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    found: dict[str, Any] = json.loads(OUTPUT.read_text())["families"] if OUTPUT.exists() else {}
    for family in sys.argv[1:] or families():
        try:
            fields = FIELDS.get(family)
            config = shrink(CONFIG_MAPPING[family](**fields), tensor=2) if fields else tiny_config(family, tensor=2)
            found[family] = float(f"{measure(config):.1e}")
        except UserError as error:
            found[family] = str(error).splitlines()[0]
        print(f"{family}: {found[family]}", flush=True)
    write_report(OUTPUT, {"ranks": RANKS, "families": dict(sorted(found.items()))}, what=__doc__ or "")


if __name__ == "__main__":
    main()
