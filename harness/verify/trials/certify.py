"""Certify a user's model, layout and config: train a tiny copy on this machine's processor, compare with one process.

The settings that decide the computation are kept: layout, ZeRO, offload, precision, schedule, clipping, the type of
optimizer, and the other keys of these sections. Ranks, batches and the model become small. The certificate lists the
settings that could not be kept.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import partial
from math import lcm
from tempfile import TemporaryDirectory

from harness.arguments import TrainingArguments
from harness.arguments.configure import RunConfig, read_config
from harness.config import Resolved
from harness.config.values.batch import ACCUMULATION, MICRO, TRAIN
from harness.config.values.idle_keys import accelerated
from harness.config.values.json_object import JsonObject
from harness.config.values.layout_keys import CONTEXT, DEEPSPEED_CONTEXT, EXPERTS, TENSOR
from harness.config.values.pointers import lookup, whole
from harness.errors import UserError
from harness.hf.skeleton import ModelSource, read_source
from harness.installed import config_check, read_run_config
from harness.optimizers import DEFAULT as DEFAULT_OPTIMIZER
from harness.optimizers import find
from harness.report import certificate
from harness.schedules import DEFAULT, SCHEDULES
from harness.training.prepare.trainable import shaping
from harness.training.recording.files import versions
from harness.verify.tiny_copy import shrink
from harness.verify.trials.composition import Composition, Execution, Training
from harness.verify.trials.trial import REFUSED, RIGHT, UNTRIED, TrialResult, try_all

MOST_RANKS = 8
MOST_CHUNKS = 4  # of a tiny copy, which may have four layers
SECTIONS = (
    "pipeline",
    "tensor_parallel",
    "zero_optimization",
    "activation_checkpointing",
    "gradient_reduction",
    "data_types",
    "bf16",
    "context_parallel",
)
VALUES = ("communication_data_type", "prescale_gradients", "gradient_predivide_factor")
READ = {
    "pipeline": (
        *("stages", "partition", "schedule", "chunks_per_stage"),
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
TRIED = frozenset(
    [
        *(*SECTIONS, *VALUES, "fp16", "optimizer", "compile", "gradient_compression", "gradient_clipping"),
        *("expert_parallel", "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
        *("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
    ]
)
"""Keys that are tried, or for which `reduce` itself says why they are not."""
STEPS = 4
AXES = {
    "cp": "ranks that share a sequence",
    "ep": "expert-parallel ranks",
    "tp": "tensor-parallel ranks",
    "pp": "pipeline stages",
}


@dataclass(frozen=True, kw_only=True)
class Reduced:
    """A user's config at a small size.

    Attributes:
        executions: the layouts to try; several if the sizes of the config need too many ranks together.
        left_out: the settings that are not tried, each in a few words.
    """

    training: Training
    executions: list[Execution]
    left_out: list[str]

    @property
    def execution(self) -> Execution:
        """The first of the layouts, which is tried in every way."""
        return self.executions[0]


def certify(
    model: str,
    arguments: TrainingArguments,
    report: Callable[[TrialResult], None],
    world_size: int | None = None,
) -> JsonObject:
    """Return the certificate of a model (a directory, or a preset's name) and the config that the arguments name.

    `report` is called with each verdict. Raises UserError for a file that cannot be read.
    """
    source = read_source(model)
    document = read_config(arguments.deepspeed_config, config_check())
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
            run = run_config(model, arguments, world_size)
            found["subject"] = certificate.subject(document.data, certificate.layout_of(run.resolved), shape)
            reduced = reduce(run)
            tiny = shrink(source.config, tensor=lcm(*(each.tp for each in reduced.executions)))
        except UserError as error:
            return {**found, "verdict": certificate.REFUSED, "reason": str(error), "compared": [], "left_out": []}
        tiny.save_pretrained(folder)
        verdicts = try_all(compositions(folder, reduced, source), report)
        return {
            **found,
            **conclude(verdicts),
            "tried": [{"ranks": each.ranks, "layout": str(each)} for each in reduced.executions],
            "compared": [_row(verdict, folder) for verdict in verdicts],
            "left_out": reduced.left_out,
        }


def run_config(model: str, arguments: TrainingArguments, world_size: int | None) -> RunConfig:
    """Read and check the config for `world_size` ranks; None: the fewest that it runs on, with two data ranks if its
    batch sizes allow that."""
    if world_size is not None:
        return read_run_config(arguments, world_size=world_size, model=model)
    data = read_config(arguments.deepspeed_config, config_check()).data
    pp = arguments.pipeline_parallel_size or whole(lookup(data, "/pipeline/stages")) or 1
    tp = arguments.tensor_parallel_size or whole(lookup(data, TENSOR)) or 1
    cp = arguments.context_parallel_size or whole(lookup(data, CONTEXT)) or whole(lookup(data, DEEPSPEED_CONTEXT)) or 1
    stated = whole(lookup(data, f"{EXPERTS}/autoep_size")) if lookup(data, f"{EXPERTS}/enabled") is True else None
    fewest = data_ranks(tp, cp, arguments.expert_parallel_size or stated or 1)
    train, micro, accumulation = (whole(lookup(data, at)) for at in (TRAIN, MICRO, ACCUMULATION))
    # ranks that share a sequence read the same samples
    dp = train // (micro * accumulation) * cp if train and micro and accumulation else max(fewest, 2)
    try:
        return read_run_config(arguments, world_size=pp * tp * dp, model=model)
    except UserError:
        if dp == fewest:
            raise
        return read_run_config(arguments, world_size=pp * tp * fewest, model=model)


def data_ranks(tp: int, cp: int, ep: int) -> int:
    """Return the fewest data-parallel ranks over which `cp` ranks share a sequence and `ep` the experts."""
    return lcm(max(cp, 1), max(ep // max(tp, 1), 1))


def reduce(run: RunConfig) -> Reduced:
    """Return the config at a small size, with the list of what is left out."""
    resolved = run.resolved
    data = run.document.data
    pp = resolved.pp_size
    while pp > max(1, MOST_CHUNKS // resolved.chunks.per_stage):
        pp //= 2
    sizes = tried_sizes(Sizes(pp=pp, tp=resolved.tp_size, cp=resolved.cp_size, ep=resolved.ep_size))
    executions = [_execution(run, each) for each in sizes]
    left_out = list(_sizes_left_out(resolved, sizes))
    if any(lookup(data, f"/zero_optimization/{name}/device") == "nvme" for name in OFFLOADS):
        left_out.append("offload to nvme: to the host's memory instead")
    precision = resolved.precision
    if precision == "fp16":
        precision = "fp32"
        left_out.append("fp16: a CPU has none; float32 is tried")
    stated = lookup(data, "/optimizer/type")
    optimizer = find(str(stated))
    tried = optimizer.name if optimizer is not None and optimizer.trial is not None else ""
    if tried:
        left_out.append("optimizer.params: values that move a tiny model are tried")
    elif stated is not None:
        left_out.append(f"optimizer {stated}: {DEFAULT_OPTIMIZER.name} is tried")
    left_out += [text for pointer, text in accelerated(data).items() if pointer != "/optimizer/type"]
    if resolved.compile_backend is not None:
        left_out.append(f"compile.backend {resolved.compile_backend}: aot_eager is tried")
    left_out += [f"{name}: not tried" for name in data if name not in TRIED and not name.startswith(("$", "_"))]
    left_out.append("batch sizes, rate and schedule of the learning rate: small ones, and a constant rate, are tried")
    training = Training(
        data="masked",
        batch=lcm(8, *(each.dp // each.cp for each in executions)),
        micro=1 if any(each.dp // each.cp > 3 for each in executions) else 2,
        steps=STEPS,
        precision=precision,
        sums=str(lookup(data, "/data_types/grad_accum_dtype") or "") if precision == "bf16" else "",
        optimizer=tried,
        clip=float(resolved.config.get("gradient_clipping", 1.0)),
    )
    return Reduced(training=training, executions=executions, left_out=left_out)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of a layout that are tried as they are."""

    pp: int
    tp: int
    cp: int
    ep: int

    @property
    def fewest(self) -> int:
        """The fewest ranks that have these sizes."""
        return self.pp * self.tp * data_ranks(self.tp, self.cp, self.ep)

    def halved(self, axis: str) -> Sizes:
        """Return the sizes with that of an axis halved; experts stay on whole groups of tensor-parallel ranks."""
        if self.ep == 1 or axis in ("pp", "cp"):
            return replace(self, **{axis: getattr(self, axis) // 2})
        tp = self.tp
        groups = self.ep // self.tp
        tp, groups = (tp // 2, groups) if axis == "tp" else (tp, groups // 2)
        return replace(self, tp=tp, ep=tp * groups)


def tried_sizes(given: Sizes) -> list[Sizes]:
    """Return the sizes to try: those given or, if they need too many ranks, several in which each axis is kept once.

    An axis that alone needs too many ranks is halved until it fits.
    """
    found = [_fitting(given, kept) for kept in AXES if getattr(given, kept) > 1] or [given]
    return list(dict.fromkeys(found))


def _fitting(given: Sizes, kept: str) -> Sizes:
    """Halve the sizes, the axis `kept` last and the largest of the others first, until the ranks are few enough."""
    sizes = given
    spared = {kept, "tp"} if kept == "ep" else {kept}  # fewer tensor-parallel ranks would halve the experts' ranks, too
    while sizes.fewest > MOST_RANKS:
        halvable = [axis for axis in AXES if getattr(sizes, axis) > (sizes.tp if axis == "ep" else 1)]
        others = [axis for axis in halvable if axis not in spared]
        last = kept if kept in halvable else "tp"
        sizes = sizes.halved(max(others, key=partial(getattr, sizes), default=last))
    return sizes


def _sizes_left_out(resolved: Resolved, tried: Sequence[Sizes]) -> Iterator[str]:
    """Yield the sizes of the layout that no execution has, and whether sizes are tried together."""
    given = Sizes(pp=resolved.pp_size, tp=resolved.tp_size, cp=resolved.cp_size, ep=resolved.ep_size)
    for axis, name in AXES.items():
        most = max(getattr(each, axis) for each in tried)
        if getattr(given, axis) != most:
            yield f"{getattr(given, axis)} {name}: {most} are tried"
    if len(tried) > 1:
        yield f"all sizes together need {given.fewest} ranks: each is tried with smaller others"
    if resolved.dp_size not in (ranks := {_dp(each) for each in tried}):
        yield f"{resolved.dp_size} data-parallel ranks: {' and '.join(map(str, sorted(ranks)))} are tried"


def _dp(sizes: Sizes) -> int:
    """Return the number of data-parallel ranks to try: two if that is not too many."""
    fewest = data_ranks(sizes.tp, sizes.cp, sizes.ep)
    return 2 if fewest == 1 and sizes.pp * sizes.tp * 2 <= MOST_RANKS else fewest


def _execution(run: RunConfig, sizes: Sizes) -> Execution:
    resolved = run.resolved
    data = run.document.data
    pp = sizes.pp
    devices = [lookup(data, f"/zero_optimization/{name}/device") for name in OFFLOADS]
    optimizer, parameters = (device not in (None, "none") for device in devices)
    offload = "optimizer" if optimizer else "none"
    if parameters:
        offload = "all"
    return Execution(
        pp=pp,
        tp=sizes.tp,
        dp=_dp(sizes),
        cp=sizes.cp,
        ep=sizes.ep,
        zero=resolved.zero_stage,
        offload=offload,
        schedule=resolved.schedule if pp > 1 else DEFAULT,
        chunks=resolved.chunks.per_stage if SCHEDULES[resolved.schedule].chunks is None and pp > 1 else 0,
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
        section = pointer.split("/")[1:-1]
        key = pointer.split("/")[-1]
        inner = rest
        for step in section:
            inner = inner.get(step, {})
        inner.pop(key, None)
    return {name: value for name, value in rest.items() if value != {}}


def compositions(model: str, reduced: Reduced, source: ModelSource) -> list[Composition]:
    """Return the compositions to try: every layout in float32, saved and resumed; the first of them also with label
    smoothing, in 16 bits, with dropout and with a router loss."""
    exact, *others = (_in_float32(each) for each in reduced.executions)
    training = replace(reduced.training, precision="fp32", sums="")
    found: list[tuple[Training, tuple[Execution, ...]]] = [
        (replace(training, evaluate=2), (each, each)) for each in (exact, *others)
    ]
    # one token less: context ranks, or ranks with sequence parallelism, then hold unequal numbers of tokens
    found.append((replace(training, smoothing=0.1, length=training.length - 1), (exact,)))
    if reduced.training.precision != "fp32":
        found.append((replace(reduced.training, data="blocks"), (reduced.execution,)))
    fields: JsonObject = source.config.to_dict()
    if any("drop" in name and isinstance(rate, float) and rate > 0 for name, rate in fields.items()):
        found.append((replace(training, dropout=0.1), (exact,)))
    if fields.get("output_router_logits"):
        found.append((replace(training, router=0.05), (exact,)))
    return [Composition(model=model, training=each, executions=executions) for each, executions in found]


def _in_float32(execution: Execution) -> Execution:
    kept = {name: value for name, value in execution.rest.items() if name not in ("bf16", "data_types")}
    return replace(execution, rest=kept)


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
    words += ["with label smoothing"] if training.smoothing else []
    words += ["with dropout"] if training.dropout else []
    words += ["with the router loss"] if training.router else []
    return ", ".join(words)


def _row(verdict: TrialResult, folder: str) -> JsonObject:
    return {
        "what": described(verdict),
        "line": str(verdict.composition).replace(folder, "MODEL"),
        "ranks": verdict.composition.ranks,
        "layout": verdict.composition.executions[0].sizes,
        "steps": verdict.composition.training.steps,
        "verdict": verdict.kind if verdict.kind != RIGHT else certificate.EQUAL,
        "reason": verdict.reason.replace(folder, "MODEL"),
        "largest": None if verdict.off is None else asdict(verdict.off),
        "allowed": None if verdict.limit is None else asdict(verdict.limit),
        "of_the_precision": None if verdict.own is None else asdict(verdict.own),
    }
