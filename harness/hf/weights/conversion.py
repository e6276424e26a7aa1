"""Convert between the tensors of a checkpoint and those of a model, both ways, by transformers' own rules.

A checkpoint may name, split and arrange its tensors differently from the model: experts one by one, gate and up apart,
without the base model's prefix, inside a composite model. transformers has the rules (`conversion_mapping`) and the
code, which runs here on lazy tensors. So every rank knows the source bytes of each of its tensors before it reads any,
and, in an export, the file regions of its tensors. Names are resolved only here.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model, revert_weight_conversion
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging

from harness.console import warn
from harness.errors import UserError
from harness.hf.weights.lazy_tensor import Box, LazyTensor, TensorSource
from harness.hf.weights.tensor_files import StoredTensors, open_tensors

if TYPE_CHECKING:
    from transformers.utils.loading_report import LoadStateDictInfo

# The size at which `save_pretrained` begins another file.
DEFAULT_FILE_BYTES = 50 * 10**9


class Unconverted(UserError):
    """transformers' conversion of a checkpoint does not run on lazy tensors."""


@dataclass(frozen=True, eq=False)
class ParameterRef:
    """A model's parameter or buffer by name; a leaf of the lazy tensors to write."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self, _into: Tensor, _box: Box) -> None:
        """Raise LookupError: a name has no values. The writer replaces it by the live tensor."""
        raise LookupError(f"{self.name} is only a name")


@dataclass(frozen=True, kw_only=True)
class CheckpointFormat:
    """The form in which a model is written.

    Attributes:
        tensors: written name -> lazy tensor, whose leaves are `ParameterRef`.
        files: file name -> names in it, kept unless a file would grow; None to choose new files.
        max_file_bytes: the size at which a new file begins.
    """

    tensors: Mapping[str, LazyTensor]
    files: Mapping[str, Sequence[str]] | None = None
    max_file_bytes: int = DEFAULT_FILE_BYTES


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint, converted to the model.

    Attributes:
        tensors: name in the model -> lazy tensor of its values. Buffers may be missing; the model makes them itself.
        untied: names that the config ties to others, but that have their own values in the files.
        form: the checkpoint's own form, for writing the model.
        in_files: name in the files -> lazy tensor of the model's tensors, whose leaves are `ParameterRef`. Tensors that
            the model lacks, such as an image encoder's, are missing.
    """

    tensors: Mapping[str, LazyTensor]
    untied: tuple[str, ...]
    form: CheckpointFormat
    in_files: Mapping[str, LazyTensor]


@torch.no_grad()
def open_checkpoint(directory: Path, model: PreTrainedModel) -> Checkpoint:
    """Find every tensor of `model`, a skeleton, in the files of `directory`; warn about tensors that the model lacks.

    Raises:
        UserError: a tensor is missing or has another shape.
        Unconverted: transformers must read the checkpoint itself.
    """
    stored = open_tensors(directory)
    names = {name: name for name in stored.tensors}
    loaded, info = _load(model, stored.tensors)
    # Only if names are missing: transformers' own rules resolve most differences, and a second load costs as much.
    inner = _inside_composite(stored.tensors, model) if info.missing_keys else None
    if inner is not None:
        names = inner
        loaded, info = _load(model, {names[name]: tensor for name, tensor in stored.tensors.items()})
    found = {
        name: tensor for name, tensor in loaded.state_dict(keep_vars=True).items() if isinstance(tensor, LazyTensor)
    }
    present = frozenset(found)
    untied = _tie(found, model)
    info.missing_keys = {name for name in info.missing_keys if name not in found}
    # Drops the names that the model's class ignores.
    loaded._adjust_missing_and_unexpected_keys(info)  # noqa: SLF001
    _refuse(directory, names.values(), info, model)
    _refuse_quantized(directory, found, model)
    if info.unexpected_keys:
        unused = _some(sorted(info.unexpected_keys))
        warn(f"{directory}: ignored, because the model has no such tensors: {unused}")
    written = _written(loaded, present)
    in_files = _named_as_in_files(written, {renamed: name for name, renamed in names.items()}, found, loaded)
    form = _form_of(stored, in_files if inner is None else written)
    return Checkpoint(tensors=found, untied=untied, form=form, in_files=in_files)


@torch.no_grad()
def default_form(model: PreTrainedModel) -> CheckpointFormat:
    """Return the form in which `save_pretrained` writes a model without a source checkpoint."""
    return CheckpointFormat(tensors=_written(model, set(model.state_dict()) - set(model.all_tied_weights_keys)))


def untie(model: PreTrainedModel, names: Iterable[str]) -> None:
    """Replace the tied parameters `names` of the skeleton by new, separate ones."""
    for name in names:
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        setattr(module, leaf, nn.Parameter(torch.empty_like(getattr(module, leaf))))
        model.all_tied_weights_keys.pop(name)


def _load(model: PreTrainedModel, tensors: Mapping[str, LazyTensor]) -> tuple[PreTrainedModel, LoadStateDictInfo]:
    """Return a copy of the skeleton into which transformers has loaded lazy tensors, and its report."""
    # A copy, as loading replaces the skeleton's parameters by lazy tensors.
    loaded = copy.deepcopy(model)
    rules: Any = get_model_conversion_mapping(loaded)
    settings = LoadStateDictConfig(weight_mapping=rules)
    with _no_progress_bar():
        info, _ = convert_and_load_state_dict_in_model(loaded, dict(tensors), settings)
    return loaded, info


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _inside_composite(stored: Iterable[str], model: PreTrainedModel) -> dict[str, str] | None:
    """Return stored name -> name in the text decoder for a composite model's checkpoint, else None.

    The decoder's prefix is the one under which most names of the base model are found.
    """
    stored = list(stored)
    base = model.base_model_prefix + "."
    tails = {name.removeprefix(base) for name in model.state_dict() if name.startswith(base)}
    # Each stored name votes for every prefix that is followed by a name of the base model.
    found: Counter[str] = Counter()
    for name in stored:
        starts = [at + 1 for at, letter in enumerate(name) if letter == "."]
        found.update(name[:at] for at in starts if name[at:] in tails)
    if not found:
        return None
    prefix = found.most_common(1)[0][0]
    # Not inside another model: names are missing for another reason.
    if prefix == base:
        return None
    # The prefix of the modules beside the base model: of the head.
    outside = prefix.removesuffix(base)

    def inner(name: str) -> str:
        if name.startswith(prefix):
            return base + name.removeprefix(prefix)
        return name.removeprefix(outside) if outside != prefix else name

    return {name: inner(name) for name in stored}


def _tie(found: dict[str, LazyTensor], model: PreTrainedModel) -> tuple[str, ...]:
    """Add tied names that are not stored to `found`; return tied names stored with different values."""
    groups: dict[str, list[str]] = {}
    for name, source in model.all_tied_weights_keys.items():
        groups.setdefault(source, [source]).append(name)
    untied = []
    for group in groups.values():
        stored = [name for name in group if name in found]
        for name in group if stored else ():
            if name not in found:
                found[name] = found[stored[0]]
            # The config ties them, but the files do not.
            elif not _equal(found[name], found[stored[0]]):
                untied.append(name)
    return tuple(untied)


def _equal(one: LazyTensor, other: LazyTensor) -> bool:
    """Return whether two lazy tensors have the same values, compared a few rows at a time."""
    if one is other or one.shape != other.shape:
        return one is other
    # About a million elements: a table of embeddings may not fit in memory twice.
    rows = max(1, (1 << 20) // max(one[0].numel(), 1))
    for start in range(0, len(one), rows):
        parts = [tensor[start : start + rows] for tensor in (one, other)]
        if not torch.equal(*(torch.empty(part.shape, dtype=part.dtype).copy_(part) for part in parts)):
            return False
    return True


def _refuse(directory: Path, stored: Iterable[str], info: LoadStateDictInfo, model: PreTrainedModel) -> None:
    """Raise UserError for missing and misshapen tensors, under their checkpoint names if known."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    missing = sorted(info.missing_keys & parameters)
    misshapen = sorted(info.mismatched_keys)
    if not missing and not misshapen and not info.conversion_errors:
        # Only buffers are missing: the model computes them itself, which is right unless training has changed them.
        if buffers := sorted(info.missing_keys):
            warn(f"{directory}: missing from the checkpoint, so initialised as in a new model: {_some(buffers)}")
        return
    # Names as the files would have them, which people can look for; a base model saved alone lacks the prefix.
    stored = set(stored)
    prefix = model.base_model_prefix + "."
    concerned = {*missing, *(name for name, *_ in misshapen), *info.conversion_errors}
    lacking = [
        written
        for written, lazy in default_form(model).tensors.items()
        if concerned & {leaf.name for leaf in lazy.leaves() if isinstance(leaf, ParameterRef)}
        and written not in stored
        and written.removeprefix(prefix) not in stored
    ]
    kind = model.config.model_type
    if misshapen and (not lacking or misshapen[0][0] in stored):
        name, found, wanted = misshapen[0]
        more = f" (and {len(misshapen) - 1} more)" if len(misshapen) > 1 else ""
        raise UserError(f"{directory}: {name} has shape {tuple(found)}, but the config expects {tuple(wanted)}{more}")
    if lacking:
        raise UserError(f"{directory}: the weights of this {kind} model lack {_some(lacking)}")
    raise Unconverted(
        f"{directory}: the weights of this {kind} model cannot be converted to {_some(sorted(concerned))}"
    )


def _refuse_quantized(directory: Path, found: Mapping[str, LazyTensor], model: PreTrainedModel) -> None:
    for name, parameter in model.named_parameters():
        kinds = {leaf.dtype for leaf in found[name].leaves()} if name in found else set()
        if parameter.is_floating_point() and not all(dtype.is_floating_point for dtype in kinds):
            raise UserError(f"{directory}: {name} is stored as {min(map(str, kinds))}: dequantize the weights first")


def _written(model: PreTrainedModel, names: Collection[str]) -> dict[str, LazyTensor]:
    """Return stored name -> lazy tensor for a checkpoint of the model's tensors `names`."""
    # As `save_pretrained` does.
    ignored = set(model._keys_to_ignore_on_save or ())  # noqa: SLF001
    held: dict[str, Tensor] = {
        name: LazyTensor.of(ParameterRef(name, tuple(tensor.shape), tensor.dtype))
        for name, tensor in model.state_dict(keep_vars=True).items()
        if name in names and name not in ignored
    }
    written: dict[str, LazyTensor] = revert_weight_conversion(model, held)
    return written


def _named_as_in_files(
    written: Mapping[str, LazyTensor],
    stored: Mapping[str, str],
    found: Mapping[str, LazyTensor],
    model: PreTrainedModel,
) -> dict[str, LazyTensor]:
    """Return `written` under the names of its tensors in the checkpoint's files.

    Args:
        stored: name in the model -> name in the files, if the two correspond.
        found: name in the model -> tensor in the files.
    """
    tensors: dict[str, LazyTensor] = {}
    for name, lazy in written.items():
        source = None if name in stored else _whole_leaf(lazy)
        origin = _whole_leaf(found[source.name]) if source is not None else None
        same = stored.get(name, name.removeprefix(model.base_model_prefix + "."))
        tensors[same if origin is None else origin.name] = lazy
    return tensors


def _form_of(stored: StoredTensors, tensors: Mapping[str, LazyTensor]) -> CheckpointFormat:
    """Return the form that writes `tensors` and keeps the checkpoint's own files."""
    files = {file: [name for name in names if name in tensors] for file, names in stored.files.items()}
    # A reader finds tensors with other names only by an index of new files.
    kept = stored.indexed and set(tensors) <= set(stored.tensors)
    return CheckpointFormat(
        tensors=tensors,
        files={file: names for file, names in files.items() if names} if kept else None,
        max_file_bytes=max(stored.sizes.values()) if len(stored.sizes) > 1 else DEFAULT_FILE_BYTES,
    )


def _whole_leaf(lazy: LazyTensor) -> TensorSource | None:
    """Return the leaf of a lazy tensor that is exactly one whole leaf, else None."""
    only = lazy.patches[0] if len(lazy.patches) == 1 else None
    return only.leaf if only is not None and only.is_whole and only.leaf.name else None


def _some(names: Sequence[str]) -> str:
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + rest
