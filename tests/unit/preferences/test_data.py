"""Preferences become samples of two sequences; what a run could not train on is refused before its first step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness import PreferenceArguments, Preferences, Trainer, TrainingArguments, UserError
from harness.arguments.themes.script import ScriptArguments
from harness.console import plain_console
from harness.data.inputs.datasets import SampleForm
from harness.data.on_disk.cache import Preparation
from harness.data.tokenizer import ByteTokenizer
from harness.hf.skeleton import read_source
from harness.preferences.documents import items_of, read_items, tokenised
from harness.preferences.items import require_first_rows
from harness.preferences.samples import PreferenceSamples, collate
from harness.preferences.streaming import IterablePairs, PairRows, stream
from harness.preflight import check_inputs
from harness.topology.env import LaunchEnv
from harness.train import main
from harness.training.parts.data import DataRequest
from tests.support.preferences import LABELLED, PAIRS

END = 256


@pytest.fixture(autouse=True)
def prepared_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def samples_of(rows: Any, kind: str = "dpo", block_size: int = 64, micro_batch: int = 3) -> PreferenceSamples:
    of = PreferenceArguments(preference=kind)
    return tokenised(
        items_of(rows, "rows", of),
        ByteTokenizer(),
        of,
        block_size=block_size,
        micro_batch=micro_batch,
        vocabulary=320,
        how=Preparation(),
    )


def text(sample: Any, row: int) -> tuple[str, str]:
    """Prompt and completion of a sequence."""
    ids, answers = sample["input_ids"][row], sample["answers"][row]
    asked = ids[~answers & (sample["labels"][row] != -100)]
    return bytes(asked.tolist()).decode(), bytes(i for i in ids[answers].tolist() if i < END).decode()


def test_a_pair_is_two_rows_of_one_prompt_whose_completions_alone_are_compared() -> None:
    samples = samples_of(PAIRS)
    for index, pair in enumerate(PAIRS):
        assert text(samples[index], 0) == (pair["prompt"], pair["chosen"])
        assert text(samples[index], 1) == (pair["prompt"], pair["rejected"])
    ids, labels = collate([samples.padded_to(32)[index] for index in (1, 5)])
    assert samples.lengths([1]).tolist() == [
        [len(text(samples[1], row)[0] + text(samples[1], row)[1]) + 1 for row in (0, 1)]
    ]
    assert ids.shape == (4, 32) and [tuple(each.shape) for each in labels] == [(2, 2, 32), (2, 2, 32), (2, 2), (2,)]


def test_a_labelled_completion_comes_with_that_of_a_neighbour() -> None:
    samples = samples_of(LABELLED, "kto")
    # eight rows in groups of three: each gets the completion of the row before, the first of a group that of its last
    for index, other in enumerate([2, 0, 1, 5, 3, 4, 7, 6]):
        assert text(samples[index], 0) == (LABELLED[index]["prompt"], LABELLED[index]["completion"])
        assert text(samples[index], 1) == (LABELLED[index]["prompt"], LABELLED[other]["completion"])
    assert samples.labels.tolist() == [float(row["label"]) for row in LABELLED]
    alone = samples_of(LABELLED[:7], "kto")
    assert text(alone[6], 1)[1] == LABELLED[5]["completion"]


def test_pairs_are_labelled_completions_too_and_no_neighbour_has_their_prompt() -> None:
    samples = samples_of(PAIRS, "kto", micro_batch=2)
    assert samples.labels.tolist() == [1.0] * 8 + [0.0] * 8
    assert all(text(samples[i], 0)[1] != text(samples[i], 1)[1] for i in range(16))
    asked = [text(samples[i], 0)[0] for i in range(16)]
    assert asked[:8] == asked[8:] == [pair["prompt"] for pair in PAIRS]


LONG = {"prompt": "x" * 40, "chosen": "y", "rejected": "z"}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        pytest.param(
            LONG, r"pairs.jsonl:2, `chosen`: no token of the completion is within the first 32 tokens", id="cut"
        ),
        pytest.param(
            {"prompt": "x" * 20, "chosen": "y" * 20, "rejected": "y" * 30},
            r"pairs.jsonl:2: both completions are equal within the first 32 tokens: raise --block_size",
            id="cut-to-equals",
        ),
        pytest.param({"prompt": "x", "chosen": "y", "rejected": "y"}, "pairs.jsonl:2: .* are equal", id="equal"),
        pytest.param({"prompt": "x", "chosen": "", "rejected": "y"}, "pairs.jsonl:2: `chosen` is empty", id="empty"),
        pytest.param({"prompt": "x", "chosen": "y"}, "pairs.jsonl:2 has no column `rejected`", id="missing"),
    ],
)
def test_a_row_that_cannot_be_compared_is_named_with_file_and_line(row: Any, words: str, tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text("\n".join(map(json.dumps, [PAIRS[0], row])))
    of = PreferenceArguments(preference="dpo")
    with pytest.raises(UserError, match=words) as caught:
        found = read_items([str(file)], of, print)
        tokenised(found, ByteTokenizer(), of, block_size=32, micro_batch=1, vocabulary=320, how=Preparation())
    assert "\n" not in str(caught.value)


def test_parquet_and_csv_are_read_with_the_columns_that_preferences_need(tmp_path: Path) -> None:
    from datasets import Dataset

    chats = [
        {
            "prompt": "2 + 2?",
            "chosen": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}],
            "rejected": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "5"}],
            "messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}],
        }
    ]
    Dataset.from_list(chats).to_parquet(tmp_path / "pairs.parquet")
    Dataset.from_list(LABELLED).to_csv(tmp_path / "labelled.csv")
    of_pairs, of_labels = PreferenceArguments(preference="dpo"), PreferenceArguments(preference="kto")
    found = read_items([str(tmp_path / "pairs.parquet")], of_pairs, print)
    assert json.loads(found[0]["second"])["messages"] == chats[0]["rejected"]
    labelled = read_items([str(tmp_path / "labelled.csv")], of_labels, print)
    assert np.array_equal(labelled["desirable"], [row["label"] for row in LABELLED])
    with pytest.raises(UserError, match=r"labelled.csv:2 has no column `chosen`"):
        require_first_rows([str(tmp_path / "labelled.csv")], of_pairs)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--preference", "dpo", "--packing"], "--packing does not work with --preference dpo"),
        (["--preference", "dpo", "--streaming"], "--streaming does not work with --preference dpo"),
        (["--preference", "kto", "--per_device_train_batch_size", "1"], "set per_device_train_batch_size to 2 or more"),
        (["--preference", "dpo", "--simpo_gamma", "1"], "--simpo_gamma has no effect with --preference dpo"),
        (["--preference", "kto", "--preference_label_smoothing", "0.1"], "it belongs to dpo and simpo"),
        (["--preference_beta", "1"], "--preference_beta has no effect without --preference"),
        (["--preference", "dpo", "--preference_beta", "0"], "--preference_beta 0.0: must be above 0"),
        (["--preference", "ppo"], "--preference"),
        (["--preference", "dpo", "--train_file", "python-stdlib"], "is text: preferences are rows"),
        ([], "pairs.jsonl:1 has `chosen` and `rejected`: train on preferences with --preference"),
    ],
)
def test_a_wrong_flag_is_refused_in_one_line(
    flags: list[str], words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, PAIRS)))
    given = ["--train_file", str(tmp_path / "pairs.jsonl"), "--max_steps", "1", "--output_dir", str(tmp_path / "run")]
    assert main([*given, *flags, "--block_size", "64"]) == 1
    lines = capfd.readouterr().err.splitlines()
    assert words in lines[-1] and len(lines) == 1


def test_a_loss_of_ones_own_or_a_collator_does_not_go_with_preferences(tmp_path: Path) -> None:
    arguments = TrainingArguments(str(tmp_path / "run"), max_steps=1)
    for given in ({"loss_fn": lambda logits, labels: logits.sum()}, {"data_collator": list}):
        with pytest.raises(UserError, match="has no effect with --preference dpo"):
            objective = Preferences(PreferenceArguments(preference="dpo"))
            Trainer("tiny-llama", arguments, PAIRS, processing_class=ByteTokenizer(), objective=objective, **given)


def test_of_a_chat_the_answers_of_the_completion_alone_are_compared() -> None:
    tokenizer = ByteTokenizer().as_transformers()
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    asked = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    row = {
        "chosen": [*asked, {"role": "assistant", "content": "good"}],
        "rejected": [*asked, {"role": "assistant", "content": "bad"}],
    }
    of = PreferenceArguments(preference="dpo")
    samples = tokenised(
        items_of([row], "rows", of), tokenizer, of, block_size=128, micro_batch=1, vocabulary=320, how=Preparation()
    )
    before = "<user>a<end><assistant>b<end><user>c<end><assistant>"
    assert text(samples[0], 0) == (before, "good<end>")
    assert text(samples[0], 1) == (before, "bad<end>")


def test_a_stream_gives_the_pairs_of_the_data_and_resumes_at_any(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    # within 64 tokens the first of these has no completion, and those of the second are equal: both are left out
    cut = [{**LONG, "prompt": "x" * 70}, {"prompt": "x" * 50, "chosen": "y" * 20, "rejected": "y" * 30}]
    file.write_text("\n".join(map(json.dumps, [*PAIRS[:2], *cut, *PAIRS[2:]])))
    form, whole = SampleForm(block_size=64, packing=False, vocabulary=320), samples_of(PAIRS)
    for rows in (PairRows([file], print), IterablePairs(PAIRS, "train_dataset", print)):
        streamed = stream(rows, ByteTokenizer(), form)
        for index in range(20):  # behind the last row the first follows
            given, wanted = streamed[index], whole[index % 8]
            assert given.keys() == wanted.keys()
            assert all(np.array_equal(given[name], wanted[name]) for name in wanted)
        again = stream(rows, ByteTokenizer(), form)
        again.seek(streamed.position(19))
        assert np.array_equal(again[19]["input_ids"], whole[3]["input_ids"])
    with pytest.raises(UserError, match="train_dataset, row 1: `chosen` and `rejected` are equal"):
        IterablePairs([{**PAIRS[0], "rejected": PAIRS[0]["chosen"]}], "train_dataset", print)


def trained_on(tmp_path: Path, kind: str, words: list[str], **flags: Any) -> tuple[Any, Any]:
    """The numbers of a step on files, as the script's flags name them, and the composition of its data."""
    script = ScriptArguments(train_file=tuple(words), model_name_or_path="tiny-llama", **flags)
    args = TrainingArguments(
        str(tmp_path / "run"),
        block_size=64,
        max_steps=2,
        per_device_train_batch_size=8,
        save_steps=0,
        verify_plan="off",
        do_train=True,
        do_eval=not script.streaming,
    )
    of = PreferenceArguments(preference=kind)
    config, source = check_inputs(script, args, LaunchEnv(), None, of), read_source("tiny-llama")
    request = DataRequest(args=args, config=config, source=source, env=LaunchEnv(), console=plain_console(0))
    objective = Preferences(of)
    data = objective.data.script_datasets(script, request)
    trainer = Trainer(source, args, data.train, data.evaluation, processing_class=data.tokenizer, objective=objective)
    trainer.train()
    trainer.close()
    first, *_ = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    return first, json.loads((tmp_path / "run/run.json").read_text())["data"].get("sources")


@pytest.fixture
def two_files(tmp_path: Path) -> list[str]:
    """Files of 60 and of 180 pairs."""
    rows = [{**pair, "prompt": f"{n}: {pair['prompt']}"} for n in range(30) for pair in PAIRS]
    for name, part in (("a", rows[:60]), ("b", rows[60:])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, part)))
    return [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]


def test_files_of_pairs_are_mixed_by_weight_each_with_its_own_reference(two_files: list[str], tmp_path: Path) -> None:
    first, second = two_files
    step, sources = trained_on(tmp_path, "dpo", [f"{first}:0.75", f"{second}:0.25"])
    # a reference of other pairs would be far from the model that has not moved yet
    assert [step["rewards/chosen"], step["rewards/rejected"]] == pytest.approx([0, 0], abs=1e-5)
    assert [(each["share"], each["name"]) for each in sources] == [(0.75, first), (0.25, second)]


def test_files_of_pairs_are_streamed_and_mixed(two_files: list[str], tmp_path: Path) -> None:
    step, sources = trained_on(tmp_path, "orpo", [f"{name}:1" for name in two_files], streaming=True)
    assert sources is None and step["consumed_samples"] == 8 and 4 < step["nll_loss"] < 8
