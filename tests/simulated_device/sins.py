"""What a program may not do on a GPU, done: each function commits one fault, which the device or the process group has
to report. They run on ranks; `said` returns what was reported."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from tests.support.simulated_device import device, works
from tests.support.simulated_device.device import NAME


def said(act: Callable[[], object]) -> str:
    """Return the error that `act` ends with; "" where it ends well."""
    try:
        act()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""


def here(*shape: int) -> torch.Tensor:
    """Ones on the device of this rank."""
    return torch.ones(*shape, device=NAME)


# ---- one process


def host_tensor_in_a_sum() -> None:
    here(3) + torch.ones(3)


def mask_made_on_the_host() -> None:
    here(3, 3).masked_fill(torch.ones(3, 3, dtype=torch.bool), 0.0)


def index_made_on_the_host() -> None:
    here(3, 3).index_select(0, torch.tensor([1]))


def sum_kept_on_the_host() -> None:
    torch.zeros(()).add_(here(3).sum())


def scalars_stacked_with_one_of_the_host() -> None:
    torch.stack([here(3).sum(), torch.tensor(1.0)])


def two_devices() -> None:
    here(3) + torch.ones(3, device=f"{NAME}:1")


def generator_of_the_host() -> None:
    here(3).normal_(generator=torch.Generator())


def result_before_its_event() -> None:
    stream, x = torch.Stream(device=NAME), here(3)
    with device.on_stream(stream):
        y = torch.zeros(3, device=NAME)
    y + x


def overwritten_before_its_event() -> None:
    stream, x = torch.Stream(device=NAME), here(3)
    stream.wait_stream(torch.accelerator.current_stream())
    with device.on_stream(stream):
        torch.relu(x)
    x.zero_()


def freed_too_early() -> None:
    stream, x = torch.Stream(device=NAME), here(3)
    stream.wait_stream(torch.accelerator.current_stream())
    with device.on_stream(stream):
        torch.relu(x)
    del x
    here(1) + 1  # it may be given that memory


def host_buffer_changed_too_early() -> None:
    buffer = torch.ones(3).pin_memory()
    buffer.to(NAME, non_blocking=True)
    buffer.zero_()
    torch.accelerator.synchronize()
    here(1) + 1


def pageable_buffer_changed_too_early() -> None:
    buffer = torch.ones(3)
    buffer.to(NAME, non_blocking=True)
    buffer.zero_()
    torch.accelerator.synchronize()
    here(1) + 1


def time_of_an_event_that_is_not_done() -> None:
    events = [torch.Event(device=NAME, enable_timing=True) for _ in range(2)]
    for event in events:
        here(3) + 1
        event.record()
    events[0].elapsed_time(events[1])


def too_much_memory() -> None:
    torch.empty(10**12, device=NAME)


ALONE: dict[Callable[[], None], str] = {
    host_tensor_in_a_sum: "found at least two devices, sim:0 and cpu",
    mask_made_on_the_host: "a tensor of the host",
    index_made_on_the_host: "a tensor of the host",
    sum_kept_on_the_host: "cpu",
    scalars_stacked_with_one_of_the_host: "a tensor of the host",
    two_devices: "found at least two devices, sim:0 and sim:1",
    generator_of_the_host: "expected a generator of the device",
    result_before_its_event: "nothing has waited for it",
    overwritten_before_its_event: "nothing has waited for it",
    freed_too_early: "record_stream is missing",
    host_buffer_changed_too_early: "before its copy to the device had been waited for",
    pageable_buffer_changed_too_early: "before its copy to the device had been waited for",
    time_of_an_event_that_is_not_done: "must be completed",
    too_much_memory: "out of memory",
}


def alone() -> dict[str, str]:
    """Commit what one process can do; what was said to each."""
    torch.accelerator.set_device_index(0)
    return {act.__name__: said(act) for act in ALONE}


def virtues() -> dict[str, object]:
    """Do the same right: nothing may be said. Returns the numbers that come out."""
    torch.accelerator.set_device_index(0)
    found: dict[str, object] = {}
    x, stream = here(3), torch.Stream(device=NAME)
    found["indices and scalars of the host"] = (x[torch.tensor([0, 2])] * torch.tensor(2.0)).tolist()
    found["generator"] = torch.equal(
        torch.rand(3, generator=torch.Generator(NAME).manual_seed(1), device=NAME).cpu(),
        torch.rand(3, generator=torch.Generator().manual_seed(1)),
    )
    stream.wait_stream(torch.accelerator.current_stream())
    with device.on_stream(stream):
        y = torch.zeros(3, device=NAME) + x
    x.record_stream(stream)
    torch.accelerator.current_stream().wait_stream(stream)
    found["another stream"] = (y + 1).tolist()
    del x
    pinned, pageable = torch.full((3,), 5.0).pin_memory(), torch.full((3,), 5.0)
    found["another device"] = (here(3).to(f"{NAME}:1") + 1).tolist()
    found["is_pinned"] = [pinned.is_pinned(), pinned[1:].is_pinned(), pageable.is_pinned()]
    host = torch.zeros(3).pin_memory()
    host.copy_(pinned.to(NAME, non_blocking=True) + 1, non_blocking=True)
    found["before"] = host.tolist() != [6.0] * 3
    event = torch.Event(device=NAME)
    event.record()
    event.synchronize()
    found["after"] = host.tolist()
    layer = torch.nn.Linear(2, 2)
    found["moved"] = layer.weight is layer.to(NAME).weight and layer.weight.device.type == NAME
    layer = torch.nn.Conv1d(2, 2, 3, groups=2).to(NAME)
    layer(here(1, 2, 5)).sum().backward()
    found["convolution"] = [grad.tolist() for grad in (layer.weight.grad[:, 0], layer.bias.grad)]
    z = torch.complex(here(3), here(3) * 2)
    found["conjugate"] = (z * z.conj()).real.tolist()
    found["uninitialised"] = bool(torch.empty(3, device=NAME).cpu().eq(0).any())
    return found


def counted() -> dict[str, int]:
    """Wait for the device in each way; how often each was counted."""
    torch.accelerator.set_device_index(0)
    x = here(3)
    device.waits(reset=True)
    x.sum().item()
    x.cpu()
    torch.ones(3).to(NAME)
    torch.ones(3).to(NAME, non_blocking=True)  # from pageable memory: it blocks
    torch.ones(3).pin_memory().to(NAME, non_blocking=True)
    x.nonzero()
    x[x > 0]
    torch.accelerator.synchronize()
    _ = x + 1, x.new_zeros(2), x.to("cpu", non_blocking=True)
    return {place.partition(" at ")[0]: count for place, count in device.waits().items()}


# ---- two ranks


def read_before_wait() -> None:
    x = here(3)
    work = dist.all_reduce(x, async_op=True)
    try:
        x + 1
    finally:
        work.wait()


def written_before_wait() -> None:
    x = here(3)
    work = dist.broadcast(x, 0, async_op=True)
    try:
        x.add_(1)
    finally:
        work.wait()


def send_of_a_changing_tensor() -> None:
    rank, x = dist.get_rank(), here(3)
    work = dist.isend(x, 1) if rank == 0 else dist.irecv(x, 0)
    try:
        x.add_(1)
    finally:
        work.wait()


def tensor_of_the_host() -> None:
    dist.all_reduce(torch.ones(3))


def tensor_of_another_device() -> None:
    dist.all_reduce(torch.ones(3, device=f"{NAME}:{1 - dist.get_rank()}"))


def not_contiguous() -> None:
    dist.all_reduce(here(3, 4).T)


def other_sizes() -> None:
    dist.all_reduce(here(3 + dist.get_rank()))


def other_dtypes() -> None:
    dist.all_reduce(here(3).to([torch.float32, torch.bfloat16][dist.get_rank()]))


def other_collectives() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(here(3))
    else:
        dist.broadcast(here(3), 0)


def both_send_first() -> None:
    other = 1 - dist.get_rank()
    sent, received = dist.isend(here(3), other), dist.irecv(here(3), other)
    sent.wait()
    received.wait()


def other_order_of_messages() -> None:
    small, large = here(2), here(4)
    if dist.get_rank() == 0:
        works = [dist.isend(small, 1), dist.isend(large, 1)]
    else:
        works = [dist.irecv(large, 0), dist.irecv(small, 0)]
    for work in works:
        work.wait()


def groups_in_another_order() -> None:
    """Two groups of the same ranks."""
    first, second = GROUPS if dist.get_rank() == 0 else GROUPS[::-1]
    works = [
        dist.all_reduce(here(3), group=first, async_op=True),
        dist.all_reduce(here(3), group=second, async_op=True),
    ]
    for work in works:
        work.wait()


def left_out() -> None:
    """Rank 1 leaves a collective out, so that it ends before the other one's call."""
    if dist.get_rank() == 0:
        dist.all_reduce(here(3))


def never_waited_for() -> None:
    dist.all_reduce(here(3), group=GROUPS[0], async_op=True)
    dist.destroy_process_group(GROUPS[0])


GROUPS: list[dist.ProcessGroup] = []
TOGETHER: dict[Callable[[], None], str] = {
    read_before_wait: "nothing has waited for it",
    written_before_wait: "nothing has waited for it",
    send_of_a_changing_tensor: "nothing has waited for it",
    tensor_of_the_host: "a tensor of the cpu",
    tensor_of_another_device: "while device",
    not_contiguous: "must be contiguous",
    other_sizes: "at its place",
    other_dtypes: "at its place",
    other_collectives: "at its place",
    both_send_first: "which waits in its send",
    other_order_of_messages: "at its place",
    groups_in_another_order: "neither has waited in between",
    left_out: "ranks [1] have not joined",
    never_waited_for: "nothing has waited for it, and its group ends",
}


def together() -> dict[str, str]:
    """Commit each fault on two ranks, in process groups of its own; what was said on this one."""
    rank = dist.get_rank()
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    found = {}
    for act in TOGETHER:
        own = dist.PrefixStore(act.__name__, store)
        dist.init_process_group(device.BACKEND, store=own, rank=rank, world_size=2, timeout=timedelta(seconds=1.5))
        GROUPS[:] = [dist.new_group([0, 1]), dist.new_group([0, 1])]
        found[act.__name__] = said(act)
        own.set(f"done {rank}", "")
        own.wait(["done 0", "done 1"])
        for left in (works.UNDERWAY, works.NEVER_ASKED):  # what the fault has left behind
            left.clear()
        dist.destroy_process_group()
        for left in (works.GROUPS, works.BEGUN_BESIDE):
            left.clear()
        torch.accelerator.synchronize()
        said(lambda: here(1) + 1)
    dist.init_process_group(device.BACKEND, store=dist.PrefixStore("end", store), rank=rank, world_size=2)
    return found
