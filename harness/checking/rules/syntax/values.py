"""Rules about single values: their type, their choices, their range."""

from __future__ import annotations

import json
from collections.abc import Iterator

from harness.checking.rules import edits
from harness.checking.rules.rule import Finding, rule
from harness.checking.rules.view import KeyOccurrence, RunView
from harness.checking.schema.coercion import NAMES, Reading, read
from harness.config.text.diagnostic import Edit, Severity
from harness.config.values.layout_keys import EXPERTS, GRADIENT_BITS, size_fault
from harness.config.values.pointers import AUTO, name_of

_UNADVISED = ("int8", "torch.int8")  # names that DeepSpeed knows, but cannot train with


def show(value: object) -> str:
    """Return a value for a message: as JSON, shortened."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    text = f'"{value}"' if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _readings(view: RunView) -> Iterator[tuple[KeyOccurrence, Reading]]:
    """Yield every known key that is no section, and how DeepSpeed reads its value."""
    for visit in view.visits:
        if visit.key is None or visit.key.is_section or visit.pointer == "/$schema":
            continue
        if visit.value == AUTO and (visit.key.takes_auto or visit.section.is_pydantic):
            continue
        refused = size_fault(visit.pointer, visit.value) or visit.pointer == GRADIENT_BITS
        if view.target == "harness" and not visit.section.is_pydantic and refused:
            continue  # by another rule
        yield visit, read(visit.key, visit.value, pydantic=visit.section.is_pydantic)


def _is_refused(visit: KeyOccurrence) -> bool:
    """Return whether DeepSpeed's parser stops at a wrong value here."""
    return visit.section.is_pydantic or (visit.key is not None and visit.key.spec.get("x-crashes") is True)


def _later_end(view: RunView, visit: KeyOccurrence) -> str:
    """Return when a wrong value that the parser accepts ends every run; empty if it may do no harm."""
    crashes = visit.key.spec.get("x-crashes") if visit.key is not None else None
    if view.target == "harness" and (visit.value == AUTO or visit.parent == EXPERTS):
        return ""  # the harness leaves the key out
    is_switch = visit.key is not None and visit.key.types == ("boolean",) and "x-exact" not in visit.key.spec
    if crashes is None and is_checked(view, visit) and not is_switch:  # any value is on or off
        return "when it is used"
    if crashes == "engine in 16 bits":
        crashes = "engine" if view.precision != "fp32" else None
    return {"engine": "when the engine starts", "step": "at the first step"}.get(str(crashes), "")


def _faults(view: RunView, fault: str) -> Iterator[tuple[KeyOccurrence, Reading, Severity, str]]:
    for visit, reading in _readings(view):
        if reading.fault != fault:
            continue
        if _is_refused(visit):
            yield visit, reading, Severity.ERROR, "refuses the config at start"
        elif end := _later_end(view, visit):
            yield visit, reading, Severity.ERROR, f"takes any value, and fails {end}"
        else:
            yield (
                visit,
                reading,
                Severity.WARNING,
                "does not check it; the run fails or misbehaves when it is used",
            )


def is_checked(view: RunView, visit: KeyOccurrence) -> bool:
    """Return whether the key is in a section whose values are all used as soon as it is on, and it is on."""
    switch = visit.section.spec.get("x-checked-if")
    return switch not in (None, visit.name) and bool(view.get(f"{visit.parent}/{switch}"))


def unchecked_ranges(view: RunView) -> Iterator[tuple[KeyOccurrence, Reading]]:
    """Yield numbers outside their range that DeepSpeed's parser accepts."""
    for visit, reading in _readings(view):
        is_off = "x-checked-if" in visit.section.spec and not is_checked(view, visit)
        if reading.fault == "range" and not _is_refused(visit) and not is_off:
            yield visit, reading


@rule("DS201", "wrong-type", Severity.ERROR, claim="refuses")
def wrong_type(view: RunView) -> Iterator[Finding]:
    """A value has a type that DeepSpeed cannot use.

    The rule accepts what DeepSpeed accepts: 5e8 is a whole number, and in sections that DeepSpeed checks 1 is true. A
    number in quotes is an error if DeepSpeed computes with it at once, as with batch sizes, or in every run, as with
    gradient_clipping. Elsewhere a wrong value in a section that DeepSpeed does not check is only a warning, because it
    may never be used.

    Wrong: {"train_batch_size": 8, "fp16": {"enabled": "maybe"}}
    Right: {"train_batch_size": 8, "fp16": {"enabled": true}}
    """
    for visit, reading, severity, deepspeed in _faults(view, "type"):
        yield Finding(
            pointer=visit.pointer,
            message=f"{name_of(visit.pointer)} is {show(visit.value)}, not {reading.wanted}",
            hint=_type_hint(visit, reading),
            severity=severity,
            deepspeed=deepspeed,
            on_value=True,
            edits=_number(view, visit, reading),
            is_safe=_is_refused(visit),
        )


def _type_hint(visit: KeyOccurrence, reading: Reading) -> str:
    if visit.name == "min_loss_scale":
        return "write a whole number of at least 1: the loss scale never needs to fall below 1"
    if visit.key is not None and "enum" in visit.key.core:
        return "use one of " + ", ".join(str(each) for each in visit.key.core["enum"] if each not in _UNADVISED)
    return f"write {reading.wanted}"


def _number(view: RunView, visit: KeyOccurrence, reading: Reading) -> tuple[Edit, ...]:
    """Return edits that remove the quotes around a number."""
    wants_number = reading.wanted in (NAMES["integer"], NAMES["number"])
    if wants_number and isinstance(visit.value, str) and visit.value.isdigit() and len(visit.value) < 19:
        return edits.replace(view.document, visit.pointer, int(visit.value))
    return ()


@rule("DS202", "unknown-choice", Severity.ERROR, claim="refuses")
def unknown_choice(view: RunView) -> Iterator[Finding]:
    """A value is not one of those that the key takes.

    Wrong: {"train_batch_size": 8, "communication_data_type": "bfloat16"}
    Right: {"train_batch_size": 8, "communication_data_type": "bf16"}
    """
    for visit, reading, severity, deepspeed in _faults(view, "choice"):
        key = visit.key
        choices = (key.core.get("enum") or key.spec.get("x-items", [])) if key is not None else []
        names = [str(choice) for choice in choices if choice not in _UNADVISED]
        yield Finding(
            pointer=visit.pointer,
            message=f"{name_of(visit.pointer)} is {show(visit.value)}",
            hint=f"use {reading.wanted}"
            if isinstance(visit.value, list) or len(names) < 2
            else "use one of " + ", ".join(names),
            severity=severity,
            deepspeed=deepspeed,
            on_value=True,
        )


@rule("DS203", "out-of-range", Severity.ERROR, claim="refuses")
def out_of_range(view: RunView) -> Iterator[Finding]:
    """A number is outside the range of its key, and DeepSpeed's parser refuses it.

    Wrong: {"train_batch_size": 8, "zero_optimization": {"stage": 2, "reduce_bucket_size": 0}}
    Right: {"train_batch_size": 8, "zero_optimization": {"stage": 2, "reduce_bucket_size": 1}}
    """
    for visit, reading, severity, deepspeed in _faults(view, "range"):
        if not _is_refused(visit):
            continue  # another rule's
        yield Finding(
            pointer=visit.pointer,
            message=f"{name_of(visit.pointer)} is {show(visit.value)}",
            hint=f"use a value that is {reading.wanted}",
            severity=severity,
            deepspeed=deepspeed,
            on_value=True,
        )


@rule("DS204", "converted-value", Severity.WARNING, claim="runs")
def converted_value(view: RunView) -> Iterator[Finding]:
    """A value has another type than its key: it is in quotes, or a switch stands for a number.

    DeepSpeed converts true to 1 and "2" to 2. Other programs that read the file, such as HuggingFace's, see the value
    as it is written.

    Wrong: {"train_batch_size": 8, "zero_optimization": {"stage": "2"}}
    Right: {"train_batch_size": 8, "zero_optimization": {"stage": 2}}
    """
    for visit, reading in _readings(view):
        if reading.fault == "converted":
            yield Finding(
                pointer=visit.pointer,
                message=f"{name_of(visit.pointer)} is {show(visit.value)}, where {reading.wanted} is expected",
                hint=f"write {show(reading.value)}",
                deepspeed=f"converts it to {show(reading.value)}",
                on_value=True,
                edits=edits.replace(view.document, visit.pointer, reading.value),
            )


@rule("DS205", "section-not-an-object", Severity.ERROR, claim="refuses")
def section_not_an_object(view: RunView) -> Iterator[Finding]:
    """A section is not an object.

    DeepSpeed then ends with an AttributeError or TypeError that names neither the section nor the cause.

    Wrong: {"train_batch_size": 8, "checkpoint": {"parallel_write": true}}
    Right: {"train_batch_size": 8, "checkpoint": {"parallel_write": {"pipeline_stage": true}}}
    """
    for visit in view.visits:
        key = visit.key
        if key is None or not key.is_section or isinstance(visit.value, dict):
            continue
        if visit.value is None and ("null" in key.types or key.spec.get("x-null")):
            continue
        if isinstance(visit.value, bool) and "boolean" in key.types:
            continue
        if view.target == "deepspeed" and not _is_read(view, visit):
            continue
        if visit.value == AUTO and (visit.section.is_pydantic or key.spec.get("x-drops-auto")):
            continue  # dropped, as every "auto" in a checked section
        yield Finding(
            pointer=visit.pointer,
            message=f"{name_of(visit.pointer)} is {show(visit.value)}, not an object",
            hint="write { ... } with its keys" if visit.value is not None else "write { ... }, or remove it",
            deepspeed="ends with an error that names neither key nor reason",
            on_value=True,
        )


def _is_read(view: RunView, visit: KeyOccurrence) -> bool:
    """Return whether DeepSpeed reads the key: parameters only beside the name of a class."""
    return "type" not in visit.section.spec.get("x-switch", ()) or bool(view.get(f"{visit.parent}/type"))


@rule("DS206", "value-not-for-a-file", Severity.ERROR, claim="refuses")
def value_not_for_a_file(view: RunView) -> Iterator[Finding]:
    """A key takes a Python object, which a JSON file cannot hold.

    `tensor_parallel.dtype` wants a torch.dtype itself; every value that JSON can write is refused.

    Wrong: {"train_batch_size": 8, "tensor_parallel": {"dtype": "bf16"}}
    Right: {"train_batch_size": 8, "tensor_parallel": {}}
    """
    for visit in view.visits:
        if visit.key is not None and visit.key.spec.get("x-only-auto") and visit.value != AUTO:
            yield Finding(
                pointer=visit.pointer,
                message=f"{name_of(visit.pointer)} cannot be set in a JSON file: DeepSpeed expects a torch.dtype",
                hint="remove it, and set fp16 or bf16",
                deepspeed="refuses the config: the value is not a torch.dtype",
                edits=edits.remove(view.document, visit.pointer),
                is_safe=False,
            )
