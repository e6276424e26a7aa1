"""What a program may hand to the Trainer that it should not: each is one line, before the first step or in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from harness import Trainer, TrainingArguments, UserError
from harness.data.inputs import datasets
from harness.data.tokenizer import ByteTokenizer

POINTS = [(torch.tensor([i / 8, 1.0]), torch.tensor([i / 4])) for i in range(8)]
TOKENS = [{"input_ids": [(5 * i + k) % 250 for k in range(4)]} for i in range(8)]
MSE = nn.functional.mse_loss


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Trainer]]:
    made: list[Trainer] = []

    def trainer(model: Any = None, data: Any = POINTS, evaluation: Any = None, **more: Any) -> Trainer:
        config = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2}
        names = ("max_steps", "save_steps", "eval_steps", "metric_for_best_model", "load_best_model_at_end", "fp16")
        settings = {"max_steps": 1, "save_steps": 0} | {name: more.pop(name) for name in names if name in more}
        arguments = TrainingArguments(str(tmp_path / "run"), deepspeed_config=config, **settings)
        given = {"loss_fn": MSE, **more}
        made.append(Trainer([nn.Linear(2, 1)] if model is None else model, arguments, data, evaluation, **given))
        return made[-1]

    yield trainer
    for each in made:
        each.close()


def refused(action: Callable[[], object]) -> str:
    with pytest.raises(UserError) as caught:
        action()
    assert "\n" not in str(caught.value)
    return str(caught.value)


IDS = [[(5 * i + k * k) % 250 for k in range(8)] for i in range(8)]
NEXT = [{"input_ids": ids, "labels": [*ids[1:], 7]} for ids in IDS]


def test_labels_that_are_shifted_already_are_not_shifted_again(
    make: Callable[..., Trainer], capsys: pytest.CaptureFixture[str]
) -> None:
    learnt = [{"input_ids": ids, "labels": [-100] * 3 + ids[3:]} for ids in IDS]
    masked = [{"input_ids": ids, "labels": [-100] * 3 + [*ids[4:], -100]} for ids in IDS]
    closed = [{"input_ids": [*ids, 0, 0], "labels": [*ids[1:], 7, -100, -100]} for ids in IDS]  # padded at the right
    for data, evaluation in ((NEXT, None), (masked, None), (learnt, NEXT), (closed, None)):
        assert "are already shifted: label i is token i + 1" in refused(
            lambda: make("tiny-llama", data, evaluation, loss_fn=None)  # noqa: B023
        )
    capsys.readouterr()
    make("tiny-llama", learnt, loss_fn=None)
    assert "labels:" not in capsys.readouterr().out
    others = [{"input_ids": ids, "labels": ids[::-1]} for ids in IDS]
    make("tiny-llama", others, loss_fn=None)
    assert "labels are neither the tokens nor the next tokens" in capsys.readouterr().out
    make("tiny-llama", NEXT, loss_fn=lambda logits, labels: nn.functional.cross_entropy(logits.mT, labels))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        pytest.param([None], "modules, LayerSpecs and functions, but this one contains a NoneType", id="none"),
        pytest.param([nn.Linear(2, 1), "relu"], "but this one contains a str", id="a-name"),
        pytest.param(nn.Sequential(), "but this one is empty", id="no-layer"),
        pytest.param([torch.tanh], "the model has nothing to train: each of its parameters is frozen", id="functions"),
        pytest.param([nn.Linear(2, 1).requires_grad_(False)], "the model has nothing to train", id="frozen"),
        pytest.param(3, "a int is not a model: give a HuggingFace decoder", id="a-number"),
        pytest.param(nn.Linear(2, 1), "a Linear is not a model: give a HuggingFace decoder", id="one-module"),
        pytest.param("no-such-model", "no-such-model: no config.json in a directory of that name", id="no-directory"),
    ],
)
def test_a_model_that_is_none(model: Any, words: str, make: Callable[..., Trainer]) -> None:
    assert words in refused(lambda: make(model))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        pytest.param({"data": []}, "the data set has 0 samples, fewer than one global batch of 4", id="no-sample"),
        pytest.param({"data": POINTS[:3]}, "the data set has 3 samples, fewer than one global batch", id="too-few"),
        pytest.param({"data": {}}, "train_dataset is an empty dict: give a data set", id="empty-dict"),
        pytest.param({"data": {"a": POINTS}}, "train_dataset is a dict of a: give one data set", id="splits"),
        pytest.param({"data": [(1, 2, 3)] * 8}, "a sample is tuple: give dicts with input_ids, pairs", id="triples"),
        pytest.param({"evaluation": {}}, "eval_dataset is an empty dict: give a data set", id="empty-evaluation"),
        pytest.param({"evaluation": {"a": "b.jsonl"}}, "eval_dataset['a'] is the text 'b.jsonl'", id="a-file"),
        pytest.param({"loss_fn": None}, "a list of layers needs loss_fn(outputs, labels)", id="no-loss"),
        pytest.param({"loss_fn": 3}, "loss_fn is a int: give a function", id="loss-a-number"),
        pytest.param({"compute_loss_func": MSE}, "compute_loss_func is for a HuggingFace model", id="two-losses"),
        pytest.param({"loss_fn": None, "compute_loss_func": MSE}, "compute_loss_func is for a Hugg", id="huggingfaces"),
        pytest.param({"callbacks": 3}, "callbacks is not a list: give [callback]", id="no-callbacks"),
        pytest.param({"callbacks": [3]}, "callback 3 has no on_train_begin: derive its class", id="a-number-called"),
        pytest.param({"optimizers": ()}, "optimizers is not a pair: give (optimizer, scheduler)", id="optimizers"),
        pytest.param({"eval_datset": []}, "Trainer takes no eval_datset: did you mean eval_dataset?", id="misspelt"),
        pytest.param({"eval_steps": 1}, "--eval_steps 1: needs an eval_dataset: give one", id="no-evaluation-data"),
    ],
)
def test_a_keyword_that_cannot_be_used(given: dict[str, Any], words: str, make: Callable[..., Trainer]) -> None:
    assert words in refused(lambda: make(**given))


@pytest.mark.parametrize(
    ("loss_fn", "words"),
    [
        pytest.param(lambda outputs, labels: [1.0], "loss_fn returned list: it must return one number", id="list"),
        pytest.param(lambda outputs, labels: 0.5, "loss_fn returned float: it must return one", id="number"),
        pytest.param(lambda outputs, labels: None, "loss_fn returned NoneType: it must return one", id="nothing"),
        pytest.param(
            lambda outputs, labels: (outputs - labels) ** 2,
            "loss_fn returned a tensor of shape (2, 1): it must return one number in a tensor",
            id="a-number-a-sample",
        ),
    ],
)
def test_a_loss_that_is_none(loss_fn: Any, words: str, make: Callable[..., Trainer]) -> None:
    ours = make(evaluation=POINTS, loss_fn=loss_fn)
    assert words in refused(ours.train)
    assert words in refused(ours.evaluate)


def test_a_loss_of_one_element_counts_as_a_number(make: Callable[..., Trainer]) -> None:
    plain, wrapped = (make(evaluation=POINTS, loss_fn=loss) for loss in (MSE, lambda o, y: MSE(o, y).reshape(1, 1)))
    wrapped.run.module.load_state_dict(plain.run.module.state_dict())
    assert wrapped.evaluate()["eval_loss"] == plain.evaluate()["eval_loss"]


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    """A Trainer that is asked for what it cannot do."""
    config = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2}
    args = TrainingArguments(str(tmp_path_factory.mktemp("run")), deepspeed_config=config, max_steps=1)
    made = Trainer([nn.Linear(2, 1)], args, POINTS, loss_fn=MSE)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("act", "words"),
    [
        pytest.param(lambda t: t.evaluate(), "evaluate() needs an eval_dataset", id="nothing-to-evaluate"),
        pytest.param(
            lambda t: t.evaluate("a"), "evaluate('a'): eval_dataset has no data set of that name", id="a-name"
        ),
        pytest.param(lambda t: t.evaluate([]), "the data set to evaluate is empty", id="evaluate-none"),
        pytest.param(lambda t: t.evaluate(3), "eval_dataset: int is not map-style", id="evaluate-a-number"),
        pytest.param(lambda t: t.predict({"a": POINTS}), "test_dataset is a dict of a: give one", id="predict-splits"),
        pytest.param(lambda t: t.predict("a"), "test_dataset is the text 'a': give a data set", id="predict-a-file"),
        pytest.param(lambda t: t.predict([]), "the data set to evaluate is empty", id="predict-none"),
        pytest.param(lambda t: t.save_model("/dev/null/a"), "the model cannot be written: /dev/null/a: Not", id="save"),
        pytest.param(lambda t: t.train(3), "no whole checkpoint there (no such directory)", id="resume-a-number"),
        pytest.param(lambda t: t.trained_model(), "trained_model() supports HuggingFace models only", id="no-model"),
    ],
)
def test_a_method_that_cannot_do_it(act: Callable[[Trainer], object], words: str, standing: Trainer) -> None:
    assert words in refused(lambda: act(standing))


def test_a_trainer_goes_on_as_if_nothing_had_been_asked(make: Callable[..., Trainer]) -> None:
    ours = make()
    refused(ours.evaluate)
    refused(lambda: ours.predict([]))
    refused(lambda: ours.train(3))
    assert ours.train().global_step == 1


def test_a_run_without_training_data_evaluates_and_does_not_train(make: Callable[..., Trainer]) -> None:
    ours = make(data=None, evaluation=POINTS)
    assert "train() needs a train_dataset" in refused(ours.train)
    assert ours.evaluate()["eval_samples"] == 8
    assert ours.train_dataset is None and ours.stream is None


def test_what_is_kept_of_the_outputs_must_be_tensors(make: Callable[..., Trainer]) -> None:
    for kept, name in ((None, "NoneType"), ("a", "str")):
        ours = make(
            evaluation=POINTS, compute_metrics=lambda _: {}, preprocess_logits_for_metrics=lambda *_, kept=kept: kept
        )
        assert f"outputs to be kept hold a {name}: preprocess_logits_for_metrics" in refused(ours.evaluate)
        assert ours.run.engine.loss.observer is None


def test_a_metric_that_there_is_not_is_named_beside_those_that_there_are(make: Callable[..., Trainer]) -> None:
    ours = make(evaluation=POINTS, eval_steps=1, save_steps=1, load_best_model_at_end=True, metric_for_best_model="f1")
    told = refused(ours.train)
    assert told.startswith(
        "--metric_for_best_model f1: the evaluation has no such number, but eval_loss, eval_runtime,"
    )


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        pytest.param([{"input_ids": []}], "sample 0 has no tokens: remove empty ones", id="empty"),
        pytest.param([{"input_ids": [1, 300]}], "sample 0: input_ids[1] is 300, but the model's ids are 0 to", id="id"),
        pytest.param([{"input_ids": "ab"}], "a sample's input_ids is ab: it must be a list of integers", id="text"),
        pytest.param([{"input_ids": [1]}, {"input_ids": [1, 2]}], "input_ids of (1,) and (2,) in one", id="lengths"),
        pytest.param([{"text": "a"}], "needs processing_class, the tokenizer", id="text-without-a-tokenizer"),
        pytest.param(POINTS[:1], "a sample of a language model has input_ids", id="pairs"),
        pytest.param(
            [{"input_ids": [1] * length} for length in (8, 8, 600, 600)],
            "sample 2 has 600 tokens, but the model has 512 positions: shorten it",
            id="longer-than-the-model-has-positions",
        ),
    ],
)
def test_samples_that_a_language_model_cannot_take(rows: Any, words: str, make: Callable[..., Trainer]) -> None:
    assert words in refused(lambda: make("tiny-llama", rows * 8, loss_fn=None))


def test_an_id_that_no_tokenizer_has_is_told_before_a_sample_is_shown(make: Callable[..., Trainer]) -> None:
    given = {"loss_fn": None, "processing_class": ByteTokenizer()}
    assert "input_ids[1] is -100, but the model's" in refused(
        lambda: make("tiny-llama", [{"input_ids": [1, -100, 3]}] * 8, **given)
    )


def test_an_evaluation_is_the_mean_over_all_labels_whatever_the_number_of_samples(make: Callable[..., Trainer]) -> None:
    every = [{**row, "labels": [-100] * (i % 4) + row["input_ids"][i % 4 :]} for i, row in enumerate(TOKENS)]
    ours = make("tiny-llama", TOKENS, loss_fn=None)
    model = ours.trained_model()
    assert model is not None
    for samples in (1, 2, 3, 8):
        rows = every[:samples]
        with torch.no_grad():
            logits = model(torch.tensor([row["input_ids"] for row in rows])).logits[:, :-1].flatten(0, 1)
        labels = torch.tensor([row["labels"] for row in rows])[:, 1:].flatten()
        found = ours.evaluate(rows)
        assert found["eval_loss"] == pytest.approx(float(nn.functional.cross_entropy(logits, labels)), rel=1e-5)
        assert found["eval_samples"] == samples


@pytest.mark.parametrize("kind", ["pandas", "pyarrow"])
def test_a_table_is_a_data_set_of_its_rows(kind: str, make: Callable[..., Trainer]) -> None:
    package = pytest.importorskip(kind)
    columns = {"input_ids": [row["input_ids"] for row in TOKENS]}
    table = package.DataFrame(columns, index=range(3, 11)) if kind == "pandas" else package.table(columns)
    ours = make("tiny-llama", table, {"a": table}, loss_fn=None, eval_steps=1)
    assert [ours.train_dataset[i] for i in range(8)] == TOKENS
    assert ours.train().global_step == 1
    assert ours.evaluate(table)["eval_samples"] == 8


def test_too_few_samples_are_told_before_they_are_tokenised(
    make: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    def tokenised(*_: object, **__: object) -> None:
        raise AssertionError("tokenised")

    monkeypatch.setattr(datasets, "make_samples", tokenised)
    monkeypatch.setattr(datasets, "make_blocks", tokenised)
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    for data, most in (([{"messages": chat}] * 3, 3), ([{"text": "a" * 40}] * 2, 2)):
        told = refused(lambda data=data: make("tiny-llama", data, loss_fn=None, processing_class=ByteTokenizer()))
        assert told.startswith(
            f"the data set has at most {most} samples, fewer than one global batch of 4 (micro-batch 2"
        )


def test_a_precision_that_the_device_has_not_is_told_before_the_data_is_read(
    make: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepspeed.accelerator import get_accelerator

    monkeypatch.setattr(type(get_accelerator()), "is_fp16_supported", lambda _: False)

    class Unread(list[Any]):
        def __getitem__(self, i: Any) -> Any:
            raise AssertionError("read")

    with pytest.raises(UserError, match="fp16 is not supported on this"):
        make("tiny-llama", Unread(TOKENS), loss_fn=None, fp16=True)
