"""What is counted while a rank runs: bytes of tensors by hand, messages by phase, groups by their innermost axis."""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from harness.checking import resolve
from harness.config import AutoValues
from harness.dry_run.ledger import Ledger, Message, Traffic, named_groups
from harness.dry_run.memory import Memory, by_dtype
from harness.dry_run.rank import RankReport, _on_device
from harness.dry_run.report import as_json, as_text, spell
from harness.parallel.pipeline.staged_module import LayerSequence
from harness.topology.layout import Coordinate, Layout

ONE = Layout(pp_size=1, tp_size=1, dp_size=1)


def test_tensors_are_counted_while_they_live() -> None:
    gc.collect()
    with Ledger(ONE, 0) as ledger:
        kept = torch.ones(100)  # 400 bytes
        view = kept[:10].view(2, 5)  # of the same storage
        assert ledger.live == 400
        doubled = kept.double()  # 800 more
        assert ledger.live == ledger.peak == 1200
        del doubled
        assert (ledger.live, ledger.peak) == (400, 1200)
        kept.add_(1)  # in place
        assert ledger.live == 400
        del kept
        assert ledger.live == 400  # the view holds it
        del view
        assert ledger.live == 0


def test_a_step_has_a_peak_and_phases_of_its_own() -> None:
    gc.collect()
    with Ledger(ONE, 0) as ledger:
        weights = torch.ones(10)
        torch.ones(1000)  # before the step, and gone
        ledger.begin_step()
        assert ledger.peak == ledger.live == 40
        activations = torch.ones(5)
        ledger.begin("BackwardPass(buffer_id=0)")
        assert ledger.marks == {"step": 40, "BackwardPass": 60}
        more = torch.ones(1)
        ledger.begin("BackwardPass(buffer_id=1)")
        assert ledger.marks["BackwardPass"] == 60  # when it was first begun
        ledger.begin_step()
        assert ledger.marks == {"step": 64} and ledger.peak == 64
        del weights, activations, more


def test_messages_of_a_repeated_phase_count_as_often() -> None:
    ledger = Ledger(ONE, 0)
    sums, sends = Message("data", 4, "all_reduce"), Message("pipeline", 2, "send")
    ledger._messages = {
        "ForwardPass": Counter({(sums, 100): 2, (sends, 10): 1}),
        "OptimizerStep": Counter({(sums, 7): 1}),
    }
    assert ledger.messages({"ForwardPass": 8}) == {
        sums: Traffic(count=17, size=1607),
        sends: Traffic(count=8, size=80),
    }
    assert ledger.messages({})[sums] == Traffic(count=3, size=207)
    ledger.begin_step()
    assert ledger.messages({}) == {}


@pytest.mark.parametrize(
    ("sizes", "rank", "named"),
    [  # ranks count the tensor axis first, then data, then pipeline
        pytest.param(
            {"pp_size": 2, "dp_size": 2, "tp_size": 2},
            5,
            {
                (0, 1, 2, 3, 4, 5, 6, 7): "world",
                (0, 1, 4, 5): "model",
                (4, 5, 6, 7): "stage",
                (1, 5): "pipeline",
                (5, 7): "data",
                (4, 5): "tensor",
            },
            id="three axes",
        ),
        pytest.param({"pp_size": 1, "dp_size": 4, "tp_size": 1}, 2, {(0, 1, 2, 3): "data"}, id="data"),
        pytest.param({"pp_size": 1, "dp_size": 1, "tp_size": 2}, 0, {(0, 1): "tensor"}, id="tensor"),
    ],
)
def test_a_group_is_named_by_its_innermost_axis(
    sizes: dict[str, int], rank: int, named: dict[tuple[int, ...], str]
) -> None:
    found = named_groups(Layout(**sizes), rank)
    assert {ranks: name for ranks, name in found.items() if len(ranks) > 1} == named


def test_bytes_are_added_up_by_dtype() -> None:
    tensors = [torch.ones(3), torch.ones(2, dtype=torch.bfloat16), torch.ones(1), torch.ones(0, dtype=torch.int8)]
    assert by_dtype(tensors) == {"float32": 16, "bfloat16": 4, "int8": 0}
    assert by_dtype([]) == {}


@pytest.mark.parametrize(
    ("size", "shown"),
    [
        (0, "0 B"),
        (1023, "1,023 B"),
        (1024, "1.00 KiB"),
        (1024**2 - 1, "1,024.00 KiB"),
        (1536 * 1024, "1.50 MiB"),
        (2**40, "1.00 TiB"),
        (2**60, "1,048,576.00 TiB"),
    ],
)
def test_bytes_have_the_unit_that_suits(size: int, shown: str) -> None:
    assert spell(size) == shown


LAYOUT = Layout(pp_size=2, tp_size=1, dp_size=2)
MEMORY = Memory(
    parameters={"bfloat16": 2048},
    gradients={"float32": 4096},
    optimizer={},
    activations=1024,
    in_flight=2,
    buffers=10,
    peak=2**20,
)


def report(memory: Memory | None = MEMORY, messages: dict[Message, Traffic] | None = None) -> RankReport:
    groups: Any = SimpleNamespace(rank=2, coordinate=Coordinate(stage=1, dp_rank=0, tp_rank=0, batch_rank=0, cp_rank=0))
    return RankReport(
        groups=groups,
        chunks={1: (3, 6)},
        kinds={"Layer": 3, "Head": 1},
        elements=1_024_000,
        memory=memory,
        messages=messages or {},
        notes=["a step"] if memory is None else [],
    )


def plan(**config: Any) -> Any:
    resolved = resolve({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, **config}, AutoValues())
    return SimpleNamespace(layout=LAYOUT, resolved=resolved, block_size=128, rows=resolved.micro_batch)


def test_the_report_on_a_rank_is_a_few_lines() -> None:
    sums = {Message("data", 2, "all_reduce"): Traffic(count=1200, size=3 * 2**30)}
    lines = as_text(plan(), report(messages=sums)).splitlines()
    assert lines[0].startswith("rank 2 of 4 (pp2 x dp2 x tp1): ")
    assert lines[1] == "  layers 3-6 (3 x Layer, Head), 1,024,000 parameters"
    assert lines[2] == "  fp32, ZeRO stage 0, 4 micro-batches of 2 x 128 tokens a step"
    rows = {line.split("  ")[2]: line.split("  ", 3)[-1].strip() for line in lines if line.startswith("    ")}
    assert rows["parameters"] == "2.00 KiB (2.00 KiB in bfloat16)" and rows["optimizer"] == "0 B"
    assert rows["activations"] == "2.00 KiB (1.00 KiB a micro-batch x 2 in flight)"
    assert rows["peak of a step"] == "1.00 MiB"
    assert "    data (2)        all_reduce        1,200      3.00 GiB" in lines
    assert next(line for line in lines if "not checked" in line).endswith(
        "the values of the weights and the data: none are read"
    )


def test_what_could_not_be_tried_is_said() -> None:
    text = as_text(plan(), report(None))
    assert "memory\n" not in text and "    none" in text and "  not checked: a step\n" in text


def test_what_lies_in_host_memory_is_a_row_of_its_own() -> None:
    assert "in host memory" not in as_text(plan(), report())
    assert "    in host memory  3.00 KiB" in as_text(plan(), report(replace(MEMORY, host=3072)))


def test_hidden_states_and_offloaded_states_are_the_hosts() -> None:
    """Two states of the four that wait are on the device; each is micro-batch x tokens x width x bytes."""
    config = {
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        "activation_checkpointing": {"cpu_checkpointing": True},
        "pipeline": {"activation_checkpoint_interval": 1},
    }
    described: Any = SimpleNamespace(get_text_config=lambda **_: SimpleNamespace(hidden_size=4))
    run = SimpleNamespace(**vars(plan(**config)), source=SimpleNamespace(config=described))
    layers = [nn.Linear(4, 4) for _ in range(4)]
    module = LayerSequence(layers, checkpoint_interval=1, seed=0)
    engine: Any = SimpleNamespace(deepspeed=SimpleNamespace(module=module))
    found = _on_device(replace(MEMORY, activations=2**15, in_flight=1), engine, run)
    waiting = 2 * 2 * 128 * 4 * 4
    assert found.host == 4096 + waiting
    assert (found.activations, found.peak) == (2**15 - waiting, 2**20 - found.host)


def test_the_json_has_names_that_stay() -> None:
    found = as_json(plan(), report(messages={Message("data", 2, "all_reduce"): Traffic(count=2, size=8)}))
    assert found["coordinate"] == {"pipeline": 1, "data": 0, "tensor": 0}
    assert found["layers"] == {"first": 3, "last": 6, "kinds": {"Layer": 3, "Head": 1}}
    assert found["messages"] == [{"group": "data", "ranks": 2, "operation": "all_reduce", "count": 2, "bytes": 8}]
    assert found["memory_bytes"]["peak"] == 2**20 and found["memory_bytes"]["in_flight"] == 2
    assert as_json(plan(), report(None))["memory_bytes"] is None
