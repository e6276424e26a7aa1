"""Let the exported generation config stop at the tokens with which the trained model ends its answers."""

from __future__ import annotations

from dataclasses import replace

from transformers import GenerationConfig

from harness.console import Console
from harness.data.samples import Samples
from harness.data.stops import stop_tokens, with_stop_tokens
from harness.data.streaming.makers import ConversationSamples
from harness.data.streaming.source import StreamedSource
from harness.data.tokenizer import ByteTokenizer, Tokenizer, known
from harness.hf.skeleton import ModelSource
from harness.training.parts.data import Datasets


def stop_at_answers(source: ModelSource, data: Datasets, console: Console) -> ModelSource:
    """Return the model with these tokens in its generation config, and report them, if the run learns conversations."""
    if data.tokenizer is None or not _learns_conversations(data.train):
        return source
    return with_stops(source, known(data.tokenizer), console)


def with_stops(source: ModelSource, tokenizer: Tokenizer, console: Console) -> ModelSource:
    """Return the model with the tokens that end the tokenizer's answers in its generation config; report them."""
    stops = stop_tokens(tokenizer.as_transformers() if isinstance(tokenizer, ByteTokenizer) else tokenizer)
    for stop in stops:
        if stop.id is None:
            console.warn(
                f"answers end with {stop.text}, which is not one token of the tokenizer, so nothing stops the model: "
                "add it as a special token, or let the chat template write {{ eos_token }} behind each answer"
            )
        else:
            console.say(f"answers end with {stop.text} (token {stop.id})")
    generation = source.generation or GenerationConfig.from_model_config(source.config)
    return replace(source, generation=with_stop_tokens(generation, stops))


def _learns_conversations(data: object) -> bool:
    sources = getattr(data, "sources", [data])
    makers = [source.maker if isinstance(source, StreamedSource) else source for source in sources]
    return any(isinstance(maker, Samples | ConversationSamples) for maker in makers)
