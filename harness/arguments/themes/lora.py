"""The flags of LoRA adapters."""

import importlib.util
import re
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar

from harness.arguments.themes.flags import Flags, flag
from harness.errors import UserError

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import BitsAndBytesConfig


def _target_modules(names: list[str] | None) -> str | list[str] | None:
    """Return names in peft's form: a list, or a plain string for `all-linear` and for a regular expression."""
    if names is None:
        return None
    alone = len(names) == 1 and (names[0] == "all-linear" or not re.fullmatch(r"[\w.]+", names[0]))
    return names[0] if alone else names


@dataclass(kw_only=True)
class LoraArguments(Flags):
    """LoRA adapters (arXiv 2106.09685) by peft; named as in TRL's ModelConfig and transformers' BitsAndBytesConfig."""

    TITLE: ClassVar[str] = "LoRA"

    use_peft: bool = flag(False, "train LoRA adapters with peft; the model's own weights are frozen")
    lora_r: int = flag(16, "rank of the adapters", least=1)
    lora_alpha: int = flag(32, "scale the adapters by lora_alpha / lora_r")
    lora_dropout: float = flag(0.0, "dropout on the input of an adapter")
    lora_target_modules: list[str] | None = flag(
        None,
        "names of linear layers, a regular expression of full names, or all-linear; default: peft's for the family",
    )
    lora_modules_to_save: list[str] | None = flag(None, "names of modules to train fully")
    use_rslora: bool = flag(False, "scale by lora_alpha / sqrt(lora_r) (arXiv 2312.03732)")
    use_dora: bool = flag(False, "also train the magnitudes of the adapted layers' rows (DoRA, arXiv 2402.09353)")
    load_in_4bit: bool = flag(False, "keep the frozen linear layers in 4 bits (QLoRA, arXiv 2305.14314)")
    bnb_4bit_quant_type: str = flag("nf4", "the 4-bit numbers", choices=("nf4", "fp4"))
    bnb_4bit_use_double_quant: bool = flag(False, "quantise the scales of the 4-bit numbers too")
    bnb_4bit_compute_dtype: str | None = flag(
        None,
        "dtype of the products with 4-bit weights; default: that of the run",
        choices=("float32", "bfloat16", "float16"),
    )

    def check(self) -> None:
        """Refuse flags that have no effect."""
        if self.load_in_4bit and not self.use_peft:
            raise UserError(
                "--load_in_4bit: weights in 4 bits cannot be trained, only adapters on them: add --use_peft"
            )
        given = [item.name for item in fields(self) if item.name in self.given - {"use_peft"}]
        if given and not self.use_peft:
            raise UserError(f"--{given[0]} has no effect without --use_peft")
        quantizing = sorted(name for name in self.given if name.startswith("bnb_4bit_"))
        if quantizing and not self.load_in_4bit:
            raise UserError(f"--{quantizing[0]} has no effect without --load_in_4bit")
        if not 0 <= self.lora_dropout < 1:
            raise UserError(f"--lora_dropout {self.lora_dropout}: must be at least 0 and below 1")

    def peft_config(self) -> "LoraConfig | None":
        """Return peft's LoraConfig, None without `use_peft`. UserError if peft is not installed."""
        if not self.use_peft:
            return None
        require_peft()
        from peft import LoraConfig

        return LoraConfig(
            task_type="CAUSAL_LM",
            r=self.lora_r,
            lora_alpha=self.lora_alpha,
            lora_dropout=self.lora_dropout,
            target_modules=_target_modules(self.lora_target_modules),
            modules_to_save=self.lora_modules_to_save,
            use_rslora=self.use_rslora,
            use_dora=self.use_dora,
            ensure_weight_tying=self.lora_modules_to_save is not None,
        )

    def quantization_config(self) -> "BitsAndBytesConfig | None":
        """Return transformers' BitsAndBytesConfig, None without `load_in_4bit`; UserError without bitsandbytes."""
        if not self.load_in_4bit:
            return None
        require_bitsandbytes()
        from transformers import BitsAndBytesConfig

        config = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=self.bnb_4bit_quant_type,
            bnb_4bit_use_double_quant=self.bnb_4bit_use_double_quant,
            bnb_4bit_compute_dtype=self.bnb_4bit_compute_dtype,
        )
        if self.bnb_4bit_compute_dtype is None:  # transformers would compute in float32
            vars(config)["bnb_4bit_compute_dtype"] = None
        return config


def require_bitsandbytes() -> None:
    """Raise UserError if bitsandbytes is not installed."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError("--load_in_4bit: bitsandbytes is not installed: pip install 'ds-harness[quantization]'")


def require_peft() -> None:
    """Raise UserError if peft is not installed."""
    if importlib.util.find_spec("peft") is None:
        raise UserError("--use_peft: peft is not installed: pip install 'ds-harness[peft]'")
