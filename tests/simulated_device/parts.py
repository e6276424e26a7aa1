"""Parts of the program that copy, or exchange, without waiting at once: what they give is used the moment it may be."""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from harness.checkpoint.background_save import KeptBuffer
from harness.cli import main
from harness.data import generate
from harness.device.moments import moment, seconds_between
from harness.device.process_group import mixed_devices
from harness.extras.compression.reduction import ALIGNED, EXACT, PACKED, CompressedReduction
from harness.extras.compression.trial import measure
from harness.extras.muon.matrices import MatrixPart
from harness.hf.weights.initialization import Change, Drawn, Scratch
from harness.hf.weights.tensor_files import open_weights_file
from harness.parallel import collectives
from harness.parallel.comm import TensorParallel
from harness.parallel.dropout import KeyedRng, RngKey
from harness.parallel.host import brought_to_host, numbers, to_device
from tests.support.models import model_of
from tests.support.simulated_device import device
from tests.support.simulated_device.device import NAME


def copies(folder: str) -> dict[str, bool]:
    """Copy between host and device in each way; whether the values came over."""
    torch.accelerator.set_device_index(0)
    place, found = torch.device(NAME, 0), {}
    there = [torch.full((size,), float(size), device=place) for size in (3, 5, 7)]
    with ThreadPoolExecutor(1) as helper:
        kept = KeptBuffer().copy(there, helper)
        found["kept for a checkpoint"] = all(float(copy.min()) == len(copy) for copy in kept) and kept[0].is_pinned()
    brought = dict(brought_to_host(enumerate(there)))
    found["brought to the host"] = all(float(copy.min()) == len(copy) for copy in brought.values())
    found["numbers"] = numbers([there[0][0], 2.0, there[1].sum()]) == [3.0, 2.0, 25.0]
    batch = torch.arange(4.0)
    sent = to_device((batch, batch + 1), place)
    batch.zero_()  # the program goes on with its own
    torch.accelerator.synchronize()
    found["batches"] = [each.sum().item() for each in sent] == [6.0, 10.0]
    path = Path(folder, "weights.safetensors")
    save_file({"a": torch.arange(6.0).view(2, 3), "b": torch.arange(9.0)}, path)
    stored = open_weights_file(path)
    device.waits(reset=True)
    for name, lazy, total in (("a", stored["a"], 15), ("b", stored["b"], 36), ("columns", stored["a"][:, 1:], 12)):
        into = torch.empty(tuple(lazy.shape), device=place)
        lazy.read_into(into)
        found[f"read {name}"] = into.sum().item() == total
    found["read through pinned memory"] = not any("pageable" in wait for wait in device.waits())
    filled = (None, (Change(torch.Tensor.normal_, 0, 6, (), {}),))
    drawn = [
        Drawn("a", (2, 3), torch.float32, 1, at, torch.nn.init.normal_, changes, Scratch())
        for changes in filled
        for at in (place, torch.device("cpu"))
    ]
    values = [torch.empty(2, 3) for _ in drawn]
    for leaf, into in zip(drawn, values, strict=True):
        leaf.read(into, ((0, 2), (0, 3)))
    found["drawn from its seed"] = all(torch.allclose(values[0], each) for each in values)
    model = model_of("llama").to(place)
    words = argparse.Namespace(seed=1, temperature=1.0, max_new_tokens=2)
    with patch.object(model, "generate", wraps=model.generate) as called:
        found["generated"] = len(generate._continued(model, [1, 2], None, words)) == 4
    # transformers would take prompts of the host, too, and then draw there
    found["generated on the device"] = called.call_args.kwargs["input_ids"].device == place
    key = RngKey(seed=1, first_sample=0, samples=1, tensor=TensorParallel(), device=place)
    x, masked = torch.ones(1, 2, 8, 4, device=place), []
    for _ in range(2):
        with KeyedRng(key, 0):
            masked.append(scaled_dot_product_attention(x, x, x, dropout_p=0.5))
        torch.rand(3, device=place)  # another draw in between
    found["masks of a kernel"] = torch.equal(*masked)
    begun = moment(place)
    there[0] + 1
    found["moments"] = seconds_between(begun, moment(place)) >= 0
    found["nothing reported"] = device.C.reports() == []
    return found


def dry_run(folder: str) -> int:
    """Build a rank of a large world, of which this machine has no device."""
    config = Path(folder, "config.json")
    sections = {"pipeline": {"stages": 2}, "tensor_parallel": {"autotp_size": 2}, "bf16": {"enabled": True}}
    config.write_text(json.dumps({"train_micro_batch_size_per_gpu": 2, **sections}))
    words = ["--rank", "63", "--world_size", "64", "--block_size", "16", "--json"]
    return main(["dry-run", *words, "--model_name_or_path", "tiny-llama", "--deepspeed_config", str(config)])


def exchanges() -> dict[str, bool]:
    """Exchange tensors in each way, on two ranks; whether the results are right when they are used."""
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None

    def own() -> Tensor:
        return torch.arange(4.0, device=NAME) + 10 * rank

    both = [torch.arange(4.0), torch.arange(4.0) + 10]
    found = {
        "sum": (collectives.all_reduce(own(), group), sum(both)),
        "begun sum": (collectives.start_all_reduce(own(), group)(), sum(both)),
        "gathered": (torch.cat(list(collectives.all_gather(own(), group))), torch.cat(both)),
        "largest": (collectives.all_reduce_max(own(), group), both[1]),
        "begun share of a sum": (collectives.start_reduce_scatter(own(), group)(), sum(both)[2 * rank : 2 * rank + 2]),
        "begun exchange": (
            collectives.start_all_to_all(own(), [[1, 3], [3, 1]], group)(),
            torch.cat([both[0][:1], both[1][:3]] if rank == 0 else [both[0][1:], both[1][3:]]),
        ),
    }
    part = MatrixPart(
        shape=(2, 4),
        start=4 * rank,
        length=4,
        offset=0,
        group=group,
        split=True,
        needed=True,
        device=torch.device(NAME, rank),
    )
    found["matrix of data ranks"] = (part.whole(own()), torch.stack(both))
    whole = own()
    collectives.all_reduce_in_place(whole, group)
    found["sum in place"] = (whole, sum(both))
    right = {name: torch.allclose((a + 0).cpu(), b) for name, (a, b) in found.items()}
    for bits in (8, 4):
        sizes, kinds, place = [1000, 300, 70], [PACKED, EXACT, ALIGNED], torch.device(NAME, rank)
        reduction = CompressedReduction(bits=bits, group=group, device=place, sizes=sizes, kinds=kinds)
        values = [torch.full((size,), float(rank), device=NAME) for size in sizes]
        reduction.average(values, 1.0)
        reduction.average(values, 2.0)  # another loss scale
        right[f"mean in {bits} bits"] = all(bool((each - 0.5).abs().max().item() < 0.1) for each in values)
    right["bits by time"] = measure(group, torch.device(NAME, rank)).bits in (0, 4, 8)
    module = torch.get_device_module(NAME)
    right["devices of one kind"] = mixed_devices(torch.device(NAME, rank)) is None
    with patch.object(module, "get_device_name", lambda _: f"generation {rank}"):
        text = mixed_devices(torch.device(NAME, rank)) or ""
    right["devices of two kinds"] = "rank 0 generation 0, rank 1 generation 1" in text
    return {**right, "nothing reported": device.C.reports() == []}
