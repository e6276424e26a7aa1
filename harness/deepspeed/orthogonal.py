"""DeepSpeed's Newton-Schulz iterations, without its Muon optimizer around them."""

from __future__ import annotations

from torch import Tensor


def newton_schulz(matrix: Tensor, method: str) -> Tensor:
    """Return an approximation of the nearest orthogonal matrix by five iterations, in the precision of `method`."""
    # imported late: torch's compiler comes with it
    from deepspeed.runtime.zero.muon import original_muon

    iterate = original_muon.zeropower_via_gram_newtonschulz
    if method != "gram":
        iterate = original_muon.zeropower_via_newtonschulz5
    found: Tensor = iterate(matrix, steps=5)
    return found
