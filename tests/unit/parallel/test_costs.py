"""Layer costs against figures worked by hand, and what they do to the boundaries."""

import pytest

from harness.parallel.pipeline.partition import LayerCost, balanced

WIDTH, LENGTH = 1024, 512
DECODER_MATMULS = 12 * WIDTH * WIDTH  # attention 4 h^2, MLP with a width of 4 h 8 h^2


def decoder(**changes):
    return LayerCost(
        matmul_parameters=DECODER_MATMULS,
        vector_parameters=2 * WIDTH,
        attention_width=WIDTH,
        sequence_length=LENGTH,
        **changes,
    )


def pipeline(vocabulary, n_layers=8, **changes):
    first = LayerCost(lookup_width=WIDTH, **changes)
    last = LayerCost(matmul_parameters=WIDTH * vocabulary, vector_parameters=WIDTH, logits=vocabulary, **changes)
    return [first, *[decoder(**changes)] * n_layers, last]


def flops(layers, **kwargs):
    return [layer.flops_per_token(**kwargs) for layer in layers]


def test_a_decoder_layer_agrees_with_the_published_formula():
    # Narayanan et al. 2021: 72 h^2 (1 + s / 6h) FLOPs a token and layer, nothing recomputed
    published = 72 * WIDTH**2 * (1 + LENGTH / (6 * WIDTH))
    assert decoder().flops_per_token(flops_per_move=0) == pytest.approx(published)
    assert decoder(checkpointed=True).flops_per_token(flops_per_move=0) == pytest.approx(published * 96 / 72)
    assert decoder().flops_per_token() == pytest.approx(published, rel=0.02)  # norms are little


def test_a_head_costs_its_matmul_and_a_little_for_the_loss():
    head = LayerCost(matmul_parameters=WIDTH * 32000, logits=32000)
    assert head.flops_per_token(flops_per_move=0) == 6 * WIDTH * 32000  # Narayanan et al. 2021: 6 h V a token
    assert 1.0 < head.flops_per_token() / (6 * WIDTH * 32000) < 1.1


def test_a_lookup_is_not_a_matmul():
    table = 128_000 * WIDTH
    lookup = LayerCost(lookup_width=WIDTH).flops_per_token()
    assert 0 < lookup < 0.001 * LayerCost(matmul_parameters=table).flops_per_token()


def test_a_large_vocabulary_moves_the_boundary():
    assert balanced(flops(pipeline(256)), 2) == [0, 5, 10]
    large = balanced(flops(pipeline(128_000)), 2)
    assert large == [0, 9, 10]  # the head outweighs all eight decoder layers: it stands alone
    assert balanced(flops(pipeline(32_000)), 2) == [0, 6, 10]


@pytest.mark.parametrize("vocabulary", [256, 32_000, 128_000])
def test_the_boundaries_do_not_hang_on_the_cost_of_a_move(vocabulary):
    cuts = [balanced(flops(pipeline(vocabulary), flops_per_move=moves), 2) for moves in (8.0, 64.0, 256.0)]
    assert cuts[0] == cuts[1] == cuts[2]


def test_checkpointing_every_layer_moves_nothing_but_one_more_forward_does():
    assert balanced(flops(pipeline(32_000, checkpointed=True)), 2) == balanced(flops(pipeline(32_000)), 2)
    assert decoder(checkpointed=True).flops_per_token() == pytest.approx(decoder().flops_per_token() * 4 / 3)
