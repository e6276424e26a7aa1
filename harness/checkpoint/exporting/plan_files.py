"""Plan the weight files of an exported model."""

from __future__ import annotations

from harness.checkpoint.tensors.tensor_writer import Entry, split_by_size
from harness.checkpoint.tensors.whole_tensors import StageTensors
from harness.config.model.files import SINGLE
from harness.errors import UserError
from harness.hf.weights.conversion import CheckpointFormat


def plan_files(stages: list[StageTensors], form: CheckpointFormat) -> dict[str, list[Entry]]:
    """Return file name -> tensors: on one host the files of `form`, if all fit its size limit, else new files per host.

    This way several hosts never write the same file. Raises UserError if a tensor belongs to no stage.
    """
    found: dict[str, Entry] = {}
    for entry in (entry for stage in stages for entry in stage.entries):
        found.setdefault(entry.name, entry)
    scattered = [name for name in form.tensors if name not in found]
    if scattered:
        raise UserError(f"the model cannot be saved: {scattered[0]} combines tensors of several pipeline stages")
    if form.files is not None and len({stage.host for stage in stages}) == 1:
        kept = {file: [found[name] for name in names] for file, names in form.files.items()}
        largest = max(sum(entry.nbytes for entry in entries) for entries in kept.values())
        if largest <= form.max_file_bytes:
            return kept
    order = list(dict.fromkeys(name for names in (form.files or {}).values() for name in names)) or list(found)
    hosts: dict[str, dict[str, None]] = {}
    for stage in stages:
        hosts.setdefault(stage.host, {}).update(dict.fromkeys(entry.name for entry in stage.entries))
    # A tied tensor belongs to several stages, perhaps on different hosts: the first host writes it.
    taken: set[str] = set()
    files: list[list[Entry]] = []
    for names in hosts.values():
        here = [name for name in order if name in names and name not in taken]
        taken.update(here)
        files += split_by_size((found[name] for name in here), form.max_file_bytes)
    if len(files) == 1:
        return {SINGLE: files[0]}
    return {f"model-{i + 1:05d}-of-{len(files):05d}.safetensors": entries for i, entries in enumerate(files)}
