"""Report everything that is wrong with a config, before any process starts."""

from __future__ import annotations

from dataclasses import replace

from harness.checking.registry import RULES
from harness.checking.rules.rule import Finding, Rule
from harness.checking.rules.view import RunView, Target
from harness.config.model.facts import require_every_layer
from harness.config.model.shape import ModelShape, read_shape
from harness.config.text.diagnostic import Diagnostic, Severity
from harness.config.text.document import Document
from harness.config.values.arguments import AutoValues
from harness.config.values.config_file import FROM_PROGRAM


def check(
    document: Document,
    *,
    world_size: int | None = None,
    model: str | None = None,
    target: Target = "harness",
    pipeline_parallel_size: int | None = None,
    tensor_parallel_size: int | None = None,
    expert_parallel_size: int | None = None,
    context_parallel_size: int | None = None,
    arguments: AutoValues | None = None,
) -> list[Diagnostic]:
    """Return all findings about a config, in the order of the file.

    Args:
        world_size: number of ranks.
        model: a preset's name or a directory with config.json.
        target: the program that will read the file.
        pipeline_parallel_size: overrides the file, as `--pipeline_parallel_size` of a run does; so do the other sizes.
        arguments: flags of the run.

    Raises UserError if the model's config cannot be read, or the model uses LayerDrop.
    """
    view = RunView.of(
        document,
        world_size=world_size,
        model=known_shape(model, target),
        target=target,
        pp_override=pipeline_parallel_size,
        tp_override=tensor_parallel_size,
        ep_override=expert_parallel_size,
        cp_override=context_parallel_size,
        arguments=arguments,
    )
    return findings(view)


def known_shape(model: str | None, target: Target) -> ModelShape | None:
    """Return the shape of a model, if one is given. Raises UserError if it cannot be read, or uses LayerDrop."""
    shape = read_shape(model) if model is not None else None
    if shape is not None and target == "harness":
        require_every_layer(shape.layerdrop)
    return shape


def findings(view: RunView) -> list[Diagnostic]:
    """Return the findings of all rules, in the order of the file."""
    found = [_placed(view, rule, finding) for rule in RULES for finding in rule.check(view)]
    return sorted(found, key=lambda item: (item.line, item.column, item.severity.rank, item.code))


def refusals(diagnostics: list[Diagnostic], *, allow_ignored_keys: bool = False) -> list[Diagnostic]:
    """Return the findings that stop a run: errors, and ignored keys that are misspelt or misplaced.

    With a misspelt key a run could train at ZeRO stage 0 unnoticed. `allow_ignored_keys` accepts such keys.
    """
    misspelt = () if allow_ignored_keys else ("DS101", "DS102")
    return [item for item in diagnostics if item.severity is Severity.ERROR or item.code in misspelt]


def _placed(view: RunView, rule: Rule, finding: Finding) -> Diagnostic:
    """Return a finding; without a place if an argument of the run alone has caused it, or if there is no file."""
    found = _diagnostic(view.document, rule, finding)
    section = finding.pointer.split("/")[1:2]
    is_absent = finding.span is None and not (section and section[0] in view.document.data)
    by_argument = is_absent and bool(section) and view.arguments is not None
    return replace(found, file="") if by_argument or (is_absent and found.file == FROM_PROGRAM) else found


def _diagnostic(document: Document, rule: Rule, finding: Finding) -> Diagnostic:
    """Return a finding with its position in the file."""
    start, end = finding.span or document.span(finding.pointer, of_value=finding.on_value)
    line, column = document.line_column(start)
    stop = document.text.find("\n", start)
    on_line = end if stop < 0 else min(end, stop)
    return Diagnostic(
        code=rule.code,
        severity=finding.severity or rule.severity,
        message=finding.message,
        file=document.path,
        pointer=finding.pointer,
        line=line,
        column=column,
        length=max(1, on_line - start),
        hint=finding.hint,
        deepspeed=finding.deepspeed,
        edits=finding.edits,
        is_safe=finding.is_safe,
    )
