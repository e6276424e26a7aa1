"""The flags of LoRA adapters."""

import importlib.util
import re
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar

from harness.arguments.themes.flags import Flags, flag
from harness.errors import UserError

if TYPE_CHECKING:
    from peft import LoraConfig


def _target_modules(names: list[str] | None) -> str | list[str] | None:
    """Return names in peft's form: a list, or a plain string for `all-linear` and for a regular expression."""
    if names is None:
        return None
    alone = len(names) == 1 and (names[0] == "all-linear" or not re.fullmatch(r"[\w.]+", names[0]))
    return names[0] if alone else names


@dataclass(kw_only=True)
class LoraArguments(Flags):
    """LoRA adapters (arXiv 2106.09685) by peft; named as in TRL's ModelConfig."""

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

    def check(self) -> None:
        """Refuse flags that have no effect."""
        given = [item.name for item in fields(self) if item.name in self.given - {"use_peft"}]
        if given and not self.use_peft:
            raise UserError(f"--{given[0]} has no effect without --use_peft")
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
            ensure_weight_tying=self.lora_modules_to_save is not None,
        )


def require_peft() -> None:
    """Raise UserError if peft is not installed."""
    if importlib.util.find_spec("peft") is None:
        raise UserError("--use_peft: peft is not installed: pip install 'ds-harness[peft]'")
