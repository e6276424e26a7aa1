"""A model's attention implementation: `--attn_implementation`, under transformers' names.

The default is the one in config.json, or else transformers' default: sdpa if the model supports it, else eager.
Flash-attention needs its installed package, a GPU and half precision. torch's flex attention evaluates the model's mask
function in blocks. It needs a GPU too, because torch has no backward for it on a CPU.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import torch
from torch.nn.attention import SDPBackend, activate_flash_attention_impl, sdpa_kernel
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

from harness.errors import UserError

CUDNN_SINCE = 9
"""Major compute capability from which cuDNN's attention is tried first: Hopper, the only one measured."""
FEW_SHAPES = 16
"""Number of input shapes up to which cuDNN's plans are worth their time."""
INSTALLED_FLASH = {"fa3": "flash_attn_interface", "fa4": "flash_attn"}
"""Flash-attentions that torch can call instead of its own, and their packages."""
FLASH = "flash"
FLEX = "flex_attention"
FLEX_DEVICES = ("cuda", "xpu")


def with_attention(config: PretrainedConfig, wanted: str | None) -> PretrainedConfig:
    """Return a copy of `config` with the `wanted` implementation, or `config` itself for None.

    Only building the model shows whether it supports the implementation.
    """
    if wanted is not None:
        config = copy.deepcopy(config)
        choose_attention(config, wanted)
    return config


def attention_of(config: PretrainedConfig) -> str | None:
    """Return a config's implementation; None for transformers' default."""
    name: str | None = config._attn_implementation  # noqa: SLF001  # transformers has no public name for it
    return name


def choose_attention(config: PretrainedConfig, name: str | None) -> None:
    """Set a config's implementation; None for transformers' default."""
    config._attn_implementation = name  # noqa: SLF001  # transformers has no public name for it


def is_flash(config: PretrainedConfig) -> bool:
    return FLASH in str(attention_of(config))


def usual_attention(config: PretrainedConfig) -> str | None:
    """Return the attention for a tiny copy on a CPU: None, the default, instead of one that needs a GPU."""
    name = attention_of(config)
    return None if is_flash(config) or name == FLEX else name


@contextmanager
def on_any_device(model: PreTrainedModel) -> Iterator[None]:
    """Let a model whose attention needs a GPU run on the CPU, on the meta device and in fp32."""
    wanted = attention_of(model.config)
    if wanted is not None and usual_attention(model.config) is None:
        has_sdpa = model._supports_sdpa  # noqa: SLF001  # what a class of transformers says of itself
        choose_attention(model.config, "sdpa" if has_sdpa else "eager")
    try:
        yield
    finally:
        if attention_of(model.config) != wanted:
            choose_attention(model.config, wanted)


class AttentionKernels:
    """Chooses the kernel that torch's scaled_dot_product_attention tries first on a GPU, before the others.

    cuDNN's takes half the time of flash-attention 2 on Hopper, but makes a plan for each new shape, in 0.1 s: if
    samples have many lengths, torch's choice is faster.

    Args:
        first: "cudnn", "flash", "efficient" or "math"; "fa3" or "fa4" for a flash-attention of another package; "auto"
            for cuDNN's on Hopper and later GPUs as long as there are few shapes, else torch's order.
    """

    def __init__(self, first: str, device: torch.device) -> None:
        self._shapes = set[object]()
        self._is_auto = first == "auto"
        if device.type != "cuda":
            first = ""  # torch's order
        elif self._is_auto:
            is_fast = torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= CUDNN_SINCE
            first = "cudnn" if is_fast else ""
        elif first in INSTALLED_FLASH:
            # This replaces torch's own flash-attention in the whole process.
            activate_flash_attention_impl(first.upper())
            first = "flash"
        self._first = first

    @contextmanager
    def ordered(self, shapes: Iterable[object]) -> Iterator[None]:
        """Set the order for passes over inputs of these shapes."""
        self._shapes.update(shapes)
        if not self._first or (self._is_auto and len(self._shapes) > FEW_SHAPES):
            yield
            return
        kernels = {
            "cudnn": SDPBackend.CUDNN_ATTENTION,
            "flash": SDPBackend.FLASH_ATTENTION,
            "efficient": SDPBackend.EFFICIENT_ATTENTION,
            "math": SDPBackend.MATH,
        }
        # All kernels in order, not the first alone: a kernel refuses some masks, dtypes and head sizes.
        with sdpa_kernel([kernels.pop(self._first), *kernels.values()], set_priority=True):
            yield


def require_sdpa_backend(wanted: str, config: PretrainedConfig, device: torch.device) -> None:
    """Raise UserError if `--sdpa_backend` cannot act on the run's attention, or its package is missing."""
    if wanted == "auto":
        return
    flag = f"--sdpa_backend {wanted}"
    if device.type == "cpu":
        raise UserError(f"{flag}: chooses among kernels of a GPU, and this run is on a CPU: omit the flag")
    if attention_of(config) not in (None, "sdpa"):
        raise UserError(
            f"{flag}: acts on sdpa attention, and this run's is {attention_of(config)}: omit one of the two"
        )
    if wanted in INSTALLED_FLASH and find_spec(INSTALLED_FLASH[wanted]) is None:
        raise UserError(f"{flag}: needs the package {INSTALLED_FLASH[wanted]}, which is not installed here")


def require_available(config: PretrainedConfig, device: torch.device, dtype: torch.dtype) -> None:
    """Raise UserError if the run cannot use its config's attention.

    Flash-attention needs its package, a GPU and 16 bits; flex attention needs a GPU, and a model without dropout.
    """
    name = str(attention_of(config))
    if name == FLEX:
        if device.type not in FLEX_DEVICES:
            raise UserError(f"attention implementation {name}: trains only on a GPU; on a CPU use tiling.attention")
        rates = vars(config.get_text_config(decoder=True)).items()
        if any("drop" in key and "att" in key and isinstance(rate, float) and rate > 0 for key, rate in rates):
            raise UserError(
                f"attention implementation {name}: does not support dropout: set the model's attention dropout to 0"
            )
    if not is_flash(config):
        return
    available = {"flash_attention_2": is_flash_attn_2_available, "flash_attention_3": is_flash_attn_3_available}
    if name not in available:
        raise UserError(
            f"attention implementation {name}: of flash-attention only {' and '.join(available)} are supported"
        )
    if device.type == "cpu" or not available[name]():
        raise UserError(
            f"attention implementation {name}: needs a GPU and its Python package, and one of the two is missing here"
        )
    if dtype == torch.float32:
        raise UserError(f"attention implementation {name}: supports bf16 and fp16 only, but this run uses fp32")
