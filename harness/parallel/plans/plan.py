"""Tensor-parallel plans: how each module of a model is sharded, as data.

If the model's family declares a plan (transformers: `base_model_tp_plan` of the config and `_tp_plan` of the classes,
merged as `model.tp_plan`), that plan is used, and a plan file may extend it; otherwise the plan file is used. A plan
maps names of modules and parameters to styles: transformers' words and a few of ours (see `STYLES`). A plan file is
`models/plans/<model_type>.json`:

    {"styles":     {"transformer.h.*.attn.c_attn": {"style": "packed_colwise", "parts": 3},
                    "transformer.h.*.attn.c_proj": "rowwise"},
     "attributes": {"transformer.h.*.attn": {"num_heads": "divide"}},
     "inputs":     {"transformer.h.*": {"alibi": {"dim": 0, "run": "num_attention_heads"}}},
     "experts":    {"transformer.h.*.experts": "ep_dispatch_experts", "transformer.h.*.experts.w1": "grouped_gemm"},
     "cases":      [{"if": {"multi_query": true}, "styles": {...}},
                    {"if": {"qk_layernorm": true}, "refuse": "its heads' norms are a list"}]}

- `styles`: style of a module or parameter, alone or with other fields of `PlanRule`; `*` in a name stands for a number,
  and null removes a style.
- `attributes`: sizes that a module's forward reads and that shrink with its weights. "divide" sets a rank's number of
  them; "share" does too, but sets 1 if there are fewer (key/value heads) than ranks; a sum of products, as in
  "num_heads * head_dim + 2 * n_groups", is computed from the other attributes after they were set. An attribute of a
  config that modules share, "config.num_heads", is changed for this module only.
- `inputs`: arguments of a module that a rank needs only its part of. Dimension `dim` consists of runs of `run` entries
  (`run` names a size in the config; without it there is one run), and the rank keeps its share of each run.
- `experts`: styles by which whole experts are distributed, for a family that declares none
  (`harness.parallel.plans.experts`).
- `cases`: the same keys, merged over the rest in order, for models whose config has all the values in `if`; there
  `true` stands for any value but 0 and null.
- `"extends": true`: the file contains only what the family's declared plan lacks or has wrong.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from transformers import PretrainedConfig, PreTrainedModel

from harness.config.values.json_object import JsonObject
from harness.errors import UserError

_PARTS = ("styles", "attributes", "inputs", "experts")
WORDS = frozenset({"divide", "share"})
STYLES = frozenset(
    {
        "colwise",
        "rowwise",
        "colwise_gather_output",
        "rowwise_split_input",
        "rowwise_split_output",
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
        # ours, for plan files
        "shared_colwise",
        "rowwise_to_split",
        "gather_input",
        "copy_input",
        "divided",
        "segmented_colwise",
        "grouped_norm",
    }
)
# transformers still takes these two in declared plans.
_FORMER_NAMES = {"colwise_rep": "colwise_gather_output", "rowwise_rep": "rowwise_split_input"}
ADVICE = "set tensor_parallel.autotp_size to 1"


def read_parts(path: Path, config: PretrainedConfig) -> JsonObject:
    """Return the content of a plan file for a model with `config`, with its cases merged.

    Raises ValueError, KeyError or TypeError if the file is not a plan, and UserError if it refuses such a model.
    """
    data = json.loads(path.read_text(encoding="utf-8"))
    unknown = set(data) - {*_PARTS, "cases", "note", "extends"}
    if unknown:
        raise ValueError(f"unknown keys {', '.join(sorted(unknown))}")
    parts: JsonObject = {"styles": dict(data["styles"])}
    parts |= {name: dict(data.get(name, {})) for name in _PARTS[1:]}
    for case in data.get("cases", []):
        if all(_is(getattr(config, field), value) for field, value in case["if"].items()):
            if "refuse" in case:
                raise UserError(
                    f"model type {path.stem!r} cannot be cut for tensor parallelism with "
                    f"{', '.join(f'{field} {getattr(config, field)}' for field in case['if'])}: {case['refuse']}: "
                    "set tensor_parallel.autotp_size to 1"
                )
            for name in _PARTS:
                parts[name] |= case.get(name, {})
    # After the cases, because a case may remove a style of the file.
    parts["styles"] = {name: rule for name, rule in parts["styles"].items() if rule is not None}
    for name, words in parts["attributes"].items():
        _require_words(name, words)
    return {**parts, "extends": data.get("extends", False)}


def _is(found: object, wanted: object) -> bool:
    return bool(found) if wanted is True else found == wanted


def _require_words(name: str, words: dict[str, str]) -> None:
    for attribute, word in words.items():
        if word not in WORDS and not set(word) & set("+*"):
            raise ValueError(
                f"{name}: attribute {attribute} is {word!r}: use {' or '.join(sorted(WORDS))}, or a sum of products"
            )


@dataclass(frozen=True, kw_only=True)
class PlanRule:
    """How a module or parameter is sharded.

    Attributes:
        style: one of `STYLES`.
        parts: number of equal parts side by side in a packed weight, or the owner's attribute with that number.
        blocks: number of equal blocks of an attention's heads; a rank takes its share of each.
        segments: widths of unequal parts: see `harness.parallel.tensor.shard`.
        unit: name of the owner's attribute with the number of consecutive outputs that must stay together (a head's),
            or of a norm's own attribute with the number of channels that it averages.
        whole: number of units at the end that every rank computes.
        dim: dimension along which a parameter is split, if its style does not decide it.
    """

    style: str
    parts: int | str = 2
    blocks: int = 1
    segments: Sequence[str] = ()
    unit: str | None = None
    whole: int = 0
    dim: int | None = None


@dataclass(frozen=True, kw_only=True)
class InputRule:
    """The split dimension of an input, and the config's name for the length of its runs (None for one run)."""

    dim: int
    run: str | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The rules of one model, by name with `*` for a number.

    Attributes:
        head, embedding: names of the output and input embedding modules, or None.
        extends: whether the rules are merged over the model's own plan.
        experts: the rules that distribute whole experts.
    """

    model_type: str
    rules: Mapping[str, PlanRule]
    attributes: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    inputs: Mapping[str, Mapping[str, InputRule]] = field(default_factory=dict)
    head: str | None = None
    embedding: str | None = None
    extends: bool = False
    experts: Mapping[str, PlanRule] = field(default_factory=dict)

    def rule_of(self, name: str) -> PlanRule | None:
        """Return the rule of a module or parameter; if several match, the pattern with the fewest `*` decides."""
        return next((self.rules[pattern] for pattern in patterns(name) if pattern in self.rules), None)

    def blocks_in(self, name: str) -> int:
        """Return the number of blocks of the attention `name`'s heads, by the rules of its layers."""
        inside = f"{wildcard(name)}."
        return max((rule.blocks for own, rule in self.rules.items() if own.startswith(inside)), default=1)

    @property
    def splits_head(self) -> bool:
        """Whether the plan splits the head by vocabulary, so that a rank can keep its shard of the logits."""
        rule = self.rules.get(self.head or "")
        return rule is not None and rule.style == "colwise_gather_output"


class NoPlan(UserError):
    """The family declares no tensor-parallel plan and has no plan file."""


def wildcard(name: str, numbers: int | None = None) -> str:
    """Return `name` with `*` in place of its numbers, or of the first `numbers` of them.

    model.layers.3.mlp becomes model.layers.*.mlp.
    """
    parts = name.split(".")
    for place in [place for place, part in enumerate(parts) if part.isdigit()][:numbers]:
        parts[place] = "*"
    return ".".join(parts)


def is_layer(pattern: str) -> bool:
    """Return whether a `wildcard` pattern names decoder layers: model.layers.*, not a module around or inside them."""
    return pattern.endswith(".*") and pattern.count("*") == 1


def patterns(name: str) -> list[str]:
    """Return the patterns that match `name`: with `*` for its first number, for its first two, and so on."""
    numbers = sum(part.isdigit() for part in name.split("."))
    return [wildcard(name, count) for count in range(1, max(numbers, 1) + 1)]


def plan_for(model: PreTrainedModel, plans: Path | None = None) -> Plan:
    """Return a transformers model's plan: its declared plan, perhaps extended by a plan file, or else that file.

    The plan file is `<model type>.json` in the folder `plans`.

    If the input and the output embedding share a parameter, both are split by vocabulary or neither is. Raises NoPlan
    if the family has no plan, and UserError for an unknown style.
    """
    config = model.config
    own: Mapping[str, str] = getattr(model, "tp_plan", None) or {}
    path = None if plans is None else plans / f"{config.model_type}.json"
    file = read_plan_file(path, config) if path is not None and path.is_file() else None
    # Some classes declare a plan for the head alone, which shards no layer.
    if any("*" in name for name in own):
        plan = Plan(model_type=config.model_type, rules={n: _rule(word) for n, word in own.items()})
        if file is not None and file.extends:
            plan = replace(file, rules={**plan.rules, **file.rules})
    elif file is not None and not file.extends:
        plan = file
    else:
        raise NoPlan(
            f"model type {config.model_type!r} declares no tensor-parallel plan: {ADVICE}, "
            f"or write a plan in {path or 'a plan file'}"
        )
    for pattern, rule in plan.rules.items():
        if rule.style not in STYLES:
            raise UserError(
                f"the tensor-parallel plan of model type {plan.model_type!r} has the unknown style "
                f"{rule.style!r} for {pattern}: {ADVICE}, "
                f"or give a plan file with one of {', '.join(sorted(STYLES))}"
            )
    return _with_embeddings(plan, model)


def read_plan_file(path: Path, config: PretrainedConfig) -> Plan:
    """Return the plan in a JSON file, which is named after its model type, for a model with `config`.

    Raises UserError if the file is not a plan, or refuses such a model.
    """
    try:
        parts = read_parts(path, config)
        return Plan(
            model_type=path.stem,
            rules={name: _rule(word) for name, word in parts["styles"].items()},
            attributes=parts["attributes"],
            inputs={
                name: {key: InputRule(**rule) for key, rule in rules.items()} for name, rules in parts["inputs"].items()
            },
            extends=bool(parts["extends"]),
            experts={name: _rule(word) for name, word in parts["experts"].items()},
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{path} is not a tensor-parallel plan: {type(error).__name__}: {error}") from error


def _rule(word: str | JsonObject) -> PlanRule:
    rule = PlanRule(style=word) if isinstance(word, str) else PlanRule(**word)
    return replace(rule, style=_FORMER_NAMES.get(rule.style, rule.style))


def _with_embeddings(plan: Plan, model: PreTrainedModel) -> Plan:
    """Return the plan with the names of the embeddings.

    A split head gathers its logits. If both embeddings share a parameter, both are split by vocabulary.
    """
    names: Mapping[int, str] = {id(module): name for name, module in model.named_modules()}
    head_module, embedding_module = model.get_output_embeddings(), model.get_input_embeddings()
    head, embedding = names.get(id(head_module)), names.get(id(embedding_module))
    rules = dict(plan.rules)
    tied = head_module is not None and head_module.weight is getattr(embedding_module, "weight", None)
    # A shared parameter has one shard, which must be of whole rows for the embedding's look-up.
    if head and embedding and tied and (head in rules or embedding in rules):
        rules |= {head: PlanRule(style="colwise_gather_output"), embedding: PlanRule(style="embedding_rowwise")}
    elif head and head in rules and rules[head].style == "colwise":
        rules[head] = PlanRule(style="colwise_gather_output")
    return replace(plan, rules=rules, head=head, embedding=embedding)
