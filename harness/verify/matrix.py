"""The stored matrix: what works for each family, tried with one version of transformers.

`matrix.json` is written by running every cell (`ds-harness models --run`). This file only reads, writes and compares
it; no model is built. A cell is "yes", "refused: why", "wrong: what" or "not tried: why".
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from harness.hf.locate import MODELS, PLANS

if TYPE_CHECKING:
    from transformers import PretrainedConfig

CELLS = ("pipeline", "tensor", "experts", "zero3", "import", "export")
STORED = MODELS / "matrix.json"
PLAN = "plan"
IS_DECODER, NEEDED = "is_decoder", "needed"
DECLARED = ("base_model_tp_plan", "base_model_ep_plan")
YES = "yes"
NO_EXPERTS = "none"  # the family is no mixture of experts


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """The cells of every family, and the transformers version that they were tried with.

    A family's row also holds, as `plan`, the digest of the plan that it was split by, if it has one, and `is_decoder`:
    "needed" where a config.json without it makes an encoder.
    """

    transformers: str
    families: Mapping[str, Mapping[str, str]]

    def count(self, cell: str) -> int:
        """Return the number of families for which a cell is "yes"."""
        return sum(row.get(cell) == YES for row in self.families.values())


def read_matrix(path: Path = STORED) -> Matrix:
    """Return the stored matrix."""
    content = json.loads(path.read_text(encoding="utf-8"))
    return Matrix(transformers=content["transformers"], families=content["families"])


def write_matrix(matrix: Matrix, path: Path = STORED) -> None:
    """Store a matrix, one line a family."""
    rows = ",\n".join(
        f"    {json.dumps(name)}: {json.dumps({key: row[key] for key in (*CELLS, PLAN, IS_DECODER) if key in row})}"
        for name, row in sorted(matrix.families.items())
    )
    head = f'{{\n  "transformers": {json.dumps(matrix.transformers)},\n  "families": {{\n'
    path.write_text(f"{head}{rows}\n  }}\n}}\n", encoding="utf-8")


def installed_transformers() -> str:
    """Return the installed version, or "" where there is none."""
    try:
        return version("transformers")
    except PackageNotFoundError:
        return ""


def plan_file(model_type: str) -> Path | None:
    """Return the packaged tensor-parallel plan of a family that declares none, or None."""
    path = PLANS / f"{model_type}.json"
    return path if path.is_file() else None


def plan_digest(config_class: type[PretrainedConfig]) -> str | None:
    """Return a digest of a family's plan: its packaged file, or what its config class declares; None without a plan."""
    path = plan_file(config_class.model_type)
    declared = {name: plan for name in DECLARED if (plan := getattr(config_class, name, None))}
    if path is None and not declared:
        return None
    content = path.read_bytes() if path is not None else json.dumps(declared, sort_keys=True).encode()
    return hashlib.sha256(content).hexdigest()[:12]


def is_tested(config: PretrainedConfig, split: bool, path: Path = STORED, *, experts: bool = False) -> bool:
    """Return whether the matrix says that the family of `config` works with the installed transformers.

    Args:
        split: also over tensor-parallel ranks. The matrix has no plan of the config's own and no edited plan file.
        experts: also with experts on several data-parallel ranks.
    """
    matrix = read_matrix(path)
    row = matrix.families.get(config.model_type, {})
    cells = ("pipeline", *(("tensor",) if split else ()), *(("experts",) if experts else ()))
    return (
        matrix.transformers == installed_transformers()
        and all(row.get(cell) == YES for cell in cells)
        and row.get(PLAN) == plan_digest(type(config))
        and not any(name.startswith("base_model_") for name in vars(config))
        and getattr(config, "is_decoder", None) is not False
    )
