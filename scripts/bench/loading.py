"""How much memory and time it takes 4 ranks to load a model of 400 million parameters, and to write it again.

A checkpoint of a llama, or of a mixtral, whose experts are stored one by one and held in one tensor, is made from a
config, in files of 200 MB. Then ranks are forked from a process that has imported everything, and each builds its part
of the model in fp32 as a training run would. Its peak above the empty process is taken twice: as anonymous memory,
which is the process's own, and as resident memory, which counts mapped files too. What it reads from files is held
against its share; the ranks' processor time, all together, against that of reading the files once into fresh memory. A
busy machine distorts that least:

    OMP_NUM_THREADS=1 python scripts/bench/loading.py [--family mixtral]
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from transformers import CONFIG_MAPPING, AutoModelForCausalLM  # noqa: E402

from harness import TrainingArguments  # noqa: E402
from harness.checkpoint.exporting.weights import export_weights  # noqa: E402
from harness.composition import installed_parts  # noqa: E402
from harness.deepspeed.process_wide import avoid_compiling  # noqa: E402
from harness.hf.skeleton import read_source  # noqa: E402
from harness.installed import read_run_config  # noqa: E402
from harness.parallel.pipeline.staged_module import build_layers  # noqa: E402
from harness.topology.groups import build_groups  # noqa: E402
from harness.topology.layout import Layout  # noqa: E402
from harness.training.engine.build import EngineSpec  # noqa: E402
from harness.training.prepare.stages import choose_boundaries  # noqa: E402
from harness.training.prepare.trainable import trainable_decoder  # noqa: E402
from scripts.bench.report import RESULTS, write_report  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402

LAYOUTS = {"pp2 x tp2": (2, 2, 1), "tp4": (1, 4, 1), "ZeRO-3 dp4": (1, 1, 3)}
SHAPE = dict(
    vocab_size=32000,
    hidden_size=1024,
    intermediate_size=2816,
    num_attention_heads=16,
    num_key_value_heads=8,
    tie_word_embeddings=False,
)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 28},
    "mixtral": {"num_hidden_layers": 8, "intermediate_size": 1568, "num_local_experts": 8},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="of the checkpoint")
    parser.add_argument("--family", default="llama", choices=sorted(FAMILIES))
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        parameters = make_checkpoint(flags.family, model, getattr(torch, flags.dtype))
        read_s = min(read_once(model) for _ in range(3))
        runs = {}
        for name, (pipeline, tensor, zero) in LAYOUTS.items():
            results = run_ranks(
                4,
                "scripts.bench.loading:load_and_write",
                str(model),
                f"{folder}/out",
                pipeline,
                tensor,
                zero,
                timeout_s=600,
            )
            runs[name] = summary(results, read_s)
            print(name, json.dumps(runs[name]))
        report = {
            "family": flags.family,
            "parameters": parameters,
            "checkpoint": {"dtype": flags.dtype, "bytes": sum(f.stat().st_size for f in model.glob("*.safetensors"))},
            "read_once_cpu_s": round(read_s, 3),
            "layouts": runs,
        }
    name = "loading.json" if flags.family == "llama" else f"loading-{flags.family}.json"
    write_report(RESULTS / name, report, what=__doc__)


def make_checkpoint(family: str, folder: Path, dtype: torch.dtype) -> int:
    """Save the model; its number of parameters."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**{**SHAPE, **FAMILIES[family]}), dtype=dtype)
    model = model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.02)
    model.save_pretrained(folder, max_shard_size="200MB")
    return sum(parameter.numel() for parameter in model.parameters())


def read_once(folder: Path) -> float:
    """Processor seconds to read all files into fresh memory (here from the page cache), as plainly as can be."""
    begun = time.process_time()
    kept = []
    for path in folder.glob("*.safetensors"):
        kept.append(torch.empty(path.stat().st_size, dtype=torch.uint8))
        with path.open("rb", buffering=0) as file:
            rest = memoryview(kept[-1].numpy())
            while rest:
                rest = rest[file.readinto(rest) :]
    return time.process_time() - begun


class Peak:
    """Watches this process's memory: the most above what it was at the start, in bytes."""

    def __init__(self) -> None:
        self.start = memory()
        self.most = dict(self.start)
        self.begun, self.begun_cpu = time.perf_counter(), time.process_time()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds, self.cpu = time.perf_counter() - self.begun, time.process_time() - self.begun_cpu
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.005):
            for kind, size in memory().items():
                self.most[kind] = max(self.most[kind], size)

    def result(self) -> dict[str, float]:
        """Bytes above the start, and seconds, by the clock and of the processor."""
        grown = {kind: self.most[kind] - self.start[kind] for kind in self.start}
        return {**grown, "seconds": self.seconds, "cpu": self.cpu}


def memory() -> dict[str, int]:
    """Resident bytes of this process: its own (anonymous), and all."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon", "VmRSS"))}
    return {"anonymous": found["RssAnon"], "resident": found["VmRSS"]}


def bytes_read() -> int:
    """Return what this process has read from files, in bytes."""
    return int(Path("/proc/self/io").read_text().split()[1])


def load_and_write(model: str, out: str, pipeline: int, tensor: int, zero: int) -> dict[str, Any]:
    """Bytes and seconds of one rank, for its part of the model, as a training run builds and exports it."""
    config = {
        "train_batch_size": 4 // pipeline // tensor,
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": zero},
        "pipeline": {"stages": pipeline},
        "tensor_parallel": {"autotp_size": tensor},
    }
    args = TrainingArguments(deepspeed_config=config, output_dir=out, max_steps=1, save_steps=0)
    resolved, steps = read_run_config(args, world_size=4).for_data(args, None, SHAPE["hidden_size"])
    groups = build_groups(Layout.from_world(4, pp_size=pipeline, tp_size=tensor))
    spec = EngineSpec(args=args, resolved=resolved, max_steps=steps)
    avoid_compiling()
    gc.collect()  # touches what is shared with the parent since the fork, so that it does not count as growth
    before = bytes_read()
    with Peak() as loading:
        subject = trainable_decoder(read_source(model), spec, groups, sequence_length=128, parts=installed_parts())
        bounds, stage = choose_boundaries(subject, spec.resolved, None), groups.coordinate.stage
        built = build_layers(subject.layers, bounds[stage], bounds[stage + 1], seed=0)
        dist.barrier()
    read = bytes_read() - before
    module = nn.Module()
    for index, layer in built.modules.items():
        module.add_module(str(index), layer)
    Path(out).mkdir(exist_ok=True)
    with Peak() as writing:
        export_weights(module, groups, Path(out), rename=subject.saved_name, form=subject.causal.form)
    elements = sum(getattr(p, "ds_tensor", p).numel() for p in module.parameters())
    return {"share": 4 * elements, "read": read, "load": loading.result(), "write": writing.result()}


def summary(results: list[dict[str, Any]], read_s: float) -> dict[str, Any]:
    """Compare the worst rank's peak with its share, and all ranks' work with reading the files once."""
    worst = max(results, key=lambda rank: rank["load"]["resident"] / rank["share"])
    seconds = max(rank["load"]["seconds"] for rank in results)
    return {
        "share_mb": round(worst["share"] / 2**20),
        "peak_over_share": {kind: round(worst["load"][kind] / worst["share"], 3) for kind in ("anonymous", "resident")},
        "read_over_share": round(max(rank["read"] / rank["share"] for rank in results), 2),
        "load_s": round(seconds, 2),
        "load_cpu_s": [round(rank["load"]["cpu"], 2) for rank in results],
        "load_cpu_over_read_once": round(sum(rank["load"]["cpu"] for rank in results) / read_s, 2),
        "write_peak_mb": {kind: round(max(r["write"][kind] for r in results) / 2**20) for kind in memory()},
        "write_s": round(max(rank["write"]["seconds"] for rank in results), 2),
    }


if __name__ == "__main__":
    main()
