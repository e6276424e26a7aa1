"""What it takes to read and tokenise the same text by the harness and by the package `datasets`, alone.

A .jsonl file is made of the standard library's sources, and a byte-level BPE is trained on them, or with `--words` a
list of words, which is seven times as fast, for large files. Each program reads the file, tokenises it in two processes
and keeps the ids on disk: the harness with `read_documents` and `make_blocks`, `datasets` with `load_dataset` and
`Dataset.map(batched=True, num_proc=2)`, once with its default batch of 1,000 documents and once with 32. Each prepares
the file, starts again on its own cache, and prepares it once more on an empty cache, where it is killed after half of
its processor time and started again. Then the rows are streamed, from the beginning and from half way on. Compare
processor time, which a busy machine distorts least.

    OMP_NUM_THREADS=1 python scripts/bench/data_preparation.py [--megabytes 100] [--words]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from harness.data.files.sources import find_files  # noqa: E402
from scripts.bench.report import RESULTS, write_report  # noqa: E402

WORKERS = 2
PROGRAMS = ("harness", "datasets", "datasets-small-batches")
SMALL_BATCH = 32  # documents of a batch of `map`, whose default is 1,000
TICKS = os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=100, help="of text")
    parser.add_argument("--words", action="store_true", help="a tokenizer of whole words instead of the BPE")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.child:
        program, text, tokenizer, cache = flags.child
        {
            "harness": prepare_by_harness,
            "datasets": prepare_by_datasets,
            "datasets-small-batches": partial(prepare_by_datasets, small=True),
            "harness-stream": stream_by_harness,
            "datasets-stream": stream_by_datasets,
        }[program](Path(text), tokenizer, Path(cache))
        return
    with tempfile.TemporaryDirectory() as folder:
        text, tokenizer = Path(folder, "text.jsonl"), Path(folder, "tokenizer")
        written = write_text(text, flags.megabytes)
        train_tokenizer(tokenizer, words=flags.words)
        report: dict[str, Any] = {"text_mb": round(written / 1e6), "file_mb": megabytes(text), "processes": WORKERS}
        for program in PROGRAMS:
            report[program] = measure(program, text, tokenizer, Path(folder, program))
            print(program, json.dumps(report[program]), flush=True)
            shutil.rmtree(Path(folder, program))
    ours, theirs = report["harness"], report["datasets"]
    report["harness_over_datasets"] = {
        name: round(ours[name] / theirs[name], 2) for name in ("cpu_s", "peak_anonymous_mb", "disk_mb")
    }
    name = "data_preparation_words" if flags.words else "data_preparation"
    write_report(RESULTS / f"{name}.json", report, what=__doc__)


def write_text(path: Path, size: int) -> int:
    """Write `size` MB of the standard library's sources, a row each, over and over; return the bytes of text."""
    texts = [file.read_text(encoding="utf-8") for file in find_files("python-stdlib")]
    written = 0
    with path.open("w", encoding="utf-8") as stream:
        for number, text in enumerate(itertools.cycle(texts)):
            if written >= size * 1e6:
                path.with_suffix(".rows").write_text(str(number))
                break
            document = f"# copy {number // len(texts)}\n{text}"
            stream.write(json.dumps({"text": document}) + "\n")
            written += len(document.encode())
    return written


def train_tokenizer(folder: Path, *, words: bool) -> None:
    """Save a byte-level BPE of 8,000 words for `AutoTokenizer`, or one of whole words, where others are unknown."""
    from tokenizers import ByteLevelBPETokenizer, Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    files = list(map(str, find_files("python-stdlib")))[::4]
    if words:
        found = Tokenizer(models.WordLevel(unk_token="<unk>"))
        found.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        found.train(files, trainers.WordLevelTrainer(vocab_size=8000, special_tokens=["<unk>", "<eos>"]))
    else:
        bpe = ByteLevelBPETokenizer()
        bpe.train(files, vocab_size=8000, special_tokens=["<eos>"])
        found = Tokenizer.from_str(bpe.to_str())
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=found, eos_token="<eos>")
    tokenizer.save_pretrained(folder)


def measure(program: str, text: Path, tokenizer: Path, cache: Path) -> dict[str, Any]:
    """Prepare: whole, from the cache, with an interruption half way. Stream: whole, and from half way on."""
    whole = watched(program, text, tokenizer, cache / "whole")
    cached = watched(program, text, tokenizer, cache / "whole")
    before = watched(program, text, tokenizer, cache / "killed", kill_at_cpu_s=whole["cpu_s"] / 2)
    after = watched(program, text, tokenizer, cache / "killed")
    repeated = before["cpu_s"] + after["cpu_s"] - whole["cpu_s"] - cached["cpu_s"]
    streams = f"{program.removesuffix('-small-batches')}-stream"
    stream = watched(streams, text, tokenizer, cache / "stream")
    resumed = watched(streams, text, tokenizer, cache / "stream")
    return {
        **whole,
        "disk_mb": sum(megabytes(file) for file in (cache / "whole").rglob("*") if file.is_file()),
        "again_from_cache_cpu_s": cached["cpu_s"],
        "killed_after_cpu_s": before["cpu_s"],
        "rest_after_kill_cpu_s": after["cpu_s"],
        "repeated_after_kill_cpu_s": round(repeated, 1),
        "stream_rows_cpu_s": stream["cpu_s"],
        "stream_from_half_way_cpu_s": resumed["cpu_s"],
        "stream_peak_anonymous_mb": stream["peak_anonymous_mb"],
    }


def watched(
    program: str, text: Path, tokenizer: Path, cache: Path, kill_at_cpu_s: float | None = None
) -> dict[str, float]:
    """Run a program in a session of its own; return its seconds and memory, those of its processes together."""
    command = [sys.executable, __file__, "--child", program, str(text), str(tokenizer), str(cache)]
    cache.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    begun, peak = time.perf_counter(), 0.0
    cpu: dict[int, float] = {}
    child = subprocess.Popen(command, start_new_session=True, env=environment, stdout=subprocess.DEVNULL)
    while child.poll() is None:
        now = 0.0
        for process in of_session(child.pid):
            with suppress(OSError, ValueError, IndexError):
                fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
                cpu[process] = (int(fields[11]) + int(fields[12])) / TICKS
                rollup = Path(f"/proc/{process}/smaps_rollup").read_text().split()
                now += int(rollup[rollup.index("Pss_Anon:") + 1]) / 1000
        peak = max(peak, now)
        if kill_at_cpu_s is not None and sum(cpu.values()) >= kill_at_cpu_s:
            os.killpg(child.pid, signal.SIGKILL)
        time.sleep(0.2)
    if child.returncode and kill_at_cpu_s is None:
        raise SystemExit(f"{program} ended with {child.returncode}")
    seconds = time.perf_counter() - begun
    return {
        "seconds": round(seconds, 1),
        "cpu_s": round(sum(cpu.values()), 1),
        "peak_anonymous_mb": round(peak),
    }


def of_session(leader: int) -> Iterator[int]:
    """Give the processes of a session."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                if os.getsid(int(entry.name)) == leader:
                    yield int(entry.name)


def megabytes(file: Path) -> float:
    return round(file.stat().st_size / 1e6, 1)


def prepare_by_harness(text: Path, tokenizer: str, cache: Path) -> None:
    """Read and tokenise as a run does."""
    from harness.data.blocks import make_blocks
    from harness.data.files.documents import read_documents
    from harness.data.on_disk.cache import Preparation
    from harness.data.tokenizer import load_tokenizer

    documents = read_documents(text, cache, workers=WORKERS)
    blocks = make_blocks(documents, load_tokenizer(tokenizer), 1024, Preparation(cache, workers=WORKERS))
    print(len(blocks), blocks[len(blocks) - 1]["input_ids"][-1])


def prepare_by_datasets(text: Path, tokenizer: str, cache: Path, *, small: bool = False) -> None:
    """Read and tokenise as run_clm.py does, each document closed; blocks would be cut when they are read."""
    from datasets import load_dataset
    from transformers import AutoTokenizer

    encode = AutoTokenizer.from_pretrained(tokenizer)

    def closed(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        ids = encode(rows["text"], add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
        return {"input_ids": [[*row, encode.eos_token_id] for row in ids]}

    rows = load_dataset("json", data_files=str(text), split="train", cache_dir=str(cache))
    batch = {"batch_size": SMALL_BATCH, "writer_batch_size": SMALL_BATCH} if small else {}
    found = rows.map(closed, batched=True, num_proc=WORKERS, remove_columns=["text"], **batch)
    print(len(found), found[len(found) - 1]["input_ids"][-1])


def stream_by_harness(text: Path, _tokenizer: str, cache: Path) -> None:
    """Read all rows; in a second call those from the position that was kept half way."""
    from harness.data.streaming.rows import FileRows

    kept, end, half = cache / "mark.json", text.with_name("end.jsonl"), int(text.with_suffix(".rows").read_text()) // 2
    end.write_text('{"text": "the last"}\n')
    mark = json.loads(kept.read_text()) if kept.exists() else {}
    rows = FileRows([text, end], "text")
    for section, row, _ in rows.since(0, mark):
        if section == 1:
            return
        if row == half and not mark:
            kept.write_text(json.dumps(rows.mark(0, row)))


def stream_by_datasets(text: Path, _tokenizer: str, cache: Path) -> None:
    """Do the same with an IterableDataset and its `state_dict`."""
    from datasets import load_dataset

    kept, half = cache / "state.json", int(text.with_suffix(".rows").read_text()) // 2
    rows = load_dataset("json", data_files=str(text), split="train", streaming=True)
    resumes = kept.exists()
    if resumes:
        rows.load_state_dict(json.loads(kept.read_text()))
    for number, _ in enumerate(rows):
        if number == half and not resumes:
            kept.write_text(json.dumps(rows.state_dict()))


if __name__ == "__main__":
    main()
