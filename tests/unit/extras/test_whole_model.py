"""Training the text decoder of a vision-language model gives the whole model, with every other byte as it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)

from harness import Trainer, TrainingArguments
from harness.cli import main
from harness.data.tokenizer import ByteTokenizer
from harness.extras.merging.merge import merge

SIZES: dict[str, Any] = dict(
    vocab_size=300,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=96,
    head_dim=16,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
VISION = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
)
TILES = dict(
    hidden_size=32,
    num_hidden_layers=1,
    num_global_layers=1,
    attention_heads=2,
    intermediate_size=48,
    vision_output_dim=64,
    image_size=28,
    patch_size=14,
    intermediate_layers_indices=[0],
    supported_aspect_ratios=[[1, 1]],
    max_num_tiles=1,
)
MROPE = dict(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]})
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48)
PATCHES = dict(
    depth=1,
    hidden_size=32,
    intermediate_size=48,
    num_heads=2,
    out_hidden_size=64,
    patch_size=4,
    fullatt_block_indexes=[0],
    deepstack_visual_indexes=[],
    num_position_embeddings=16,
)
MODELS: dict[str, Any] = {
    "gemma3": dict(text_config=SIZES | {"query_pre_attn_scalar": 16}, vision_config=VISION, mm_tokens_per_image=1),
    "llava": dict(
        text_config=SIZES | {"model_type": "llama"},
        vision_config=VISION | {"model_type": "clip_vision_model", "projection_dim": 32},
        image_token_index=299,
    ),
    "emu3": dict(
        text_config=SIZES,
        vq_config=dict(
            embed_dim=8,
            codebook_size=16,
            latent_channels=32,
            base_channels=32,
            channel_multiplier=[1, 1],
            num_res_blocks=1,
            attn_resolutions=[],
            hidden_size=32,
            num_attention_heads=1,
        ),
        vocabulary_map={"<image>": 299, **{f"<|visual token {i:06d}|>": 100 + i for i in range(16)}},
    ),
    "qwen2_5_vl": dict(text_config=SIZES | MROPE, vision_config=PATCHES),
    "qwen3_vl_moe": dict(text_config=SIZES | MROPE | EXPERTS, vision_config=PATCHES),
    "mllama": dict(text_config=SIZES | {"cross_attention_layers": [1]}, vision_config=TILES),
}


TOWERS = ("vision", "visual.", "model.visual.", "vqmodel.", "multi_modal_projector.")


def saved(folder: Path, family: str, dtype: torch.dtype) -> Path:
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(CONFIG_MAPPING[family](**MODELS[family])).to(dtype)
    model.save_pretrained(folder, max_shard_size="100KB")
    (folder / "preprocessor_config.json").write_text('{"size": 28}')
    return folder


def tensors_in(folder: Path) -> dict[str, Tensor]:
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


@torch.no_grad()
def logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    return model.float().eval()(input_ids=ids).logits


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("gemma3", torch.bfloat16),
        ("llava", torch.float32),
        pytest.param("mllama", torch.float32, marks=pytest.mark.thorough),
        pytest.param("emu3", torch.float32, marks=pytest.mark.thorough),
        pytest.param("qwen2_5_vl", torch.float32, marks=pytest.mark.thorough),
        ("qwen3_vl_moe", torch.float32),
    ],
)
def test_the_whole_model_comes_out_of_training_its_text_decoder(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    base = saved(tmp_path / "base", family, dtype)
    rows = [{"input_ids": [(7 * row + at) % 250 + 3 for at in range(24)]} for row in range(8)]
    args = TrainingArguments(
        output_dir=str(tmp_path / "run"), per_device_train_batch_size=4, max_steps=2, save_steps=2, learning_rate=1e-2
    )
    with pytest.warns(UserWarning, match=r"only the text decoder .* is trained; its other parts stay unchanged"):
        trainer = Trainer(str(base), args, rows)
    trainer.train()
    text = trainer.trained_model()
    out = trainer.save_model()
    trainer.close()
    before, after = tensors_in(base), tensors_in(out)
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name].float(), after[name].float())}
    assert not [name for name in changed if name.startswith(TOWERS)]
    assert all(before[name].dtype == after[name].dtype for name in before if name.startswith(TOWERS))
    assert len(changed) > 10
    assert {path.name for path in base.iterdir()} <= {path.name for path in out.iterdir()}
    assert not list(out.glob("*unfinished*"))
    same = [
        name
        for name in ("config.json", "preprocessor_config.json")
        if (out / name).read_bytes() == (base / name).read_bytes()
    ]
    assert same == (
        ["config.json", "preprocessor_config.json"] if dtype == torch.float32 else ["preprocessor_config.json"]
    )
    whole = AutoModelForImageTextToText.from_pretrained(out)
    ids = torch.tensor([rows[0]["input_ids"]])
    assert torch.allclose(logits(whole, ids), logits(text, ids), atol=1e-5)
    assert not torch.allclose(
        logits(whole, ids), logits(AutoModelForImageTextToText.from_pretrained(base), ids), atol=1e-2
    )
    checkpoint = out / "checkpoint-2"
    assert not [name for name in tensors_in(checkpoint) if not name.startswith(("model.", "lm_head."))]
    assert json.loads((checkpoint / "config.json").read_text())["model_type"] == text.config.model_type
    assert type(AutoModelForCausalLM.from_pretrained(checkpoint)) is type(text)


def test_adapters_of_the_text_decoder_are_merged_into_the_whole_model(tmp_path: Path) -> None:
    base = saved(tmp_path / "base", "gemma3", torch.bfloat16)
    text = AutoModelForCausalLM.from_config(CONFIG_MAPPING["gemma3_text"](**MODELS["gemma3"]["text_config"]))
    text.name_or_path = str(base)
    adapted = get_peft_model(text, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    adapted.save_pretrained(str(tmp_path / "adapters"))
    with pytest.warns(UserWarning, match="ignored, because the model has no such tensors"):
        merge([tmp_path / "adapters"], tmp_path / "out")
    before, after = tensors_in(base), tensors_in(tmp_path / "out")
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert sorted(changed) == [f"language_model.model.layers.{layer}.self_attn.q_proj.weight" for layer in (0, 1)]
    assert (tmp_path / "out/config.json").read_bytes() == (base / "config.json").read_bytes()


def test_a_whole_model_continues_a_prompt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = saved(tmp_path / "base", "llava", torch.float32)  # of which transformers has no causal class
    ByteTokenizer().save_pretrained(base)
    assert main(["generate", str(base), "--prompt", "ab", "--max_new_tokens", "2"]) == 0
    assert capsys.readouterr().out.startswith("ab")


def test_the_planner_says_how_much_is_carried_along(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = saved(tmp_path / "base", "gemma3", torch.bfloat16)
    exact = sum(value.nbytes for name, value in tensors_in(base).items() if any(tower in name for tower in TOWERS))
    words = ["estimate", "--deepspeed_config", "zero3", "--model", str(base), "--hardware", "h100", "--block_size", "8"]
    assert main([*words, "--world_size", "2", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["carried_gib"] * 2**30 == pytest.approx(exact, rel=0.02)
    assert main([*words, "--world_size", "2"]) == 0
    assert "besides the text decoder, the model's files hold about" in capsys.readouterr().out
    (base / "model.safetensors.index.json").unlink(missing_ok=True)
    for path in base.glob("*.safetensors"):
        path.write_bytes(b"damaged")
    assert main([*words, "--world_size", "2", "--json"]) == 0
    assert "carried_gib" not in capsys.readouterr().out
