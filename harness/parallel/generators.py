"""Derive seeds from keys, and draw random numbers without changing the state of the run's generators."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

ON_HOST = ("cpu", "meta")
"""Device types that use the CPU's generator."""


def seed_of(*key: object) -> int:
    """Return a seed in [0, 2**63) that depends on all parts of `key`, the same in every process.

    Parts must print alike everywhere, like numbers and text.
    """
    # Python's `hash` differs between processes.
    digest = hashlib.blake2b("\0".join(map(str, key)).encode(), digest_size=8).digest()
    # 63 bits, so that it is positive as a signed integer.
    return int.from_bytes(digest, "little") >> 1


def default_generator(device: torch.device) -> torch.Generator:
    """Return torch's default generator of `device`."""
    if device.type in ON_HOST:
        return torch.default_generator
    module = torch.get_device_module(device)
    generator: torch.Generator = module.default_generators[
        module.current_device() if device.index is None else device.index
    ]
    return generator


@contextmanager
def own_torch_generators(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Enter `own_generators` for torch's generators only, which takes a tenth of the time."""
    generators = [torch.default_generator]
    if device is not None and device.type not in ON_HOST:
        generators.append(default_generator(device))
    states = list(map(torch.Generator.get_state, generators))
    try:
        # Not `torch.manual_seed`, which would reset the generators of other devices too, in the middle of a run.
        for generator in generators:
            generator.manual_seed(seed)
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


@contextmanager
def own_generators(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Draw random numbers from `seed` in this context; restore all generators afterwards.

    Covers the global generators of torch (on the CPU and on `device`), numpy and Python. Does not wait for the device.
    """
    numpy_state = np.random.get_state()
    python_state = random.getstate()
    try:
        with own_torch_generators(seed, device):
            reseed(seed)
            yield
    finally:
        np.random.set_state(numpy_state)
        random.setstate(python_state)


def reseed(seed: int) -> None:
    """Switch to another seed within `own_generators`, on the CPU; saving states again would take ten times longer."""
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)  # numpy takes 32 bits
    random.seed(seed)
