"""Rules about context parallelism: data-parallel ranks that share each sequence."""

from __future__ import annotations

from collections.abc import Iterator

from harness.checking.rules.rule import Finding, rule
from harness.checking.rules.view import RunView
from harness.config.text.diagnostic import Severity
from harness.config.values.layout_keys import ATTENTION_TILE, CONTEXT, DEEPSPEED_CONTEXT, LOSS_TILE
from harness.wording import counted


def context_pointer(view: RunView) -> str:
    """Return the pointer of the key that sets the context-parallel size; the harness's own if none does."""
    return DEEPSPEED_CONTEXT if view.has(DEEPSPEED_CONTEXT) and not view.has(CONTEXT) else CONTEXT


@rule("DS321", "context-sizes-in-conflict", Severity.ERROR, claim="runs")
def context_sizes_in_conflict(view: RunView) -> Iterator[Finding]:
    """Two keys set the context-parallel size, and they differ.

    The harness reads DeepSpeed's `sequence_parallel_size` as `context_parallel.size`.
    `--context_parallel_size` overrides `context_parallel.size`, as the other flags of the layout override theirs. It
    does not override DeepSpeed's key, which another program may read too.

    Wrong: {"train_micro_batch_size_per_gpu": 1, "context_parallel": {"size": 2}, "sequence_parallel_size": 4}
    Right: {"train_micro_batch_size_per_gpu": 1, "context_parallel": {"size": 2}}
    """
    deepspeed = view.size(DEEPSPEED_CONTEXT)
    if view.target != "harness" or deepspeed is None:
        return
    own = view.size(CONTEXT)
    flag = view.cp_override
    name, other = ("--context_parallel_size", flag) if flag is not None else ("context_parallel.size", own)
    if other not in (None, deepspeed):
        yield Finding(
            pointer=DEEPSPEED_CONTEXT,
            message=f"sequence_parallel_size is {deepspeed} and {name} is {other}",
            hint="remove sequence_parallel_size, or write the same number",
            deepspeed="reads sequence_parallel_size alone",
            on_value=True,
        )


@rule("DS322", "context-with-compile", Severity.ERROR, claim="refuses")
def context_with_compile(view: RunView) -> Iterator[Finding]:
    """Context parallelism is on together with torch.compile.

    Context ranks exchange attention heads inside a layer, and torch.compile cannot compile that exchange here.

    Wrong: {"train_micro_batch_size_per_gpu": 1, "context_parallel": {"size": 2}, "compile": {"enabled": true}}
    Right: {"train_micro_batch_size_per_gpu": 1, "context_parallel": {"size": 2}}
    """
    if view.target == "harness" and view.cp_size > 1 and view.compile_backend is not None:
        yield Finding(
            pointer="/compile/enabled",
            message=f"{counted(view.cp_size, 'context rank')} exchange attention heads inside of layers, which "
            "torch.compile does not support here",
            hint="remove compile.enabled, or context_parallel",
            deepspeed="refuses the key by itself; from the harness it does not get this section",
        )


@rule("DS323", "more-context-ranks-than-heads", Severity.WARNING, claim="runs", model="tiny-llama")
def more_context_ranks_than_heads(view: RunView) -> Iterator[Finding]:
    """There are more context ranks than attention heads per tensor-parallel rank.

    In attention each context rank computes some of the heads over all tokens. With fewer heads than ranks every rank
    computes all heads. The result is right, but attention is no faster than on one rank and takes as much memory.

    Wrong: {"train_micro_batch_size_per_gpu": 1, "context_parallel": {"size": 1009}}
    Right: {"train_micro_batch_size_per_gpu": 1, "context_parallel": {"size": 2}}
    """
    heads = view.model.heads if view.model is not None else None
    if view.target != "harness" or heads is None or view.cp_size == 1:
        return
    here = max(heads // view.tp_size, 1)
    if view.cp_size > here:
        ranks = f" on each of {view.tp_size} tensor-parallel ranks" if view.tp_size > 1 else ""
        yield Finding(
            pointer=context_pointer(view),
            message=f"{view.cp_size} context ranks, but only {counted(here, 'attention head')}{ranks}: every rank "
            "computes all of them",
            hint=f"set context_parallel.size to at most {here}",
            deepspeed="ignores the section",
            on_value=True,
        )


@rule("DS324", "context-without-effect", Severity.WARNING, claim="runs", target="deepspeed")
def context_without_effect(view: RunView) -> Iterator[Finding]:
    """context_parallel is set, but only the harness reads it, and the config is for another program.

    Wrong: {"train_micro_batch_size_per_gpu": 1, "context_parallel": {"size": 2}}
    Right: {"train_micro_batch_size_per_gpu": 1}
    """
    if view.target != "harness" and (view.size(CONTEXT) or 1) > 1:
        yield Finding(
            pointer=CONTEXT,
            message="context_parallel has no effect: only the harness knows it",
            hint="remove it, or train with the harness",
            deepspeed="ignores the section",
        )


@rule("DS325", "mask-of-all-pairs", Severity.WARNING, claim="runs", model="tiny-mistral")
def mask_of_all_pairs(view: RunView) -> Iterator[Finding]:
    """A model with sliding-window attention builds masks of tokens x tokens in a config for long sequences.

    If the window is shorter than the sequence, torch's attention needs a mask with a byte for each pair of tokens: 1
    GiB at 32,768 tokens, 16 GiB at 131,072. Every rank builds it, however many share the sequence. `tiling.attention`
    builds it for some queries at a time; on a GPU `--attn_implementation flex_attention` builds it in blocks. A run
    whose mask alone exceeds the memory is refused before it starts.

    Wrong: {"train_micro_batch_size_per_gpu": 1, "tiling": {"loss": 4096}}
    Right: {"train_micro_batch_size_per_gpu": 1, "tiling": {"loss": 4096, "attention": 1024}}
    """
    window = view.model.window if view.model is not None else None
    is_long = view.cp_size > 1 or (view.size(LOSS_TILE) or 0) > 0
    if view.target == "harness" and window is not None and is_long and not view.size(ATTENTION_TILE):
        yield Finding(
            pointer=LOSS_TILE if view.size(LOSS_TILE) else context_pointer(view),
            message=f"the model has a window of {counted(window, 'token')}: a longer sequence takes a mask of tokens x "
            "tokens bytes, 16 GiB at 131,072",
            hint="set tiling.attention to 1024",
            deepspeed="ignores the section",
        )
