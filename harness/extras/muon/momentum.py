"""Muon: momentum with orthogonalised updates for matrices, and AdamW for embeddings, head and vectors.

DeepSpeed's ZeRO orthogonalises gradients while it reduces them, before it computes their norm. This optimizer does so
in its step instead. So every engine reduces, measures and clips true gradients, as for any other optimizer, and updates
are the same in every layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from math import sqrt
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adam import adam

from harness.config.values.json_object import JsonObject
from harness.deepspeed.orthogonal import newton_schulz
from harness.deepspeed.zero3_parameters import unpartitioned_shape
from harness.errors import UserError
from harness.extras.muon.matrices import MatrixPart, locate_matrices
from harness.parallel.tensor.shard import shard_of
from harness.topology.groups import Groups
from harness.training.engine.optimizer import ParameterGroup

MATRIX_VALUES = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.0, "ns_method": "gram"}
"""Options of the groups of matrices, with DeepSpeed's defaults."""
OTHER_VALUES = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0}
"""Options of the other groups, with DeepSpeed's defaults."""
BY_ADAMW = ("embed", "lm_head")
"""Matrices with these words in their names are left to AdamW, as in DeepSpeed."""


class OrthogonalMomentum(Optimizer):
    """Muon with AdamW. Its name must not contain "muon": ZeRO would recognise it and orthogonalise a second time.

    Attributes:
        matrices: tensor that ZeRO updates -> the matrices in it; set by `attach`.
    """

    def __init__(self, groups: list[ParameterGroup], *, decoupled_decay: bool = True) -> None:
        super().__init__(groups, {})
        self.decoupled_decay = decoupled_decay
        self.matrices: Mapping[Tensor, list[MatrixPart]] = {}

    def attach(self, engine: DeepSpeedEngine, groups: Groups) -> None:
        """Locate the matrices in the tensors that ZeRO updates; all ranks call it."""
        chosen = [index for index, group in enumerate(self.param_groups) if group["of_matrices"]]
        self.matrices = locate_matrices(engine.optimizer, chosen, groups.tp_group, engine.device)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Update all parameters, taking a missing gradient as zeros; return the result of `closure`."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for parameter in group["params"]:
                # Gathering a matrix is collective, so a rank without a gradient takes part with zeros.
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = gradient
                if group["of_matrices"]:
                    self._step_on_matrices(parameter, gradient, group)
            if not group["of_matrices"]:
                self._step_on_others(group)
        return loss

    def _step_on_matrices(self, parameter: Tensor, gradient: Tensor, group: ParameterGroup) -> None:
        """Update a tensor that holds matrices or parts of matrices."""
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        momentum = state["momentum_buffer"]
        momentum.lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(momentum, group["momentum"]).reshape(-1)  # Nesterov momentum
        for matrix in self.matrices.get(parameter, ()):
            whole = matrix.whole(update)  # collective; None on ranks that do not need the whole matrix
            if whole is not None and matrix.length:
                update[matrix.place] = matrix.own(orthogonal(whole, group["ns_method"])).to(update.device)
        # decoupled decay, as in DeepSpeed's Muon: of the weights before the update, so the update itself is not decayed
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(update.view(parameter.shape), alpha=-group["lr"])

    def _step_on_others(self, group: ParameterGroup) -> None:
        """Update all other parameters with torch's AdamW step."""
        parameters = group["params"]
        states = [self._state_of_other(parameter) for parameter in parameters]
        adam(
            parameters,
            [parameter.grad for parameter in parameters],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            decoupled_weight_decay=self.decoupled_decay,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _state_of_other(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        return state


def orthogonal(matrix: Tensor, method: str) -> Tensor:
    """Return the nearest orthogonal matrix to `matrix` [..., rows, columns], scaled by shape as in DeepSpeed's Muon.

    Approximate: five Newton-Schulz iterations, in the precision of DeepSpeed's `method`.
    """
    rows, columns = matrix.shape[-2:]
    # DeepSpeed's function is compiled. On a CPU that needs a C++ compiler, and takes more time than it saves.
    with torch.compiler.set_stance("force_eager") if matrix.device.type == "cpu" else nullcontext():
        found = newton_schulz(matrix.flatten(1) if matrix.ndim == 4 else matrix, method)
    return (found * (sqrt(rows / columns) if rows > columns else 1.0)).to(matrix.dtype).view(matrix.shape)


def muon(groups: list[ParameterGroup], params: JsonObject, names: Mapping[Tensor, str]) -> OrthogonalMomentum:
    """Return the optimizer for the parameters in `groups`.

    Args:
        params: options of DeepSpeed's Muon.
        names: parameter of the module -> its name; for a tied one, its name in the first layer that holds it. The name
            decides between Muon and AdamW, even on a stage where a tied embedding is only the head.

    Raises:
        UserError: a matrix is distributed over data-parallel ranks in a way that cannot be orthogonalised.
    """
    for parameter, name in names.items():
        _require_whole(parameter, name)
    halves = []
    for group in groups:
        for of_matrices, own in ((True, MATRIX_VALUES), (False, OTHER_VALUES)):
            chosen = [p for p in group["params"] if _is_matrix(p, names[p]) is of_matrices]
            values = {**own, **{key: params[key] for key in own if key in params}}
            values["lr"] = params.get("muon_lr" if of_matrices else "adam_lr", values["lr"])
            if chosen:
                halves.append({**values, **group, "params": chosen, "of_matrices": of_matrices})
    return OrthogonalMomentum(halves, decoupled_decay=params.get("adam_w_mode", True))


def _require_whole(parameter: Tensor, name: str) -> None:
    """Raise UserError if one matrix holds all experts and these are distributed over data-parallel ranks.

    The matrix would have to be orthogonalised as a whole. A batch of matrices, one for each expert, is fine, because
    each rank holds whole matrices.
    """
    shard = shard_of(parameter)
    if parameter.requires_grad and shard is not None and shard.over_data and len(shard.full_shape) == 2:
        raise UserError(
            f"optimizer Muon: {name} is one matrix of all experts, which are on several data-parallel ranks: remove "
            "expert_parallel, or use another optimizer"
        )


def _is_matrix(parameter: Tensor, name: str) -> bool:
    shard = shard_of(parameter)
    shape = shard.full_shape if shard is not None else unpartitioned_shape(parameter)
    return len(shape) >= 2 and not any(word in name.lower() for word in BY_ADAMW)
