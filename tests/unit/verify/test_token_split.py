"""Which parts of a model can compute some tokens without the others; and attention by rows of a mask."""

from __future__ import annotations

from functools import cached_property, partial

import pytest
import torch

from harness.context_parallel.tiles import idle_tiles
from harness.errors import UserError
from harness.hf.causal import CausalModel, assemble
from harness.hf.context.plan import TokenSplit
from harness.hf.context.sequence import own_tokens
from harness.hf.forward.outer_forward import OuterForward
from harness.hf.forward.payload import Tokens
from harness.hf.skeleton import ModelSource
from harness.parallel.comm import TensorParallel
from harness.parallel.context.masks import MaskRows
from harness.parallel.context.sequence_shards import ContextParallel
from harness.verify.comparison import find_difference
from harness.verify.tiny_copy import tiny_config, tiny_model
from harness.verify.token_split import token_split_support

CPU = torch.device("cpu")


def in_tiles(source: ModelSource, tensor: TensorParallel, tile: int, *, loss: bool = False) -> CausalModel:
    apart = TokenSplit(
        plan=token_split_support(source.config), block_tile=tile, attention_tile=tile, loss_tile=tile if loss else 0
    )
    return assemble(source, tensor=tensor, device=CPU, dtype=torch.float32, seed=0, finish=lambda _: None, apart=apart)


@pytest.mark.parametrize(
    ("family", "gathered"),
    [
        ("llama", [set()]),
        ("deepseek_v3", [set(), set()]),  # attention over compressed keys goes through the interface too
        ("mamba", [{"mixer"}]),
        ("bloom", [{"self_attention"}]),  # an attention of its own
        ("qwen3_next", [{"linear_attn"}, set()]),
    ],
)
def test_what_mixes_tokens_in_its_own_way_needs_all_of_them(family: str, gathered: list[set[str]]) -> None:
    plan = token_split_support(tiny_config(family))
    assert sorted(map(sorted, plan.gathered.values())) == sorted(map(sorted, gathered))
    assert plan.prologue and plan.epilogue and not plan.whole


def test_blocks_and_norms_compute_each_token_by_itself() -> None:
    (alone,) = token_split_support(tiny_config("llama")).alone.values()
    assert alone == {"mlp", "input_layernorm", "post_attention_layernorm"}


@pytest.mark.parametrize(
    ("family", "alone"),
    [
        ("gemma4_text", {"mlp", "input_layernorm"}),
        ("glm_moe_dsa", {"mlp", "input_layernorm"}),
        ("zamba2", {"input_layernorm"}),
        ("roformer", {"intermediate", "output"}),
    ],
)
def test_a_model_that_passes_on_more_than_a_hidden_state_may_still_be_tiled(family: str, alone: set[str]) -> None:
    plan = token_split_support(tiny_config(family))
    assert plan.whole and plan.epilogue
    assert alone <= frozenset.union(*plan.alone.values())


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("gemma3n_text", "passes on hidden states that do not begin with"),
        ("inkling2_text", "reads outputs of earlier layers after its last one"),
    ],
)
def test_tiles_of_the_loss_are_refused_with_the_true_reason(family: str, reason: str) -> None:
    with pytest.raises(UserError, match=f"tiling.loss: model type '{family}' {reason}"):
        in_tiles(ModelSource(name=family, config=tiny_config(family), weights=None), TensorParallel(), 5, loss=True)


def test_a_model_without_a_tiny_copy_is_not_said_to_combine_tokens() -> None:
    config = tiny_config("llama")
    config.hidden_act = "no such function"
    assert (
        "could not be tried on a tiny copy (no tiny copy of this llama model runs"
        in token_split_support(config).obstacle
    )


def test_attention_that_reads_other_keys_gets_all_tokens_and_the_other_blocks_do_not() -> None:
    plan = token_split_support(tiny_config("deepseek_v4"))
    assert list(plan.gathered.values()) == [{"self_attn"}]
    assert all({"mlp", "input_layernorm"} <= alone for alone in plan.alone.values())


@pytest.mark.parametrize(
    ("family", "attention", "idle"),
    [
        ("llama", None, []),
        ("llama", "flex_attention", ["tiling.attention"]),
        ("bloom", None, ["tiling.attention"]),
        ("zamba2", None, ["tiling.attention"]),
        ("rwkv", None, ["tiling.attention"]),
    ],
)
def test_tiles_without_effect_are_told(family: str, attention: str | None, idle: list[str]) -> None:
    model = tiny_model(tiny_config(family))
    layers = [
        model.get_submodule(name) for name in OuterForward(ModelSource.of_model(model).skeleton(), CPU).layer_names
    ]
    apart = TokenSplit(plan=token_split_support(model.config), block_tile=5, attention_tile=5)
    assert [line.split(" has no effect")[0] for line in idle_tiles(apart, layers, attention)] == idle


@torch.no_grad()
def test_a_stretch_of_a_packed_row_begins_inside_of_a_document() -> None:
    model = tiny_model(tiny_config("git")).eval()  # whose masks look up tokens by their positions in the document
    outer = OuterForward(ModelSource.of_model(model).skeleton(), CPU)
    modules = {name: model.get_submodule(name) for name in outer.prologue}
    tokens = Tokens(torch.arange(16).reshape(2, 8), torch.arange(8).expand(2, 8))
    own = own_tokens(tokens, outer, ContextParallel(rank=1, size=2))
    whole, part = (outer.enter(each, modules, training=False).hidden for each in (tokens, own))
    assert torch.equal(part, whole[:, 4:])


@pytest.mark.parametrize("family", ["mistral", "gpt_oss"])
def test_attention_by_rows_of_a_mask_changes_no_gradient(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[list[slice]] = []
    found = MaskRows.keys.func

    def noting(self: MaskRows) -> list[slice]:
        made.append(found(self))
        return made[-1]

    noted = cached_property(noting)
    noted.__set_name__(MaskRows, "keys")
    monkeypatch.setattr(MaskRows, "keys", noted)
    config = tiny_config(family)
    config.sliding_window = 6
    assert find_difference(config, partial(in_tiles, tile=5), TensorParallel(), CPU) is None
    seen = [keys.stop - keys.start for mask in made for keys in mask]
    assert seen and min(seen) <= 10, "keys that no query sees are left out"
