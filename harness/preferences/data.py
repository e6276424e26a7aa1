"""Prepare the preferences of a run as samples, from the script's files or from data sets given to the Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch

from harness.arguments import TrainingArguments
from harness.arguments.themes.preferences import PreferenceArguments
from harness.arguments.themes.script import ScriptArguments
from harness.batches.collate import IGNORED, AnyDataset, MapDataset
from harness.batches.evaluation import EvaluationData
from harness.batches.given import as_dataset, is_iterable, read_all
from harness.config.values.json_object import JsonObject
from harness.console import Console
from harness.data.files.documents import hold_out
from harness.data.files.sources import find_files
from harness.data.inputs.data_files import described_files
from harness.data.inputs.datasets import NEEDS_TOKENIZER, SampleForm, own_tokenizer
from harness.data.inputs.stop_at_answers import with_stops
from harness.data.mixing import Joined, Mixture, Source, joined
from harness.data.on_disk.cache import Preparation, once_per_host
from harness.data.on_disk.progress import Speaker
from harness.data.preview import marked
from harness.data.streaming.flags import refuse_buffer, require_streamable
from harness.data.streaming.source import Streamed
from harness.data.tokenizer import ByteTokenizer, Tokenizer, known, load_tokenizer
from harness.device.process_group import shared_store, start
from harness.errors import UserError
from harness.hf.locate import model_directory
from harness.hf.skeleton import ModelSource
from harness.hf.unbuilt import require_cut
from harness.preferences.documents import items_of, read_items, tokenised
from harness.preferences.items import groups_of, held_out_group, require_exchange, require_whole_data
from harness.preferences.samples import PreferenceSamples
from harness.preferences.streaming import IterablePairs, PairRows, stream
from harness.training.parts.data import AnyTokenizer, DataRequest, Datasets, SamplePrompts, UserData
from harness.wording import counted

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True)
class PreferenceData:
    """Makes samples of preferences; see `harness.training.parts.data.DataPart`."""

    of: PreferenceArguments

    def own_tokenizer(self, model: object) -> Tokenizer | None:
        """Return the tokenizer in a model's directory; None if there is none, or `model` is not a name."""
        return own_tokenizer(model)

    def script_datasets(self, script: ScriptArguments, request: DataRequest) -> Datasets:
        """Prepare the data of scripts/train.py's files; all ranks call it. UserError for files that cannot be used."""
        tokenizer = load_tokenizer(script.tokenizer_name, model_directory(script.model))
        args = request.args
        say = Speaker.of(request.console)
        prepare = self._preparing(tokenizer, request)

        def build() -> tuple[MapDataset | None, MapDataset | None]:
            holds_out = script.validation_file is None and script.holds_out(evaluates=args.evaluates or args.do_eval)
            groups = groups_of(script.train_file) if args.trains or holds_out else []
            weights = [g.weight for g in groups if g.weight is not None]
            names = [g.paths[0] for g in groups]
            found = [] if script.streaming else [read_items(group.paths, self.of, say) for group in groups]
            held_out: list[Dataset] = []
            if script.validation_file is not None:
                held_out = [read_items(held_out_group(script.validation_file).paths, self.of, say)]
            elif holds_out:
                found, held_out = map(list, zip(*(hold_out(each, script.held_out) for each in found), strict=True))
            of_held = names if holds_out else []
            evaluation = joined(list(map(prepare, held_out)), names=of_held) if held_out else None
            if not args.trains:
                return None, evaluation
            if script.streaming:
                form = _form(tokenizer, request)
                files = [[file for path in group.paths for file in find_files(path)] for group in groups]
                streams = [stream(PairRows(each, say), tokenizer, form) for each in files]
                return Streamed(streams, weights, args.shuffle_buffer_size, names), evaluation
            return joined(list(map(prepare, found)), weights, names), evaluation

        start(request.env)
        train, evaluation = once_per_host(build, env=request.env, store=shared_store())
        return self._described(Datasets(train=train, evaluation=evaluation, tokenizer=tokenizer), request.console)

    def user_datasets(self, given: UserData, request: DataRequest) -> Datasets:
        """Prepare the data sets given to the Trainer; all ranks call it. UserError if they cannot be used."""
        train, evaluation = given.train_dataset, given.eval_dataset
        parts = list(evaluation.values()) if isinstance(evaluation, Mapping) else [evaluation]
        if all(each is None or _is_prepared(each) for each in (train, *parts)):  # by `script_datasets`
            held_out = cast("EvaluationData", evaluation)
            return Datasets(
                train=cast("MapDataset | None", train), evaluation=held_out, tokenizer=given.processing_class
            )
        if given.processing_class is None:
            raise UserError(NEEDS_TOKENIZER)
        if is_iterable(train):
            require_whole_data("an IterableDataset", self.of)
            require_streamable(request.args, "an IterableDataset")
        else:
            refuse_buffer(request.args)
        tokenizer = known(given.processing_class)
        prepare = self._preparing(tokenizer, request)

        def prepared(data: AnyDataset, name: str) -> MapDataset:
            if _is_prepared(data):
                return cast("MapDataset", data)
            if is_iterable(data) and name == "train_dataset":
                streamed = stream(
                    IterablePairs(data, name, Speaker.of(request.console)), tokenizer, _form(tokenizer, request)
                )
                return Streamed([streamed], buffer=request.args.shuffle_buffer_size)
            return prepare(items_of(read_all(as_dataset(data), name), name, self.of))

        def build() -> tuple[MapDataset | None, EvaluationData]:
            made = None if train is None else prepared(train, "train_dataset")
            if isinstance(evaluation, Mapping):
                return made, {name: prepared(each, f"eval_dataset[{name!r}]") for name, each in evaluation.items()}
            return made, None if evaluation is None else prepared(evaluation, "eval_dataset")

        start(request.env)
        made, held_out = once_per_host(build, env=request.env, store=shared_store())
        return self._described(Datasets(train=made, evaluation=held_out, tokenizer=tokenizer), request.console)

    def later_dataset(
        self, data: MapDataset, name: str, tokenizer: AnyTokenizer | None, request: DataRequest
    ) -> MapDataset:
        """Prepare a data set that is given to `evaluate` or `predict`; all ranks call it.

        Raises UserError if the loss needs the log-probabilities of the model before training.
        """
        if isinstance(data, PreferenceSamples) and (data.reference is not None or not self.of.loss.needs_reference):
            return data
        if self.of.loss.needs_reference:
            raise UserError(
                f"{name}: --preference {self.of.preference} compares with the model before training, so give all data "
                "that is evaluated to the Trainer as eval_dataset"
            )
        if tokenizer is None or request.source is None:
            raise UserError(NEEDS_TOKENIZER)
        form = SampleForm.of(known(tokenizer), request.source, request.args)
        how = _preparation(request)
        return once_per_host(
            lambda: self._samples(items_of(data, name, self.of), known(tokenizer), form, 1, how),
            env=request.env,
            store=shared_store(),
        )

    def stop_at_answers(self, source: ModelSource, data: Datasets, console: Console) -> ModelSource:
        """Return the model with a generation config that stops where completions end."""
        if data.train is None or data.tokenizer is None:
            return source
        return with_stops(source, known(data.tokenizer), console)

    def sample_lines(self, data: Datasets) -> Iterator[str]:
        """Yield lines for the user that show the first sample, with the tokens in the loss marked."""
        if data.tokenizer is not None:
            for samples in samples_in(data.train)[:1]:
                yield from self.shown(samples, data.tokenizer, 1)

    def shown(self, samples: PreferenceSamples, tokenizer: AnyTokenizer, count: int) -> Iterator[str]:
        """Yield the two sequences of the first samples as text, with the tokens in the loss marked."""
        own = known(tokenizer)
        as_text = own.as_transformers() if isinstance(own, ByteTokenizer) else own
        for index in range(min(count, len(samples))):
            sample = samples[index]
            kinds = (
                ["chosen", "rejected"] if self.of.loss.paired else ["desirable" if sample["label"] else "undesirable"]
            )
            labels = torch.where(sample["answers"], sample["labels"], IGNORED)
            for row, kind in enumerate(kinds):
                used = int((sample["labels"][row] != IGNORED).sum())
                ids = sample["input_ids"][row, :used].tolist()
                learnt = labels[row, :used].tolist()
                yield f"{kind}: {marked(ids, learnt, as_text)}"

    def sample_prompts(
        self,
        args: TrainingArguments,
        data: Datasets,  # noqa: ARG002
        source: ModelSource,  # noqa: ARG002
        vocabulary: int,  # noqa: ARG002
    ) -> SamplePrompts:
        """Raise UserError: `Preferences.obstacles` has refused the flag before."""
        raise UserError(f"--sample_prompts {args.sample_prompts} does not work with --preference: remove it")

    def data_files(self, flags: Mapping[str, object]) -> JsonObject:
        """Return for `run.json` the files that the script's flags name."""
        return described_files(
            flags,
            lambda words: [file for group in groups_of(words) for path in group.paths for file in find_files(path)],
        )

    def composition(self, data: AnyDataset | None) -> JsonObject:
        """Return for `run.json` the samples and tokens of each source of a data set; {} for a stream."""
        sources = samples_in(data)
        names, shares = (data.names, data.shares) if isinstance(data, Mixture) else ([""], [None])
        sizes = [
            {"samples": len(each), "tokens": each.sequences.tokens(), "learnt": each.sequences.learnt()}
            for each in sources
        ]
        rows = zip(names, shares, sizes, strict=False)
        return {"sources": [{"name": name, "share": share, **size} for name, share, size in rows]} if sources else {}

    def _preparing(self, tokenizer: Tokenizer, request: DataRequest) -> Callable[[Dataset], Source]:
        """Return the function that turns items into samples. UserError if the run's settings do not fit."""
        source = request.source
        resolved = request.config.resolved
        assert source is not None  # `plan_run` refuses an objective for a list of layers
        require_cut(source, resolved.tp_size, resolved.ep_size)
        form = SampleForm.of(tokenizer, source, request.args)
        micro_batch = resolved.micro_batch
        require_exchange(self.of, micro_batch)
        how = _preparation(request)
        return lambda found: cast("Source", self._samples(found, tokenizer, form, micro_batch, how))

    def _samples(
        self, found: Dataset, tokenizer: Tokenizer, form: SampleForm, micro_batch: int, how: Preparation
    ) -> PreferenceSamples:
        return tokenised(
            found,
            tokenizer,
            self.of,
            block_size=form.block_size,
            micro_batch=micro_batch,
            vocabulary=form.vocabulary,
            how=how,
        )

    def _described(self, data: Datasets, console: Console) -> Datasets:
        """Report the sizes of the data sets; return them."""
        parts = {"training": data.train}
        evaluation = data.evaluation if isinstance(data.evaluation, Mapping) else {"": data.evaluation}
        parts |= {f"evaluation {name}".strip(): each for name, each in evaluation.items()}
        kind = "pair" if self.of.loss.paired else "labelled completion"
        for name, each in parts.items():
            for number, samples in enumerate(samples_in(each)):
                share = ""
                if isinstance(each, Mixture):
                    share = f"{each.names[number]} gives {each.shares[number]:.1%} of the samples and has "
                cut, lost = samples.sequences.lost()
                shortened = f"; {counted(cut, 'longer sequence')} lost {counted(lost, 'token')}" if cut else ""
                tokens = counted(samples.sequences.tokens(), "token")
                console.say(
                    f"{name}: {share}{counted(len(samples), kind)} of {tokens}, {samples.sequences.learnt():,} of them "
                    f"in completions{shortened}"
                )
        return data


def _form(tokenizer: Tokenizer, request: DataRequest) -> SampleForm:
    assert request.source is not None  # `plan_run` refuses an objective for a list of layers
    return SampleForm.of(tokenizer, request.source, request.args)


def _preparation(request: DataRequest) -> Preparation:
    return Preparation(say=Speaker.of(request.console))


def _is_prepared(data: object) -> bool:
    return isinstance(data, PreferenceSamples | Joined | Streamed)


def samples_in(data: object) -> list[PreferenceSamples]:
    """Return the prepared samples of each source of a data set; [] for a stream, and for other data."""
    sources = data.sources if isinstance(data, Joined) else [data]
    return [each for each in sources if isinstance(each, PreferenceSamples)]
