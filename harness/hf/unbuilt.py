"""What data and verbs ask about a model that is not built, or built by transformers alone; training itself does not."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from torch import nn
from transformers import AutoConfig, PreTrainedModel

from harness.hf.locate import PLANS
from harness.hf.skeleton import ModelSource, build_skeleton, causal_class
from harness.parallel.comm import TensorParallel
from harness.parallel.plans.apply import cut
from harness.parallel.plans.experts import expert_parallel_plan
from harness.parallel.plans.plan import plan_for
from harness.parallel.token_exchange import Neighbours


def require_cut(source: ModelSource, tp_size: int, ep_size: int) -> None:
    """Raise UserError for a model that, by its config alone, cannot be cut for `tp_size` and `ep_size` ranks.

    `assemble` finds the same and more, but only after the data has been prepared; this takes a second at most.
    """
    if tp_size == 1 and ep_size == 1:
        return
    model = build_skeleton(source.config)
    plan = expert_parallel_plan(model, PLANS, tp_size=tp_size) if ep_size > 1 else plan_for(model, PLANS)
    text = source.config.get_text_config(decoder=True)
    neighbours = TensorParallel(size=max(ep_size // tp_size, 1))
    with suppress(ValueError):  # raised for weights tied between layers; `assemble` cuts layer by layer
        cut(model, "", plan, TensorParallel(size=tp_size), text, neighbours=Neighbours(ranks=neighbours))


def make_loadable(directory: Path) -> None:
    """Let AutoModelForCausalLM load `directory` if `causal_class` finds its class; a directory of adapters has none."""
    if (directory / "config.json").is_file():
        causal_class(AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False))


def vocabulary_size(model: PreTrainedModel) -> int:
    """Return the number of token ids that a causal model both reads and predicts.

    That is the rows of its input embedding or of its head, whichever are fewer: a config may name several vocabularies.
    """
    ends: tuple[nn.Module | None, ...] = (model.get_input_embeddings(), model.get_output_embeddings())
    return min(end.get_parameter("weight").shape[0] for end in ends if end is not None)
