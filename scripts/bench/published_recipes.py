"""What NVIDIA's recipes of published runs say and their tables leave out.

Megatron-Bridge: scripts/performance/configs at the tag of the container (v0.1.0 is 25.09, v0.2.0 25.11, v0.3.0 26.02,
v0.4.0 26.04, v0.5.0 26.06). NeMo AutoModel: examples/llm_benchmark.
"""

from __future__ import annotations

import re


def container(row: dict[str, str]) -> float:
    """Return the year and month of the container that a row ran in, 0 where it names none."""
    found = re.match(r"(\d\d\.\d\d)[.\d]* NeMo Container", row["notes"])
    return float(found[1]) if found else 0.0


def replays_step(row: dict[str, str]) -> bool:
    """Whether a run replays its step as one CUDA graph, with fused experts and their traffic behind computation.

    From 26.06 the recipes of mixtures in MXFP8 have all three: all of them on GB200 and GB300, on others the small
    Qwen3 and what has interleaved stages.
    """
    if row["precision"] != "MXFP8" or container(row) < 26.06:
        return False
    if not row["model"].startswith(("Qwen3", "DeepSeek", "GPT OSS")):
        return False
    return row["gpu"].startswith("GB") or row["model"].startswith("Qwen3_30B") or _is_interleaved(row)


def replays_layers(row: dict[str, str]) -> bool:
    """Whether a run replays its layers as CUDA graphs, their experts included, as it drops tokens and pads.

    The recipes of 25.09 say so for the small Qwen3 on B200 and GB200, and for the large one on GB200.
    """
    if container(row) != 25.09 or "tokendrop" not in row["model"]:
        return False
    if row["model"].startswith("Qwen3_30B"):
        return row["gpu"].startswith(("B200", "GB200"))
    return row["model"].startswith("Qwen3_235B") and row["gpu"].startswith("GB200")


def hides_experts(row: dict[str, str]) -> bool:
    """Whether tokens travel to experts while layers compute on another micro-batch.

    Beside replayed steps, the recipes say so for interleaved stages on H100, B200 and B300, and from 26.04 for GPT-OSS
    on GB200.
    """
    if replays_step(row):
        return True
    if row["model"].startswith("GPT OSS"):
        return row["gpu"].startswith("GB200") and container(row) >= 26.04
    return container(row) >= 25.11 and not row["gpu"].startswith("GB") and _is_interleaved(row)


def sends_copies(row: dict[str, str]) -> bool:
    """Whether copies of a token are sent one by one, by NCCL's all-to-all, between nodes.

    Recipes that name no other dispatcher: GPT-OSS before 26.04, and the large Qwen3 on H100. (v0.3.1 names one for the
    latter, but what 26.02.01 measured has the layouts of v0.3.0.)
    """
    if row["model"].startswith("GPT OSS"):
        return 0 < container(row) < 26.04
    return row["model"].startswith("Qwen3_235B") and row["gpu"].startswith("H100")


def predicts_two(row: dict[str, str]) -> bool:
    """Whether a run trains DeepSeek's multi-token prediction: one layer more, and the head twice.

    The recipes have it by default, and the tables' FLOPs a token count it (260 GFLOP instead of 250) but where the
    model's name says otherwise.
    """
    return container(row) >= 25.11 and row["model"].startswith("DeepSeekV3") and "w/o" not in row["model"]


def recomputes_up(row: dict[str, str]) -> bool:
    """Whether a run computes compressed queries, keys and values again (`recompute_modules`: mla_up_proj).

    The recipes of DeepSeek say so but on GB300, and in 26.04 on GB200.
    """
    if container(row) < 25.11 or not row["model"].startswith("DeepSeekV3") or row["gpu"].startswith("GB300"):
        return False
    return not (row["gpu"].startswith("GB200") and container(row) == 26.04)


def reduces_narrow(row: dict[str, str]) -> bool:
    """Whether gradients are summed and sent in bf16: recipes of Megatron-Bridge set grad_reduce_in_fp32 to False."""
    return "Bridge" in row["system"]


def checkpoints(row: dict[str, str]) -> bool | None:
    """Whether a run of AutoModel recomputes whole layers; None of other programs.

    Its recipes do, but for GPT-OSS and for DeepSeek on 1,024 GPUs.
    """
    if not row["system"].startswith("NeMo AutoModel"):
        return None
    return not row["model"].startswith("GPT-OSS") and row["gpus"] != "1024"


def _is_interleaved(row: dict[str, str]) -> bool:
    return row["vpp"] not in ("", "1")
