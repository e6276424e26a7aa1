"""Make a tiny copy of any model's config: the same kinds of layers at sizes that run in milliseconds.

`tiny_sizes.json` has the new sizes by names of config fields; no family is named. Enough layers are kept, in order, to
show every kind (attention types, dense or sparse, sharing or not). Heads keep their ratio, and tensor-parallel ranks
share them equally or not, as before. A width that was heads x head size stays so, and one that the number of ranks does
not divide stays indivisible. Dropout is off. If no model can be built with the first choice of sizes,
others are tried (`variants`). Every tiny copy has been run: its logits are finite, and the same in two runs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from harness.errors import UserError, text_of
from harness.hf.unbuilt import vocabulary_size
from harness.parallel.generators import own_generators
from harness.parallel.plans.experts import run_where_aligned
from harness.verify.shrink import FIRST_ID, fewer_layers, read_table, shrink_fields, varied

MOST_PARAMETERS = 20_000_000
BATCH, SEQUENCE = 2, 32


def tiny_config(model_type: str, *, tensor: int = 1) -> PretrainedConfig:
    """Return a tiny config of a family, from its class's defaults. Raises UserError if none runs.

    Two query heads share a key/value head if the family allows it: most checkpoints have that, but few defaults.
    """
    kind: Callable[..., PretrainedConfig] = CONFIG_MAPPING[model_type]
    default = kind()
    tiny = shrink(kind(is_decoder=True) if hasattr(default, "is_decoder") else default, tensor=tensor)
    heads, shared = (vars(tiny).get(name) for name in ("num_attention_heads", "num_key_value_heads"))
    if heads is None or heads != shared or heads % (2 * tensor):
        return tiny
    grouped = copy.deepcopy(tiny)
    grouped.num_key_value_heads = heads // 2
    try:
        model = tiny_model(grouped)
        require_running(model)
        # only with a mask does torch's attention repeat each key for its group of queries
        mask = torch.ones(BATCH, SEQUENCE, dtype=torch.long)
        mask[:, -1] = 0
        model(input_ids=tiny_ids(model), attention_mask=mask, use_cache=False)
    except Exception:  # attention that makes keys from a compressed form has one key per head
        return tiny
    return grouped


def shrink(config: PretrainedConfig, *, tensor: int = 1) -> PretrainedConfig:
    """Return a tiny copy of `config` for `tensor` tensor-parallel ranks. Raises UserError if none runs."""
    table = read_table()
    reason: Exception | None = None
    own = config.to_dict()
    tried = [varied(shrink_fields(own, table, tensor), variant) for variant in table["variants"]]
    for fields in [*tried, fewer_layers(own, table)]:  # a small model may run at its own sizes alone
        try:
            tiny = type(config).from_dict(fields)
            tiny.use_cache = False
            vars(tiny).update({key: value for key, value in vars(config).items() if key.startswith("base_model_")})
            require_running(tiny_model(tiny))
            return tiny
        except Exception as error:  # any family, any reason; the first one is reported
            reason = reason or error
    assert reason is not None
    raise UserError(
        f"no tiny copy of this {config.model_type} model runs: {type(reason).__name__}: {text_of(reason, 160)}"
    )


def tiny_model(config: PretrainedConfig, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return the model of a tiny config, in training mode, with random nonzero weights.

    Raises ValueError if it is large.
    """
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size:,} parameters are left")
    with own_generators(seed):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
        with torch.no_grad():
            for parameter in model.parameters():  # a zero bias or a closed gate would hide faults behind it
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
    run_where_aligned(model, dtype)
    cast: PreTrainedModel = model.to(dtype)
    return cast


def tiny_ids(model: PreTrainedModel, seed: int = 0) -> Tensor:
    """Return token ids for a tiny model, [BATCH, SEQUENCE]; low ones, which often mean something, are left out."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(FIRST_ID, vocabulary_size(model), (BATCH, SEQUENCE), generator=generator)


@torch.no_grad()
def require_running(model: PreTrainedModel) -> None:
    """Raise ValueError unless the model's logits are finite, and the same in two runs."""
    ids = tiny_ids(model)
    first, second = (model(input_ids=ids, use_cache=False).logits for _ in range(2))
    if not torch.isfinite(first).all():
        raise ValueError("its logits are not finite")
    if not torch.equal(first, second):
        raise ValueError("its forward gives different logits each time")
