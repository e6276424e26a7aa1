"""The verb `ds-harness checkpoint`: show a checkpoint's content, verify it, or export its model.

Showing and verifying import neither torch nor transformers.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from harness.checkpoint.directories import read_manifest, read_progress, set_aside
from harness.checkpoint.exporting.model_files import hide_secrets
from harness.checkpoint.integrity import changed_file, damage, unlisted
from harness.checkpoint.listed import listed_files
from harness.config.values.json_file import read_json
from harness.errors import UserError, reason
from harness.verb_parser import Boolean, VerbParser, path_argument
from harness.wording import counted

DESCRIPTION = """Show, verify or export a checkpoint of a run, or merge its adapters into their base model: see
`checkpoint merge --help`. `verify` exits with 1 if a file has changed since it was saved, or was added later."""
EXAMPLE = """example:
  ds-harness checkpoint show runs/mine/checkpoint-500
  ds-harness checkpoint verify runs/mine/checkpoint-500
  ds-harness checkpoint export runs/mine/checkpoint-500 --output_dir model --dtype bfloat16
  ds-harness checkpoint merge runs/lora merged"""
DTYPES = ("float32", "bfloat16", "float16")
MERGING = "harness.extras.merging.command"
"""The part that merges adapters."""
TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "vocab*", "merges.txt", "*.jinja")


def checkpoint(argv: Sequence[str]) -> int:
    """Show, verify or export a checkpoint; returns the exit code.

    Raises UserError if it is not complete, is damaged, or cannot be exported.
    """
    if argv[:1] == ["merge"]:
        code: int = import_module(MERGING).merge_command(argv[1:])
        return code
    parser = VerbParser("checkpoint", DESCRIPTION, EXAMPLE)
    parser.add_argument("action", choices=("show", "verify", "export"), help="what to do with the checkpoint")
    parser.add_argument("directory", type=path_argument, metavar="DIR", help="output_dir/checkpoint-STEP")
    parser.add_argument("--output_dir", type=path_argument, help="export: where the model is written")
    parser.add_argument("--dtype", choices=DTYPES, help="export: of the weights; default: float32")
    parser.add_argument(
        "--merge", action=Boolean, help="export: adapters merged into their base model, in the dtype of its files"
    )
    args = parser.parse_args(argv)
    for flag in ("output_dir", "dtype", "merge"):
        if args.action != "export" and getattr(args, flag):
            parser.error(f"--{flag} has no effect on {args.action}")
    if args.merge and args.dtype is not None:
        parser.error("--dtype has no effect with --merge: the merged model has the dtype of its base model")
    if args.action == "export" and args.output_dir is None:
        parser.error("export needs --output_dir")
    if found := damage(args.directory):
        raise UserError(f"{args.directory}: no whole checkpoint there ({found})")
    if args.action == "show":
        show(args.directory)
    elif args.action == "verify":
        verify(args.directory)
    elif args.merge:
        require_as_saved(args.directory)
        import_module(MERGING).merge_adapters([args.directory], args.output_dir)
    else:
        dtype = args.dtype or "float32"
        require_as_saved(args.directory)
        with listed_files(args.directory) as directory:
            try:
                export(directory, args.output_dir, dtype)
            except OSError as error:
                why = reason(error, args.output_dir)
                raise UserError(f"{args.directory} cannot be exported to {args.output_dir}: {why}") from error
        print(f"{args.output_dir}: exported in {dtype}")
    return 0


def show(directory: Path) -> None:
    """Print a checkpoint's step, layout, model and optimizer, and its files."""
    progress = read_progress(directory)
    files = read_manifest(directory).files
    if progress.run_id:
        print(f"run {progress.run_id}")
    print(f"step {progress.step:,}, {counted(progress.consumed_samples, 'sample')} consumed")
    print(f"saved with {progress.layout}, ZeRO-{progress.zero_stage}, {progress.precision}; any other can resume it")
    print(f"model: {progress.model}{' (adapters only)' if progress.adapters else ''}")
    print(
        f"optimizer: {progress.optimizer}" + "".join(f", {name} {value:g}" for name, value in progress.counters.items())
    )
    for name, (size, _) in sorted(files.items()):
        print(f"  {size:>15,} bytes  {name}")


def verify(directory: Path) -> None:
    """Compare all files with their saved checksums. UserError for the first that differs, or was added later."""
    require_as_saved(directory)
    if others := unlisted(directory):
        raise UserError(f"{directory} contains {others[0]}, which it was not saved with: move it elsewhere")
    files = read_manifest(directory).files
    print(
        f"{directory}: {counted(len(files), 'file')}, {sum(size for size, _ in files.values()):,} bytes, all as saved"
    )


def require_as_saved(directory: Path) -> None:
    """Compare all files with their saved checksums. UserError for the first that differs."""
    if found := changed_file(directory, 0, 1):
        raise UserError(f"{directory} is damaged: {found}")


def export(directory: Path, output_dir: Path, dtype: str) -> None:
    """Write the model in `dtype` as a HuggingFace directory, or adapters as peft does. UserError for own layers."""
    if links := [path for path in output_dir.glob("*") if path.is_symlink() and not path.is_dir()]:
        raise UserError(f"{links[0]} is a link, through which another file would be overwritten: remove it")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    if read_progress(directory).adapters:
        _export_adapters(directory, output_dir, dtype)
    elif not (directory / "config.json").is_file():
        raise UserError(f"{directory.name}: a list of layers is not a HuggingFace model: use its safetensors files")
    else:
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        from harness.checkpoint.exporting.model_files import set_aside_adapters
        from harness.hf.unbuilt import make_loadable

        disable_progress_bar()
        output_dir.mkdir(parents=True, exist_ok=True)  # save_pretrained only logs an error for a file of that name
        make_loadable(directory)
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, local_files_only=True)
        set_aside_adapters(output_dir)
        model.save_pretrained(output_dir)
        _copy(directory, output_dir, TOKENIZER_FILES)


def _export_adapters(directory: Path, output_dir: Path, dtype: str) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    from harness.checkpoint.exporting.model_files import set_aside_model
    from harness.checkpoint.exporting.weights import FILE

    output_dir.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.to(getattr(torch, dtype)) for name, tensor in load_file(directory / FILE).items()}
    save_file(tensors, output_dir / FILE, metadata={"format": "pt"})
    set_aside_model(output_dir, read_json(directory / "adapter_config.json").get("base_model_name_or_path") or "")
    _copy(directory, output_dir, ("adapter_config.json", *TOKENIZER_FILES))


def _copy(directory: Path, output_dir: Path, patterns: Sequence[str]) -> None:
    if any(directory.glob("tokenizer*")) and not any(directory.glob("*.jinja")):
        set_aside(output_dir / "chat_template.jinja")  # it would count as this tokenizer's
    for path in {path for pattern in patterns for path in directory.glob(pattern)}:
        (output_dir / path.name).write_bytes(path.read_bytes())
    hide_secrets(output_dir)
