"""`ds-harness generate`: a prompt is continued, a chat model answers, and what cannot load is one line."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from harness import Trainer, TrainingArguments
from harness.checkpoint.directories import contents, finish, partial_name
from harness.cli import main
from harness.data.generate import brings_template, prompt_ids
from harness.data.tokenizer import ByteTokenizer
from tests.support.models import model_of
from tests.unit.checkpoint.saved import progress


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    model_of("llama", vocab_size=258, num_hidden_layers=1).save_pretrained(folder)
    ByteTokenizer().save_pretrained(folder)
    return folder


def test_a_prompt_is_continued_the_same_way_each_time(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for extra in ([], [], ["--seed", "1"], ["--temperature", "0"], ["--chat"]):
        assert main(["generate", str(directory), "--prompt", "def ", "--max_new_tokens", "8", *extra]) == 0
        texts.append(capsys.readouterr().out)
    same, again, other, greedy, answer = texts
    assert same == again != other
    assert greedy.startswith("def ") and not answer.startswith("def ")


def test_the_template_is_used_where_a_tokenizer_brings_one(directory: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert not brings_template(tokenizer)  # the bytes tokenizer has one for every model
    tokenizer.init_kwargs.pop("harness_tokenizer")
    assert brings_template(tokenizer)
    assert tokenizer.decode(prompt_ids(tokenizer, "hi", chat=True)).startswith("<|user|>\nhi")


def test_a_tokenizer_without_a_vocabulary_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model_of("gpt2", num_hidden_layers=1).save_pretrained(tmp_path)  # transformers makes a tokenizer of one token
    assert main(["generate", str(tmp_path), "--prompt", "def "]) == 1
    assert "has a tokenizer without a vocabulary" in capsys.readouterr().err


def test_only_files_that_a_checkpoint_lists_are_read(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / partial_name(2)
    AutoModelForCausalLM.from_pretrained(directory).save_pretrained(written, max_shard_size="20KB")
    AutoTokenizer.from_pretrained(directory).save_pretrained(written)
    saved = finish(tmp_path, progress(2), contents(written))
    command = ["generate", str(saved), "--prompt", "def ", "--max_new_tokens", "8", "--temperature", "0"]
    assert main(command) == 0
    text = capsys.readouterr().out
    cannot_be_exported(saved, capsys)
    (saved / "adapter_config.json").write_text("not read")
    assert main(command) == 0 and capsys.readouterr().out == text
    (saved / "model.safetensors").write_bytes((directory / "model.safetensors").read_bytes())
    assert main(command) == 1
    assert "contains model.safetensors, which it was not saved with" in capsys.readouterr().err


def test_adapters_generate_from_a_checkpoint_and_from_its_export(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = TrainingArguments(str(tmp_path / "run"), max_steps=1, per_device_train_batch_size=4)
    rows = [{"input_ids": [1, 2, 3, 4]}] * 4
    trainer = Trainer(str(directory), args, rows, peft_config=LoraConfig(r=2), processing_class=ByteTokenizer())
    trainer.train()
    trainer.close()
    saved, texts = tmp_path / "run/checkpoint-1", []
    exported = tmp_path / "exported"
    assert main(["checkpoint", "export", str(saved), "--output_dir", str(exported)]) == 0
    capsys.readouterr()
    for each in (saved, exported):
        assert main(["generate", str(each), "--prompt", "def ", "--max_new_tokens", "8", "--temperature", "0"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and texts[0].startswith("def ")
    cannot_be_exported(saved, capsys)


def cannot_be_exported(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "export", str(saved), "--output_dir", "/dev/null/x"]) == 1
    said = f"ds-harness checkpoint: {saved} cannot be exported to /dev/null/x: Not a directory\n"
    assert capsys.readouterr().err.endswith(said)


def test_what_is_no_model_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["generate", str(tmp_path), "--prompt", "hi", "--max_new_tokens", "0"])
    assert "--max_new_tokens must be at least 1" in capsys.readouterr().err
    assert main(["generate", str(tmp_path), "--prompt", "hi"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("ds-harness generate: MODEL_DIR") and error.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tokenizer.json", "[" * 9999),
        ("tokenizer.json", "{}"),
        ("tokenizer_config.json", "[]"),
        ("model.safetensors", "not tensors"),
        ("generation_config.json", "null"),
        ("generation_config.json", '{"eos_token_id": {}}'),
        ("config.json", '{"model_type": []}'),
    ],
)
def test_a_broken_file_of_a_model_is_one_line(
    directory: Path, tmp_path: Path, name: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(directory, tmp_path / "model")
    (tmp_path / "model" / name).write_text(text)
    assert main(["generate", str(tmp_path / "model"), "--prompt", "a", "--max_new_tokens", "1"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert str(tmp_path / "model") in line


def test_a_chat_model_is_exported_to_stop_where_its_template_ends_an_answer(directory: Path, tmp_path: Path) -> None:
    tokenizer = ByteTokenizer().as_transformers()
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|padding|>{% endfor %}" + (
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}] * 4
    args = TrainingArguments(str(tmp_path / "run"), max_steps=1, per_device_train_batch_size=4)
    trainer = Trainer(str(directory), args, rows, processing_class=tokenizer)
    trainer.train()
    trainer.save_model(tmp_path / "run")
    trainer.close()
    exported = GenerationConfig.from_pretrained(tmp_path / "run").eos_token_id
    before = GenerationConfig.from_pretrained(directory).eos_token_id
    assert exported == ByteTokenizer.pad_token_id if before is None else exported[-1] == ByteTokenizer.pad_token_id
