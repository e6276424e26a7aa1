"""Rules about differences from DeepSpeed alone: keys without effect in the harness, and keys that it refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from harness.checking.rules.deepspeed.offload import ZERO, offloads
from harness.checking.rules.deepspeed.precision import FLOAT16
from harness.checking.rules.layout.layout import EXPERT_PARTS, EXPERT_ROUTING
from harness.checking.rules.rule import Finding, rule
from harness.checking.rules.view import RunView
from harness.checking.schema import find
from harness.checking.schema.coercion import as_float
from harness.config.text.diagnostic import Severity
from harness.config.values.idle_keys import IDLE, ON_A_CPU, accelerated
from harness.config.values.layout_keys import EXPERTS, FEED_FORWARD_TILE
from harness.config.values.pointers import AUTO, name_of
from harness.optimizers import DEFAULT


def _asks(view: RunView, pointer: str) -> bool:
    """Return whether a key has another value than its default."""
    key = find(pointer)
    value = view.as_read(pointer)
    default: object = key.spec.get("default") if key is not None else None
    return view.has(pointer) and value not in (None, AUTO, default) and not (value is False and default is None)


@rule("DS107", "no-effect-in-the-harness", Severity.WARNING, claim="runs")
def no_effect_in_the_harness(view: RunView) -> Iterator[Finding]:
    """A key configures something that the harness does itself, or does not do.

    The harness itself reads the data, shards the model and writes checkpoints. It does not use DeepSpeed's compiler or
    autotuning. So `data_efficiency`, `compile.deepcompile`, `hybrid_engine`, `autotuning`, `checkpoint.writer` and
    others have no effect, and most are not passed on to DeepSpeed. With `--target deepspeed` or `hf` this is not
    reported.

    Wrong: {"train_batch_size": 8, "dataloader_drop_last": true}
    Right: {"train_batch_size": 8}
    """
    reported: set[str] = set()
    for pointer, why in IDLE.items() if view.target == "harness" else ():
        section = pointer.split("/")[1]
        if section in ("data_efficiency", "compile") and section in reported:
            continue
        if _asks(view, pointer):
            reported.add(section)
            yield Finding(
                pointer=pointer,
                message=f"{name_of(pointer)} has no effect in the harness: {why}",
                hint="remove it",
                deepspeed="never reads it in a run of the harness",
            )
    if view.target == "harness" and view.tp_size == 1:
        for name in ("partition_activations", "contiguous_memory_optimization"):
            if view.on(f"/activation_checkpointing/{name}"):
                yield Finding(
                    pointer=f"/activation_checkpointing/{name}",
                    message=f"{name} has no effect: it distributes activations over tensor-parallel ranks, and"
                    " there is only one",
                    hint="remove it, or set tensor_parallel.autotp_size to 2 or more",
                    deepspeed="never reads it in a run of the harness",
                )
    forced = view.on("/zero_force_ds_cpu_optimizer") and not view.has("/optimizer")
    if view.target == "harness" and forced and offloads(view, "offload_optimizer"):
        yield Finding(
            pointer="/zero_force_ds_cpu_optimizer",
            message="zero_force_ds_cpu_optimizer has no effect in the harness: the optimizer is torch's fused "
            f"{DEFAULT.name}",
            hint="set it to false, or name an optimizer",
            deepspeed=f"refuses torch's {DEFAULT.name} with an offloaded optimizer state",
        )


@dataclass(frozen=True)
class _Refusal:
    """A key that the harness refuses: the condition and the message."""

    pointer: str
    holds: Callable[[RunView], bool]
    message: str
    hint: str
    deepspeed: str


def _asks_of_experts(view: RunView, *, pointer: str) -> bool:
    return view.on(f"{EXPERTS}/enabled") and _asks(view, pointer)


def _zero_3(view: RunView) -> bool:
    return view.zero_stage == 3


_REFUSED = (
    _Refusal(
        "/managed_gradient_accumulation",
        lambda view: view.as_read("/managed_gradient_accumulation") is False,
        "managed_gradient_accumulation false would run the optimizer after every micro-batch",
        "remove it",
        "leaves gradient accumulation to the program",
    ),
    _Refusal(
        f"{ZERO}/offload_param/device",
        lambda view: _zero_3(view) and view.get(f"{ZERO}/offload_param/device") == "nvme",
        "parameters cannot be offloaded to NVMe: the harness partitions them layer by layer, and each layer "
        "would delete the files of the earlier ones",
        'set offload_param.device to "cpu"',
        "keeps one file per parameter in nvme_path",
    ),
    _Refusal(
        f"{ZERO}/offload_optimizer/ratio",
        lambda view: _zero_3(view) and (as_float(view.get(f"{ZERO}/offload_optimizer/ratio")) or 1.0) < 1.0,
        "offload_optimizer.ratio below 1 needs DeepSpeedCPUAdam, which the harness does not use",
        "remove ratio",
        "raises AssertionError with another optimizer",
    ),
    _Refusal(
        f"{ZERO}/stage3_module_granularity_threshold",
        lambda view: (
            _zero_3(view)
            and max(view.size(f"{ZERO}/{name}module_granularity_threshold") or 0 for name in ("stage3_", "")) > 0
        ),
        "stage3_module_granularity_threshold gathers whole modules that the harness calls in parts",
        "remove it: the harness finds the modules that must be gathered whole",
        "marks modules by their size, and fails in their first forward or backward",
    ),
    _Refusal(
        f"{ZERO}/zero_quantized_gradients",
        lambda view: _zero_3(view) and view.on(f"{ZERO}/zero_quantized_gradients") and view.tp_size > 1,
        "zero_quantized_gradients would sum gradients over all ranks, tensor-parallel ones included",
        "remove it, or set tensor_parallel.autotp_size to 1",
        "reduces quantized gradients over the whole world",
    ),
    _Refusal(
        f"{ZERO}/reduce_scatter",
        lambda view: (
            _zero_3(view)
            and view.on(f"{ZERO}/zero_quantized_gradients")
            and view.as_read(f"{ZERO}/reduce_scatter") is False
        ),
        "zero_quantized_gradients does not work with reduce_scatter false",
        "remove reduce_scatter, or zero_quantized_gradients",
        "raises AssertionError when the engine starts",
    ),
    _Refusal(
        "/compile/enabled",
        lambda view: _zero_3(view) and view.compile_backend is not None,
        "torch.compile cannot compile a layer whose parameters ZeRO-3 gathers and frees while it runs",
        "use ZeRO stage 0, 1 or 2, or remove it",
        "refuses the key by itself; from the harness it does not get this section",
    ),
    _Refusal(
        "/activation_checkpointing/partition_activations",
        lambda view: view.sequence_parallel and view.on("/activation_checkpointing/partition_activations"),
        "partition_activations has nothing to distribute where tensor_parallel.sequence_parallel is on: each rank "
        "stores its share of the sequence already",
        "remove partition_activations",
        "takes activations for equal on all tensor-parallel ranks",
    ),
    _Refusal(
        f"{ZERO}/stage",
        lambda view: _zero_3(view) and view.exchanges_tokens,
        "experts that are distributed over data-parallel ranks cannot be partitioned over these ranks as well",
        "use ZeRO stage 0, 1 or 2, or remove expert_parallel",
        "partitions each rank's experts over the ranks that hold the same ones",
    ),
    _Refusal(
        f"{ZERO}/reduce_scatter",
        lambda view: (
            view.zero_stage in (1, 2) and view.exchanges_tokens and view.as_read(f"{ZERO}/reduce_scatter") is False
        ),
        "reduce_scatter false sums the gradients of different experts, which are on different data-parallel ranks",
        "remove reduce_scatter",
        "raises AssertionError when the engine starts",
    ),
    _Refusal(
        f"{ZERO}/contiguous_gradients",
        lambda view: (
            view.zero_stage == 2 and view.exchanges_tokens and view.as_read(f"{ZERO}/contiguous_gradients") is False
        ),
        "contiguous_gradients false does not work at ZeRO stage 2 where data-parallel ranks hold different experts",
        "remove contiguous_gradients",
        "raises AssertionError when the engine starts",
    ),
    _Refusal(
        FEED_FORWARD_TILE,
        lambda view: view.exchanges_tokens and (view.size(FEED_FORWARD_TILE) or 0) > 0,
        "tiling.feed_forward would send each tile of tokens to the experts of other ranks separately",
        "remove it: each rank computes only its own experts",
        "does not read it",
    ),
    _Refusal(
        "/fp16/enabled",
        lambda view: view.zero_stage == 0 and view.exchanges_tokens and view.precision == "fp16",
        "fp16 at ZeRO stage 0 clips by a norm that leaves out the experts of other data-parallel ranks",
        "use bf16, or ZeRO stage 1 or 2",
        "takes the mean of the ranks' norms",
    ),
    *(
        _Refusal(
            f"{EXPERTS}/{name}",
            partial(_asks_of_experts, pointer=f"{EXPERTS}/{name}"),
            f"expert_parallel.{name} would change what the model computes, and the harness routes as its config says",
            "remove it, and change the model's config.json if that says otherwise",
            "routes by it instead of by the model",
        )
        for name in EXPERT_ROUTING
    ),
    _Refusal(
        f"{EXPERTS}/{EXPERT_PARTS}",
        partial(_asks_of_experts, pointer=f"{EXPERTS}/{EXPERT_PARTS}"),
        "expert_parallel.expert_tensor_parallel_size would split experts that are distributed whole",
        "remove it, or remove expert_parallel, so that tensor-parallel ranks share every expert",
        "splits each expert over tensor-parallel ranks",
    ),
    _Refusal(
        "/torch_autocast/dtype",
        lambda view: view.on("/torch_autocast/enabled") and view.get("/torch_autocast/dtype") in FLOAT16,
        "torch_autocast in float16 clips by a gradient norm that includes the loss scale",
        'use "bfloat16", or replace torch_autocast with fp16',
        "reports and clips the scaled norm",
    ),
)


@rule("DS108", "refused-by-the-harness", Severity.ERROR, claim="elsewhere")
def refused_by_the_harness(view: RunView) -> Iterator[Finding]:
    """A key that DeepSpeed accepts, but that would make a run of the harness fail or compute something else.

    The harness partitions parameters layer by layer at ZeRO-3, decides itself when the optimizer steps, and makes the
    optimizer if the config names none. Keys that conflict with this are refused before the run starts.

    Wrong: {"train_batch_size": 8, "managed_gradient_accumulation": false}
    Right: {"train_batch_size": 8, "managed_gradient_accumulation": true}
    """
    for item in _REFUSED if view.target == "harness" else ():
        if item.holds(view):
            yield Finding(
                pointer=item.pointer,
                message=item.message,
                hint=item.hint,
                deepspeed=item.deepspeed,
            )


@rule("DS109", "needs-an-accelerator", Severity.INFO, claim="elsewhere")
def needs_an_accelerator(view: RunView) -> Iterator[Finding]:
    """A feature that DeepSpeed supports on accelerators only.

    `ds-harness check` does not know the device. On a CPU the run is refused with the same message, before the model is
    built.

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "Lamb", "params": {"lr": 1e-4}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 1e-4}}}
    """
    for pointer, message in accelerated(view.data).items() if view.target == "harness" else ():
        yield Finding(
            pointer=pointer,
            message=message,
            hint=ON_A_CPU,
            deepspeed="fails on a CPU when the kernel is loaded",
            on_value=True,
        )
