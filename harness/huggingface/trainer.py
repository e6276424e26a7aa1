"""The Trainer for scripts written for HuggingFace's: what they read from a run, and call before and after training.

None of it takes part in training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from huggingface_hub import ModelCardData
from torch.utils.data import DataLoader, Dataset

from harness.atomic import replace_text
from harness.batches.collate import AnyDataset, Collator, MapDataset
from harness.batches.stream import read_micro_batch
from harness.config.values.json_file import read_json
from harness.config.values.secrets import Secrets
from harness.errors import UserError
from harness.huggingface.hub import upload
from harness.huggingface.names import missing, require_ours
from harness.topology.agreement import all_or_none
from harness.training.evaluate import batch_size, tokens_of_new
from harness.training.recording.files import write_object
from harness.training.trainer import Trainer

CARD = "<!-- written by ds-harness -->"
Batches: TypeAlias = "DataLoader[object]"
"""Micro-batches of one rank, as `MicroBatches` gives them."""


class MicroBatches(Dataset[object]):
    """The micro-batches of one rank: dicts of input_ids, labels and perhaps position_ids, or pairs (inputs, labels)."""

    def __init__(self, dataset: MapDataset, rows: Sequence[Sequence[int]], collator: Collator) -> None:
        self.dataset = dataset
        self.rows = rows
        self.collator = collator

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> object:
        (inputs, labels), _ = read_micro_batch(self.dataset, self.rows[number], self.collator)
        if not isinstance(self.dataset[self.rows[number][0]], Mapping):
            return inputs, labels
        has_positions = isinstance(inputs, tuple | list)
        named = (
            dict(zip(("input_ids", "position_ids"), inputs, strict=True)) if has_positions else {"input_ids": inputs}
        )
        return {**named, "labels": labels}


class HuggingFaceTrainer(Trainer):
    """A run under more names of HuggingFace's Trainer: attributes, reports, files, data loaders, the hub.

    Methods and arguments of HuggingFace's Trainer that this one does not have are refused, with what to use instead.
    """

    def _require_known(self, others: Mapping[str, object]) -> None:
        require_ours(type(self), others)

    @property
    def model_wrapped(self) -> Any:
        """DeepSpeed's engine around `model`."""
        self.run.engine.settle()
        return self.run.engine.deepspeed

    @property
    def optimizer(self) -> object:
        """DeepSpeed's optimizer on this rank."""
        return self.model_wrapped.optimizer

    @property
    def lr_scheduler(self) -> object:
        """The schedule of the learning rate."""
        return self.model_wrapped.lr_scheduler

    @property
    def is_deepspeed_enabled(self) -> bool:
        """Whether DeepSpeed is used: always true."""
        return True

    def is_world_process_zero(self) -> bool:
        """Return whether this is rank 0."""
        return self.state.is_world_process_zero

    def is_local_process_zero(self) -> bool:
        """Return whether this is the first rank of its host."""
        return self.state.is_local_process_zero

    def get_num_trainable_parameters(self) -> int:
        """Return the number of trained parameters of the whole model."""
        return self.run.trainable.size(trained=True)

    def get_learning_rates(self) -> list[float]:
        """Return the learning rate of each parameter group for the next step."""
        return [float(group["lr"]) for group in self.model_wrapped.optimizer.param_groups]

    def get_train_dataloader(self) -> Batches:
        """Return this rank's micro-batches in one pass through the data, for inspection; training does not use them.

        Raises UserError without training data, and for a stream, which is read once.
        """
        if self.stream is None:
            raise UserError("get_train_dataloader() needs a train_dataset")
        rows = self.stream.first_pass()
        return DataLoader(MicroBatches(self.stream.dataset, rows, self.stream.collator), batch_size=None)

    def get_eval_dataloader(self, eval_dataset: AnyDataset | str | None = None) -> Batches:
        """Return this rank's micro-batches in an evaluation, for inspection; `eval_dataset` as in `evaluate`.

        Raises UserError without evaluation data, and if it is not said which of several data sets.
        """
        if eval_dataset is not None and not isinstance(eval_dataset, str):
            return self.get_test_dataloader(eval_dataset)
        data = self.eval_dataset
        if eval_dataset is not None:
            data = data.get(eval_dataset) if isinstance(data, Mapping) else None
        if data is None or isinstance(data, Mapping):
            raise UserError("get_eval_dataloader() needs one eval_dataset: give it, or the name of one")
        return self._in_order(data)

    def get_test_dataloader(self, test_dataset: AnyDataset) -> Batches:
        """Return this rank's micro-batches in a prediction, for inspection."""
        return self._in_order(tokens_of_new(self.run, test_dataset, "test_dataset"))

    def _in_order(self, data: MapDataset) -> Batches:
        run = self.run
        groups = self.run.groups
        size = batch_size(run)
        rows = [list(range(start, min(start + size, len(data)))) for start in range(0, len(data), size)]
        mine = rows[groups.coordinate.batch_rank :: groups.layout.batch_ranks]
        return DataLoader(MicroBatches(data, mine, run.data_check.collator), batch_size=None)

    def log_metrics(self, split: str, metrics: Mapping[str, object]) -> None:
        """Print metrics of `split` (train, eval, test) as a table, on rank 0."""
        shown = {name: f"{value:,.4f}" if isinstance(value, float) else str(value) for name, value in metrics.items()}
        width = max(map(len, shown), default=0)
        digits = max(map(len, shown.values()), default=0)
        lines = [f"  {name:{width}} = {shown[name]:>{digits}}" for name in sorted(shown)]
        self.run.console.say("\n".join([f"***** {split} metrics *****", *lines]))

    def save_metrics(self, split: str, metrics: Mapping[str, object], combined: bool = True) -> None:
        """Write metrics to `output_dir/SPLIT_results.json`, and if `combined` to `all_results.json`; rank 0 writes."""
        folder = Path(self.args.output_dir)
        if not self.is_world_process_zero():
            return
        write_object(folder / f"{split}_results.json", metrics)
        if combined:
            everything = folder / "all_results.json"
            earlier = read_json(everything) if everything.is_file() else {}
            write_object(everything, {**(earlier if isinstance(earlier, dict) else {}), **metrics})

    def save_state(self) -> None:
        """Write the state, with its log history, to `output_dir/trainer_state.json`; rank 0 writes."""
        if self.is_world_process_zero():
            write_object(Path(self.args.output_dir) / "trainer_state.json", asdict(self.state))

    def create_model_card(
        self,
        language: str | None = None,
        license: str | None = None,
        tags: str | list[str] | None = None,
        model_name: str | None = None,
        finetuned_from: str | None = None,
        tasks: str | list[str] | None = None,
        dataset_tags: str | list[str] | None = None,
        dataset: str | list[str] | None = None,
        dataset_args: str | list[str] | None = None,
    ) -> None:
        """Write `output_dir/README.md` for the hub, with base model, data and last evaluation; rank 0 writes.

        A README.md that ds-harness did not write is kept.
        """
        path = Path(self.args.output_dir) / "README.md"
        if not self.is_world_process_zero() or (path.is_file() and CARD not in path.read_text("utf-8", "replace")):
            return
        data = ModelCardData(
            language=language,
            license=license,
            tags=[*_words(tags), "ds-harness"],
            base_model=finetuned_from,
            datasets=dataset_tags,
            pipeline_tag=next(iter(_words(tasks)), None),
        )
        names = [*_words(dataset), *_words(dataset_args)]
        of_data = f" Trained on {', '.join(names)}." if names else ""
        last = next((row for row in reversed(self.state.log_history) if any(map(_is_loss, row))), {})
        figures = [f"- {key}: {value:.4g}" for key, value in last.items() if _is_loss(key)]
        of_base = f"Fine-tuned from {finetuned_from}." if finetuned_from else "Trained from its config."
        heading = f"# {model_name or path.parent.name}"
        parts = [f"---\n{data.to_yaml()}\n---", CARD, heading, of_base + of_data, "\n".join(figures)]
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, Secrets.known().masked("\n\n".join(filter(None, parts)) + "\n"))

    def push_to_hub(
        self,
        commit_message: str = "End of training",
        blocking: bool = True,  # noqa: ARG002  # it always waits
        token: str | None = None,
        revision: str | None = None,
        *,
        repo_id: str | None = None,
        private: bool | None = None,
        **card: str | None,
    ) -> str:
        """Write the model and upload it to the hub as `repo_id` (default: the name of `output_dir`); all ranks call it.

        `card` is passed to `create_model_card`. Returns the commit's URL when everything is sent, whatever `blocking`
        says. Raises UserError if the upload fails.
        """
        folder = self.save_model()
        all_or_none(lambda: self.create_model_card(**card))
        send = partial(upload, folder, commit_message, repo_id=repo_id, private=private, token=token, revision=revision)
        return all_or_none(lambda: send() if self.is_world_process_zero() else "")

    if not TYPE_CHECKING:  # hidden from type checkers, which would accept any name

        def __getattr__(self, name: str) -> NoReturn:
            """Raise AttributeError; for a member of HuggingFace's Trainer, it says what to use instead."""
            raise missing(self, name)


def _is_loss(key: str) -> bool:
    """Return whether a logged value is the loss of an evaluation."""
    return key.startswith("eval_") and key.endswith("_loss")


def _words(given: str | list[str] | None) -> list[str]:
    return [given] if isinstance(given, str) else given or []
