"""Which layers of a model compute in fp8, and on which devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import nn
from transformers import PretrainedConfig

from harness.config.model.facts import experts_of
from harness.config.values.arguments import FP8_MULTIPLE
from harness.errors import UserError
from harness.extras.fp8.product import Fp8Product, Multiply, emulated, on_device
from harness.hf.adapters import plain_name
from harness.hf.decoder import DecoderLayer
from harness.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear, SharedColumnLinear
from harness.parallel.weight_gradients import FORWARDS, replace_product
from harness.training.engine.spec import EngineSpec

CAPABILITY = (8, 9)
CUT = (ColumnParallelLinear, RowParallelLinear, SharedColumnLinear)


def fp8_layers(
    spec: EngineSpec, device: torch.device, config: PretrainedConfig, kernel: Multiply | None = None
) -> Callable[[nn.Module], None]:
    """Return what makes the linear layers of a decoder layer compute in fp8, as `--fp8` asks.

    Args:
        kernel: multiplies in a dry run of `--fp8 rowwise`, whose device may lack fp8; None: that of the device.

    Raises:
        UserError: the device or the run's precision has no fp8 products.
    """
    how = spec.args.fp8
    if spec.resolved.precision != "bf16":
        raise UserError(
            f'--fp8 {how} needs "bf16": {{"enabled": true}}: this run computes in {spec.resolved.precision}'
        )
    multiply = emulated if how == "emulate" else kernel or kernel_of(device)
    experts, _ = experts_of(config.get_text_config(decoder=True).to_dict())
    resolved = spec.resolved
    read_again = resolved.accumulation > 1 or resolved.activation_checkpoint_interval > 0
    product = partial(
        Fp8Product,
        multiply=multiply,
        keeps_weights=read_again and resolved.zero_stage < 3,  # ZeRO-3 keeps no whole weights
        joins=spec.is_pipeline,
    )

    def finish(layer: nn.Module) -> None:
        if isinstance(layer, DecoderLayer):  # not the head, nor what embeds tokens
            for name, linear in _linear_layers(layer, experts):
                replace_product(linear, _product(name, linear, product))

    return finish


def kernel_of(device: torch.device) -> Multiply:
    """Return the product of a GPU that has fp8. Raises UserError for other devices."""
    emulate = "remove --fp8 (--fp8 emulate computes its numbers on any device, slowly)"
    if device.type != "cuda" or torch.version.hip is not None:
        raise UserError(f"--fp8 rowwise needs an NVIDIA GPU of compute capability 8.9 or more: {emulate}")
    found = torch.cuda.get_device_capability(device)
    if found < CAPABILITY:
        which = f"{torch.cuda.get_device_name(device)} has {found[0]}.{found[1]}"
        raise UserError(f"--fp8 rowwise needs compute capability 8.9, and {which}: {emulate}")
    return on_device


def _linear_layers(layer: nn.Module, experts: int) -> Iterator[tuple[str, nn.Module]]:
    """Yield the linear layers that compute in fp8, by name. Raises UserError for weights in 4 bits.

    Not adapters, which are thin; routers, which choose by small differences; and layers whose widths no kernel takes.
    """
    for name, module in layer.named_modules():
        is_known = isinstance(module, CUT) or type(module).forward in FORWARDS
        if not is_known or ".lora_" in name:
            continue
        if hasattr(module, "product"):
            raise UserError("--fp8 and --load_in_4bit exclude each other: remove one of them")
        inputs, outputs = _widths(module)
        if inputs % FP8_MULTIPLE == outputs % FP8_MULTIPLE == 0 and (experts < 2 or outputs != experts):
            yield plain_name(name), module


def _widths(linear: nn.Module) -> tuple[int, int]:
    """Return the whole widths of the inputs and outputs of a linear layer."""
    if isinstance(linear, nn.Linear):
        return linear.in_features, linear.out_features
    inputs, outputs = linear.get_parameter("weight").shape  # transformers' Conv1D
    return inputs, outputs


def _product(name: str, linear: nn.Module, product: Callable[..., Fp8Product]) -> Fp8Product:
    """Return the product of a layer. Raises UserError if the kernels cannot compute a rank's part of it."""
    if not isinstance(linear, CUT):
        return product()
    if any(width % FP8_MULTIPLE for width in linear.weight.shape):
        raise UserError(
            f"--fp8: {name} has a part of {' x '.join(map(str, linear.weight.shape))} on each rank, but fp8 products "
            f"need multiples of {FP8_MULTIPLE}: set a smaller tensor_parallel.autotp_size"
        )
    return product(group=linear.group, cut_inputs=isinstance(linear, RowParallelLinear))
