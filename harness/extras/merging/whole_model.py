"""Write a vision-language model whose text decoder was trained: its own files, with other values in the text decoder.

The ranks export the text decoder alone, as for any model. One rank then writes the whole model from that export and
from the files that the run began with, a tensor at a time: every other tensor is copied byte for byte, under its own
name, and so are the config and the files of the processor.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig

from harness.atomic import replaced_files
from harness.checkpoint.exporting.model_files import hide_secrets, replace_model, settle_model, unfinished_name
from harness.checkpoint.tensors.tensor_writer import index_content
from harness.config.values.json_file import read_json
from harness.config.values.json_object import JsonObject
from harness.console import warn
from harness.extras.merging.merge import BESIDE_WEIGHTS, copy_files, write_file
from harness.extras.merging.merged_model import stored_dtype
from harness.hf.skeleton import ModelSource, is_composite
from harness.hf.weights.conversion import Unconverted, open_checkpoint
from harness.hf.weights.lazy_tensor import Box, LazyTensor, TensorSource, realised
from harness.hf.weights.tensor_files import open_tensors

GENERATION = "generation_config.json"
END = "eos_token_id"


@dataclass(frozen=True, eq=False)
class _Trained:
    """A parameter of the trained text decoder, as a part of a tensor of the whole model's files."""

    name: str
    values: LazyTensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    @property
    def dtype(self) -> torch.dtype:
        return stored_dtype(self.values)

    def read(self, into: Tensor, box: Box) -> None:
        """Copy the values in `box` to `into`, which has the sizes of `box`."""
        into.copy_(realised(self.values)[tuple(slice(*span) for span in box)])


@dataclass(frozen=True, kw_only=True)
class CompositeFiles:
    """The files of the whole model, into which a trained text decoder is put back.

    Attributes:
        source: the text decoder, whose weights lie in the whole model's directory.
        base: that directory.
        in_files: name in its files -> how the text decoder's tensors make it.
    """

    source: ModelSource
    base: Path
    in_files: Mapping[str, LazyTensor]

    def write(self, text: Path, directory: Path) -> None:
        """Write the whole model to `directory`, with the text decoder that was exported to `text`; one rank calls it.

        Raises UserError or OSError if a file cannot be written.
        """
        trained = open_checkpoint(text, self.source.skeleton()).tensors
        leaves: dict[str, TensorSource] = {name: _Trained(name, lazy) for name, lazy in trained.items()}
        stored = open_tensors(self.base)
        settle_model(directory)
        entries = {}
        for file, names in stored.files.items():
            tensors = {name: stored.tensors[name] for name in names}
            for name in names:
                if name in self.in_files:
                    tensors[name] = self.in_files[name].with_leaves(leaves.__getitem__)
            entries[file] = write_file(directory / unfinished_name(file), tensors)
        kept = (path for path in self.base.iterdir() if path.suffix in BESIDE_WEIGHTS)
        with replaced_files(directory) as folder:
            copy_files(folder, (path for path in kept if not path.name.endswith(".index.json")))
            _write_changed(folder / "config.json", _with_dtype(self.base, {leaf.dtype for leaf in leaves.values()}))
            _write_changed(folder / GENERATION, _with_end(self.base, text))
            hide_secrets(folder)
        replace_model(directory, list(entries), index_content(entries))


def whole_model(source: ModelSource) -> CompositeFiles | None:
    """Return the whole model that a text decoder comes from; None if it is not a part of one.

    A model that transformers must read itself is exported as its text decoder alone, with a warning.
    """
    if not isinstance(source.weights, Path):
        return None
    if not is_composite(AutoConfig.from_pretrained(source.weights, local_files_only=True, trust_remote_code=False)):
        return None
    files = open_tensors(source.weights).files
    try:
        in_files = open_checkpoint(source.weights, source.skeleton()).in_files
        can_be_written = in_files.keys() <= {name for names in files.values() for name in names}
    except Unconverted:
        can_be_written = False
    if not can_be_written or not all(file.endswith(".safetensors") for file in files):
        warn(f"{source.weights}: its text decoder is exported alone, as it cannot be put back into these files")
        return None
    return CompositeFiles(source=source, base=source.weights, in_files=in_files)


def _with_dtype(base: Path, trained: set[torch.dtype]) -> JsonObject:
    """Return the whole model's config, with a dtype that holds the trained values, too."""
    config: JsonObject = read_json(base / "config.json")
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    stated = getattr(torch, str(config.get(key, "float32")).removeprefix("torch."), torch.float32)
    wide = stated
    for dtype in trained:
        wide = torch.promote_types(wide, dtype) if dtype.is_floating_point else wide
    for part in [config, *(part for part in config.values() if isinstance(part, dict))] if wide != stated else []:
        if key in part or part is config:
            part[key] = str(wide).removeprefix("torch.")
    return config


def _with_end(base: Path, text: Path) -> JsonObject | None:
    """Return the whole model's generation config, with the tokens that end the trained answers; None without one."""
    if not (base / GENERATION).is_file():
        return None
    config: JsonObject = read_json(base / GENERATION)
    trained = read_json(text / GENERATION)
    if END in trained:
        config[END] = trained[END]
    return config


def _write_changed(path: Path, content: JsonObject | None) -> None:
    """Write a JSON file anew if its content has changed; else it stays as it is, to the byte."""
    if content is not None and read_json(path) != content:
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
