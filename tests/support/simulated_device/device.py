"""Makes `sim`, a device that is not there, torch's and DeepSpeed's accelerator and a backend of torch.distributed.

torch loads it by itself (as a plugin, `plugin/`) in processes started with the environment of `environment()`. It
computes with torch's CPU kernels, so losses can be compared with a CPU's, and it is as strict as CUDA and NCCL about
what may mix and what must be waited for: `device.cpp` and `process_group.py` say what they report. Each rank of a host
has the device of its local rank. `waits()` counts by place how often the host has waited for the device.

With a clock (`clock.py`) it predicts how long what it does would take.

What it cannot show: measured speed, kernels that exist on a GPU alone, NCCL's own errors.

    SIMULATED_DEVICE_COUNT  devices of a host; 8
    SIMULATED_DEVICE_GIB    memory of each; 16
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import traceback
import types
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
NAME, BACKEND = "sim", "simccl"
C: Any = None  # the compiled part
TIME = 1  # where a clock of the compiled part has the nanoseconds
WAITS: Counter[str] = Counter()
FINISH: list[Callable[[], None]] = []  # what a synchronisation of the device finishes: collectives


def environment() -> dict[str, str]:
    """Return what a process of Python needs in its environment to have the device; builds it first."""
    built()
    folders = [str(HERE / "plugin"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(folders), "SIMULATED_DEVICE": "1"}


def why_not() -> str | None:
    """Return why the device cannot be built here; None if it can."""
    compiler = os.environ.get("CXX", "c++")
    return None if shutil.which(compiler) else f"the simulated device needs a C++ compiler: {compiler} is not there"


def is_installed() -> bool:
    """Whether this process has the device."""
    return C is not None


def built() -> Path:
    """Return the library with the device, compiled if it is not there yet for this source, torch and Python."""
    source = HERE / "device.cpp"
    named = f"{torch.__version__} {sys.version} {source.read_text()} {(HERE / 'memory.h').read_text()}"
    from torch.utils.cpp_extension import get_default_build_root, include_paths, library_paths

    folder = Path(get_default_build_root()) / "simulated_device"
    library = folder / f"simulated_{hashlib.sha256(named.encode()).hexdigest()[:16]}.so"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two workers of a fresh machine would compile it at the same time
        if not library.exists():
            partial = library.with_suffix(f".{os.getpid()}")
            headers = [f"-I{path}" for path in (*include_paths(), sysconfig.get_paths()["include"])]
            words = ["-O1", "-std=c++20", "-w", "-fPIC", "-shared", *headers, "-DTORCH_EXTENSION_NAME=simulated"]
            libraries = [*(f"-L{path}" for path in library_paths()), "-lc10", "-ltorch_cpu", "-ltorch_python"]
            compiler = os.environ.get("CXX", "c++")
            subprocess.run([compiler, *words, str(source), "-o", str(partial), *libraries], check=True)
            partial.rename(library)
    return library


def _load() -> Any:
    spec = importlib.util.spec_from_file_location("simulated", built())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def waits(*, reset: bool = False) -> Counter[str]:
    """Return how often the host has waited for the device, by kind and place; `reset`: and begin anew."""
    found = Counter(WAITS)
    if reset:
        WAITS.clear()
    return found


def _listen(what: str, about: str) -> None:
    if what == "finish":
        for finish in FINISH:
            finish()
        return
    WAITS[f"{about} at {_place()}"] += 1


def _place() -> str:
    """Return where the program is: the innermost line of its own, and of what it calls."""
    stack = traceback.extract_stack(sys._getframe())
    frames = [each for each in stack if "/torch/" not in each.filename and each.filename != __file__]
    near = [frame for frame in frames if "/harness/" in frame.filename] or frames
    place = "outside of Python"
    if near:
        place = f"{_short(near[-1].filename)}:{near[-1].lineno}"
        if frames[-1] is not near[-1]:
            place += f" in {_short(frames[-1].filename)}:{frames[-1].lineno}"
    return place


def _short(path: str) -> str:
    return path.split("/site-packages/")[-1].removeprefix(f"{ROOT}/")


@contextmanager
def on_device(index: int) -> Iterator[None]:
    """Make a device the current one."""
    before = C.current_device()
    C.set_device(index)
    try:
        yield
    finally:
        C.set_device(before)


@contextmanager
def on_stream(stream: torch.Stream | None) -> Iterator[None]:
    """Make a stream the current one."""
    if stream is None:
        yield
        return
    before = torch.accelerator.current_stream()
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


def _index(device: Any = None) -> int:
    if device is None:
        return int(C.current_device())
    if isinstance(device, int):
        return device
    found = torch.device(device).index
    return int(C.current_device()) if found is None else found


class Stream(torch.Stream):
    """As torch.cuda.Stream."""

    def __new__(cls, device: Any = None, priority: int = 0, **given: Any) -> Stream:
        return super().__new__(cls, device=torch.device(NAME, _index(device)), priority=priority, **given)


def event(enable_timing: bool = False, **_given: Any) -> torch.Event:
    """Return an event as torch.cuda.Event does; not of a class of its own, of which torch would take no time."""
    return torch.Event(device=NAME, enable_timing=enable_timing)


def _default_stream(device: Any = None) -> torch.Stream:
    kind = torch.accelerator.current_stream().device_type
    return torch.Stream(stream_id=0, device_index=_index(device), device_type=kind)


def _module() -> types.ModuleType:
    """Return `torch.sim`: what torch and DeepSpeed call of `torch.cuda`."""
    module, count = types.ModuleType(f"torch.{NAME}"), C.device_count()
    generators = [C.default_generator(index) for index in range(count)]

    def seed_all(seed: int) -> None:
        for generator in generators:
            generator.manual_seed(seed)

    def nothing(*_: Any) -> None: ...

    used, peak, reset = (lambda _=None: C.used()), (lambda _=None: C.peak()), (lambda _=None: C.reset_peak())
    found = {
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": nothing,
        "_lazy_call": lambda call: call(),
        "init": nothing,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": C.device_count,
        "current_device": C.current_device,
        "set_device": lambda device: C.set_device(_index(device)),
        "device": lambda device: on_device(_index(device)),
        "synchronize": lambda device=None: torch.accelerator.synchronize(_index(device)),
        "is_bf16_supported": lambda *_: True,
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "default_generators": generators,
        "manual_seed": lambda seed: generators[C.current_device()].manual_seed(seed),
        "manual_seed_all": seed_all,
        "initial_seed": lambda: generators[C.current_device()].initial_seed(),
        "get_rng_state": lambda device=None: generators[_index(device)].get_state(),
        "set_rng_state": lambda state, device=None: generators[_index(device)].set_state(state),
        "get_rng_state_all": lambda: [generator.get_state() for generator in generators],
        "memory_allocated": used,
        "memory_reserved": used,
        "memory_cached": used,
        "max_memory_allocated": peak,
        "max_memory_reserved": peak,
        "max_memory_cached": peak,
        "reset_peak_memory_stats": reset,
        "reset_max_memory_allocated": reset,
        "reset_max_memory_cached": reset,
        "memory_stats": lambda _=None: {
            "allocated_bytes.all.current": C.used(),
            "allocated_bytes.all.peak": C.peak(),
            "num_alloc_retries": 0,
        },
        "mem_get_info": lambda _=None: (C.capacity() - C.used(), C.capacity()),
        "empty_cache": nothing,
        "get_device_name": lambda _=None: "simulated device",
        "get_device_capability": lambda _=None: (9, 0),
        "get_device_properties": lambda _=None: types.SimpleNamespace(
            name="simulated device", total_memory=C.capacity(), major=9, minor=0, multi_processor_count=132
        ),
        "Stream": Stream,
        "Event": event,
        "stream": on_stream,
        "current_stream": lambda device=None: torch.accelerator.current_stream(torch.device(NAME, _index(device))),
        "default_stream": _default_stream,
    }
    vars(module).update(found)
    return module


def host_view(tensor: Tensor) -> Tensor:
    """Return a tensor of the host in the same memory; what only the device's own parts may do."""
    view: Tensor = C.on_host(tensor.detach())
    return view


class _AfterImport:
    """Sets DeepSpeed's accelerator when the module that holds it has been imported."""

    NAME = "deepspeed.accelerator.real_accelerator"

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self.NAME:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        run = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            run(module)
            from tests.support.simulated_device.accelerator import SimulatedAccelerator

            if os.environ.get("DS_ACCELERATOR") != "cpu":
                module.set_accelerator(SimulatedAccelerator())

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Make the device torch's accelerator; torch calls this when it is imported, DeepSpeed is told when it is."""
    if os.environ.get("SIMULATED_DEVICE") != "1" or is_installed():
        return
    global C
    C = _load()
    gib = float(os.environ.get("SIMULATED_DEVICE_GIB", "16"))
    C.start(int(os.environ.get("SIMULATED_DEVICE_COUNT", "8")), int(gib * 2**30), _listen, _place)
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module())
    torch.utils.generate_methods_for_privateuse1_backend()
    sys.meta_path.insert(0, _AfterImport())
    if torch.distributed.is_available():
        from tests.support.simulated_device.process_group import register

        register(BACKEND, NAME)


install()
