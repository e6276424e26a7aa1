"""Adapters merged into their base model: peft's `merge_and_unload` to the bit, in the base model's files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

from harness import Trainer, TrainingArguments
from harness.cli import main
from harness.errors import UserError
from harness.extras.merging.merge import merge
from tests.support.models import model_of

ALL = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
EXPERTS = {
    "r": 2,
    "target_modules": ["q_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}
ENDS = {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}


def base_model(folder: Path, family: str = "llama", dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Path:
    model_of(family, **changes).to(dtype).save_pretrained(folder, max_shard_size="60KB")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return folder


def loaded(base: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(base, dtype="auto")


def adapters(folder: Path, base: Path, peft: dict[str, Any], seed: int = 1, rows: int | None = None) -> Path:
    """Adapters with random values in all tensors, as peft saves them."""
    model = loaded(base)
    if rows is not None:
        model.resize_token_embeddings(rows)
    made = get_peft_model(model, LoraConfig(**peft))
    torch.manual_seed(seed)
    for parameter in made.parameters():
        if parameter.requires_grad:
            parameter.data += torch.randn_like(parameter) / 20
    made.save_pretrained(str(folder))
    return folder


def by_peft(base: Path, *folders: Path, rows: int | None = None) -> PreTrainedModel:
    model = loaded(base)
    if rows is not None:
        model.resize_token_embeddings(rows)
    made = PeftModel.from_pretrained(model, str(folders[0]), "0")
    for number, folder in enumerate(folders[1:], 1):
        made.load_adapter(str(folder), str(number))
    return made.merge_and_unload(adapter_names=[str(number) for number in range(len(folders))])


def tensors_in(folder: Path) -> dict[str, Tensor]:
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


def require_same_model(ours: PreTrainedModel, theirs: PreTrainedModel) -> None:
    mine, expected = ours.state_dict(), theirs.state_dict()
    assert mine.keys() == expected.keys()
    assert [name for name in mine if not torch.equal(mine[name], expected[name])] == []
    assert {value.dtype for value in mine.values()} == {value.dtype for value in expected.values()}


@pytest.mark.parametrize(
    ("family", "peft", "sizes"),
    [
        ("llama", {**ALL, "use_rslora": True}, {}),
        ("llama", {**ALL, "use_dora": True}, {}),
        ("qwen2", {**ALL, "bias": "lora_only"}, {}),
        ("qwen2", {"r": 2, "target_modules": ["q_proj"], "bias": "all"}, {}),
        ("mixtral", EXPERTS, {"num_local_experts": 4}),
        ("llama", ENDS, {}),
        ("llama", {**ENDS, "ensure_weight_tying": True}, {"tie_word_embeddings": True}),
    ],
    ids=["rslora", "dora", "biases", "all-biases", "experts", "ends", "tied"],
)
def test_the_merged_model_is_that_of_peft_in_the_files_of_the_base(
    family: str, peft: dict[str, Any], sizes: dict[str, Any], tmp_path: Path
) -> None:
    base = base_model(tmp_path / "base", family, **sizes)
    found = adapters(tmp_path / "adapters", base, peft)
    out = tmp_path / "out"
    assert merge([found], out) == base
    require_same_model(loaded(out), by_peft(base, found))
    assert sorted(path.name for path in out.iterdir()) == sorted(path.name for path in base.iterdir())
    index = "model.safetensors.index.json"
    for name in ("config.json", "tokenizer_config.json", index):
        assert (out / name).read_bytes() == (base / name).read_bytes()
    assert len(json.loads((out / index).read_text())["weight_map"]) > len(list(out.glob("*.safetensors"))) > 1
    before, after = tensors_in(base), tensors_in(out)
    kept = [name for name in before if torch.equal(before[name], after[name])]
    assert 0 < len(kept) < len(before) == len(after)


def test_adapters_are_merged_one_after_the_other_as_peft_does(tmp_path: Path) -> None:
    base = base_model(tmp_path / "base")
    both = adapters(tmp_path / "a", base, {**ALL, "use_dora": True}), adapters(tmp_path / "b", base, ALL, seed=2)
    assert main(["checkpoint", "merge", str(both[0]), str(tmp_path / "out"), "--adapters", str(both[1])]) == 0
    require_same_model(loaded(tmp_path / "out"), by_peft(base, *both))


def test_a_head_that_is_no_longer_tied_gets_values_of_its_own(tmp_path: Path) -> None:
    base = base_model(tmp_path / "base", tie_word_embeddings=True)
    found = adapters(tmp_path / "adapters", base, {**ENDS, "modules_to_save": ["lm_head"]})
    merge([found], tmp_path / "out")
    ours, theirs = loaded(tmp_path / "out"), by_peft(base, found)
    require_same_model(ours, theirs)
    assert not torch.equal(ours.lm_head.weight, ours.model.embed_tokens.weight)
    assert not ours.config.tie_word_embeddings


def test_a_vocabulary_that_has_grown_stays_grown(tmp_path: Path) -> None:
    base = base_model(tmp_path / "base", "qwen2")
    found = adapters(tmp_path / "adapters", base, ENDS, rows=328)
    (found / "tokenizer_config.json").write_text('{"of": "the adapters"}')
    merge([found], tmp_path / "out")
    ours = loaded(tmp_path / "out")
    require_same_model(ours, by_peft(base, found, rows=328))
    assert ours.config.vocab_size == 328
    assert json.loads((tmp_path / "out/tokenizer_config.json").read_text()) == {"of": "the adapters"}


def test_a_changed_adapter_changes_only_its_layer_and_bytes_of_others_stay(tmp_path: Path) -> None:
    base = base_model(tmp_path / "base", dtype=torch.float16)
    found = adapters(tmp_path / "adapters", base, {"r": 2, "target_modules": r".*\.1\.mlp\.up_proj"})
    merge([found], tmp_path / "out")
    before, after = tensors_in(base), tensors_in(tmp_path / "out")
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert changed == ["model.layers.1.mlp.up_proj.weight"]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("wide", r"adapters: these adapters do not fit the base model: size mismatch for .*q_proj"),
        (
            "deep",
            r"adapter_model\.safetensors has model\.layers\.3\..*, which the base model lacks: are these adapters of",
        ),
        ("shallow", r"adapter_model\.safetensors lacks model\.layers\.2\..*: are these adapters of another model\?"),
        ("other", r"adapters: these adapters do not fit the base model: Target modules .* not found"),
        ("none", r"base: no adapters to merge there: it is a whole model already"),
        ("gone", r"adapter_config\.json: the base model .* is not there: name it with the --base"),
        ("full", r"out is not an empty directory: name a new one"),
    ],
)
def test_what_cannot_be_merged_is_one_line(wrong: str, words: str, tmp_path: Path) -> None:
    sizes = {"wide": {"hidden_size": 32}, "deep": {"num_hidden_layers": 5}, "shallow": {"num_hidden_layers": 2}}
    other = base_model(tmp_path / "other", **sizes.get(wrong, {}))
    found = adapters(tmp_path / "adapters", other, {"r": 2, "target_modules": ["q_proj"]})
    base = base_model(tmp_path / "base", "gpt2" if wrong == "other" else "llama")
    if wrong == "gone":
        (found / "adapter_config.json").write_text(
            (found / "adapter_config.json").read_text().replace(str(other), str(tmp_path / "nowhere"))
        )
    if wrong == "full":
        (tmp_path / "out").mkdir()
        (tmp_path / "out/file").touch()
    with pytest.raises(UserError, match=words) as error:
        merge([base if wrong == "none" else found], tmp_path / "out", None if wrong == "gone" else str(base))
    assert "\n" not in str(error.value)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("unfinished")]


def test_adapters_of_another_base_model_of_the_same_shape_are_refused(tmp_path: Path) -> None:
    base, copied = base_model(tmp_path / "base"), base_model(tmp_path / "copied")
    model = loaded(base)
    model.lm_head.weight.data *= 2
    model.save_pretrained(tmp_path / "other")
    ours, theirs = adapters(tmp_path / "a", base, ALL), adapters(tmp_path / "b", tmp_path / "other", ALL)
    refusal = r"b: these adapters are of .*other, not of .*base: merge only adapters of one base model$"
    with pytest.raises(UserError, match=refusal):
        merge([theirs], tmp_path / "out", str(base))
    with pytest.raises(UserError, match=refusal):
        merge([ours, theirs], tmp_path / "out")
    merge([ours], tmp_path / "out", str(copied))
    shutil.rmtree(tmp_path / "other")
    with pytest.raises(UserError, match=refusal):
        merge([ours, theirs], tmp_path / "out again")
    merge([theirs], tmp_path / "out again", str(base))


def test_two_adapters_that_replace_one_module_are_refused(tmp_path: Path) -> None:
    base = base_model(tmp_path / "base")
    both = [adapters(tmp_path / name, base, ENDS) for name in "ab"]
    with pytest.raises(UserError, match=r"a and .*b both replace .* \(modules_to_save\): merge only one of them"):
        merge(both, tmp_path / "out")


def test_adapters_of_a_base_in_4_bits_are_merged_into_its_own_weights(tmp_path: Path) -> None:
    base, run = base_model(tmp_path / "base"), tmp_path / "run"
    (base / "tokenizer_config.json").unlink()  # of no tokenizer
    args = TrainingArguments(
        str(run), deepspeed_config={"train_batch_size": 2}, max_steps=2, save_steps=2, learning_rate=0.05
    )
    rows = [{"input_ids": [(7 * row + place) % 250 for place in range(8)]} for row in range(4)]
    bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    trainer = Trainer(str(base), args, rows, peft_config=LoraConfig(**ALL), quantization_config=bits)
    trainer.train()
    trainer.save_model()
    trainer.close()
    wanted = by_peft(base, run)
    assert not torch.equal(wanted.model.layers[0].mlp.up_proj.weight, loaded(base).model.layers[0].mlp.up_proj.weight)
    for number, of in enumerate((run, run / "checkpoint-2")):
        assert merge([of], tmp_path / f"out-{number}") == base
        require_same_model(loaded(tmp_path / f"out-{number}"), wanted)
