"""Write the documentation of the rules: one page for each, made from its docstring and its examples.

`python -m harness.config.cli.pages` writes docs/rules; a test fails if the pages there are out of date.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from harness.config.rules.registry import RULES
from harness.config.rules.rule import Rule
from harness.config.schema import supported

_CLAIMS = {
    "refuses": "DeepSpeed's config parser refuses the wrong example",
    "engine": "DeepSpeed's parser takes the wrong example, `deepspeed.initialize` refuses it",
    "runs": "DeepSpeed takes the wrong example and starts",
    "elsewhere": "it shows in a run of several ranks, or with a model",
}

# why some values are errors although DeepSpeed's parser accepts them
STRICTER = {
    "/train_micro_batch_size_per_gpu": "a fraction of a sample passes the arithmetic, but no loader can deliver it",
    "/gradient_accumulation_steps": "a fraction of a micro-batch passes the arithmetic, but no step can run it",
    "/sequence_parallel_size": "the parser divides by it only when it is given a dictionary, and not a file",
    "/vocabulary_size": "an empty string, list or object counts as absent",
    "/torch_autocast/lower_precision_safe_modules": "the keys of an object pass for names",
    "/optimizer/params": "without a type it is never looked at",
    "/scheduler/params": "it is looked at when the schedule is built",
    "/timers": "a string or list is searched for the word throughput",
    "/gradient_compression": "only the harness reads the section",
    "/context_parallel": "only the harness reads the section",
    "/tiling": "only the harness reads the section",
    "/expert_parallel": "an empty value counts as absent",
    "/data_efficiency/data_sampling/dynamic_batching/min_batch_size": "a fraction is cut, and a string converted",
    "/data_efficiency/data_sampling/dynamic_batching/max_batch_size": "a fraction is cut, and a string converted",
    "/autotuning/results_dir": "anything that is not empty passes for a folder",
    "/autotuning/exps_dir": "anything that is not empty passes for a folder",
}
# why some values pass although DeepSpeed's parser refuses them on some machines
LENIENT = {
    "/aio/use_gds": "it is refused only where the accelerator is not CUDA, which a file does not say",
    "/wall_clock_breakdown": "a number above 1e10 is a float, and refused",
    "/flops_profiler/enabled": "a number above 1e10 is a float, and refused",
}


def page(rule: Rule) -> str:
    """Return a rule's page in Markdown."""
    options = "".join(f" --{name} {value}" for name, value in rule.options.items() if name != "arguments")
    arguments = "".join(f" --{name} {value}" for name, value in rule.options.get("arguments", {}).items())
    verb = "resolve" if arguments else "check"
    return "\n".join(
        [
            f"# {rule.code} {rule.name} ({rule.severity.value})",
            "",
            rule.page,
            "",
            f"Raised by `ds-harness {verb}{options}{arguments}`; {_CLAIMS[rule.claim]}.",
            "",
            "```json",
            pretty(rule.wrong),
            "```",
            "",
            "Use instead:",
            "",
            "```json",
            pretty(rule.right),
            "```",
            "",
        ]
    )


def pretty(text: str) -> str:
    """Return an example with one key a line; one that is not plain JSON, or has duplicate keys, stays unchanged."""
    try:
        data = json.loads(text)
    except ValueError:
        return text
    return text if len(json.dumps(data)) != len(text) else json.dumps(data, indent=2)


def index() -> str:
    """Return the list of all rules in Markdown."""
    low, high = supported()
    rows = [f"| [{r.code}]({r.code}.md) | {r.name} | {r.severity.value} | {r.title} |" for r in RULES]
    return "\n".join(
        [
            "# Rules of `ds-harness check`",
            "",
            f"They are tested with DeepSpeed {low} up to (not including) {high}. An **error** is what DeepSpeed, or the"
            " program named by `--target`, refuses; a **warning** runs, but not as it is written; an **info** is"
            " advice with a number behind it.",
            "",
            "| code | name | severity | what it finds |",
            "|---|---|---|---|",
            *rows,
            "",
            "## Where the verdict is not that of DeepSpeed's parser",
            "",
            "A test runs values of every kind through DeepSpeed's parser, for every key. The verdicts are the same,"
            " with these exceptions. An error here, because the run would fail later or do something else:",
            "",
            *(f"- `{pointer.strip('/').replace('/', '.')}`: {reason}" for pointer, reason in STRICTER.items()),
            "",
            "Accepted here, although DeepSpeed may refuse it:",
            "",
            *(f"- `{pointer.strip('/').replace('/', '.')}`: {reason}" for pointer, reason in LENIENT.items()),
            "",
            "A zero for `scheduler.params.warmup_num_steps` is refused when DeepSpeed builds the schedule; the harness"
            " writes 1 for it, so with `--target harness` it is a warning.",
            "",
        ]
    )


def pages() -> dict[str, str]:
    """Return name -> content of every file of docs/rules."""
    return {"README.md": index()} | {f"{rule.code}.md": page(rule) for rule in RULES}


def main() -> None:
    """Write the pages to docs/rules in the working directory, and remove those of rules that no longer exist."""
    folder = Path("docs/rules")
    folder.mkdir(parents=True, exist_ok=True)
    wanted = pages()
    for stale in {path.name for path in folder.glob("*.md")} - wanted.keys():
        (folder / stale).unlink()
    for name, text in wanted.items():
        (folder / name).write_text(text, "utf-8")
    print(f"{len(wanted)} pages in {folder}", file=sys.stderr)


if __name__ == "__main__":
    main()
