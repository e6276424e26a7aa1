"""Rules about names: keys that DeepSpeed does not know, has removed, or knows in another place."""

from __future__ import annotations

from collections.abc import Iterator

from harness.checking import schema
from harness.checking.rules import edits
from harness.checking.rules.rule import Finding, rule
from harness.checking.rules.view import KeyOccurrence, RunView, is_comment
from harness.checking.schema.suggest import alias_here, elsewhere
from harness.config.text.diagnostic import Edit, Severity
from harness.config.values.coercion import as_bool
from harness.config.values.pointers import AUTO, name_of
from harness.spelling import nearest

_OFFLOADS = ("offload_optimizer", "offload_param")


def unknown(view: RunView) -> Iterator[KeyOccurrence]:
    """Yield keys that no section has, except comments and removed features, which other rules report."""
    for visit in view.visits:
        if visit.key is not None or visit.section.removed(visit.name) or visit.section.unknown_keys == "free":
            continue
        if not (is_comment(visit.name) and not visit.section.is_pydantic):
            yield visit


def _consequence(visit: KeyOccurrence) -> tuple[Severity, str]:
    """Return the severity of an unknown key in its section, and what DeepSpeed does with it."""
    if visit.section.is_pydantic and visit.value != AUTO:
        return Severity.ERROR, "refuses the config: extra inputs are not permitted"
    return Severity.WARNING, "silently ignores the key"


def _meant(visit: KeyOccurrence) -> str | None:
    """Guess which key of the same section is meant; None without a good guess."""
    meant = alias_here(visit.name, visit.parent) or nearest(visit.name, visit.section.keys)
    takes_object = meant is not None and (
        visit.section.keys[meant].is_section or "object" in visit.section.keys[meant].types
    )
    return None if isinstance(visit.value, dict) and not takes_object else meant


@rule("DS101", "misspelt-key", Severity.WARNING, claim="runs")
def misspelt_key(view: RunView) -> Iterator[Finding]:
    """An unknown key that looks like a misspelling of a known one.

    At the top level DeepSpeed ignores what it does not know: `zero_optimisation` with stage 3 trains at
    stage 0, and `gradient_cliping` leaves clipping at its default of 1.0. Sections that DeepSpeed checks refuse such a
    key, so there it is an error. Renaming makes the key take effect, so only `--unsafe-fixes` does that.

    Wrong: {"train_batch_size": 8, "zero_optimisation": {"stage": 3}}
    Right: {"train_batch_size": 8, "zero_optimization": {"stage": 3}}
    """
    for visit in unknown(view):
        meant = _meant(visit)
        if meant is None:
            continue
        severity, deepspeed = _consequence(visit)
        taken = view.file_has(f"{visit.parent}/{meant}")
        yield Finding(
            pointer=visit.pointer,
            message=f"unknown key {name_of(visit.pointer)}",
            hint=f"{meant} is set as well; keep one of them" if taken else f"did you mean {meant}?",
            severity=severity,
            deepspeed=deepspeed,
            edits=() if taken else edits.rename(view.document, visit.pointer, meant),
            is_safe=False,
        )


@rule("DS102", "misplaced-key", Severity.WARNING, claim="runs")
def misplaced_key(view: RunView) -> Iterator[Finding]:
    """A key is in the wrong section.

    A common case is `partition_activations` under `pipeline`, where nothing reads it. `--unsafe-fixes` moves the key to
    where it acts, unless that key is set already.

    Wrong: {"train_batch_size": 8, "pipeline": {"partition_activations": true}}
    Right: {"train_batch_size": 8, "activation_checkpointing": {"partition_activations": true}}
    """
    for visit in unknown(view):
        if _meant(visit) is not None:
            continue
        place = elsewhere(visit.name, visit.parent, visit.value)
        if place is None or (visit.name == "loss_scale" and visit.parent in ("/bf16", "/bfloat16")):
            continue
        severity, deepspeed = _consequence(visit)
        home = schema.find(place)
        is_switch = home is not None and home.is_section and not isinstance(visit.value, dict)
        parent = place.rsplit("/", 1)[0]
        if is_switch:
            hint = f"remove it: {name_of(place)} is a separate section"
            change = edits.remove(view.document, visit.pointer)
        elif view.file_has(place):
            hint, change = f"it belongs at {name_of(place)}, which is set as well; keep one of them", ()
        else:
            hint = f"move it to {name_of(place)}"
            change = edits.move(view.document, visit.pointer, place)
        yield Finding(
            pointer=visit.pointer,
            message=f"{visit.name} does not belong in {name_of(visit.parent) or 'the top level'}"
            + (f" but in {name_of(parent)}" if parent and not is_switch else ""),
            hint=hint,
            severity=severity,
            deepspeed=deepspeed,
            edits=change,
            is_safe=is_switch and not visit.section.is_pydantic,
        )


@rule("DS103", "unknown-key", Severity.WARNING, claim="runs")
def unknown_key(view: RunView) -> Iterator[Finding]:
    """An unknown key that resembles no known one.

    In the sections that DeepSpeed checks it is an error. Everywhere else, the top level included, the key
    is silently ignored. A key that starts with `_` or `$`, or has "comment" in its name, counts as a
    comment.

    Wrong: {"train_batch_size": 8, "frobnicate": true}
    Right: {"train_batch_size": 8}
    """
    for visit in unknown(view):
        if _meant(visit) is not None or elsewhere(visit.name, visit.parent, visit.value) is not None:
            continue
        severity, deepspeed = _consequence(visit)
        yield Finding(
            pointer=visit.pointer,
            message=f"unknown key {name_of(visit.pointer)}",
            hint="remove it",
            severity=severity,
            deepspeed=deepspeed,
        )


@rule("DS104", "removed-feature", Severity.ERROR, claim="refuses")
def removed_feature(view: RunView) -> Iterator[Finding]:
    """A key of a feature that DeepSpeed has removed.

    DeepSpeed refuses it even when it is switched off, so that nobody trains without what the config asks
    for. If the section says `"enabled": false`, `--fix` removes it.

    Wrong: {"train_batch_size": 8, "elasticity": {"enabled": false}}
    Right: {"train_batch_size": 8}
    """
    for visit in view.visits:
        hint = visit.section.removed(visit.name)
        if hint is None:
            continue
        value = visit.value
        is_off = value is False or (isinstance(value, dict) and value.get("enabled", True) is False)
        yield Finding(
            pointer=visit.pointer,
            message=f"{name_of(visit.pointer)} is a feature that DeepSpeed has removed",
            hint=hint,
            deepspeed="raises DeepSpeedConfigError, even when the feature is switched off",
            edits=edits.remove(view.document, visit.pointer) if is_off else (),
        )


@rule("DS105", "deprecated-key", Severity.WARNING, claim="runs")
def deprecated_key(view: RunView) -> Iterator[Finding]:
    """An old name of a key, or an old form of a section.

    It still works until a release drops it.

    Wrong: {"train_batch_size": 8, "zero_optimization": {"stage": 2, "cpu_offload": true}}
    Right: {"train_batch_size": 8, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    """
    for visit in view.visits:
        if visit.key is None or not visit.key.spec.get("deprecated") or visit.value == AUTO:
            continue
        new = visit.key.spec.get("x-replaced-by")
        shadowed = visit.name == "bfloat16" and view.get("/bf16") is not None
        hint = f"use {new}" if new else "use pin_memory in offload_optimizer or offload_param"
        yield Finding(
            pointer=visit.pointer,
            message=f"{name_of(visit.pointer)} is deprecated",
            hint="remove it" if shadowed or (new in _OFFLOADS and as_bool(visit.value) is not True) else hint,
            deepspeed="ignores it because bf16 is set" if shadowed else "still reads it",
            edits=_modern(view, visit, new),
        )
    if isinstance(switch := view.get("/zero_optimization"), bool):
        stage = int(switch)
        yield Finding(
            pointer="/zero_optimization",
            message="zero_optimization as true or false is deprecated",
            hint=f'write {{"stage": {stage}}}',
            deepspeed=f"reads it as stage {stage}, and logs a warning",
            edits=edits.replace(view.document, "/zero_optimization", {"stage": stage}),
        )


def _modern(view: RunView, visit: KeyOccurrence, new: str | None) -> tuple[Edit, ...]:
    """Return the edits that replace the old form by the new one; none if that would change the training."""
    if new is None or view.file_has(f"{visit.parent}/{new}"):
        return ()
    if new in _OFFLOADS:
        if as_bool(visit.value) is not True:
            return edits.remove(view.document, visit.pointer)
        value = edits.replace(view.document, visit.pointer, {"device": "cpu"})
        return (*edits.rename(view.document, visit.pointer, new), *value)
    return edits.rename(view.document, visit.pointer, new)


@rule("DS106", "deprecated-key-beside-its-replacement", Severity.ERROR, claim="refuses")
def deprecated_key_beside_its_replacement(view: RunView) -> Iterator[Finding]:
    """The old and the new form of one setting are both set.

    DeepSpeed refuses that whatever the two values are, because it cannot tell which one is meant. The same
    holds for two names of one key, such as prefetch_bucket_size and stage3_prefetch_bucket_size.

    Wrong: {"train_batch_size": 8, "zero_optimization": {"stage": 2, "cpu_offload": false,
           "offload_optimizer": {"device": "cpu"}}}
    Right: {"train_batch_size": 8, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    """
    for visit in view.visits:
        if visit.key is not None and visit.name != visit.key.name and view.has(f"{visit.parent}/{visit.key.name}"):
            yield Finding(
                pointer=visit.pointer,
                message=f"{visit.name} and {visit.key.name} are two names for the same key",
                hint=f"remove {visit.name}",
                deepspeed="refuses the config: extra inputs are not permitted",
            )
        new = visit.key.spec.get("x-replaced-by") if visit.key is not None else None
        if new is None or visit.value == AUTO or not visit.section.is_pydantic:
            continue
        names = [name for name, key in visit.section.keys.items() if key.name == new]
        beside = next((name for name in names if view.get(f"{visit.parent}/{name}") not in (None, AUTO)), None)
        if beside is not None:
            yield Finding(
                pointer=visit.pointer,
                message=f"{visit.name} and {beside} cannot both be set",
                hint=f"remove {visit.name}",
                deepspeed="raises AssertionError",
            )
