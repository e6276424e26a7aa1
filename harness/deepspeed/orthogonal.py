"""DeepSpeed's Newton-Schulz iterations, without the optimizer around them."""

from __future__ import annotations

from torch import Tensor


def newton_schulz(matrix: Tensor, method: str) -> Tensor:
    """Return an approximation of the orthogonal matrix nearest to `matrix`, of its shape, by five iterations.

    Args:
        method: "gram" iterates on the small Gram matrix in fp16, anything else on the matrix itself in bf16; both in
            float32 where the device lacks that type.
    """
    # imported late, as it brings torch's compiler
    from deepspeed.runtime.zero.muon import original_muon

    iterate = original_muon.zeropower_via_gram_newtonschulz
    if method != "gram":
        iterate = original_muon.zeropower_via_newtonschulz5
    found: Tensor = iterate(matrix, steps=5)
    return found
