"""Replace the weight files of a directory together, so that a crash leaves the old model or the new one.

The files are written under other names (`unfinished_name`). One operation switches from the old model to the new one:
the rename of `model.safetensors` or of the index. The rest only gives the files their final names; if it is
interrupted, the next export completes it. Secrets are removed from the configs beside them.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from harness.atomic import FOLDER, UNFINISHED, free_name, replace_text, sync_file, sync_folder
from harness.config.model.files import INDEX, SINGLE
from harness.config.values.json_file import MOST_BYTES, parse_json, regular_bytes
from harness.config.values.json_object import JsonObject
from harness.config.values.secrets import without_secret_texts
from harness.hf.locate import ADAPTERS

CONFIGS = ("config.json", "generation_config.json", "adapter_config.json", "tokenizer_config.json")
OF_A_MODEL = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")


def unfinished_name(name: str) -> str:
    """Return a weight file's temporary name. It ends with .safetensors, so that an index may refer to it."""
    return UNFINISHED + name


def replace_model(directory: Path, files: Sequence[str], index: JsonObject) -> None:
    """Replace the model in `directory` by the complete files there, which still have their `unfinished_name`.

    Args:
        files: the final names.
        index: content of HuggingFace's index file, with final names; not written for a single `model.safetensors`.
    """
    for name in files:
        sync_file(directory / unfinished_name(name))
    set_aside_adapters(directory)
    if list(files) == [SINGLE]:
        (directory / unfinished_name(SINGLE)).replace(directory / SINGLE)  # the switch to the new model
        (directory / INDEX).unlink(missing_ok=True)
    else:
        replace_text(directory / INDEX, _index_text(index, unfinished_name))
        # The switch is the new index, or the removal of an old single file, which readers prefer to an index.
        (directory / SINGLE).unlink(missing_ok=True)
        _finish(directory, files, index)
    for path in directory.glob("model*.safetensors"):
        if OF_A_MODEL.fullmatch(path.name) and path.name not in files:  # files with other names are the user's
            path.unlink()
    sync_folder(directory)


def settle_model(directory: Path) -> None:
    """Complete a replacement interrupted after the switch, and delete the files of unfinished replacements."""
    path = directory / INDEX
    text = regular_bytes(path, MOST_BYTES).decode("utf-8") if path.is_file() else ""
    if UNFINISHED in text:  # an index of an interrupted replacement
        index = parse_json(text)
        if (directory / SINGLE).is_file():  # interrupted before the switch: the single file is still the model
            path.unlink()
        else:
            index["weight_map"] = {name: file.removeprefix(UNFINISHED) for name, file in index["weight_map"].items()}
            _finish(directory, sorted(set(index["weight_map"].values())), index)
    for folder in directory.glob(FOLDER + "*"):
        shutil.rmtree(folder)
    for file in directory.glob(unfinished_name("*.safetensors")):
        file.unlink()


def set_aside_adapters(directory: Path) -> None:
    """Move adapters to a folder like `adapters.1`: transformers would apply them to a model beside them."""
    _set_aside([directory / ADAPTERS, *directory.glob("adapter_model.*")], directory / "adapters")


def set_aside_model(directory: Path, base: str) -> None:
    """Move a model to a folder like `model.1`, unless it is the adapters' `base`: transformers would use it."""
    if base and Path(base).resolve() == directory.resolve():
        return
    settle_model(directory)
    weights = [path for path in directory.glob("model*.safetensors") if OF_A_MODEL.fullmatch(path.name)]
    others = [directory / name for name in ("config.json", "generation_config.json", INDEX)]
    _set_aside([*others, *weights, *directory.glob("pytorch_model*")], directory / "model")


def _set_aside(files: Sequence[Path], folder: Path) -> None:
    """Move the existing files to a new folder. Without the first, which is needed to read the others, they stay."""
    if files[0].is_file():
        (moved := free_name(folder)).mkdir()
        for path in filter(Path.is_file, files):
            path.rename(moved / path.name)
        sync_folder(folder.parent)


def _finish(directory: Path, files: Sequence[str], index: JsonObject) -> None:
    """Give the files their final names; the unfinished names stay until the index no longer refers to them."""
    for name in files:
        source = directory / unfinished_name(name)
        target = directory / name
        target.unlink(missing_ok=True)
        try:
            target.hardlink_to(source)
        except OSError:  # a file system without hard links
            shutil.copyfile(source, target)
            sync_file(target)
    replace_text(directory / INDEX, _index_text(index, str))
    for name in files:
        (directory / unfinished_name(name)).unlink(missing_ok=True)


def _index_text(index: JsonObject, naming: Callable[[str], str]) -> str:
    weight_map = {name: naming(file) for name, file in index["weight_map"].items()}
    return json.dumps({**index, "weight_map": weight_map}, indent=2, sort_keys=True) + "\n"


def hide_secrets(folder: Path) -> None:
    """Remove secrets from the configs of a model, its adapters and its tokenizer in a folder.

    A model's config may contain a `token` or an `api_key`, and exported models are published.
    """
    for path in filter(Path.is_file, (folder / name for name in CONFIGS)):
        content = json.loads(path.read_text(encoding="utf-8"))
        if (plain := without_secret_texts(content)) != content:
            path.write_text(json.dumps(plain, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
