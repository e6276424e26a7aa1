"""A base in 4 bits is bitsandbytes' own: the same values however it is cut, and peft's logits and gradients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import bitsandbytes.functional as bnb
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from harness.arguments.themes.lora import LoraArguments
from harness.errors import UserError
from harness.extras.lora import adapted
from harness.extras.quantized.matrix import quantise, reserved
from tests.support.layers import build, prepare, run
from tests.support.models import model_of

IDS = torch.arange(24).reshape(2, 12)
PEFT = {"r": 4, "target_modules": "all-linear", "bias": "none"}
CUTS: list[tuple[Callable[[Tensor], Tensor] | None, int]] = [
    (None, 64),
    (lambda whole: whole[8:40], 64),
    (lambda whole: whole[:, 32:96], 32),
    (lambda whole: whole[:, 30:90], 2),
    (lambda whole: torch.cat([whole[1:5], whole[20:30]]), 64),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("double", [False, True])
def test_a_part_of_a_matrix_has_the_values_of_the_whole_one(dtype: torch.dtype, kind: str, double: bool) -> None:
    whole = torch.randn(48, 128, generator=torch.Generator().manual_seed(0)).to(dtype)
    wanted = bnb.dequantize_4bit(*bnb.quantize_4bit(whole, blocksize=64, compress_statistics=double, quant_type=kind))
    for cut, block in CUTS:
        form, stored = quantise(whole, kind, double=double, take=cut)
        assert form.block == block  # the longest run that the cut leaves
        assert torch.equal(form.dequantise(stored, dtype), wanted if cut is None else cut(wanted))


@pytest.mark.parametrize(("double", "bytes_each"), [(False, 1 / 2 + 4 / 64), (True, 1 / 2 + 1 / 64 + 4 / 64 / 256)])
def test_a_dry_run_reserves_the_bytes_that_a_run_stores(double: bool, bytes_each: float) -> None:
    _, stored = quantise(torch.randn(128, 256), "nf4", double=double)
    form, room = reserved((128, 256), "nf4", double=double, device=torch.device("cpu"))
    assert len(stored) == len(room) == round(128 * 256 * bytes_each)
    assert form.dequantise(room.zero_(), torch.float32).shape == (128, 256)


def saved(folder: Path, family: str) -> Path:
    model = model_of(family)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)), alpha=0.05)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_and_gradients_are_those_of_pefts_own_model(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    directory = saved(tmp_path, family)
    bits = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=family == "gpt2",
        bnb_4bit_compute_dtype=dtype,
    )
    source, adaptation = adapted(str(directory), LoraConfig(**PEFT), bits)
    assert source is not None
    built = build(prepare(source, dtype=dtype, adaptation=adaptation))
    ours = {name: p for module in built.modules.values() for name, p in module.named_parameters()}
    assert {p.dtype for n, p in ours.items() if "base_layer.weight" in n} == {torch.uint8}
    base = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, quantization_config=bits, device_map="cpu")
    theirs: Any = get_peft_model(base, LoraConfig(**PEFT), autocast_adapter_dtype=False).eval()
    trained = {name.removeprefix("base_model.model."): p for name, p in theirs.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for name, parameter in trained.items():
            ours[name].normal_(std=0.1)
            parameter.copy_(ours[name])
    found, wanted = run(built, IDS), theirs(IDS).logits
    assert torch.equal(found, wanted)
    (found.float() ** 2).sum().backward()
    (wanted.float() ** 2).sum().backward()
    for name, parameter in trained.items():
        assert parameter.grad is not None and torch.equal(ours[name].grad, parameter.grad), name


@pytest.mark.parametrize(
    ("flags", "refusal"),
    [
        (
            {"load_in_4bit": True},
            "--load_in_4bit: weights in 4 bits cannot be trained, only adapters on them: add --use",
        ),
        (
            {"use_peft": True, "bnb_4bit_quant_type": "fp4"},
            "--bnb_4bit_quant_type has no effect without --load_in_4bit",
        ),
    ],
)
def test_flags_that_ask_for_the_impossible_are_refused(flags: dict[str, Any], refusal: str) -> None:
    with pytest.raises(UserError, match=f"^{refusal}"):
        LoraArguments(**flags)


def test_a_base_that_no_directory_holds_or_in_8_bits_is_refused(tmp_path: Path) -> None:
    four, eight = BitsAndBytesConfig(load_in_4bit=True), BitsAndBytesConfig(load_in_8bit=True)
    with pytest.raises(UserError, match="weights in 4 bits cannot be trained"):
        adapted("tiny-llama", None, four)
    with pytest.raises(UserError, match="--load_in_4bit needs the directory of a model with weights"):
        adapted("tiny-llama", LoraConfig(**PEFT), four)
    with pytest.raises(UserError, match="only load_in_4bit=True is supported"):
        adapted(str(saved(tmp_path, "llama")), LoraConfig(**PEFT), eight)
