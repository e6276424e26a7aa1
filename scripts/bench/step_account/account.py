"""The account of a step: the kernels, bytes and milliseconds of one rank on a device, by what they are for.

The rank's step is recorded in a dry run and costed with the planner's formulas: products by their tiles, attention by
its rate, all else by the bytes that it moves, and each kernel with its start. Kernels are those of a GPU, which runs
lists of tensors (`_foreach`, fused optimizers) in few of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from harness.config.values.json_object import JsonObject
from harness.deepspeed.initialize import replacing
from harness.deepspeed.update import StagedEngine
from harness.deepspeed.zero3_parameters import unpartitioned_shape
from harness.dry_run.rank import DryRun, SimulatedRank, expect_peers, make_step, simulated_rank
from harness.extras.fusing import fused as fusing
from harness.extras.fusing.residual_norms import join_sums
from harness.planner.hardware import Hardware
from harness.planner.layer_time import HOST_ZERO_3
from harness.topology.env import LaunchEnv
from harness.training.engine.build import compiled_parts

from .fusion import Fusion, fused
from .operations import PARTS, SUMS, Recorded, StepRecorder

HOST = "gaps, host time"


@dataclass(frozen=True)
class Cost:
    """What some operations cost a device."""

    kernels: int = 0
    bytes: float = 0.0
    seconds: float = 0.0

    def plus(self, other: Cost, times: int = 1) -> Cost:
        """Return the sum of this cost and `times` the other."""
        return Cost(
            self.kernels + times * other.kernels,
            self.bytes + times * other.bytes,
            self.seconds + times * other.seconds,
        )


@dataclass(frozen=True, kw_only=True)
class Account:
    """The account of one rank's step.

    Attributes:
        parts: cost of each part; the last one is the time in which the device waits for its host.
        later: bytes that summing gradients moves in each micro-batch but the first.
        parameters: number of trained parameters of the rank's layers; under ZeRO-3 those of all data-parallel ranks.
    """

    parts: Mapping[str, Cost]
    later: float
    parameters: int

    @property
    def total(self) -> Cost:
        """The cost of the step."""
        total = Cost()
        for cost in self.parts.values():
            total = total.plus(cost)
        return total

    @property
    def bytes_per_parameter(self) -> float:
        """Bytes a trained parameter that summing gradients moves in each micro-batch but the first."""
        return self.later / self.parameters

    def as_json(self) -> JsonObject:
        """Return the account as JSON; programs rely on its keys."""
        return {
            "milliseconds": 1e3 * self.total.seconds,
            "kernels": self.total.kernels,
            "bytes_per_parameter": self.bytes_per_parameter,
            "parts": {
                part: {"milliseconds": 1e3 * cost.seconds, "kernels": cost.kernels, "bytes": cost.bytes}
                for part, cost in self.parts.items()
            },
        }

    def __str__(self) -> str:
        rows = [("part of a step", "kernels", "GB", "ms")]
        for part, cost in {**self.parts, "step": self.total}.items():
            rows.append((part, f"{cost.kernels:,}", f"{cost.bytes / 1e9:.2f}", f"{1e3 * cost.seconds:.2f}"))
        lines = [f"{a:<22}{b:>10}{c:>10}{d:>10}" for a, b, c, d in rows]
        return "\n".join(
            [*lines, f"sums of gradients: {self.bytes_per_parameter:.2f} bytes a parameter and micro-batch"]
        )


def account(plan: DryRun, env: LaunchEnv, hardware: Hardware, fusion: Fusion | None = None) -> Account:
    """Return the account of the rank `env.rank`. Raises UserError for what a run would refuse.

    Args:
        fusion: "compile" to count what a compiler fuses in each layer as one kernel, "kernels" to count norms, rotary
            embeddings, activations and the loss as one each; None to count transformers' own operations.
    """
    # as on a GPU: on the CPU of a dry run torch's fused optimizer does not clip, and norms take no sums
    joined = [(fusing, "_fuse_on_cpu", join_sums)] if fusion == "kernels" else []
    with replacing((StagedEngine, "_clips_inside", True), *joined), simulated_rank(plan, env) as rank:
        expect_peers(rank)
        make_step(rank, 1)  # afterwards the optimizer has its states
        one, two = (_costs(_recorded(rank, count, hardware), hardware, fusion) for count in (1, 2))
        layers = len(compiled_parts(rank.engine.deepspeed.module))
        trained = (each for each in rank.engine.deepspeed.module.parameters() if each.requires_grad)
        parameters = sum(prod(unpartitioned_shape(each)) for each in trained)
    times = plan.resolved.accumulation - 1
    parts = {part: one[part].plus(two[part], times).plus(one[part], -times) for part in (*PARTS, HOST)}
    issued = parts.pop(HOST).seconds
    if plan.resolved.zero_stage == 3:
        issued += HOST_ZERO_3 * layers * plan.resolved.accumulation * hardware.dispatch_seconds
    busy = sum(cost.seconds for cost in parts.values())
    return Account(
        parts={**parts, HOST: Cost(seconds=max(0.0, issued - busy))},
        later=two[SUMS].bytes - one[SUMS].bytes,
        parameters=parameters,
    )


def _recorded(rank: SimulatedRank, micro_batches: int, hardware: Hardware) -> list[Recorded]:
    """Return the operations of a step with some micro-batches."""
    recorder = StepRecorder(hardware, compiled_parts(rank.engine.deepspeed.module))
    with recorder.watching_modules(), recorder:
        make_step(rank, micro_batches)
    return recorder.recorded


def _costs(recorded: Sequence[Recorded], hardware: Hardware, fusion: Fusion | None) -> dict[str, Cost]:
    """Return the cost of each part, and the seconds in which the host issues all of them."""
    found = dict.fromkeys((*PARTS, HOST), Cost())
    operations = fused(recorded, fusion, hardware)
    for each in operations:
        found[each.part] = found[each.part].plus(Cost(each.kernels, each.bytes, each.seconds))
    found[HOST] = Cost(seconds=hardware.dispatch_seconds * len(operations))
    return found
