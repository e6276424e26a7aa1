"""Train a composition by plain torch and transformers in one process: the reference for every execution.

No layer, loss or optimizer of the harness is used. Three of its definitions are. The order of samples is imported. The
other two are written here a second time: micro-batches are consecutive samples in that order, and random draws depend
on seed, sample, layer and position within the layer.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle
from transformers import AutoModelForCausalLM, get_scheduler

from harness.batches.order import batch_indices
from harness.config.values.json_object import JsonObject
from harness.data.tokenizer import ByteTokenizer
from harness.errors import UserError
from harness.optimizers import DEFAULT, OPTIMIZERS
from harness.parallel.plans.experts import run_where_aligned
from harness.verify.trials.composition import Composition, Training
from harness.verify.trials.subject import (
    SAMPLED,
    SCALE_POWER,
    Subject,
    trial_options,
)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
APART = 1e-4  # relative difference of logits that rounding does not make: documents see each other
ROUNDING = {"fp32": (2e-7, 1), "bf16": (5e-3, 16), "fp16": (7e-4, 16)}
"""Rounding errors that are put into weights, by precision: their relative size, and one weight of how many gets one."""

Model: TypeAlias = Any
"""A model of transformers, perhaps inside one of peft."""


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """The results of a training.

    Attributes:
        losses, norms: loss and gradient norm before clipping of each step.
        evaluations: loss of each evaluation, by step.
        texts: continuations of the prompts, at each evaluation.
        weights: the exported tensors after the last step, by name; before: those before the first step.
    """

    losses: list[float]
    norms: list[float]
    evaluations: dict[int, float] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    before: Mapping[str, Tensor] = field(default_factory=dict)


def reference(
    composition: Composition, subject: Subject, *, precision: str | None = None, rounding: int | None = None
) -> TrainingResult:
    """Train in one process, in the composition's precision or another one.

    Args:
        rounding: seed of rounding errors that are put into the initial weights; None: unchanged weights.
    """
    return _Loop(composition.training, subject, precision or composition.training.precision).run(rounding)


class _Loop:
    """One training. The optimizer updates float32 weights; in a 16-bit precision the model holds copies of them."""

    def __init__(self, training: Training, subject: Subject, precision: str) -> None:
        self.training = training
        self.precision = precision
        self.dtype = DTYPES[precision]
        self.scale = 2.0**SCALE_POWER if precision == "fp16" else 1.0
        self.sums = DTYPES.get(training.sums, torch.float32) if self.dtype != torch.float32 else torch.float32
        self.masters = _model(training, subject, torch.float32)
        self.model = self.masters if self.dtype == torch.float32 else _model(training, subject, self.dtype)
        with torch.no_grad():  # a run in 16 bits begins with weights rounded to 16 bits
            for master, copy in zip(self.masters.parameters(), self.model.parameters(), strict=True):
                master.copy_(copy)
        self.trained = [p for p in self.masters.parameters() if p.requires_grad]
        self.copies = [p for p in self.model.parameters() if p.requires_grad]
        self.subject = subject
        self.rows = subject.trained()

    def run(self, rounding: int | None) -> TrainingResult:
        training = self.training
        before = _exported(self.model)
        if training.data == "packed" and self._joins_documents:
            self._require_apart(self.rows[0])
        if rounding is not None:
            self._move_weights(torch.Generator().manual_seed(rounding))
        self._copy()
        optimizer = _optimizer(self.masters, training)
        scheduler = get_scheduler(training.scheduler, optimizer, training.warmup, training.steps)
        found = TrainingResult(losses=[], norms=[], before=before)
        for step in range(1, training.steps + 1):
            found.losses.append(self._gradients((step - 1) * training.batch))
            norm = torch.nn.utils.clip_grad_norm_(self.trained, training.clip or float("inf"))
            found.norms.append(norm.item())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            self._copy()
            if training.evaluate and (step % training.evaluate == 0 or step == training.steps):
                found.evaluations[step] = self._evaluate()
                found.texts.extend(map(self._continue, self.subject.prompts))
        return TrainingResult(**{**vars(found), "weights": _exported(self.model)})

    @torch.no_grad()
    def _move_weights(self, generator: torch.Generator) -> None:
        """Put rounding errors into the weights."""
        size, one_of = ROUNDING[self.precision]
        for parameter in self.masters.parameters():
            sign = torch.randint(2, parameter.shape, generator=generator) * 2 - 1
            chosen = torch.randint(one_of, parameter.shape, generator=generator) == 0
            parameter.mul_(1 + size * sign * chosen)

    @torch.no_grad()
    def _copy(self) -> None:
        if self.model is not self.masters:
            for copy, master in zip(self.model.parameters(), self.masters.parameters(), strict=True):
                copy.copy_(master)

    def _gradients(self, consumed: int) -> float:
        """Set the gradients of a step on the float32 weights; return the loss of the step."""
        training = self.training
        total = 0.0
        order = batch_indices(consumed, training.batch, len(self.rows), training.seed).tolist()
        parts = [
            [self.rows[row] for row in order[start : start + training.micro]]
            for start in range(0, training.batch, training.micro)
        ]
        count = sum(_counted(row) for part in parts for row in part)
        sums = [torch.zeros_like(copy, dtype=self.sums) for copy in self.copies]
        used = [False] * len(sums)
        for number, part in enumerate(parts):
            rng = _DropoutRng(self.model, training, consumed + number * training.micro) if training.dropout else None
            loss, router = self._losses(part, rng)
            value = loss / count + training.router * router / len(parts)
            (value * self.scale).backward()
            total += value.item()
            for index, copy in enumerate(self.copies):
                if copy.grad is not None:
                    sums[index] += copy.grad.to(self.sums)
                    used[index], copy.grad = True, None
        for master, gradient, is_used in zip(self.trained, sums, used, strict=True):
            master.grad = gradient.float() / self.scale if is_used else None
        return total

    @property
    def _joins_documents(self) -> bool:
        """Whether documents of a row share a forward pass: dropout and router losses depend on all of a micro-batch."""
        return bool(self.training.dropout or self.training.router)

    @torch.no_grad()
    def _require_apart(self, row: Mapping[str, list[int]]) -> None:
        """Raise UserError if the model lets the documents of a packed row see each other."""
        self.masters.eval()
        ids, positions = (torch.tensor([row[name]]) for name in ("input_ids", "position_ids"))
        joined = self.masters(input_ids=ids, position_ids=positions, use_cache=False).logits[0]
        start, stop = _bounds(row)[-2:]
        alone = self.masters(input_ids=ids[:, start:stop], use_cache=False).logits[0]
        self.masters.train()
        if (joined[start:stop] - alone).abs().max() > APART * alone.abs().max():
            raise UserError("it does not keep the documents of a packed row apart, but here they share a forward pass")

    def _losses(self, part: Sequence[Mapping[str, list[int]]], rng: _DropoutRng | None) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses of a micro-batch's labels, and its router loss."""
        training = self.training
        total = router = torch.zeros(())
        whole = self._joins_documents
        if whole or training.data != "packed":
            # padding counts in a router loss too
            names = {"packed": ["position_ids"], "padded": [] if whole else ["attention_mask"]}.get(training.data, [])
            given = {name: torch.tensor([row[name] for row in part]) for name in ("input_ids", *names)}
            more = {"output_router_logits": True} if training.router else {}
            with rng or nullcontext():
                outputs = self.model(**given, **more, use_cache=False)
            router = outputs.aux_loss.float() if training.router else router
            for row, logits in zip(part, outputs.logits, strict=True):
                total = total + _loss(logits, _labels(row), training.smoothing)
            return total, router
        for row in part:
            labels = _labels(row)
            for start, stop in pairwise(_bounds(row)):
                ids = torch.tensor([row["input_ids"][start:stop]])
                logits = self.model(input_ids=ids, use_cache=False).logits[0]
                total = total + _loss(logits, labels[start:stop], training.smoothing)
        return total, router

    @torch.no_grad()
    def _evaluate(self) -> float:
        self.model.eval()
        rows = self.subject.evaluated()
        loss, router = self._losses(rows, None)
        self.model.train()
        return float(loss / sum(map(_counted, rows)) + self.training.router * router)

    @torch.no_grad()
    def _continue(self, prompt: str) -> str:
        self.model.eval()
        ids = list(prompt.encode())
        longest = max(map(len, map(str.encode, self.subject.prompts))) + SAMPLED
        for _ in range(SAMPLED):
            # Padded on the right like in the harness. No token sees the padding, but a sparse attention (hy_v4,
            # deepseek_v32) chooses differently among keys with equal scores if the row is longer.
            padded = torch.tensor([ids + [ids[-1]] * (longest - len(ids))])
            token = int(self.model(input_ids=padded, use_cache=False).logits[0, len(ids) - 1].argmax())
            if token == ByteTokenizer().eos_token_id:
                break
            ids.append(token)
        self.model.train()
        return str(ByteTokenizer().decode(ids[len(prompt.encode()) :]))


def _model(training: Training, subject: Subject, dtype: torch.dtype) -> Model:
    more = {"attn_implementation": training.attention} if training.attention else {}
    model: Model = AutoModelForCausalLM.from_pretrained(subject.base, dtype=dtype, local_files_only=True, **more)
    run_where_aligned(model, dtype)
    if subject.adapters is not None:
        from peft import PeftModel

        # peft would keep adapters in float32; DeepSpeed, and so the harness, has one dtype and updates float32 copies
        model = PeftModel.from_pretrained(model, subject.adapters, is_trainable=True, autocast_adapter_dtype=False)
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.data = parameter.data.to(dtype)
    return model.train()


def _exported(model: Model) -> dict[str, Tensor]:
    """Return the tensors that `save_pretrained` writes."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return read_weights(Path(folder))


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Return name -> tensor (any shape) of a HuggingFace or peft directory."""
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def _optimizer(model: Model, training: Training) -> Optimizer:
    """Return torch's optimizer, with weight decay for the parameters that transformers decays."""
    from transformers import Trainer  # takes seconds to import, and ranks import this module without needing it

    decayed = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]  # it does not use self
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups: list[JsonObject] = [
        {"params": [p for name, p in named if name in decayed], "weight_decay": training.decay},
        {"params": [p for name, p in named if name not in decayed], "weight_decay": 0.0},
    ]
    optimizer = OPTIMIZERS[training.optimizer] if training.optimizer else DEFAULT
    found: Optimizer = resolve_name(optimizer.class_of({}, by_torch=True).path)(groups, **trial_options(training))
    return found


# -- the loss ----------------------------------------------------------------------------------------------


def _labels(row: Mapping[str, list[int]]) -> list[int]:
    mask = row.get("attention_mask", [1] * len(row["input_ids"]))
    labels = [x if seen else -100 for x, seen in zip(row.get("labels", row["input_ids"]), mask, strict=True)]
    for start in _bounds(row)[:-1]:  # nothing predicts the first token of a document
        labels[start] = -100
    return labels


def _bounds(row: Mapping[str, list[int]]) -> list[int]:
    """Return where the documents of a row begin, and where the last of them ends, without padding."""
    positions = row.get("position_ids", range(len(row["input_ids"])))
    end = sum(row.get("attention_mask", [1] * len(row["input_ids"])))
    return [*(place for place, position in enumerate(positions) if position == 0), end]


def _counted(row: Mapping[str, list[int]]) -> int:
    return sum(label != -100 for label in _labels(row)[1:])


def _loss(logits: Tensor, labels: Sequence[int], smoothing: float) -> Tensor:
    """Return the sum of the losses of valid labels; row i of logits [sequence, vocabulary] predicts label i + 1."""
    wanted = torch.tensor(labels[1:])
    logarithms = logits[: len(wanted)].float().log_softmax(-1)[wanted != -100]
    hit = logarithms.gather(-1, wanted[wanted != -100][:, None]).sum()
    return -(1 - smoothing) * hit - smoothing * logarithms.mean(-1).sum()


# -- random numbers ----------------------------------------------------------------------------------------


class _DropoutRng(TorchFunctionMode):
    """Draws the dropout masks of a micro-batch from seed, sample, layer and number of the draw in the layer."""

    def __init__(self, model: Model, training: Training, first_sample: int) -> None:
        super().__init__()
        self.key = training.seed, first_sample
        self.samples = training.micro
        self.lora = training.lora
        self.layer = self.number = 0
        self.stack = _layer_stack(model)
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> None:
        last = len(self.stack)
        for index, layer in enumerate(self.stack, 1):
            self._hooks.append(layer.register_forward_pre_hook(lambda *_, index=index: self._enter(index)))
            if index == last:
                self._hooks.append(layer.register_forward_hook(lambda *_: self._enter(last + 1)))
        super().__enter__()  # type: ignore[no-untyped-call]  # torch gives it no types

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # torch gives it no types
        for hook in self._hooks:
            hook.remove()

    def _enter(self, layer: int) -> None:
        self.layer = layer
        self.number = 0

    def __torch_function__(
        self, func: Model, types: object, args: tuple[object, ...] = (), kwargs: JsonObject | None = None
    ) -> object:
        kwargs = kwargs or {}
        attend: Callable[..., Tensor] = self._attention
        drop: Callable[..., Tensor] = self._dropout
        if func in (F.dropout, torch.dropout):
            return drop(*args, **kwargs)
        if func is F.scaled_dot_product_attention and kwargs.get("dropout_p"):
            return attend(*args, **kwargs)
        return func(*args, **kwargs)

    def _dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:  # noqa: ARG002
        if not training or not p:
            return input
        if self.lora and self.layer > len(self.stack):
            # modernbert-decoder: the harness counts its norm and its head as two layers
            raise UserError("it drops inputs of adapters after its last layer, where no layer number is known")
        dropped = torch.empty(input.shape, dtype=torch.bool)
        for index, part in enumerate(dropped.view(self.samples, -1)):
            key = (self.key[0], self.key[1] + index, self.layer, self.number, 0)
            digest = hashlib.blake2b("\0".join(map(str, key)).encode(), digest_size=8).digest()
            part.bernoulli_(p, generator=torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1))
        self.number += 1
        return (input / (1 - p)).masked_fill(dropped, 0.0)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,  # noqa: ARG002  # the shapes show it
    ) -> Tensor:
        groups = query.shape[-3] // key.shape[-3]
        key = key.repeat_interleave(groups, -3)
        value = value.repeat_interleave(groups, -3)
        scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, float("-inf"))
        elif attn_mask is not None:
            scores = scores + attn_mask
        return self._dropout(scores.softmax(-1), dropout_p) @ value


def _layer_stack(model: Model) -> nn.ModuleList:
    """Return the decoder layers: the first list with as many modules as the model has layers, no image encoder."""
    depth = model.config.get_text_config(decoder=True).num_hidden_layers
    lists = ((name, m) for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == depth)
    return next(found for name, found in lists if "image" not in name and "vision" not in name)
