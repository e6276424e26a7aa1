"""Rules about the layout: pipeline stages x data-parallel ranks (context ranks among them) x tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator

from harness.checking.rules import edits
from harness.checking.rules.layout.context import context_pointer
from harness.checking.rules.rule import Finding, rule
from harness.checking.rules.view import RunView
from harness.config.text.diagnostic import Edit, Severity
from harness.config.values.coercion import as_int
from harness.config.values.layout_keys import LEAST, TENSOR, expert_fault, size_fault
from harness.config.values.pointers import AUTO
from harness.wording import counted

EXPERT_ROUTING = (
    *("route_norm", "route_scale", "routed_scaling_factor", "score_apply", "score_func", "top_k"),
    *("num_expert_groups", "num_limited_groups", "load_balance_coeff", "expert_activation"),
)
"""Options of DeepSpeed's AutoEP that change what a mixture of experts computes; here the model's config decides."""
EXPERT_PARTS = "expert_tensor_parallel_size"
_READ = {"/tensor_parallel": ("autotp_size", "sequence_parallel"), "/expert_parallel": ("autoep_size", "token_pieces")}
_REFUSED = (*EXPERT_ROUTING, EXPERT_PARTS)  # where the section is enabled: DS108
EXPERT_RANKS = "/expert_parallel/autoep_size"
SEQUENCE_PARALLEL = "/tensor_parallel/sequence_parallel"


@rule("DS311", "layout-does-not-fit", Severity.ERROR, claim="elsewhere", world_size=3)
def layout_does_not_fit(view: RunView) -> Iterator[Finding]:
    """The number of ranks is not a multiple of pipeline stages x context ranks x tensor-parallel ranks.

    That product is the number of ranks that read the same samples. Left-over ranks would be idle, so the harness
    refuses to start. It is checked with `--world_size`, and at the start of a run. Without the harness DeepSpeed's
    AutoTP and AutoEP each divide the ranks into groups of their size.

    Wrong: {"train_micro_batch_size_per_gpu": 1, "pipeline": {"stages": 2}}
    Right: {"train_micro_batch_size_per_gpu": 1, "pipeline": {"stages": 3}}
    """
    if view.world_size is None:
        return
    if view.target != "harness":
        yield from _groups_that_do_not_fit(view, view.world_size)
        return
    copy = view.pp_size * view.tp_size * view.cp_size
    if view.world_size % copy:
        pointer = "/pipeline/stages" if view.pp_size > 1 else TENSOR
        context = f"{counted(view.cp_size, 'context rank')} x " if view.cp_size > 1 else ""
        yield Finding(
            pointer=context_pointer(view) if view.cp_size > 1 else pointer,
            message=f"{counted(view.world_size, 'rank')} cannot be divided into copies of "
            f"{counted(view.pp_size, 'pipeline stage')} x {context}{counted(view.tp_size, 'tensor-parallel rank')}",
            hint=f"start a multiple of {copy} ranks, or change the layout",
            deepspeed="does not read the layout here",
            on_value=True,
        )


def _groups_that_do_not_fit(view: RunView, world_size: int) -> Iterator[Finding]:
    """Yield a finding for each kind of group of DeepSpeed's own that does not divide the ranks."""
    experts = view.size(EXPERT_RANKS) if view.truthy("/expert_parallel/enabled") else None
    for pointer, size in ((TENSOR, view.tp_size), (EXPERT_RANKS, experts or 1)):
        if world_size % size:
            yield Finding(
                pointer=pointer,
                message=f"{counted(world_size, 'rank')} cannot be divided into groups of {size}",
                hint=f"start a multiple of {size} ranks, or change the layout",
                deepspeed="raises an error when the engine starts",
                on_value=True,
            )


@rule("DS313", "autotp-option-in-the-harness", Severity.WARNING, claim="runs")
def autotp_option_in_the_harness(view: RunView) -> Iterator[Finding]:
    """An option of DeepSpeed's AutoTP or AutoEP, which do not run under the harness.

    The harness shards the layers itself, by the plan that the model declares. From these sections it reads only
    `tensor_parallel.autotp_size`, `tensor_parallel.sequence_parallel` and, if `expert_parallel.enabled` is true,
    `expert_parallel.autoep_size` and `expert_parallel.token_pieces`. It does not pass the sections on to DeepSpeed.
    Options of AutoEP that would change what the model computes are refused (DS108).

    Wrong: {"train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"autotp_size": 1, "tp_overlap_comm": true}}
    Right: {"train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"autotp_size": 1}}
    """
    if view.target != "harness":
        return
    for visit in view.visits:
        read = _READ.get(visit.parent)
        if read is None or visit.key is None or visit.name in (*read, *_REFUSED, "dtype", "enabled"):
            continue
        if visit.value not in (AUTO, None, visit.key.spec.get("default")):
            tool = "AutoTP" if visit.parent == "/tensor_parallel" else "AutoEP"
            yield Finding(
                pointer=visit.pointer,
                message=f"{visit.name} is an option of {tool}, which the harness does not use",
                hint=f"remove it: the harness reads only {' and '.join(read)} here",
                deepspeed="does not get this section from the harness",
            )


@rule("DS314", "experts-over-other-ranks", Severity.ERROR, claim="elsewhere", world_size=8)
def experts_over_other_ranks(view: RunView) -> Iterator[Finding]:
    """The expert-parallel size does not fit the layout.

    The harness distributes whole experts among the ranks of a tensor-parallel group, which see the same tokens, or of
    several neighbouring groups on the data axis, which send tokens to each other. So `autoep_size` must be 1, or a
    multiple of `tensor_parallel.autotp_size` that divides the number of ranks of a stage. That number is known with
    `--world_size`, and when a run starts. Without `expert_parallel` each tensor-parallel rank has a part of every
    expert.

    Wrong: {"train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"autotp_size": 4},
           "expert_parallel": {"enabled": true, "autoep_size": 2}}
    Right: {"train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"autotp_size": 2},
           "expert_parallel": {"enabled": true, "autoep_size": 4}}
    """
    fault = expert_fault(view.ep_size, view.tp_size, view.dp_size) if view.target == "harness" else None
    if fault is not None:
        yield Finding(
            pointer="/expert_parallel/autoep_size",
            message=fault[0],
            hint=fault[1],
            deepspeed="exchanges tokens between data-parallel ranks, too",
            on_value=True,
        )


@rule("DS315", "size-that-is-none", Severity.ERROR, claim="elsewhere")
def size_that_is_none(view: RunView) -> Iterator[Finding]:
    """A size of the layout is 0, negative, a fraction, a string, or a switch.

    DeepSpeed reads `pipeline.stages`, `pipeline.activation_checkpoint_interval` and
    `expert_parallel.autoep_size` without a check. The harness needs valid sizes for its layout, and does not
    guess. `tensor_parallel.autotp_size` may be 0, which DeepSpeed reads as off.

    Wrong: {"train_micro_batch_size_per_gpu": 1, "pipeline": {"stages": 0}}
    Right: {"train_micro_batch_size_per_gpu": 1, "pipeline": {"stages": 1}}
    """
    if view.target != "harness":
        return
    for pointer in LEAST:
        if not view.has(pointer) or (pointer.startswith("/tensor_parallel") and as_int(view.get(pointer)) is None):
            continue  # DeepSpeed itself refuses what is no number in that section
        fault = size_fault(pointer, view.as_read(pointer))
        if fault is not None:
            yield Finding(
                pointer=pointer,
                message=fault[0],
                hint=fault[1],
                deepspeed="does not validate it",
                on_value=True,
                edits=_number(view, pointer),
                is_safe=False,
            )


@rule("DS316", "key-of-the-harness", Severity.ERROR, claim="refuses", target="deepspeed")
def key_of_the_harness(view: RunView) -> Iterator[Finding]:
    """A key that only the harness knows, in a config for another program.

    These are `tensor_parallel.sequence_parallel` (tensor-parallel ranks share the sequence between the blocks
    of a layer; Korthikanti et al. 2022, arXiv 2205.05198), `compile.enabled` and `compile.backend`
    (torch.compile of the decoder layers). DeepSpeed checks these sections, and refuses keys that it does not know.

    Wrong: {"train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"autotp_size": 1, "sequence_parallel": true}}
    Right: {"train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"autotp_size": 1}}
    """
    if view.target == "harness":
        return
    for visit in view.visits:
        if visit.key is not None and visit.key.spec.get("x-harness") and visit.value != AUTO:
            yield Finding(
                pointer=visit.pointer,
                message=f"{visit.name} is a key of the harness",
                hint="remove it, or train with the harness",
                deepspeed="refuses the config: extra inputs are not permitted",
                edits=edits.remove(view.document, visit.pointer),
                is_safe=False,
            )


@rule("DS317", "sequence-parallel-on-one-rank", Severity.WARNING, claim="refuses")
def sequence_parallel_on_one_rank(view: RunView) -> Iterator[Finding]:
    """tensor_parallel.sequence_parallel is on, but there is no tensor parallelism.

    Sequence parallelism splits the sequence over the ranks of a tensor-parallel group, so it needs at least
    two of them.

    Wrong: {"train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"autotp_size": 1, "sequence_parallel": true}}
    Right: {"train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"autotp_size": 1}}
    """
    if view.target == "harness" and view.tp_size == 1 and view.on(SEQUENCE_PARALLEL):
        yield Finding(
            pointer=SEQUENCE_PARALLEL,
            message="sequence_parallel has no effect: there is one tensor-parallel rank",
            hint="set tensor_parallel.autotp_size to 2 or more, or remove it",
            deepspeed="refuses the key by itself; from the harness it does not get this section",
        )


def _number(view: RunView, pointer: str) -> tuple[Edit, ...]:
    """Return edits that write a number without its quotes, and 1 for a switch that is on."""
    value = view.get(pointer)
    if value is True or (isinstance(value, str) and value.isdigit() and 0 < len(value) < 19):
        return edits.replace(view.document, pointer, int(value))
    return ()
