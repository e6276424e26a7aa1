"""Let the exported generation config stop at the tokens with which the trained model ends its answers."""

from __future__ import annotations

from dataclasses import replace

from transformers import GenerationConfig

from harness.data.samples import Samples
from harness.data.stops import stop_tokens, with_stop_tokens
from harness.data.streaming.source import StreamedSource
from harness.data.tokenizer import ByteTokenizer
from harness.training.prepare.plan import RunPlan


def stop_at_answers(plan: RunPlan) -> None:
    """Add these tokens to the model's generation config, and report them, if the run learns conversations."""
    source, tokenizer = plan.source, plan.data.tokenizer
    if source is None or tokenizer is None or not _learns_conversations(plan.data.train):
        return
    templated = tokenizer.as_transformers() if isinstance(tokenizer, ByteTokenizer) else tokenizer
    stops = stop_tokens(templated)
    generation = source.generation or GenerationConfig.from_model_config(source.config)
    plan.source = replace(source, generation=with_stop_tokens(generation, stops))
    for stop in stops:
        if stop.id is None:
            plan.console.warn(
                f"answers end with {stop.text}, which is not one token of the tokenizer, so nothing stops the model: "
                "add it as a special token, or let the chat template write {{ eos_token }} behind each answer"
            )
        else:
            plan.console.say(f"answers end with {stop.text} (token {stop.id})")


def _learns_conversations(data: object) -> bool:
    sources = getattr(data, "sources", [data])
    return any(
        isinstance(source, Samples) or (isinstance(source, StreamedSource) and source.learns_conversations)
        for source in sources
    )
