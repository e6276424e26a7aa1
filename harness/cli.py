"""The command `ds-harness`: find the verb and call it.

A verb's package is imported only when the verb is called, so that every other verb starts quickly. Exit codes: 0 done,
1 the user must correct something (one line on standard error), 2 unknown flags and values that no argument takes.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence
from importlib import import_module

from harness import completion

VERBS = {
    "train": ("harness.start", "train on all devices of this machine, or of several hosts"),
    "check": ("harness.checking.cli.verbs", "check DeepSpeed configs"),
    "explain": ("harness.checking.cli.verbs", "explain a rule"),
    "schema": ("harness.checking.cli.verbs", "print the JSON Schema of DeepSpeed's config"),
    "resolve": ("harness.checking.cli.verbs", 'replace every "auto" and show where each value comes from'),
    "models": ("harness.verify.trials.models_command", "show which model families work in which layout"),
    "verify": (
        "harness.verify.trials.verify_command",
        "check that a config gives the same numbers as training in one process",
    ),
    "plan": ("harness.planner.cli.verbs", "rank every layout of a number of ranks by its predicted speed"),
    "estimate": ("harness.planner.cli.verbs", "predict memory and speed of one config"),
    "checkpoint": ("harness.checkpoint.commands", "show, verify, export or merge a checkpoint"),
    "generate": ("harness.data.generate", "let a trained model continue a prompt"),
    "report": ("harness.report.commands", "show runs in one HTML file"),
    "dry-run": ("harness.dry_run.command", "build one rank of a run without the others: memory, messages, errors"),
    "cluster": ("harness.cluster.commands", "write a job file for Kubernetes or Slurm"),
    "launch": ("harness.resilience.launch", "start a script of your own on devices and hosts, and keep it going"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    if completion.is_asked():
        args = completion.arguments_for_help(VERBS)
    verb = args[0] if args else ""
    if verb not in VERBS:
        return _help(verb)
    from harness.errors import UserError, reason
    from harness.preconditions import establish

    try:
        establish()
    except UserError as error:
        print(f"ds-harness {verb}: {error}", file=sys.stderr)
        return 1
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a file may hold what the terminal cannot show
    try:
        module = import_module(VERBS[verb][0])
        code: int = getattr(module, verb.replace("-", "_"))(args[1:])
    except UserError as error:
        print(f"ds-harness {verb}: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        from harness.installed import absent_part

        part = absent_part(error.name or "")
        if part is None:
            raise
        print(f"ds-harness {verb}: needs {part}, which is not installed", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader of our output has gone, as `head` does
        sys.stderr.close()
        return 1
    except OSError as error:  # of a file or a folder that the verb did not expect to fail
        where = f"{error.filename}: " if error.filename else ""
        print(f"ds-harness {verb}: {where}{reason(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return code


def _help(verb: str) -> int:
    """Print the verbs; return 2 if something else was asked for."""
    if verb == "--version":
        from importlib.metadata import version

        print(f"ds-harness {version('ds-harness')}")
        return 0
    example = "ds-harness train --deepspeed_config zero3 --max_steps 20 --output_dir runs/first"
    verbs = "\n".join(f"  {name:<10} {text}" for name, (_, text) in VERBS.items())
    parser = argparse.ArgumentParser(
        prog="ds-harness",
        usage="ds-harness VERB ...",
        description="Train HuggingFace decoders with DeepSpeed. Run `ds-harness VERB --help` for details.",
        epilog=f"verbs:\n{verbs}\n\nexample:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if verb in ("", "-h", "--help"):
        parser.print_help()
        return 0 if verb else 2
    from harness.spelling import nearest

    meant = nearest(verb, VERBS)
    advice = f"use one of {', '.join(VERBS)}" if meant is None else f"did you mean {meant}?"
    print(f"ds-harness: unknown verb {verb!r}; {advice}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
