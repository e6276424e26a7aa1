"""Prepare training and evaluation data as tokens, from the script's files or from data sets of text or conversations.

A data set that already holds tokens is used as it is. On each host one rank prepares the data, and the others read its
cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from harness.arguments import TrainingArguments
from harness.arguments.configure import RunConfig
from harness.arguments.themes.script import ScriptArguments
from harness.batches.collate import AnyDataset, MapDataset
from harness.batches.evaluation import EvaluationData, by_prefix
from harness.batches.given import as_dataset, is_iterable, read_all
from harness.batches.stream import require_samples
from harness.config.model.files import has_tokenizer
from harness.config.values.arguments import BLOCK_SIZE
from harness.console import Console
from harness.data.blocks import make_blocks, require_block_size, token_blocks
from harness.data.files.documents import as_documents, hold_out, holds_tokens, read_documents
from harness.data.files.sources import TOKENS, SourceGroup, find_files, find_tokens, source_groups, validation_group
from harness.data.mixing import Source, described, joined
from harness.data.on_disk.cache import Preparation, once_per_host
from harness.data.on_disk.progress import Speaker
from harness.data.preview import composition, summary
from harness.data.samples import make_samples
from harness.data.streaming.flags import refuse_buffer, require_streamable
from harness.data.streaming.iterable import IterableRows, Rows
from harness.data.streaming.makers import sample_maker
from harness.data.streaming.rows import DocumentRows, FileRows
from harness.data.streaming.source import Streamed, StreamedSource, samples_of_rows
from harness.data.tokenizer import Tokenizer, check_vocabulary, identity, known, load_tokenizer
from harness.device.process_group import shared_store, start
from harness.errors import UserError
from harness.hf.layers.attention import with_attention
from harness.hf.locate import model_directory
from harness.hf.skeleton import ModelSource, build_skeleton, position_limit
from harness.hf.unbuilt import require_cut, vocabulary_size
from harness.topology.env import LaunchEnv
from harness.training.parts import needed
from harness.training.parts.data import AnyTokenizer, DataRequest, Datasets, UserData
from harness.wording import counted

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PretrainedConfig

NEEDS_TOKENIZER = "a data set of text or conversations needs processing_class, the tokenizer"
_COUNTED = 1000  # up to this number of documents, measure their size before tokenising

Pair: TypeAlias = tuple[MapDataset | None, EvaluationData]
"""Training and evaluation data."""
Documents: TypeAlias = "Dataset | list[Path]"
"""Documents to be tokenised, or files of tokens."""
_Data = TypeVar("_Data", bound=AnyDataset)


@dataclass(frozen=True, kw_only=True)
class SampleForm:
    """The form of samples.

    Attributes:
        block_size: tokens of a sample.
        packing: whether documents share samples without attending to each other.
        vocabulary: number of ids of the model.
    """

    block_size: int
    packing: bool
    vocabulary: int

    @classmethod
    def of(cls, tokenizer: Tokenizer, source: ModelSource, args: TrainingArguments) -> SampleForm:
        """Return the form that the arguments ask for. UserError if form or tokenizer do not fit the model."""
        vocabulary = vocabulary_size(build_skeleton(source.config))
        check_vocabulary(tokenizer, vocabulary)
        if args.packing:  # a model that cannot keep documents apart is refused before anything is tokenised
            _require_documents_apart(with_attention(source.config, args.attn_implementation))
        longest = position_limit(source.config)
        block_size = args.block_size
        if block_size is None:
            block_size = min(BLOCK_SIZE, longest or BLOCK_SIZE)
        elif longest is not None and block_size > longest:
            raise UserError(
                f"--block_size {block_size}: the model has {counted(longest, 'position')}: use at most {longest}"
            )
        require_block_size(block_size)
        return cls(block_size=block_size, packing=args.packing, vocabulary=vocabulary)


def _require_documents_apart(config: PretrainedConfig) -> None:
    needed(find_spec("harness.verify"), "--packing", "harness.verify")
    from harness.verify.packing import require_documents_apart

    require_documents_apart(config)


def script_datasets(script: ScriptArguments, request: DataRequest) -> Datasets:
    """Prepare the data of scripts/train.py's files; all ranks call it.

    Training files are read only if the run trains, or holds out a part of them for evaluation. Raises UserError for
    files that cannot be used.
    """
    args, config, source = request.args, request.config, request.source
    assert source is not None  # a script's model is a HuggingFace model
    tokenizer = load_tokenizer(script.tokenizer_name, model_directory(script.model))
    require_cut(source, config.resolved.tp_size, config.resolved.ep_size)
    say = Speaker.of(request.console)
    form = SampleForm.of(tokenizer, source, args)
    lay_out = _layer_out(tokenizer, form, say)

    def build() -> Pair:
        holds_out = script.validation_file is None and script.holds_out(evaluates=args.evaluates or args.do_eval)
        groups = source_groups(script.train_file) if args.trains or holds_out else []
        weights = [g.weight for g in groups if g.weight is not None]
        names = [g.paths[0] for g in groups]
        held_out: list[Documents] = []
        of_held: list[str] = []  # names of the sources of `held_out`
        documents = [] if script.streaming else [_read(group, say) for group in groups]
        if script.validation_file is not None:
            held_out = [_read(validation_group(script.validation_file), say)]
        elif holds_out:
            # Token files may have no index of documents to hold out; the preflight refuses sources of tokens alone.
            named = [pair for pair in zip(names, documents, strict=True) if not isinstance(pair[1], list)]
            split = [hold_out(each, script.held_out) for _, each in named]
            of_held = [name for name, _ in named]
            documents = [kept for kept, _ in split]
            held_out = [held for _, held in split]
        evaluation = joined([lay_out(each) for each in held_out], names=of_held) if held_out else None
        if not args.trains:
            return None, evaluation
        if script.streaming:
            files = [[file for path in group.paths for file in find_files(path)] for group in groups]
            rows = [FileRows(each, group.kind, say) for each, group in zip(files, groups, strict=True)]
            sources = [_streamed(each, each.kind, tokenizer, form) for each in rows]
            return Streamed(sources, weights, args.shuffle_buffer_size, names), evaluation
        _require_enough(documents, form, config)
        return joined([lay_out(each) for each in documents], weights, names), evaluation

    return _on_each_host(build, tokenizer, request.env, request.console)


def _require_enough(documents: Sequence[Documents], form: SampleForm, config: RunConfig) -> None:
    """Raise UserError, before anything is tokenised, if the training data cannot fill one global batch."""
    most = 0.0
    for each in documents:
        if isinstance(each, list) or (len(each) > _COUNTED and "conversation" not in each.column_names):
            return  # token files are counted when they are mapped; more than 1,000 documents fill any usual batch
        most += len(each)
        if "conversation" not in each.column_names:  # upper bound: two tokens a byte, and one a document for its end
            most += sum(2 * len(text.encode()) + 8 for text in each["text"]) / form.block_size
    resolved = config.resolved
    require_samples(int(most), resolved.micro_batch, resolved.accumulation, resolved.batch_ranks, at_most=True)


def _read(group: SourceGroup, say: Callable[[str], None]) -> Documents:
    """Return the documents of a group of sources; for token files, their paths."""
    if group.kind == TOKENS:
        return [file for path in group.paths for file in find_tokens(path)]
    return read_documents(group.paths, say=say)


def user_datasets(given: UserData, request: DataRequest) -> Datasets:
    """Prepare the data sets given to the Trainer: text and conversations are tokenised. All ranks call it.

    Raises UserError for text without a tokenizer, and for --packing or --block_size where they would have no effect.
    """
    args, source = request.args, request.source
    given_train = as_dataset(given.train_dataset)
    tokenizer = None if given.processing_class is None else known(given.processing_class)
    evaluation = _each(given.eval_dataset, lambda data: read_all(as_dataset(data), "eval_dataset"))
    say = Speaker.of(request.console)
    train = stream_of_dataset(given_train, tokenizer, source, args, say) if is_iterable(given_train) else given_train
    if not isinstance(train, Streamed):
        refuse_buffer(args)
    if source is None and args.block_size is not None:
        raise UserError("--block_size has no effect with your own data_collator, which lays out samples: remove it")
    if args.packing:
        _require_packed(source, train, *by_prefix(evaluation).values())
    if source is None or all(holds_tokens(data) for data in (train, *by_prefix(evaluation).values())):
        return Datasets(train=train, evaluation=evaluation, tokenizer=tokenizer)
    if tokenizer is None:
        raise UserError(NEEDS_TOKENIZER)
    require_cut(source, request.config.resolved.tp_size, request.config.resolved.ep_size)
    form = SampleForm.of(tokenizer, source, args)
    lay_out = _layer_out(tokenizer, form, say)

    def prepared(data: MapDataset, name: str) -> MapDataset:
        if holds_tokens(data):
            return data
        documents = as_documents(data, name, say)
        if data is train:
            _require_enough([documents], form, request.config)
        return lay_out(documents)

    def build() -> Pair:
        trained = None if train is None else prepared(train, "train_dataset")
        return trained, _each(evaluation, lambda data: prepared(data, "eval_dataset"))

    return _on_each_host(build, tokenizer, request.env, request.console)


def stream_of_dataset(
    dataset: Iterable[object],
    tokenizer: Tokenizer | None,
    source: ModelSource | None,
    args: TrainingArguments,
    say: Callable[[str], None],
) -> Streamed:
    """Return an IterableDataset as a stream of samples; without a `source` its rows are the samples.

    Raises UserError for arguments that a stream cannot follow, and for text without a tokenizer.
    """
    require_streamable(args, "an IterableDataset")
    if source is None:
        return samples_of_rows(IterableRows(dataset, "train_dataset", say=say), args.shuffle_buffer_size)
    rows = DocumentRows(dataset, "train_dataset", say=say)
    if rows.kind is None:
        return samples_of_rows(rows, args.shuffle_buffer_size)
    if tokenizer is None:
        raise UserError(NEEDS_TOKENIZER)
    form = SampleForm.of(tokenizer, source, args)
    return Streamed([_streamed(rows, rows.kind, tokenizer, form)], buffer=args.shuffle_buffer_size)


def _streamed(rows: Rows, kind: str, tokenizer: Tokenizer, form: SampleForm) -> StreamedSource:
    maker = sample_maker(kind, tokenizer, form.block_size, packing=form.packing, vocabulary=form.vocabulary)
    return StreamedSource(rows, maker, identity(tokenizer))


def _each(data: _Data | Mapping[str, _Data] | None, change: Callable[[_Data], MapDataset]) -> EvaluationData:
    """Apply `change` to a data set, or to each of several."""
    if isinstance(data, Mapping):
        return {name: change(each) for name, each in data.items()}
    return None if data is None else change(data)


def later_dataset(data: MapDataset, name: str, tokenizer: AnyTokenizer | None, request: DataRequest) -> MapDataset:
    """Tokenise a data set that is given to `evaluate` or `predict`, if it needs that; all ranks call it.

    Raises UserError for text without a tokenizer.
    """
    source = request.source
    if source is None or holds_tokens(data):
        return data
    if tokenizer is None:
        raise UserError(NEEDS_TOKENIZER)
    say = Speaker.of(request.console)
    lay_out = _layer_out(known(tokenizer), SampleForm.of(known(tokenizer), source, request.args), say)
    return once_per_host(lambda: lay_out(as_documents(data, name, say)), env=request.env, store=shared_store())


def own_tokenizer(model: object) -> Tokenizer | None:
    """Return the tokenizer in a model's directory; None if there is none, or `model` is not a name."""
    if not isinstance(model, str | Path):
        return None
    directory = model_directory(str(model))
    return load_tokenizer(None, directory) if has_tokenizer(directory) else None


def _require_packed(source: ModelSource | None, *datasets: MapDataset | None) -> None:
    """Raise UserError if --packing has no effect: with the user's own collator, or on tokens without position_ids."""
    if source is None:
        raise UserError("--packing has no effect with your own data_collator, which lays out samples: remove it")
    for data in datasets:
        row = data[0] if data is not None and holds_tokens(data) and len(data) else None
        if isinstance(row, Mapping) and "input_ids" in row and "position_ids" not in row:
            raise UserError(
                "--packing packs text and conversations, but this data set has input_ids: "
                "add position_ids that begin at 0 with each document, or remove --packing"
            )


def _layer_out(tokenizer: Tokenizer, form: SampleForm, say: Callable[[str], None]) -> Callable[[Documents], Source]:
    """Return the function that turns documents or token files into samples."""
    size = form.block_size
    packing = form.packing
    how = Preparation(say=say)

    def lay_out(documents: Documents) -> Source:
        if isinstance(documents, list):
            return token_blocks(documents, size, form.vocabulary, packing=packing)
        if "conversation" in documents.column_names:
            return make_samples(documents, tokenizer, size, how, packing=packing, vocabulary=form.vocabulary)
        return make_blocks(documents, tokenizer, size, how, packing=packing)

    return lay_out


def _on_each_host(build: Callable[[], Pair], tokenizer: Tokenizer, env: LaunchEnv, console: Console) -> Datasets:
    start(env)
    train, evaluation = once_per_host(build, env=env, store=shared_store())
    for name, data in {"training": train, **by_prefix(evaluation, "evaluation")}.items():
        for line in described(data):
            console.say(f"{name}: {line}")
    if console.speaks:
        for line in summary(composition(train)):
            console.say(f"training: {line}")
    return Datasets(train=train, evaluation=evaluation, tokenizer=tokenizer)
