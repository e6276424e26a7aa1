"""Ranks that share a sequence: DeepSpeed's Ulysses and this harness beside one process, family by family.

    python scripts/bench/context_parity.py [--ranks 2] [--families llama,mistral,...] [--program harness]

Each family has a tiny random model in float32 with a window shorter than the sequence where it takes one. The gradients
of the mean loss, summed over the ranks, are compared with those of transformers in one process: the Euclidean norm of
the difference over that of the gradient. Each family is run with plain rows, and with two documents in a row, which the
one process computes one after the other. A family that is refused is reported with the reason. The table of
docs/measurements.md is printed in the end; without --families results/context_parity.json is written, too.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from report import RESULTS, write_report
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel, logging
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from harness.hf.causal import assemble
from harness.hf.context.plan import TokenSplit
from harness.hf.skeleton import ModelSource
from harness.parallel.comm import TensorParallel
from harness.parallel.context.sequence_shards import ContextParallel
from harness.parallel.pipeline.staged_module import build_layers
from harness.verify.packing import require_documents_apart
from harness.verify.tiny_copy import tiny_config, tiny_model
from harness.verify.token_split import token_split_support

FAMILIES = (
    *(
        "llama",
        "mistral",
        "ministral",
        "qwen2",
        "qwen3",
        "phi3",
        "olmo3",
        "exaone4",
        "cohere2",
        "gemma2",
        "gemma3_text",
    ),
    *("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "llama4_text", "qwen3_next", "mamba", "bloom"),
)
PROGRAMS = ("deepspeed", "harness")
LENGTH, WINDOW, FIRST = 32, 8, 13
"""Tokens of a row, of a window, and of the first of two documents of a packed row."""


def config_of(family: str) -> PretrainedConfig:
    """Return a tiny config, with a window shorter than the sequence where the family can have one."""
    config = tiny_config(family)
    config.tie_word_embeddings = False
    if getattr(config, "head_dim", 0) is None:  # DeepSpeed reads it
        config.head_dim = config.hidden_size // config.num_attention_heads
    if getattr(config, "use_sliding_window", None) is False:  # qwen has a window in the layers that are told so
        config.use_sliding_window = True
        if hasattr(config, "layer_types"):
            config.layer_types = ["sliding_attention"] * len(config.layer_types)
    for name in ("sliding_window", "attention_chunk_size"):
        if hasattr(config, name):
            setattr(config, name, WINDOW)
    return config


def loss_of(logits: Tensor, labels: Tensor, count: Tensor) -> Tensor:
    """Return the sum of the losses of these tokens over the number of all labels."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum") / count


def sample(model: PreTrainedModel, packed: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return ids, positions, the next token of each, and the number of labels."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(4, model.config.get_text_config().vocab_size, (1, LENGTH), generator=generator)
    positions = torch.cat([torch.arange(FIRST), torch.arange(LENGTH - FIRST)] if packed else [torch.arange(LENGTH)])
    labels = F.pad(ids[:, 1:], (0, 1), value=-100)
    if packed:
        labels[:, FIRST - 1] = -100
    return ids, positions[None], labels, (labels != -100).sum()


def flat_sums(model: PreTrainedModel, packed: bool) -> dict[str, Tensor]:
    """Return the gradients of one process, which is given each document by itself."""
    ids, _, labels, count = sample(model, packed)
    bounds = (0, FIRST, LENGTH) if packed else (0, LENGTH)
    for start, stop in pairwise(bounds):
        logits = model(input_ids=ids[:, start:stop], use_cache=False).logits
        loss_of(logits, labels[:, start:stop], count).backward()
    return taken(model)


def taken(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return the gradients of a model, and free them."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def by_deepspeed(model: PreTrainedModel, packed: bool, size: int) -> dict[str, Tensor]:
    """Return this rank's gradients with DeepSpeed's Ulysses."""
    from deepspeed.runtime.sequence_parallel import parallel_state_sp as state
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    state._SEQUENCE_PARALLEL_GROUP = state._SEQUENCE_DATA_PARALLEL_GROUP = None  # noqa: SLF001  # of the family before
    attention = model.config._attn_implementation  # noqa: SLF001  # transformers has no public name for it
    whole = ALL_ATTENTION_FUNCTIONS.get(attention)  # which DeepSpeed replaces for every model of the process
    try:
        UlyssesSPAttentionHF.register_with_transformers(model, attention, size, 1, seq_length_is_variable=True)
        ids, positions, labels, count = sample(model, packed)
        own = ContextParallel.of(dist.group.WORLD).own
        logits = model(input_ids=own(ids), position_ids=own(positions), use_cache=False).logits
        loss_of(logits, own(labels), count).backward()
    finally:
        if whole is not None:
            ALL_ATTENTION_FUNCTIONS[attention] = whole
    return taken(model)


def by_harness(model: PreTrainedModel, packed: bool, _size: int) -> dict[str, Tensor]:
    """Return this rank's gradients with the layers of the harness."""
    if packed:
        require_documents_apart(model.config)
    context = ContextParallel.of(dist.group.WORLD)
    apart = TokenSplit(plan=token_split_support(model.config), context=context)
    causal = assemble(
        ModelSource.of_model(model),
        tensor=TensorParallel(),
        device=torch.device("cpu"),
        dtype=torch.float32,
        seed=0,
        finish=lambda _: None,
        apart=apart,
    )
    layers = build_layers(causal.layers, 0, len(causal.layers), 0)
    ids, positions, labels, count = sample(model, packed)
    value = (ids, positions) if packed else ids
    for layer in layers.calls:
        value = layer(value)
    loss_of(value, context.own(labels), count).backward()
    parts = [taken(module) for module in layers.modules.values()]
    return {name: gradient for part in parts for name, gradient in part.items()}


def off(own: dict[str, Tensor], whole: dict[str, Tensor]) -> float:
    """Return how far the sum of all ranks' gradients is from those of one process, relative."""
    difference = total = 0.0
    for name, wanted in whole.items():
        found = own[name].clone() if name in own else torch.zeros_like(wanted)
        dist.all_reduce(found)
        difference += float((found - wanted).square().sum())
        total += float(wanted.square().sum())
    return (difference / total) ** 0.5


def row(family: str, packed: bool, size: int, program: str) -> str:
    """Return what one program makes of a family: how far it is off, or why it refuses."""
    run = {"deepspeed": by_deepspeed, "harness": by_harness}[program]
    outcome: tuple[str, dict[str, Tensor]] = ("", {})
    try:
        model = tiny_model(config_of(family))
        whole = flat_sums(model, packed)
        outcome = "", run(model, packed, size)
    except Exception as error:  # whatever a program refuses with
        outcome = f"refused: {type(error).__name__}: {' '.join(str(error).split())[:60]}", {}
    refusals: list[str] = [""] * size
    dist.all_gather_object(refusals, outcome[0])
    return next(filter(None, refusals), None) or f"{off(outcome[1], whole):.1e}"


def work(rank: int, size: int, folder: str, families: list[str], program: str) -> None:
    """Be one rank of one program; rank 0 writes what it found to a file."""
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    dist.init_process_group("gloo", init_method=f"file://{folder}/{program}", rank=rank, world_size=size)
    if program == "deepspeed":
        import deepspeed

        deepspeed.init_distributed("gloo", verbose=False, dist_init_required=False)
    found = {}
    for family in families:
        found[family] = {rows: row(family, rows == "packed", size, program) for rows in ("plain", "packed")}
        if rank == 0:
            print(
                f"{program:<10} {family:<16} {found[family]['plain']:<12} packed {found[family]['packed']}", flush=True
            )
    if rank == 0:
        Path(folder, f"{program}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def table(found: dict[str, dict[str, dict[str, str]]]) -> Iterator[str]:
    """Yield the lines of the table in docs/measurements.md, from what each program made of each family and rows."""
    yield "| family | DeepSpeed | packed | this harness | packed |"
    yield "|---|---|---|---|---|"
    for family in found["harness"]:
        cells = [found[program][family][rows] for program in found for rows in ("plain", "packed")]
        yield " | ".join([f"| {family}", *("refused" if "refused" in cell else cell for cell in cells)]) + " |"


def main() -> int:
    """Print a line a family and program, and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="that share a sequence (default: 2)")
    parser.add_argument("--families", help="model types, with commas (default: those of docs/measurements.md)")
    parser.add_argument("--program", choices=PROGRAMS, help="run this one, and take the other from the results")
    args = parser.parse_args()
    families = args.families.split(",") if args.families else [*FAMILIES]
    path = RESULTS / "context_parity.json"
    found = {name: json.loads(path.read_text())[name] for name in PROGRAMS} if args.program else {}
    for program in [args.program] if args.program else PROGRAMS:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(work, (args.ranks, folder, families, program), nprocs=args.ranks)
            found[program] = json.loads(Path(folder, f"{program}.json").read_text())
    for line in table(found):
        print(line)
    if not args.families:
        write_report(path, {"ranks": args.ranks, **found}, what=str(__doc__))
    return 0


if __name__ == "__main__":
    sys.exit(main())
