"""Tensor-parallel plans: what becomes of each module of a model, as data.

A plan is the model's own where its family declares one (transformers: `base_model_tp_plan` of the config and
`_tp_plan` of the classes, merged as `model.tp_plan`), else a file `<model_type>.json`:

    {"styles":     {"transformer.h.*.attn.c_attn": {"style": "packed_colwise", "parts": 3},
                    "transformer.h.*.attn.c_proj": "rowwise"},
     "attributes": {"transformer.h.*.attn": {"num_heads": "divide"}},
     "inputs":     {"transformer.h.*": {"alibi": {"dim": 0, "run": "num_attention_heads"}}}}

`styles` are transformers' words (see `STYLES`) by module or parameter name, `*` for a number. `attributes`
are sizes which a module's forward reads and which shrink with its weights. `inputs` are tensors, given to a
module, of which a rank needs its part: dimension `dim` is made of runs of `run` entries (a size in the
config; without it, one run), of each of which the rank keeps its share.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from harness.config.errors import UserError

STYLES = frozenset(
    {
        "colwise",
        "rowwise",
        "colwise_gather_output",
        "rowwise_split_input",
        "packed_colwise",
        "packed_rowwise",
        "embedding_rowwise",
        "embedding_colwise",
        "moe_tp_experts",
        "moe_identity_expert",
        "mla_kv_a_proj",
        "all_reduce",
        "local_params",
        "replicated_with_grad_allreduce",
        "replicate",
    }
)
_FORMER_NAMES = {"colwise_rep": "colwise_gather_output", "rowwise_rep": "rowwise_split_input"}
_ADVICE = "set tensor_parallel.autotp_size to 1"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What becomes of a module or parameter. `parts`: how many equal parts a packed weight holds side by
    side."""

    style: str
    parts: int = 2


@dataclass(frozen=True, kw_only=True)
class InputRule:
    """Which dimension of an input is cut, and the config's name for the length of its runs (None: one
    run)."""

    dim: int
    run: str | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The rules of one model, by name with `*` for a number. `head` and `embedding`: the names of the modules
    that make the logits and that take the ids, where the model tells."""

    model_type: str
    rules: Mapping[str, Rule]
    attributes: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    inputs: Mapping[str, Mapping[str, InputRule]] = field(default_factory=dict)
    head: str | None = None
    embedding: str | None = None

    @property
    def splits_head(self) -> bool:
        """Whether the logits' vocabulary is split, so that a rank's logits can be kept local."""
        rule = self.rules.get(self.head or "")
        return rule is not None and rule.style == "colwise_gather_output"


class NoPlan(UserError):
    """A family that declares no tensor-parallel plan, and has no plan file either."""


def wildcard(name: str) -> str:
    """`name` with `*` in the place of every number between dots: model.layers.3.mlp -> model.layers.*.mlp."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def plan_for(model: nn.Module, plans: Path | None = None) -> Plan:
    """The plan of a transformers model: its own, else the file of its model type in the folder `plans`.

    Where input and output embedding are one parameter, both are split by vocabulary or neither is. Raises
    UserError where the family has no plan, and where a plan has a style that is not known.
    """
    config: Any = model.config
    own: Mapping[str, str] = getattr(model, "tp_plan", None) or {}
    if any("*" in name for name in own):
        plan = Plan(model_type=config.model_type, rules={n: _rule(word) for n, word in own.items()})
    else:
        path = None if plans is None else plans / f"{config.model_type}.json"
        if path is None or not path.is_file():
            raise NoPlan(
                f"model type {config.model_type!r} declares no tensor-parallel plan: {_ADVICE}, "
                f"or describe how to cut it in {path or 'a plan file'}"
            )
        plan = read_plan_file(path)
    for pattern, rule in plan.rules.items():
        if rule.style not in STYLES:
            raise UserError(
                f"the tensor-parallel plan of model type {plan.model_type!r} has the style "
                f"{rule.style!r} for {pattern}, which is not known: {_ADVICE}, "
                f"or give a plan file with one of {', '.join(sorted(STYLES))}"
            )
    return _with_embeddings(plan, model)


def read_plan_file(path: Path) -> Plan:
    """The plan in a JSON file, named after its model type. Raises UserError where it is not one."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return Plan(
            model_type=path.stem,
            rules={n: _rule(word) for n, word in data["styles"].items()},
            attributes=_words(data.get("attributes", {}), {"divide"}),
            inputs={
                n: {name: InputRule(**r) for name, r in rules.items()} for n, rules in data.get("inputs", {}).items()
            },
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{path} is not a tensor-parallel plan: {type(error).__name__}: {error}") from error


def _rule(word: str | Mapping[str, Any]) -> Rule:
    rule = Rule(style=word) if isinstance(word, str) else Rule(**word)
    return replace(rule, style=_FORMER_NAMES.get(rule.style, rule.style))


def _words(attributes: Mapping[str, Mapping[str, str]], known: set[str]) -> Mapping[str, Mapping[str, str]]:
    for pattern, words in attributes.items():
        for name, word in words.items():
            if word not in known:
                raise ValueError(f"{pattern}: attribute {name} says {word!r}, known is {', '.join(sorted(known))}")
    return attributes


def _with_embeddings(plan: Plan, model: Any) -> Plan:
    """The plan with the embeddings' names. Logits leave a split head gathered; where both embeddings share a
    parameter, both are split by vocabulary."""
    names: Mapping[int, str] = {id(module): name for name, module in model.named_modules()}
    head_module, embedding_module = model.get_output_embeddings(), model.get_input_embeddings()
    head, embedding = names.get(id(head_module)), names.get(id(embedding_module))
    rules = dict(plan.rules)
    tied = head_module is not None and head_module.weight is getattr(embedding_module, "weight", None)
    if head and embedding and tied and (head in rules or embedding in rules):
        rules |= {head: Rule(style="colwise_gather_output"), embedding: Rule(style="embedding_rowwise")}
    elif head and head in rules and rules[head].style == "colwise":
        rules[head] = Rule(style="colwise_gather_output")
    return replace(plan, rules=rules, head=head, embedding=embedding)
