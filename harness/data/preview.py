"""Show a data set's samples with the tokens in the loss marked, its token counts and its lengths.

This reveals a wrong loss mask before a run begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from harness.batches.collate import IGNORED, AnyDataset
from harness.config.values.json_object import JsonObject
from harness.data.blocks import Blocks
from harness.data.mixing import Joined, Mixture
from harness.data.samples import Samples
from harness.data.tokenizer import ByteTokenizer, known
from harness.errors import printable
from harness.parallel.generators import own_generators, seed_of
from harness.training.parts.data import AnyTokenizer, Datasets

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BEGIN, END = "[[", "]]"
"""Put around text that is trained on."""
_LONGEST_RUN = 240  # characters; a longer stretch of text is shortened to its beginning and end
_MOST_RUNS = 12
_COLUMNS = 20  # of a histogram


def composition(data: AnyDataset | None) -> JsonObject:
    """Return the composition of prepared data for `run.json`: samples and tokens of each source, lengths.

    {} for data that was not prepared here.
    """
    if not isinstance(data, Joined | Blocks | Samples):
        return {}
    sources = [
        each for each in (data.sources if isinstance(data, Joined) else [data]) if isinstance(each, Blocks | Samples)
    ]
    names: Sequence[str] = data.names if isinstance(data, Mixture) else [""] * len(sources)
    shares: Sequence[float | None] = data.shares if isinstance(data, Mixture) else [None] * len(sources)
    rows = [
        {"name": name, "share": share, **_sizes(source)}
        for name, share, source in zip(names, shares, sources, strict=True)
    ]
    lengths = [source.conversations.lengths() for source in sources if isinstance(source, Samples)]
    return {"sources": rows, **({"lengths": _histogram(np.concatenate(lengths))} if lengths else {})}


def summary(found: JsonObject) -> Iterator[str]:
    """Yield lines for the user on a composition: tokens in the loss, in all and by source, and conversation lengths."""
    sources = found.get("sources", ())
    tokens, learnt = (sum(row[name] for row in sources) for name in ("tokens", "learnt"))
    if tokens:
        yield f"{learnt:,} of {tokens:,} tokens are in the loss ({learnt / tokens:.1%})"
    for row in sources if len(sources) > 1 else ():
        yield f"{row['name']}: {row['learnt']:,} of {row['tokens']:,} tokens are in the loss"
    if "lengths" in found:
        lengths = found["lengths"]
        yield (
            f"conversations have {lengths['least']:,} to {lengths['most']:,} tokens, half of them up to "
            f"{lengths['median']:,}, 95% up to {lengths['p95']:,}"
        )


def sample_lines(data: Datasets) -> Iterator[str]:
    """Yield a line for the user that shows the first training sample."""
    for text in shown(data.train, data.tokenizer):
        yield f"a sample, the tokens in the loss between {BEGIN} and {END}: {text}"


def shown(data: AnyDataset | None, given: AnyTokenizer | None, count: int = 1) -> Iterator[str]:
    """Yield `count` samples as text, one line each, with the text that is trained on between [[ and ]].

    Yields nothing without a tokenizer, or for samples without ids.
    """
    if data is None or given is None or not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        return
    tokenizer = known(given)
    as_text = tokenizer.as_transformers() if isinstance(tokenizer, ByteTokenizer) else tokenizer
    count = min(count, len(data))
    rows = data.order(0, count, 0).tolist() if isinstance(data, Mixture) else range(count)  # from every source some
    for index in rows:
        with own_generators(seed_of("preview", index)):
            sample = data[index]
        if not isinstance(sample, Mapping) or "input_ids" not in sample:
            return
        yield _marked(sample, as_text)


def _marked(sample: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> str:
    ids = torch.as_tensor(sample["input_ids"]).flatten().tolist()
    labels = torch.as_tensor(sample.get("labels", sample["input_ids"])).flatten().tolist()
    used = max((i for i, label in enumerate(labels) if label != IGNORED), default=-1) + 1
    if "attention_mask" in sample:
        used = max(used, int(torch.as_tensor(sample["attention_mask"]).sum()))
    return marked(ids[:used], labels[:used], tokenizer)


def marked(ids: Sequence[int], labels: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text of ids on one line, shortened, with the runs that have labels between BEGIN and END."""
    learnt = [label != IGNORED and place > 0 for place, label in enumerate(labels)]  # the first is never predicted
    pairs = zip(ids, learnt, strict=True)
    runs = [(is_learnt, [one for one, _ in run]) for is_learnt, run in groupby(pairs, key=lambda pair: pair[1])]
    texts = []
    for is_learnt, run in runs[:_MOST_RUNS]:
        text = _cut(printable(str(tokenizer.decode(run, skip_special_tokens=False))))
        texts.append(f"{BEGIN}{text}{END}" if is_learnt else text)
    return "".join(texts) + (" ..." if len(runs) > _MOST_RUNS else "")


def _cut(text: str) -> str:
    half = _LONGEST_RUN // 2
    return text if len(text) <= _LONGEST_RUN else f"{text[:half]} ... {text[-half:]}"


def _sizes(source: Blocks | Samples) -> JsonObject:
    """Return the numbers of samples, of tokens and of tokens in the loss of a source."""
    if isinstance(source, Samples):
        tokens = source.conversations.tokens()
        learnt = source.conversations.learnt()
        return {"samples": len(source), "tokens": tokens, "learnt": learnt}
    tokens = len(source) * source.block_size
    return {"samples": len(source), "tokens": tokens, "learnt": tokens - len(source)}


def _histogram(lengths: np.ndarray[Any, np.dtype[np.integer[Any]]]) -> JsonObject:
    """Return a histogram and percentiles of lengths in tokens; `edges` has one entry more than `counts`."""
    edges = np.unique(np.linspace(lengths.min(), lengths.max() + 1, _COLUMNS + 1).astype(np.int64))
    counts, _ = np.histogram(lengths, edges)
    at = {
        "median": np.median(lengths),
        "p95": np.percentile(lengths, 95),
        "least": lengths.min(),
        "most": lengths.max(),
    }
    return {**{name: int(value) for name, value in at.items()}, "edges": edges.tolist(), "counts": counts.tolist()}
