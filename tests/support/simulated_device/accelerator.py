"""DeepSpeed's accelerator for the simulated device: what its CUDA one does, with `torch.sim` for `torch.cuda`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

from tests.support.simulated_device.device import BACKEND, NAME

# methods and properties that call the function of the same name of torch.cuda
SAME = frozenset(
    """set_device current_device device_count synchronize set_rng_state get_rng_state manual_seed manual_seed_all
    initial_seed Stream stream current_stream default_stream Event empty_cache memory_allocated max_memory_allocated
    reset_max_memory_allocated memory_cached max_memory_cached reset_max_memory_cached memory_stats
    reset_peak_memory_stats memory_reserved max_memory_reserved is_available is_bf16_supported""".split()  # noqa: SIM905
)
TENSORS = {
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "DoubleTensor": torch.double,
    "FloatTensor": torch.float,
    "HalfTensor": torch.half,
    "IntTensor": torch.int,
    "LongTensor": torch.long,
}


class SimulatedAccelerator(CUDA_Accelerator):  # type: ignore[misc]
    """A GPU without kernels of its own: DeepSpeed's compiled operations are not there."""

    def __init__(self) -> None:
        self._name, self._communication_backend_name = NAME, BACKEND
        self._compile_backend, self._nvtx_domains = "inductor", {}

    def __getattribute__(self, name: str) -> Any:
        if name in SAME and name not in super().__getattribute__("__dict__"):
            return getattr(torch.get_device_module(NAME), name)
        if name in TENSORS:
            return partial(torch.tensor, dtype=TENSORS[name], device=NAME)
        return super().__getattribute__(name)

    def device_name(self, device_index: int | None = None) -> str:
        return NAME if device_index is None else f"{NAME}:{device_index}"

    def device(self, device_index: int | None = None) -> torch.device:
        return torch.device(NAME, self.current_device() if device_index is None else device_index)

    def current_device_name(self) -> str:
        return f"{NAME}:{self.current_device()}"

    def communication_backend_version(self) -> tuple[int, ...]:
        return (2, 27, 5)

    def default_generator(self, device_index: int) -> torch.Generator:
        return torch.get_device_module(NAME).default_generators[device_index]

    def total_memory(self, device_index: int | None = None) -> int:
        return torch.get_device_module(NAME).mem_get_info(device_index)[1]

    def available_memory(self, device_index: int | None = None) -> int:
        return torch.get_device_module(NAME).mem_get_info(device_index)[0]

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == NAME

    def is_fp16_supported(self) -> bool:
        return True

    def is_triton_supported(self) -> bool:
        return False

    def prefer_triton_grouped_mm(self) -> bool:
        return False

    def range_push(self, *_: Any, **__: Any) -> None: ...

    def range_pop(self, *_: Any, **__: Any) -> None: ...

    def is_current_stream_capturing(self) -> bool:
        return False

    def register_host_memory(self, address: int, num_bytes: int) -> bool:
        return True

    def unregister_host_memory(self, address: int) -> None: ...

    def visible_devices_envs(self) -> list[str]:
        return ["SIMULATED_DEVICE_VISIBLE"]

    def op_builder_dir(self) -> str:
        return "deepspeed.ops.op_builder.cpu"

    def get_op_builder(self, class_name: str) -> Any:
        from deepspeed.ops.op_builder import cpu

        return getattr(cpu, class_name, cpu.NotImplementedBuilder)

    def create_op_builder(self, class_name: str) -> Any:
        return self.get_op_builder(class_name)()
