"""Muon's groups, and what its steps are where nothing is orthogonalised: torch's Adam, and Nesterov's momentum."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from harness.deepspeed.flat_tensors import updated_tensors
from harness.deepspeed.optimizer_states import template
from harness.errors import UserError
from harness.extras.muon.momentum import MATRIX_VALUES, OTHER_VALUES, OrthogonalMomentum, muon
from harness.parallel.tensor.shard import Shard, mark
from harness.training.engine.optimizer import LateAdagrad, names_of, own_optimizer, parameter_groups


class Decoder(nn.Module):
    """The kinds of parameters that a decoder has."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(6, 4)
        self.proj = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.experts = nn.Parameter(torch.ones(2, 4, 4))
        self.scale = nn.Parameter(torch.ones(4))
        self.LM_head = nn.Linear(4, 6, bias=False)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)


def made(module: nn.Module, **params: Any) -> OrthogonalMomentum:
    return muon(parameter_groups(module, 0.1), params, names_of(module))


def by_name(module: nn.Module, optimizer: OrthogonalMomentum) -> dict[bool, set[str]]:
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    found: dict[bool, set[str]] = {True: set(), False: set()}
    for group in optimizer.param_groups:
        found[group["of_matrices"]] |= {names[id(parameter)] for parameter in group["params"]}
    return found


def test_matrices_are_orthogonalised_but_for_the_embedding_and_the_head() -> None:
    module = Decoder()
    assert by_name(module, made(module)) == {
        True: {"proj.weight", "experts"},
        False: {"embed_tokens.weight", "LM_head.weight", "proj.bias", "norm.weight", "norm.bias", "scale"},
    }


def test_a_tied_matrix_goes_where_the_first_layer_that_has_it_sends_it() -> None:
    module = nn.Module()
    module.lm_head, module.wte = nn.Linear(4, 6, bias=False), nn.Embedding(6, 4)
    module.pooler = nn.Linear(4, 4, bias=False)
    firsts = {"lm_head.weight": "0.wte.weight", "pooler.weight": "0.embed.weight"}
    optimizer = muon(parameter_groups(module, 0.1, firsts), {}, names_of(module, firsts))
    assert by_name(module, optimizer) == {True: {"lm_head.weight", "wte.weight"}, False: {"pooler.weight"}}


def test_a_shard_of_a_matrix_is_a_matrix_and_a_shard_of_a_vector_is_none() -> None:
    module = nn.Module()
    module.a, module.b = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(2, 2))
    mark(module.a, Shard(full_shape=(4, 2), dim=0, pieces=((0, 2),), widths=(2, 2)))
    mark(module.b, Shard(full_shape=(8,), dim=0, pieces=((0, 4),), widths=(4, 4)))
    assert by_name(module, made(module)) == {True: {"a"}, False: {"b"}}


@pytest.mark.parametrize(
    ("params", "of_matrices", "of_others"),
    [
        pytest.param({}, MATRIX_VALUES, OTHER_VALUES, id="defaults"),
        pytest.param({"lr": 1e-3}, {"lr": 1e-3}, {"lr": 1e-3}, id="one-rate"),
        pytest.param({"lr": 1e-3, "muon_lr": 0.5}, {"lr": 0.5}, {"lr": 1e-3}, id="a-rate-of-matrices"),
        pytest.param({"adam_lr": 0.25}, {"lr": MATRIX_VALUES["lr"]}, {"lr": 0.25}, id="a-rate-of-others"),
        pytest.param({"momentum": 0.5, "betas": [0.1, 0.2]}, {"momentum": 0.5}, {"betas": [0.1, 0.2]}, id="own-values"),
        pytest.param({"eps": 1e-3, "ns_method": "standard"}, {"ns_method": "standard"}, {"eps": 1e-3}, id="each-its"),
    ],
)
def test_values_of_the_json_go_to_the_halves_that_they_steer(
    params: dict[str, Any], of_matrices: dict[str, Any], of_others: dict[str, Any]
) -> None:
    optimizer = made(Decoder(), **params)
    for group in optimizer.param_groups:
        wanted = dict(of_matrices if group["of_matrices"] else of_others)
        wanted.pop("weight_decay", None)  # that of the groups, by HuggingFace's rule
        assert {name: group[name] for name in wanted} == wanted
        assert not ("betas" in group and group["of_matrices"]) and ("momentum" in group) is group["of_matrices"]
    decays = {(group["of_matrices"], group["weight_decay"]) for group in optimizer.param_groups}
    assert decays == {(True, 0.1), (False, 0.1), (False, 0.0)}


def trained(optimizer: torch.optim.Optimizer, weight: nn.Parameter) -> torch.Tensor:
    """The weight after four steps, the second of which gives it no gradient."""
    for step in range(4):
        weight.grad = None if step == 1 else torch.linspace(-1, 1, weight.numel()).reshape(weight.shape) * (step + 1)
        optimizer.step()
    return weight.detach().clone()


@pytest.mark.parametrize("decoupled", [True, False])
def test_what_is_no_matrix_moves_as_by_torch(decoupled: bool) -> None:
    values = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.05}
    ours, theirs = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(5))
    optimizer = OrthogonalMomentum([{"params": [ours], "of_matrices": False, **values}], decoupled_decay=decoupled)
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    wanted = kind([theirs], **values)  # type: ignore[arg-type]
    found = trained(optimizer, ours)
    for step in range(4):  # a missing gradient is 0 here, and passed over there
        factor = 0 if step == 1 else step + 1
        theirs.grad = torch.linspace(-1, 1, 5) * factor
        wanted.step()
    torch.testing.assert_close(found, theirs.detach())


def test_a_part_that_holds_no_matrix_moves_by_nesterovs_momentum() -> None:
    weight = nn.Parameter(torch.ones(2, 3))
    values = {"lr": 0.1, "momentum": 0.75, "weight_decay": 0.5, "ns_method": "gram"}
    found = trained(OrthogonalMomentum([{"params": [weight], "of_matrices": True, **values}]), weight)
    value, momentum = torch.ones(6), torch.zeros(6)
    for step in range(4):
        gradient = torch.linspace(-1, 1, 6) * (0 if step == 1 else step + 1)
        momentum = 0.75 * momentum + 0.25 * gradient
        value = value * (1 - 0.1 * 0.5) - 0.1 * (0.25 * gradient + 0.75 * momentum)
    torch.testing.assert_close(found.reshape(-1), value)


def test_a_step_returns_what_its_closure_returns_and_states_are_kept_and_loaded() -> None:
    def begun() -> tuple[nn.Parameter, OrthogonalMomentum]:
        weight = nn.Parameter(torch.ones(3))
        return weight, OrthogonalMomentum([{"params": [weight], "of_matrices": False, **OTHER_VALUES}])

    weight, whole = begun()
    assert whole.step(lambda: 1.5) == 1.5 and whole.step() is None
    trained(whole, weight)
    copied, again = begun()
    copied.data.copy_(weight.data)
    again.load_state_dict(copy.deepcopy(whole.state_dict()))
    assert torch.equal(trained(again, copied), trained(whole, weight))


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        pytest.param({}, "AdamW", id="none-is-torchs-adamw"),
        pytest.param({"optimizer": {"type": "Muon"}}, "OrthogonalMomentum", id="muon"),
        pytest.param({"optimizer": {"type": "MUON", "params": {"lr": 1.0}}}, "OrthogonalMomentum", id="in-capitals"),
        pytest.param({"optimizer": {"type": "Adagrad"}}, "LateAdagrad", id="adagrad-without-zero"),
        pytest.param(
            {"optimizer": {"type": "adagrad"}, "zero_optimization": {"stage": 1}}, "LateAdagrad", id="adagrad-by-zero"
        ),
        pytest.param(
            {
                "optimizer": {"type": "adagrad"},
                "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
            },
            "LateAdagrad",
            id="adagrad-offloaded",
        ),
        pytest.param({"optimizer": {"type": "SGD", "params": {"lr": 1.0}}}, None, id="others-are-deepspeeds"),
    ],
)
def test_the_json_says_whose_optimizer_it_is(config: dict[str, Any], kind: str | None) -> None:
    from harness import TrainingArguments

    module = Decoder()
    found = own_optimizer(config, module, parameter_groups(module, 0.1), TrainingArguments(), torch.device("cpu"))
    assert (None if found is None else type(found).__name__) == kind


def test_adagrad_that_a_gpu_offloads_is_deepspeeds() -> None:
    from harness import TrainingArguments

    module, arguments = Decoder(), TrainingArguments()
    config = {
        "optimizer": {"type": "Adagrad", "params": {"amsgrad": False, "fp32_optimizer_states": True}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    }
    groups = parameter_groups(module, 0.1)
    assert own_optimizer(config, module, groups, arguments, torch.device("cuda")) is None
    assert isinstance(own_optimizer(config, module, groups, arguments, torch.device("cpu")), LateAdagrad)


@pytest.mark.parametrize(
    ("shape", "over_data", "refused"), [((4, 8), True, True), ((4, 8), False, False), ((4, 2, 8), True, False)]
)
def test_one_matrix_of_experts_on_several_data_ranks_is_refused(
    shape: tuple[int, ...], over_data: bool, refused: bool
) -> None:
    module = nn.Module()
    module.w1 = mark(
        nn.Parameter(torch.zeros(2, *shape[1:])), Shard(full_shape=shape, dim=0, pieces=((0, 2),), over_data=over_data)
    )
    groups = parameter_groups(module, 0.0)
    if refused:
        with pytest.raises(UserError, match="optimizer Muon: w1 is one matrix of all experts"):
            muon(groups, {}, names_of(module))
    else:
        assert muon(groups, {}, names_of(module)).param_groups[0]["of_matrices"]


def test_muon_keeps_a_momentum_of_matrices_and_the_moments_of_others() -> None:
    module = nn.ModuleDict({"embed": nn.Embedding(8, 4), "layer": nn.Linear(4, 4)})
    optimizer = muon([{"params": list(module.parameters())}], {"lr": 0.01}, names_of(module))
    kept = {each.param_group: sorted(template(optimizer, each).elements) for each in updated_tensors(optimizer)}
    assert sorted(kept.values()) == [["exp_avg", "exp_avg_sq"], ["momentum_buffer"]]
