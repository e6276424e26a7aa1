"""Run the planner for its page in the browser: one JSON in, one JSON out."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from harness.config.model.families import require_trainable_config
from harness.config.values.json_object import JsonObject
from harness.errors import UserError
from harness.planner.estimate import Estimate
from harness.planner.hardware import GIB, Hardware, device_of
from harness.planner.model_config import families
from harness.planner.preset import preset
from harness.planner.search import LARGEST, Found, Task, more_memory, require_fit, search, task_of

FITTING = 40  # number of rows that fit and that the page shows, until all are asked for
TOO_LARGE = 10  # number of rows shown that do not fit
EXPERT_FAMILIES = Path(__file__).parent / "expert_families.json"  # exists only in the page, which has no transformers
LABELS = {
    "memory_gib": "Memory of a GPU, GiB",
    "node.devices": "GPUs in a node",
    "node.gb_per_second": "Link in a node, GB/s a GPU",
    "network.gb_per_second": "Network, GB/s a GPU",
}
"""Path of a constant in a device's file -> label of the form's field for it."""


def answer(question: str) -> str:
    """Return the plan for the page's form as JSON; its key `error` has a message if the user must correct something.

    Args:
        question: JSON with `config` (an object, or the pasted text), `model`, `hardware` (a device file's content),
            `hardware_name`, `gpus`, `batch`, `sequence`, `precision` and `edits` (by the names of `LABELS`), all
            numbers as typed; `row`, the name of the chosen row; and `rows`, the number of rows to return (0: all).
    """
    asked = json.loads(question)
    row = asked.pop("row", "")
    most = asked.pop("rows", 0)
    try:
        task, note, found = _searched(json.dumps(asked))
        return json.dumps(shown(task, note, found, row, most), default=str)
    except UserError as error:
        return json.dumps({"error": str(error).removeprefix("--model ")})


@lru_cache(maxsize=1)
def _searched(question: str) -> tuple[Task, str, Found]:
    """Return the task, a note on its model, and all layouts; cached, so that a click on a row does not search again."""
    asked = json.loads(question)
    config = _config(asked["config"])
    gpus = _size(asked["gpus"], "GPUs")
    require_trainable_config(config, len(config) == 1)
    try:
        task = task_of(
            config,
            asked["model"],
            _device(asked, gpus),
            world_size=gpus,
            sequence=_size(asked["sequence"], "Sequence length"),
            global_batch=_size(asked["batch"], "Global batch"),
            precision=asked["precision"],
        )
    except UserError as error:
        raise UserError(_with_family(str(error), config)) from None
    task = _spread(task, config)
    return task, note_on(task, config), search(task)


def shown(task: Task, note: str, found: Found, row: str = "", most: int = FITTING) -> JsonObject:
    """Return a plan as the page shows it, or an object with `error` alone if no layout could be tried.

    Args:
        note: a remark on the model, shown if the plan has no message of its own.
        row: name of the chosen row; by default the best.
        most: number of rows that fit (0: all).
    """
    rows = [*found.fitting, *found.too_large]
    refusal = _refusal(task, found)
    if not rows:
        return {"error": refusal}
    least = min(found.too_large, key=lambda one: one.peak_bytes, default=None)
    chosen = next((one for one in rows if name_of(one) == row), found.fitting[0] if found.fitting else least)
    assert chosen is not None
    fitting = found.fitting[: most or None]
    large = sorted(found.too_large, key=lambda one: -one.tokens_per_second)[:TOO_LARGE]
    listed = [*fitting, *large]
    memory = more_memory(found) if found.fitting else None
    content: JsonObject = {
        "message": refusal or note,
        "is_error": bool(refusal),
        "tried": found.tried,
        "fit": len(found.fitting),
        "reasons": found.reasons.most_common(),
        "rows": [
            _row(one, task, found) for one in (listed if any(one is chosen for one in listed) else [*listed, chosen])
        ],
        "chosen": _row(chosen, task, found),
        "more_memory": None,
    }
    if memory is not None:
        gain = memory.tokens_per_second / found.fitting[0].tokens_per_second - 1
        content["more_memory"] = {"gib": memory.gib, "gain": gain}
    return content


def _refusal(task: Task, found: Found) -> str:
    """Return why no layout fits; "" if one does."""
    try:
        require_fit(task, found)
    except UserError as error:
        return str(error)
    return ""


def _row(one: Estimate, task: Task, found: Found) -> JsonObject:
    """Return a row of the table; its `number` is 0 if the layout does not fit."""
    return {
        **one.row(),
        "name": name_of(one),
        "number": next((n for n, other in enumerate(found.fitting, 1) if other is one), 0),
        "fits": one.fits,
        "verdict": _verdict(one),
        "preset": preset(one.strategy, task.workload.precision),
    }


def name_of(one: Estimate) -> str:
    """Return the name of a layout in the page's address."""
    s = one.strategy
    more = f".{s.chunks}.{s.sequence_parallel}" if s.chunks > 1 or s.sequence_parallel else ""
    more += f".cp{s.cp_size}" if s.cp_size > 1 else ""
    tiles = (s.recompute_every, s.host_activations, s.loss_tile, s.block_tile, s.attention_tile)
    more += f".{'-'.join(str(int(one)) for one in tiles)}" if tiles != (1, False, 0, 0, 0) else ""
    return (
        f"pp{s.pp_size}.tp{s.tp_size}.dp{s.dp_size}.ep{s.ep_size}.zero{s.zero_stage}.micro{s.micro_batch}"
        f".{s.recompute}.{s.offload}.{s.schedule}{more}"
    )


def _verdict(one: Estimate) -> str:
    if one.fits:
        return "fits" if one.has_room else "fits closely: a prediction may lack some memory"
    if one.peak_bytes > one.hardware.limit_bytes:
        limit = one.hardware.limit_bytes / GIB
        return f"does not fit: needs {one.peak_bytes / GIB:.1f} GiB on a GPU that has {limit:.1f}"
    limit = one.hardware.host_memory_bytes / GIB
    return f"does not fit: needs {one.host_bytes / GIB:.1f} GiB of the host for each GPU, which has {limit:.1f}"


def _config(given: object) -> JsonObject:
    """Return a config.json, which may be given as the text that the user has pasted."""
    if isinstance(given, str):
        if not given.strip():
            raise UserError("paste the content of a model's config.json")
        try:
            given = json.loads(given)
        except ValueError as error:
            raise UserError(f"config.json is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise UserError("config.json is not an object")
    return given


def _size(text: str, name: str) -> int:
    plain = text.translate(str.maketrans("", "", ",_ "))
    if not plain.isdecimal() or not 1 <= int(plain[:20]) <= LARGEST:
        raise UserError(f'{name}: "{text}" is not a whole number between 1 and {LARGEST:,}')
    return int(plain)


def _device(asked: Mapping[str, JsonObject], gpus: int) -> Hardware:
    """Return the device with the user's changes."""
    content = copy.deepcopy(asked["hardware"])
    for path, text in asked["edits"].items():
        try:
            number = float(text)
        except ValueError:
            number = 0.0
        if not 0 < number < float("inf"):
            raise UserError(f'{LABELS[path]}: "{text}" is not a number above 0')
        *keys, last = path.split(".")
        part = content
        for key in keys:
            part = part[key]
        part[last] = int(number) if number.is_integer() else number
    return device_of(content, str(asked["hardware_name"]), gpus)


def _family(config: Mapping[str, object]) -> str | None:
    text = config.get("text_config")
    family = (text if isinstance(text, dict) else config).get("model_type")
    return None if family is None else str(family)


def note_on(task: Task, config: Mapping[str, object]) -> str:
    """Return a note on what was assumed about the model; "" if nothing was."""
    note = _family_note(config)
    if task.workload.shape.guessed and not note:  # the page has no transformers to build the model
        return "the number of parameters is a guess: `ds-harness plan` counts them on the model itself"
    return note


def _family_note(config: Mapping[str, object]) -> str:
    family = _family(config)
    if family in families():
        return ""
    return f"model type {family!r} is unknown here: planned from its sizes alone, with the layers of a common decoder"


def _with_family(message: str, config: JsonObject) -> str:
    """Add the name of the unknown family to a message about a missing size."""
    _, lacks, rest = message.partition("its config.json gives no")
    return f"unknown model type {_family(config)!r}, and {lacks}{rest}" if lacks and _family_note(config) else message


def _spread(task: Task, config: JsonObject) -> Task:
    """Return the task with `spreads_experts` by the list from the transformers with which the page was written."""
    if not EXPERT_FAMILIES.is_file() or not any(layer.experts for layer in task.workload.shape.layers):
        return task
    return replace(task, spreads_experts=_family(config) in json.loads(EXPERT_FAMILIES.read_text(encoding="utf-8")))
