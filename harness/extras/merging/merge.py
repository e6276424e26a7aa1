"""Write a base model with adapters merged into it: the base model's files, with other values in the adapted tensors.

Only one layer is in memory at a time. What adapters do not change is copied byte for byte, and so are the config, the
tokenizer and the generation settings; the config changes only if the vocabulary or a tie does.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open

from harness.atomic import free_name, sync_folder
from harness.checkpoint.directories import MANIFEST, RUN, STATE, numbered
from harness.checkpoint.exporting.model_files import hide_secrets
from harness.checkpoint.integrity import damage, is_checkpoint, newest_whole
from harness.checkpoint.saved_run import SavedRun
from harness.checkpoint.tensors.tensor_writer import Entry, OpenFiles, create, file_regions, index_content
from harness.config.model.files import INDEX, SINGLE, has_tokenizer, has_weights
from harness.config.values.json_file import read_json
from harness.config.values.json_object import JsonObject
from harness.errors import UserError
from harness.extras.lora import base_checksums, stored_checksums
from harness.extras.merging.merged_model import WEIGHTS, MergedModel, stored_dtype
from harness.hf.adapters import PREFIX
from harness.hf.locate import ADAPTERS, model_directory
from harness.hf.skeleton import ModelSource, read_source
from harness.hf.weights.conversion import Checkpoint, open_checkpoint, untie
from harness.hf.weights.lazy_tensor import LazyTensor
from harness.hf.weights.tensor_files import StoredTensors, open_tensors

BESIDE_WEIGHTS = (".json", ".jinja", ".model", ".txt", ".tiktoken", ".py")
"""Endings of the files that belong to a model besides its weights."""
NOT_OF_A_MODEL = (RUN, STATE, MANIFEST, ADAPTERS, "trainer_state.json")
TOKENIZER = ("tokenizer", "special_tokens_map", "added_tokens", "vocab", "merges", "chat_template", "spiece")
"""How the names of a tokenizer's files begin."""
BASE = "base_model"
"""The folder beside adapters in which a run writes a base model that it has initialised itself."""


def merge(adapters: Sequence[Path], out: Path, base: str | None = None) -> Path:
    """Write a base model with adapters merged into it, one after the other, to the new directory `out`.

    Args:
        adapters: directories: of peft's adapters, of a run that trained some, or of one of its checkpoints.
        base: the base model, a directory or an id of the hub; None: the one that the first adapters name.

    Returns:
        The base model's directory.

    Raises:
        UserError: the adapters do not fit the base model or cannot be merged, or `out` holds files already.
        OSError: a file cannot be written.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is not an empty directory: name a new one for the merged model")
    found = [adapter_directory(path) for path in adapters]
    source = read_source(str(_base_directory(found[0], base)))
    if not isinstance(source.weights, Path):
        raise UserError(f"{source.name} has no weights to merge adapters into: name the base model with --base")
    for path in found:
        _require_base(path, source)
        _require_named_base(path, source.weights, base or _named_base(found[0]), is_given=base is not None)
    out.absolute().parent.mkdir(parents=True, exist_ok=True)
    folder = free_name(out.with_name(f"unfinished-{out.name}"))
    folder.mkdir()
    try:
        _write(source, source.weights, found, folder)
        folder.rename(out)  # replaces an empty directory
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    sync_folder(out.absolute().parent)
    return source.weights


def adapter_directory(path: Path) -> Path:
    """Return the directory of adapters that `path` means: itself, or the newest checkpoint of a run that has not ended.

    Raises UserError if there is none, or the checkpoint is damaged.
    """
    newest = None if (path / ADAPTERS).is_file() else newest_whole(path)
    directory = newest or path
    if not (directory / ADAPTERS).is_file() or not (directory / WEIGHTS).is_file():
        why = "it is a whole model already" if has_weights(directory) else f"it lacks {ADAPTERS} or {WEIGHTS}"
        raise UserError(f"{path}: no adapters to merge there: {why}")
    if is_checkpoint(directory) and (problem := damage(directory)):
        raise UserError(f"{directory}: no whole checkpoint there ({problem})")
    return directory


def _base_directory(adapters: Path, base: str | None) -> Path:
    if base is not None:
        return model_directory(base, "--base")
    named = _named_base(adapters)
    beside = adapters.parent / BASE
    if not named and beside.is_dir():
        named = str(beside)
    if not named:
        raise UserError(f"{adapters / ADAPTERS} names no base model: name it with the --base of checkpoint merge")
    if Path(named).is_absolute() and not Path(named).exists():
        raise UserError(
            f"{adapters / ADAPTERS}: the base model {named} is not there: name it with the --base of checkpoint merge"
        )
    return model_directory(named, "--base")


def _named_base(adapters: Path) -> str:
    return _adapter_config(adapters).get("base_model_name_or_path") or ""


def _adapter_config(adapters: Path) -> JsonObject:
    try:
        config = read_json(adapters / ADAPTERS)
    except (OSError, ValueError) as error:
        raise UserError(f"{adapters / ADAPTERS}: cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise UserError(f"{adapters / ADAPTERS}: cannot be read: it is not a JSON object")
    return config


def _require_base(adapters: Path, source: ModelSource) -> None:
    """Raise UserError if the run that trained the adapters had other weights under them."""
    found = [path for _, path in numbered(adapters)]
    checkpoint = adapters if is_checkpoint(adapters) else next((path for path in found if damage(path) is None), None)
    if checkpoint is not None and (saved := SavedRun.read(checkpoint)).progress.base:
        replaced = _adapter_config(adapters).get("modules_to_save") or ()
        ours = base_checksums(source, replaced)
        if saved.progress.base.keys().isdisjoint(ours):
            raise UserError(f"{checkpoint} contains adapters for a model with other layers than {source.name}")
        saved.require_same_base(ours)


def _require_named_base(adapters: Path, weights: Path, base: str, *, is_given: bool) -> None:
    """Raise UserError if the adapters name another base model than `base`, with other weights than those in `weights`.

    Args:
        is_given: whether the user has named the base; then a place that is not there any more may have held it.
    """
    named = _named_base(adapters)
    if not named or named == base or Path(named).resolve() == weights.resolve():
        return
    is_another = _has_other_values(Path(named), weights) if has_weights(Path(named)) else not is_given
    if is_another:
        raise UserError(
            f"{adapters}: these adapters are of {named}, not of {base}: merge only adapters of one base model"
        )


def _has_other_values(named: Path, weights: Path) -> bool:
    """Return whether two directories hold tensors of the same names and shapes, but other values.

    Other names and shapes are told when the adapters are loaded.
    """
    one, other = ({name: t.shape for name, t in open_tensors(path).tensors.items()} for path in (named, weights))
    return one == other and stored_checksums(named) != stored_checksums(weights)


# -- what is written -----------------------------------------------------------------------------------------


def _write(source: ModelSource, base: Path, adapters: Sequence[Path], folder: Path) -> None:
    """Write the merged model to an empty folder."""
    skeleton = source.skeleton()
    stored = open_tensors(base)
    if other := next((name for name in stored.files if not name.endswith(".safetensors")), None):
        raise UserError(f"{base / other}: save the base model as safetensors before adapters are merged into it")
    checkpoint = open_checkpoint(base, skeleton)
    untie(skeleton, checkpoint.untied)
    rows = vocabulary_of(adapters[-1], skeleton.get_input_embeddings().get_parameter("weight").shape[0])
    if rows is not None:
        skeleton.resize_token_embeddings(rows, mean_resizing=False)
    merged = MergedModel(skeleton, adapters, checkpoint.tensors)
    files = _planned(stored, checkpoint, merged)
    entries = {name: write_file(folder / name, tensors) for name, tensors in files.items()}
    changed = rows is not None or bool(merged.untied)
    copy_files(folder, (path for path in base.iterdir() if path.suffix in BESIDE_WEIGHTS and path.name != INDEX))
    if (base / INDEX).is_file() and not changed:
        copy_files(folder, [base / INDEX])
    elif list(files) != [SINGLE]:
        _write_json(folder / INDEX, index_content(entries))
    if changed:
        _change_config(folder / "config.json", rows, untied=bool(merged.untied))
    if rows is not None or not has_tokenizer(folder):
        copy_files(folder, (path for path in adapters[-1].iterdir() if path.name.startswith(TOKENIZER)))
    hide_secrets(folder)


def vocabulary_of(adapters: Path, rows: int) -> int | None:
    """Return the rows of the embedding that the adapters replace, if these are others than the model's; else None."""
    with safe_open(adapters / WEIGHTS, "pt") as file:
        found = [
            file.get_slice(name).get_shape()[0]
            for name in file.keys()  # noqa: SIM118  # it is not a dict
            if name.startswith(PREFIX) and name.endswith((".embed_tokens.weight", ".wte.weight", ".embed_in.weight"))
        ]
    return found[0] if found and found[0] != rows else None


def _planned(stored: StoredTensors, checkpoint: Checkpoint, merged: MergedModel) -> dict[str, dict[str, LazyTensor]]:
    """Return file name -> name -> tensor of the merged model. UserError if a changed parameter is in no file."""
    changed = {
        name: _of_merged(lazy, merged)
        for name, lazy in checkpoint.in_files.items()
        if any(leaf.name in merged.changed for leaf in lazy.leaves())
    }
    written = {leaf.name for lazy in checkpoint.in_files.values() for leaf in lazy.leaves()}
    added = {name: LazyTensor.of(merged.parameter(name)) for name in merged.untied - written}
    files = {
        file: {name: changed.get(name, stored.tensors[name]) for name in names} for file, names in stored.files.items()
    }
    next(reversed(files.values())).update(added)
    return files


def _of_merged(lazy: LazyTensor, merged: MergedModel) -> LazyTensor:
    """Return a tensor of the files, made of the merged model's parameters as it is made of the base model's."""
    only = lazy.patches[0]
    if len(lazy.patches) == 1 and only.is_whole:  # it may have more rows now
        return LazyTensor.of(merged.parameter(only.leaf.name))
    return lazy.with_leaves(merged.parameter)


def write_file(path: Path, tensors: Mapping[str, LazyTensor]) -> list[Entry]:
    """Write one safetensors file, a tensor at a time; return what it contains."""
    entries = [
        Entry(name=name, shape=tuple(lazy.shape), dtype=stored_dtype(lazy), trained=True)
        for name, lazy in tensors.items()
    ]
    header, regions = file_regions(path, entries)
    create(path, header, regions)
    with OpenFiles(several_hosts=False) as opened:
        for region in regions:
            values = torch.empty(region.entry.shape, dtype=region.entry.dtype)
            tensors[region.entry.name].read_into(values)
            opened.write(region, (0,) * values.dim(), values)
        opened.sync()
    return entries


def copy_files(folder: Path, files: Iterable[Path]) -> None:
    """Copy those of `files` that belong to a model, not to a run, into a folder."""
    for path in files:
        if path.is_file() and path.name not in NOT_OF_A_MODEL:
            shutil.copyfile(path, folder / path.name)


def _write_json(path: Path, content: JsonObject) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _change_config(path: Path, rows: int | None, *, untied: bool) -> None:
    """Set the vocabulary's size in a config, and that weights are not tied, where they have changed."""
    config = read_json(path)
    for part in (config, config.get("text_config") or {}):
        if rows is not None and (part is not config or "vocab_size" in config or "text_config" not in config):
            part["vocab_size"] = rows
        if untied:
            part["tie_word_embeddings"] = False
    _write_json(path, config)
