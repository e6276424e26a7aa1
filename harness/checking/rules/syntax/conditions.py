"""Rules about keys that depend on each other: the conditions (`if`, `then`, `else`) of the schema.

jsonschema evaluates them. It takes as long to import as all other rules take to run, so it is imported only if the
file has a section with conditions; few have one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from harness.checking.rules.rule import Finding, rule
from harness.checking.rules.syntax.values import show
from harness.checking.rules.view import KeyOccurrence, RunView
from harness.checking.schema.coercion import NAMES
from harness.config.text.diagnostic import Severity
from harness.config.values.layout_keys import EXPERTS
from harness.config.values.pointers import name_of
from harness.wording import all_of, one_of

if TYPE_CHECKING:
    from jsonschema.exceptions import ValidationError

_CONDITIONS = ("if", "then", "else")
_NOT_PASSED_ON = (EXPERTS, "/data_efficiency")
"""Sections that the harness does not pass on to DeepSpeed."""


def _violations(view: RunView, *, by_engine: bool) -> Iterator[tuple[KeyOccurrence, ValidationError]]:
    """Yield each violated condition with its section; of those that the parser, or only the engine, looks at."""
    for visit in view.visits:
        spec = visit.key.spec if visit.key is not None else {}
        section = view.as_read(visit.pointer)
        if view.target == "harness" and visit.pointer in _NOT_PASSED_ON:
            continue
        if "if" not in spec or not isinstance(section, dict) or (spec.get("x-crashes") == "engine") != by_engine:
            continue
        from jsonschema import Draft202012Validator

        conditions = {word: spec[word] for word in _CONDITIONS if word in spec}
        for error in Draft202012Validator(conditions).iter_errors(section):
            yield visit, error


def _findings(view: RunView, *, by_engine: bool, deepspeed: str) -> Iterator[Finding]:
    seen: set[tuple[str, str]] = set()
    for visit, error in _violations(view, by_engine=by_engine):
        pointer = "/".join([visit.pointer, *map(str, error.absolute_path)])
        broken = str(error.validator)
        if (pointer, broken) in seen:
            continue  # jsonschema reports each missing key by itself
        seen.add((pointer, broken))
        schemas = (error.schema, visit.key.spec.get("then") if visit.key is not None else None)
        why = next((each["x-why"] for each in schemas if isinstance(each, dict) and "x-why" in each), None)
        message, hint = _words(pointer, error)
        yield Finding(
            pointer=pointer,
            message=f"{message}: {why or f'{visit.name} is on'}",
            hint=hint,
            deepspeed=deepspeed,
            on_value=error.validator != "required",
        )


def _words(pointer: str, error: ValidationError) -> tuple[str, str]:
    """Return what is wrong at a pointer, and the remedy."""
    name = name_of(pointer)
    wanted = cast("Any", error.validator_value)
    found = cast("Any", error.instance)
    match error.validator:
        case "required":
            missing = [key for key in wanted if key not in found]
            return f"{name} needs {all_of(missing)}", f"add {all_of(missing)}"
        case "const":
            return f"{name} is {show(found)}, not {show(wanted)}", f"set {name} to {show(wanted)}"
        case "type":
            return f"{name} is {show(found)}, not {NAMES[wanted]}", f"write {NAMES[wanted]}"
        case "enum":
            return f"{name} is {show(found)}", f"use {one_of(wanted)}"
        case "minItems":
            return f"{name} has {len(found)} items, but needs {wanted}", f"write a list of {wanted} or more items"
        case "minimum":
            return f"{name} is {show(found)}, but must be at least {wanted}", f"use a number of at least {wanted}"
    return f"{name} is {show(found)}, but must be above {wanted}", f"use a number above {wanted}"


@rule("DS208", "incomplete-section", Severity.ERROR, claim="refuses")
def incomplete_section(view: RunView) -> Iterator[Finding]:
    """A feature is on, but a setting that it needs is missing, and DeepSpeed's parser asks for it.

    Curriculum learning needs its metrics of difficulty, dynamic batching the number of tokens in a batch.

    Wrong: {"train_batch_size": 8, "data_efficiency": {"data_sampling": {"dynamic_batching": {"enabled": true}}}}
    Right: {"train_batch_size": 8, "data_efficiency": {"data_sampling": {"dynamic_batching": {"enabled": true,
           "max_tokens": 4096}}}}
    """
    yield from _findings(view, by_engine=False, deepspeed="raises AssertionError")


@rule("DS209", "section-that-cannot-start", Severity.ERROR, claim="engine")
def section_that_cannot_start(view: RunView) -> Iterator[Finding]:
    """A feature is on, but a setting that it needs is missing or excludes another, and only the engine notices.

    Random layerwise token dropping (`random_ltd`) looks up the number of layers and its schedule without a default, and
    curriculum learning the schedule of each metric. AutoEP refuses some options beside others. ZenFlow chooses
    `select_interval` itself if `select_strategy` is "auto", and needs a number otherwise.

    Wrong: {"train_batch_size": 8, "data_efficiency": {"data_routing": {"random_ltd": {"enabled": true}}}}
    Right: {"train_batch_size": 8, "data_efficiency": {"data_routing": {"random_ltd": {"enabled": true,
           "total_layer_num": 24, "random_ltd_layer_num": 22, "random_ltd_schedule": {"min_value": 128,
           "max_value": 2048, "schedule_type": "fixed_linear", "schedule_config": {"require_steps": 1000,
           "seq_per_step": 16}}}}}}
    """
    yield from _findings(view, by_engine=True, deepspeed="fails when the engine starts, or at the first step")
