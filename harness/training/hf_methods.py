"""What scripts call of HuggingFace's Trainer after training, under its names; its other names are refused in a line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from harness.checkpoint.atomic import replace_text
from harness.config.values.json_file import read_json
from harness.config.values.json_object import JsonObject
from harness.config.values.secrets import Secrets
from harness.errors import UserError
from harness.topology.agreement import all_or_none
from harness.training.hf_names import LOOP, METHODS, methods_of_transformers

if TYPE_CHECKING:
    from harness.arguments import TrainingArguments
    from harness.training.callbacks import TrainerState
    from harness.training.run import Run

ALL = "all_results.json"
STATE = "trainer_state.json"
OF_MODEL = (
    *("*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json", "adapter_config.json"),
    *("tokenizer*", "special_tokens_map.json", "vocab*", "merges.txt", "*.model", "chat_template*", "README.md"),
)
"""The files of `output_dir` that make the model."""


class NotHere(UserError, AttributeError):
    """A method of HuggingFace's Trainer that this one has not; `hasattr` is false."""


class HuggingFaceMethods:
    """Metrics and state as files, and the model on the hub, as HuggingFace's Trainer has them."""

    args: TrainingArguments
    state: TrainerState
    run: Run

    if not TYPE_CHECKING:  # a type checker knows the methods that there are

        def __getattr__(self, name: str) -> NoReturn:
            """Refuse in one line what HuggingFace's Trainer has, and this one has not."""
            if not name.startswith("__") and name in METHODS.keys() | methods_of_transformers():
                raise NotHere(f"Trainer.{name} is a method of HuggingFace's Trainer: {METHODS.get(name, LOOP)}")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def is_world_process_zero(self) -> bool:
        """Whether this is rank 0."""
        return self.state.is_world_process_zero

    def is_local_process_zero(self) -> bool:
        """Whether this is the first rank of its host."""
        return self.state.is_local_process_zero

    def log_metrics(self, split: str, metrics: Mapping[str, object]) -> None:
        """Print metrics of `split` (train, eval, test) as a table, on rank 0."""
        shown = {name: f"{value:,.4f}" if isinstance(value, float) else str(value) for name, value in metrics.items()}
        width, digits = max(map(len, shown), default=0), max(map(len, shown.values()), default=0)
        lines = [f"  {name:{width}} = {shown[name]:>{digits}}" for name in sorted(shown)]
        self.run.console.say("\n".join([f"***** {split} metrics *****", *lines]))

    def save_metrics(self, split: str, metrics: Mapping[str, object], combined: bool = True) -> None:
        """Write metrics to `output_dir/SPLIT_results.json`, `combined` also into `all_results.json`; rank 0 writes."""
        folder = Path(self.args.output_dir)
        if not self.is_world_process_zero():
            return
        self._write(folder / f"{split}_results.json", metrics)
        if combined:
            earlier = read_json(folder / ALL) if (folder / ALL).is_file() else {}
            self._write(folder / ALL, {**(earlier if isinstance(earlier, dict) else {}), **metrics})

    def save_state(self) -> None:
        """Write the state with its history of logs to `output_dir/trainer_state.json`; rank 0 writes."""
        if self.is_world_process_zero():
            self._write(Path(self.args.output_dir) / STATE, asdict(self.state))

    def push_to_hub(
        self,
        commit_message: str = "End of training",
        *,
        repo_id: str | None = None,
        private: bool | None = None,
        token: str | None = None,
        revision: str | None = None,
    ) -> str:
        """Write the model and upload its files to the hub, as `repo_id` (default: the name of `output_dir`); return the
        address of the commit. All ranks call it. UserError if it cannot be uploaded.
        """
        folder = Path(self.args.output_dir)
        self.save_model()

        def upload() -> str:
            from huggingface_hub import HfApi
            from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # its client's, whichever that is

            try:
                api = HfApi(token=token)
                name = api.create_repo(repo_id or folder.name, private=private, exist_ok=True).repo_id
                done = api.upload_folder(
                    repo_id=name,
                    folder_path=folder,
                    commit_message=commit_message,
                    revision=revision,
                    allow_patterns=list(OF_MODEL),
                    ignore_patterns=["checkpoint-*/*", "logs/*"],
                )
            except (HTTPError, OSError, ValueError) as error:  # no token, no network, no such name, no right
                said = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
                raise UserError(f"push_to_hub: {said}; the model is in {folder}: `hf upload` can send it") from error
            return str(done.commit_url)

        return all_or_none(lambda: upload() if self.is_world_process_zero() else "")

    def save_model(self, output_dir: str | Path | None = None) -> Path:
        """Write the model; the Trainer does it."""
        raise NotImplementedError

    def _write(self, path: Path, content: Mapping[str, object]) -> None:
        plain: JsonObject = Secrets.known().without(content)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_text(path, json.dumps(plain, indent=2, sort_keys=True, default=str) + "\n")
        except OSError as error:
            raise UserError(f"{path}: cannot be written: {error.strerror or error}") from error
