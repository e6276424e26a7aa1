"""The weight files of a directory, which belong together: replaced so that a crash leaves the old model or the new one.

They are written under names of their own (`unfinished_name`). One step, the renaming of `model.safetensors` or of the
index, makes the directory's model the new one. What follows only gives the files their final names, and is done by the
next export if it was cut off.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from harness.checkpoint.atomic import FOLDER, UNFINISHED, replace_text, sync_file, sync_folder
from harness.config.values.json_file import MOST_BYTES, parse_json, regular_bytes
from harness.config.values.json_object import JsonObject
from harness.hf.weights.tensor_files import INDEX, SINGLE

OF_A_MODEL = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")


def unfinished_name(name: str) -> str:
    """Return the name of a weight file while it is written. It can be loaded: an index may name it."""
    return UNFINISHED + name


def replace_model(directory: Path, files: Sequence[str], index: JsonObject) -> None:
    """Put whole files, under their `unfinished_name`, in the place of the model of `directory`.

    Args:
        files: their final names.
        index: the content of HuggingFace's index file, by final names; not written for a lone `model.safetensors`.
    """
    for name in files:
        sync_file(directory / unfinished_name(name))
    if list(files) == [SINGLE]:
        (directory / unfinished_name(SINGLE)).replace(directory / SINGLE)  # from here on the model is the new one
        (directory / INDEX).unlink(missing_ok=True)
    else:
        replace_text(directory / INDEX, _index_text(index, unfinished_name))
        (directory / SINGLE).unlink(missing_ok=True)  # readers prefer it to an index: from here on the model is new
        _finish(directory, files, index)
    for path in directory.glob("model*.safetensors"):
        if OF_A_MODEL.fullmatch(path.name) and path.name not in files:  # others are the user's
            path.unlink()
    sync_folder(directory)


def settle_model(directory: Path) -> None:
    """Complete a replacement that was cut off, and remove what unfinished ones have left."""
    path = directory / INDEX
    text = regular_bytes(path, MOST_BYTES).decode("utf-8") if path.is_file() else ""
    if UNFINISHED in text:  # one of our own, then
        index = parse_json(text)
        if (directory / SINGLE).is_file():  # it is the model still
            path.unlink()
        else:
            index["weight_map"] = {name: file.removeprefix(UNFINISHED) for name, file in index["weight_map"].items()}
            _finish(directory, sorted(set(index["weight_map"].values())), index)
    for folder in directory.glob(FOLDER + "*"):
        shutil.rmtree(folder)
    for file in directory.glob(unfinished_name("*.safetensors")):
        file.unlink()


def _finish(directory: Path, files: Sequence[str], index: JsonObject) -> None:
    """Give the files their final names beside the unfinished ones, which the index on the disk still names."""
    for name in files:
        source, target = directory / unfinished_name(name), directory / name
        target.unlink(missing_ok=True)
        try:
            target.hardlink_to(source)
        except OSError:  # a file system on which a file has one name only
            shutil.copyfile(source, target)
            sync_file(target)
    replace_text(directory / INDEX, _index_text(index, str))
    for name in files:
        (directory / unfinished_name(name)).unlink(missing_ok=True)


def _index_text(index: JsonObject, naming: Callable[[str], str]) -> str:
    weight_map = {name: naming(file) for name, file in index["weight_map"].items()}
    return json.dumps({**index, "weight_map": weight_map}, indent=2, sort_keys=True) + "\n"
