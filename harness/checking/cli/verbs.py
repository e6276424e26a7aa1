"""The verbs of `ds-harness` that concern configs: check, explain, schema, resolve."""

from __future__ import annotations

import argparse
import glob
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from harness.checking import resolve as resolve_document
from harness.checking.check import check as check_document
from harness.checking.check import known_shape
from harness.checking.cli.fix import diff, fix, with_usable_remedies
from harness.checking.cli.render import FORMATS, render, shows_colour, text_block
from harness.checking.registry import RULES, by_code
from harness.checking.rules.view import TARGETS
from harness.checking.schema import version_warning
from harness.config.model.families import require_trainable_family
from harness.config.model.shape import ModelShape
from harness.config.resolving.resolved import Resolved
from harness.config.text.diagnostic import ConfigError, Diagnostic, Severity
from harness.config.text.document import MAX_BYTES, Document, from_bytes, from_text, load
from harness.config.values.arguments import FP8, FP8_MULTIPLE, AutoValues
from harness.errors import UserError
from harness.preference_losses import PREFERENCE_LOSSES
from harness.verb_parser import Boolean, VerbParser, name_or_path, positive, run_arguments
from harness.wording import counted


def _parser(verb: str, description: str, example: str) -> VerbParser:
    return VerbParser(verb, description, f"example:\n  {example}")


def check(argv: Sequence[str]) -> int:
    """Check files and return the exit code: 0 without errors, 1 with errors."""
    example = "ds-harness check ds_configs --world_size 8 --strict"
    parser = _parser("check", "Check DeepSpeed configs and report every problem, before any process starts.", example)
    parser.add_argument(
        "files",
        nargs="+",
        type=name_or_path,
        metavar="FILE",
        help="files, directories, globs or presets; - is standard input",
    )
    parser.add_argument("--world_size", type=positive, help="number of ranks that the run will have")
    parser.add_argument(
        "--model",
        type=name_or_path,
        help="a preset, a directory with config.json, or a model type: check that the layout fits it",
    )
    parser.add_argument(
        "--fp8", choices=FP8, help="check for a run with this flag: its precision, and what stays in bf16"
    )
    parser.add_argument(
        "--preference", choices=tuple(PREFERENCE_LOSSES), help="check for a run with this flag: what it needs beside"
    )
    parser.add_argument("--target", choices=TARGETS, default="harness", help="program that will read the file")
    parser.add_argument("--format", choices=FORMATS, default="text", help="output format")
    parser.add_argument("--strict", action=Boolean, help="exit with 1 on warnings too")
    parser.add_argument("--fix", action=Boolean, help="apply the fixes that do not change the training")
    unsafe = "with --fix: also apply fixes that change the training, such as renaming an ignored key"
    parser.add_argument("--unsafe-fixes", action=Boolean, help=unsafe)
    args = parser.parse_args(argv)
    if args.model is not None and args.target == "harness":
        require_trainable_family(args.model)
    findings: list[Diagnostic] = []
    texts: dict[str, str] = {}
    sources = _sources(args.files)
    arguments = None if args.fp8 is None else AutoValues(fp8=args.fp8, given=frozenset({"fp8"}))
    for source in sources:
        try:
            document = _read(source)
            document = _fix(document, args) if args.fix else document
        except ConfigError as error:
            findings += error.diagnostics
            continue
        texts[document.path] = document.text
        found = check_document(
            document, world_size=args.world_size, model=args.model, target=args.target, arguments=arguments
        )
        if args.format == "text":  # which counts the fixes
            found = with_usable_remedies(document, found, world_size=args.world_size, target=args.target)
        findings += found
    if (warning := version_warning()) is not None:
        print(f"ds-harness check: {warning}", file=sys.stderr)
    print(render(findings, args.format, texts, colour=shows_colour(sys.stdout), files=len(sources)))
    if args.fp8 not in (None, "no") and args.format == "text":
        print(_left_out_of_fp8(args.fp8, None if args.model is None else known_shape(args.model, args.target)))
    if args.preference is not None and args.format == "text":
        print(_beside_preferences(args.preference))
    failing = {Severity.ERROR, Severity.WARNING} if args.strict else {Severity.ERROR}
    return int(any(finding.severity in failing for finding in findings))


def _left_out_of_fp8(how: str, model: ModelShape | None) -> str:
    """Return a sentence on what `--fp8` leaves in bf16, and on the devices that it needs."""
    widths = () if model is None else (model.hidden, model.intermediate)
    odd = [f"{width:,}" for width in widths if width and width % FP8_MULTIPLE]
    also = f", and layers of a width of {' or '.join(odd)}, no multiple of {FP8_MULTIPLE}" if odd else ""
    device = "" if how == "emulate" else "; needs an NVIDIA GPU of compute capability 8.9 or more, so not an A100"
    kept = "head, embeddings, norms, attention, fused experts, routers and adapters"
    return f"--fp8 {how}: {kept} stay in bf16{also}{device}"


def _beside_preferences(kind: str) -> str:
    """Return a sentence on what training on preferences needs more than training on the next token."""
    before = "; a pass over the data without gradients comes first" if PREFERENCE_LOSSES[kind].needs_reference else ""
    return (
        f"--preference {kind}: a sample is two sequences, so a micro-batch has the activations of twice as many{before}"
    )


def _read(source: str) -> Document:
    return from_bytes(sys.stdin.buffer.read(MAX_BYTES + 1), "<stdin>") if source == "-" else load(source)


def _sources(arguments: Sequence[str]) -> list[str]:
    """Return every file that the arguments name: for a directory the .json files in it, for a glob its matches."""
    sources: list[str] = []
    for argument in arguments:
        if Path(argument).is_dir():
            below = sorted(str(path) for path in Path(argument).rglob("*.json") if path.is_file())
            if not below:
                raise UserError(f"{argument}: no .json file in this directory")
            sources += below
        elif glob.has_magic(argument) and not os.path.lexists(argument):
            matches = sorted(path for path in glob.glob(argument, recursive=True) if Path(path).is_file())  # noqa: PTH207
            if not matches:
                raise UserError(f"{argument}: no file matches")
            sources += matches
        else:
            sources.append(argument)
    return list(dict.fromkeys(sources))


def _fix(document: Document, args: argparse.Namespace) -> Document:
    """Fix the file in place and print the diff to stderr; for standard input only print the diff."""
    fixed = fix(document, world_size=args.world_size, target=args.target, unsafe=args.unsafe_fixes)
    if fixed.text == document.text:
        return document
    print(diff(document.path, document.text, fixed.text, colour=shows_colour(sys.stderr)), file=sys.stderr)
    if document.path != "<stdin>":
        try:
            Path(document.path).write_bytes(fixed.text.encode("utf-8"))
        except OSError as error:
            raise UserError(f"{document.path}: cannot be written: {(error.strerror or '').lower()}") from None
    return from_text(fixed.text, document.path)


def explain(argv: Sequence[str]) -> int:
    """Print a rule's page, or the list of all rules; UserError for a rule that does not exist."""
    parser = _parser("explain", "Print the page of a rule, or list all rules.", "ds-harness explain DS101")
    parser.add_argument("code", nargs="?", help="a rule's code or name")
    args = parser.parse_args(argv)
    if args.code is None:
        for rule in RULES:
            print(f"{rule.code}  {rule.severity.value:<7}  {rule.name}")
        return 0
    found = by_code(args.code)
    if found is None:
        raise UserError(f"no rule {args.code!r}; `ds-harness explain` lists them")
    from harness.checking.cli.pages import page

    print(page(found).rstrip())
    return 0


def schema(argv: Sequence[str]) -> int:
    """Print the schema, whole or one section."""
    from harness.checking.schema import ROOT, bundle, files

    sections = sorted(name.removesuffix(".json") for name in files() if name != ROOT)
    parser = _parser("schema", "Print the JSON Schema of DeepSpeed's config.", "ds-harness schema > deepspeed.json")
    text = "print this section alone: " + ", ".join(sections)
    parser.add_argument("section", nargs="?", choices=sections, metavar="SECTION", help=text)
    args = parser.parse_args(argv)
    found = bundle() if args.section is None else files()[f"{args.section}.json"]
    print(json.dumps(found, indent=2, ensure_ascii=False))
    return 0


def resolve(argv: Sequence[str]) -> int:
    """Print the config with every "auto" replaced, for DeepSpeed without the harness, and the source of each value."""
    example = "ds-harness resolve zero3 --world_size 8 --learning_rate 1e-4 --hidden_size 4096"
    parser = _parser("resolve", 'Replace every "auto" with its value and show where the value comes from.', example)
    parser.add_argument("file", type=name_or_path, metavar="FILE", help="a config or a preset")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="output format")
    parser.add_run_arguments(item.name for item in fields(AutoValues) if item.name != "given")
    args = parser.parse_args(argv)
    document = load(args.file)
    try:
        resolved = resolve_document(document, run_arguments(args), allow_ignored_keys=True)
    except ConfigError as error:
        for finding in error.diagnostics:
            print(text_block(finding, document.text, colour=shows_colour(sys.stderr)), file=sys.stderr)
        return 1
    if args.format == "text":
        _print_filled(resolved)
    print(json.dumps(resolved.alone, indent=2))
    return 0


def _print_filled(resolved: Resolved) -> None:
    """Print each value that was filled in, with its source, as a comment above the config."""
    width = max((len(item.pointer) for item in resolved.filled), default=0)
    for item in resolved.filled:
        value = "-" if item.value is None else json.dumps(item.value)
        print(f"# {item.pointer.strip('/').replace('/', '.'):<{width}} {value:<14} {item.source}")
    context = f" (context {resolved.cp_size})" if resolved.cp_size > 1 else ""
    print(
        f"# pipeline {resolved.pp_size} x tensor {resolved.tp_size} x data {resolved.dp_size}{context}:"
        f" {counted(resolved.train_batch, 'sample')} a step"
    )
    if "train_batch_size" not in resolved.alone:
        print("# without train_batch_size: DeepSpeed alone would count every rank as data-parallel")
