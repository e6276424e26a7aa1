"""Certify a user's model, layout and config: train a tiny copy on this machine's processor, compare with one process.

The settings that decide the computation are kept: layout, ZeRO, offload, precision, schedule, clipping, the type of
optimizer, and the other keys of these sections. Ranks, batches and the model become small. The certificate lists the
settings that could not be kept.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from tempfile import TemporaryDirectory

from harness.arguments import TrainingArguments
from harness.arguments.configure import RunConfig, read_config, read_run_config
from harness.config.values.batch import ACCUMULATION, MICRO, TRAIN
from harness.config.values.idle_keys import accelerated
from harness.config.values.json_object import JsonObject
from harness.config.values.pointers import lookup, whole
from harness.errors import UserError
from harness.hf.skeleton import ModelSource, read_source
from harness.hf.verify.tiny_copy import shrink
from harness.parity.composition import Composition, Execution, Training
from harness.parity.trial import REFUSED, RIGHT, UNTRIED, TrialResult, try_all
from harness.report import certificate
from harness.training.prepare.trainable import shaping
from harness.training.recording.files import versions

MOST_RANKS = 8
SECTIONS = (
    "pipeline",
    "tensor_parallel",
    "zero_optimization",
    "activation_checkpointing",
    "data_types",
    "bf16",
    "context_parallel",
)
VALUES = ("communication_data_type", "prescale_gradients", "gradient_predivide_factor")
READ = {
    "pipeline": (
        *("stages", "partition", "schedule", "chunks_per_stage", "parts_per_stage"),
        "activation_checkpoint_interval",
    ),
    "tensor_parallel": ("autotp_size", "sequence_parallel"),
    "zero_optimization": ("stage",),
    "data_types": ("grad_accum_dtype",),
    "bf16": ("enabled",),
    "context_parallel": ("size",),
}
"""Keys that become fields of an `Execution` or a `Training`; all other keys of SECTIONS are kept as they are."""
OFFLOADS = ("offload_optimizer", "offload_param")
OF_NVME = ("device", "nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "pipeline_read", "pipeline_write")
OPTIMIZERS = {name.lower(): name for name in ("Adam", "AdamW", "SGD", "Adagrad", "RMSprop")}
TRIED = frozenset(
    [
        *(*SECTIONS, *VALUES, "fp16", "optimizer", "compile", "gradient_compression", "gradient_clipping"),
        *("expert_parallel", "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
        *("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
    ]
)
"""Keys that are tried, or for which `reduce` itself says why they are not."""
STEPS = 4


@dataclass(frozen=True, kw_only=True)
class Reduced:
    """A user's config at a small size.

    Attributes:
        left_out: the settings that are not tried, each in a few words.
    """

    training: Training
    execution: Execution
    left_out: list[str]


def certify(
    model: str,
    arguments: TrainingArguments,
    report: Callable[[TrialResult], None],
    world_size: int | None = None,
) -> JsonObject:
    """Return the certificate of a model (a directory, or a preset's name) and the config that the arguments name.

    `report` is called with each verdict. Raises UserError for a file that cannot be read.
    """
    source, document = read_source(model), read_config(arguments.deepspeed_config)
    shape = shaping(source.config)
    found: JsonObject = {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "model": model,
        "config": str(arguments.deepspeed_config),
        "versions": versions(),
        "machine": {"processors": os.cpu_count(), "device": "cpu"},
        "subject": certificate.subject(document.data, {}, shape),  # a refused config may have no layout
    }
    with TemporaryDirectory(prefix="verify_") as folder:
        try:
            run = _run_config(model, arguments, world_size)
            found["subject"] = certificate.subject(document.data, certificate.layout_of(run.resolved), shape)
            reduced = reduce(run)
            tiny = shrink(source.config, tensor=reduced.execution.tp)
        except UserError as error:
            return {**found, "verdict": certificate.REFUSED, "reason": str(error), "compared": [], "left_out": []}
        tiny.save_pretrained(folder)
        verdicts = try_all(compositions(folder, reduced, source), report)
        return {
            **found,
            **conclude(verdicts),
            "tried": {"ranks": reduced.execution.ranks, "layout": str(reduced.execution)},
            "compared": [_row(verdict, folder) for verdict in verdicts],
            "left_out": reduced.left_out,
        }


def _run_config(model: str, arguments: TrainingArguments, world_size: int | None) -> RunConfig:
    """Read and check the config for `world_size` ranks; None: the fewest that it runs on, with two data ranks if its
    batch sizes allow that."""
    if world_size is not None:
        return read_run_config(arguments, world_size=world_size, model=model)
    data = read_config(arguments.deepspeed_config).data
    pp = arguments.pipeline_parallel_size or whole(lookup(data, "/pipeline/stages")) or 1
    tp = arguments.tensor_parallel_size or whole(lookup(data, "/tensor_parallel/autotp_size")) or 1
    train, micro, accumulation = (whole(lookup(data, at)) for at in (TRAIN, MICRO, ACCUMULATION))
    stated = train // (micro * accumulation) if train and micro and accumulation else None
    try:
        return read_run_config(arguments, world_size=pp * tp * (stated or 2), model=model)
    except UserError:
        return read_run_config(arguments, world_size=pp * tp, model=model)


def reduce(run: RunConfig) -> Reduced:
    """Return the config at a small size, with the list of what is left out."""
    resolved, data, left_out = run.resolved, run.document.data, []
    execution = _execution(run)
    asked = {
        "pipeline stages": (resolved.pp_size, execution.pp),
        "tensor-parallel ranks": (resolved.tp_size, execution.tp),
    }
    asked["ranks that share a sequence"] = (resolved.cp_size, execution.cp)
    left_out += [f"{there} {name}: {here} are tried" for name, (there, here) in asked.items() if there != here]
    if any(lookup(data, f"/zero_optimization/{name}/device") == "nvme" for name in OFFLOADS):
        left_out.append("offload to nvme: to the host's memory instead")
    precision = resolved.precision
    if precision == "fp16":
        precision = "fp32"
        left_out.append("fp16: a CPU has none; float32 is tried")
    stated = lookup(data, "/optimizer/type")
    optimizer = "adamw" if stated is None else OPTIMIZERS.get(str(stated).lower())
    if optimizer is None:
        optimizer = "adamw"
        left_out.append(f"optimizer {stated}: AdamW is tried")
    elif stated is not None:
        left_out.append("optimizer.params: values that move a tiny model are tried")
    left_out += [text for pointer, text in accelerated(data).items() if pointer != "/optimizer/type"]
    if resolved.compile_backend is not None:
        left_out.append(f"compile.backend {resolved.compile_backend}: aot_eager is tried")
    left_out += [f"{name}: not tried" for name in data if name not in TRIED and not name.startswith(("$", "_"))]
    left_out.append("batch sizes, rate and schedule of the learning rate: small ones, and a constant rate, are tried")
    training = Training(
        data="masked",
        micro=2 if execution.dp < 4 else 1,
        steps=STEPS,
        precision=precision,
        sums=str(lookup(data, "/data_types/grad_accum_dtype") or "") if precision == "bf16" else "",
        optimizer=optimizer,
        clip=float(resolved.config.get("gradient_clipping", 1.0)),
    )
    return Reduced(training=training, execution=execution, left_out=left_out)


def _execution(run: RunConfig) -> Execution:
    resolved, data = run.resolved, run.document.data
    pp, tp = resolved.pp_size, resolved.tp_size
    while pp * tp > MOST_RANKS:  # stages and tensor-parallel ranks remain
        pp, tp = (pp // 2, tp) if pp >= tp else (pp, tp // 2)
    dp = 2 if pp * tp * 2 <= MOST_RANKS else 1
    devices = [lookup(data, f"/zero_optimization/{name}/device") for name in OFFLOADS]
    optimizer, parameters = (device not in (None, "none") for device in devices)
    return Execution(
        pp=pp,
        tp=tp,
        dp=dp,
        cp=2 if resolved.cp_size > 1 and dp == 2 else 1,
        ep=1 if resolved.ep_size == 1 else tp * (dp if resolved.ep_size > resolved.tp_size else 1),
        zero=resolved.zero_stage,
        offload="all" if parameters else "optimizer" if optimizer else "none",
        schedule=resolved.schedule if pp > 1 else "1f1b",
        chunks=resolved.chunks.per_stage if resolved.schedule == "interleaved" and pp > 1 else 0,
        partition=resolved.partition if pp > 1 else "balanced",
        recompute=resolved.activation_checkpoint_interval,
        sequence=resolved.sequence_parallel,
        bits=resolved.gradient_bits or 0,
        compile="aot_eager" if resolved.compile_backend is not None else "",
        rest=_rest(data),
    )


def _rest(data: JsonObject) -> JsonObject:
    """Return the keys of a JSON that are kept besides the fields of an execution."""
    rest: JsonObject = {name: copy.deepcopy(data[name]) for name in VALUES if name in data}
    for name in SECTIONS:
        section = data.get(name)
        if isinstance(section, dict):
            more = {key: copy.deepcopy(value) for key, value in section.items() if key not in READ.get(name, ())}
            rest |= {name: more} if more else {}
    zero = rest.get("zero_optimization", {})
    for name in OFFLOADS:
        if isinstance(zero.get(name), dict):
            zero[name] = {key: value for key, value in zero[name].items() if key not in OF_NVME}
    for pointer in accelerated(data):  # a CPU would refuse them
        section, key = pointer.split("/")[1:-1], pointer.split("/")[-1]
        inner = rest
        for step in section:
            inner = inner.get(step, {})
        inner.pop(key, None)
    return {name: value for name, value in rest.items() if value != {}}


def compositions(model: str, reduced: Reduced, source: ModelSource) -> list[Composition]:
    """Return the compositions to try: in float32, saved and resumed; in 16 bits; with dropout; with a router loss."""
    plain = {name: value for name, value in reduced.execution.rest.items() if name not in ("bf16", "data_types")}
    exact = replace(reduced.execution, rest=plain)
    training = replace(reduced.training, precision="fp32", sums="")
    found: list[tuple[Training, tuple[Execution, ...]]] = [(replace(training, evaluate=2), (exact, exact))]
    if reduced.training.precision != "fp32":
        found.append((replace(reduced.training, data="blocks"), (reduced.execution,)))
    fields: JsonObject = source.config.to_dict()
    if any("drop" in name and isinstance(rate, float) and rate > 0 for name, rate in fields.items()):
        found.append((replace(training, dropout=0.1), (exact,)))
    if fields.get("output_router_logits"):
        found.append((replace(training, router=0.05), (exact,)))
    return [Composition(model=model, training=each, executions=executions) for each, executions in found]


def conclude(verdicts: Sequence[TrialResult]) -> JsonObject:
    """Return the verdict on all compositions, with its reason."""
    bad = next((verdict for verdict in verdicts if verdict.is_bad), None)
    if bad is not None:
        return {"verdict": certificate.DIFFERS, "reason": f"{described(bad)}: {bad.reason}"}
    for kind, word in ((REFUSED, certificate.REFUSED), (UNTRIED, certificate.UNVERIFIED)):
        other = next((verdict for verdict in verdicts if verdict.kind == kind), None)
        if other is not None:
            return {"verdict": word, "reason": other.reason}
    return {"verdict": certificate.EQUAL}


def described(verdict: TrialResult) -> str:
    """Describe what was tried in a few words."""
    training, executions = verdict.composition.training, verdict.composition.executions
    words = [{"fp32": "float32"}.get(training.precision, training.precision)]
    words += ["saved and resumed"] if len(executions) > 1 else []
    words += ["with dropout"] if training.dropout else []
    words += ["with the router loss"] if training.router else []
    return ", ".join(words)


def _row(verdict: TrialResult, folder: str) -> JsonObject:
    return {
        "what": described(verdict),
        "line": str(verdict.composition).replace(folder, "MODEL"),
        "ranks": verdict.composition.ranks,
        "steps": verdict.composition.training.steps,
        "verdict": verdict.kind if verdict.kind != RIGHT else certificate.EQUAL,
        "reason": verdict.reason.replace(folder, "MODEL"),
        "largest": None if verdict.off is None else asdict(verdict.off),
        "allowed": None if verdict.limit is None else asdict(verdict.limit),
        "of_the_precision": None if verdict.own is None else asdict(verdict.own),
    }
