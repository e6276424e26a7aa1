"""Let an exported model continue a prompt: python scripts/generate.py runs/demo --prompt "def ".

Plain transformers, nothing of the harness: what a run leaves behind is a HuggingFace directory like any.
"""

import argparse
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging


def main() -> int:
    """Print the prompt and its continuation; returns 1, with one line on standard error, if nothing loads."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="output directory of a run: a model or adapters, and tokenizer files")
    parser.add_argument("--prompt", default="    def __init__(self, ")
    parser.add_argument("--max_new_tokens", type=int, default=300)
    parser.add_argument("--temperature", type=float, default=0.5, help="0: always take the most likely token")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    if not any(Path(args.model, name).is_file() for name in ("config.json", "adapter_config.json")):
        print(
            f"generate: {args.model} contains no config.json: give the output directory of a finished run",
            file=sys.stderr,
        )
        return 1
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(args.model, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(args.model, local_files_only=True).eval()
    except (OSError, ValueError) as error:
        print(f"generate: cannot load {args.model}: {str(error).splitlines()[0]}", file=sys.stderr)
        return 1
    torch.manual_seed(args.seed)
    sampling = {"do_sample": True, "temperature": args.temperature} if args.temperature > 0 else {}
    ids = tokenizer(args.prompt, return_tensors="pt")
    out = model.generate(**ids, max_new_tokens=args.max_new_tokens, **sampling)
    print(tokenizer.decode(out[0], skip_special_tokens=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
