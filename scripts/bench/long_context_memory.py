"""What each key for long sequences saves: peak bytes of a step of a small Llama at 32,768 tokens, by the dry run.

    python scripts/bench/long_context_memory.py [--tokens 32768]

Nothing is computed: `ds-harness dry-run` counts the tensors of a step, which the run's own code makes. Prints a table,
in which each row has the keys of those above it, and writes results/long_context_memory.json. Takes a minute.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from report import RESULTS, write_report

GIB = 1 << 30
MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32_000,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2**20,
}
BASE: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}}
STEPS: list[tuple[str, dict[str, Any]]] = [
    ("as it is", {}),
    ("recomputed layers", {"pipeline": {"activation_checkpoint_interval": 1}}),
    ("+ loss in tiles", {"tiling": {"loss": 2048}}),
    ("+ hidden states in host memory", {"activation_checkpointing": {"cpu_checkpointing": True}}),
    ("+ feed-forward blocks and norms in tiles", {"tiling": {"loss": 2048, "feed_forward": 2048}}),
    ("+ four context ranks", {"context_parallel": {"size": 4}}),
]


def peak(folder: Path, config: dict[str, Any], tokens: int) -> int:
    """Return the bytes that a rank holds at the peak of a step."""
    (folder / "config.json").write_text(json.dumps(MODEL))
    (folder / "deepspeed.json").write_text(json.dumps(config))
    ranks = config.get("context_parallel", {}).get("size", 1)
    words = ["--rank", "0", "--world_size", str(ranks), "--json", "--model", str(folder), "--block_size", str(tokens)]
    command = [sys.executable, "-m", "harness", "dry-run", "--deepspeed_config", str(folder / "deepspeed.json"), *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return int(json.loads(done.stdout.splitlines()[-1])["memory_bytes"]["peak"])


def main() -> None:
    """Count all steps of the ladder, one upon the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32_768, help="of a sample")
    tokens = parser.parse_args().tokens
    config, found = dict(BASE), {}
    with tempfile.TemporaryDirectory() as folder:
        for name, keys in STEPS:
            config |= keys
            found[name] = peak(Path(folder), config, tokens)
            print(f"| {name} | {found[name] / GIB:.2f} GiB |", flush=True)
    write_report(
        RESULTS / "long_context_memory.json", {"tokens": tokens, "model": MODEL, "bytes": found}, what=str(__doc__)
    )


if __name__ == "__main__":
    main()
