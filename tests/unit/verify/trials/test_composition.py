"""A composition is a line, and a line a composition."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from harness.errors import UserError
from harness.verify.trials.composition import Composition, Execution, Training
from harness.verify.trials.subject import make_subject
from tests.support.random_compositions import Families, draw, features, pairs, shrink

FIXED = Path(__file__).parents[3] / "distributed" / "compositions.txt"


def test_a_random_composition_comes_back_from_its_line() -> None:
    families = Families.read()
    for seed in range(200):
        composition = draw(Random(seed), families)
        assert Composition.parse(str(composition)) == composition
        assert composition.training.batch % (composition.training.micro * composition.executions[0].dp) == 0


def test_the_fixed_lines_are_written_as_a_composition_prints_itself() -> None:
    lines = [line for line in FIXED.read_text().splitlines() if line and not line.startswith("#")]
    assert len(lines) == len(set(lines)) >= 50
    for line in lines:
        composition = Composition.parse(line)
        assert Composition.parse(str(composition)) == composition


def test_a_model_has_one_place_however_its_fields_are_ordered(tmp_path: Path) -> None:
    """Else each rank, which reads the line, makes it at once where the process that drew it has made another."""
    drawn = Composition(model="gpt2", training=Training(config={"vocab_size": 320, "n_embd": 64}))
    assert str(drawn) != f"gpt2 config={json.dumps(drawn.training.config, separators=(',', ':'))} : pp=1"
    assert make_subject(drawn, tmp_path) == make_subject(Composition.parse(str(drawn)), tmp_path)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "must begin with a model family"),
        ("pp=2", "must begin with a model family"),
        ("llama : stages=2", "'stages=2': write NAME=VALUE with one of pp"),
        ("llama : pp=two", "'pp=two': write a value like '1'"),
        ("llama pp=2", "'pp=2': write NAME=VALUE with one of config"),
    ],
)
def test_a_line_that_says_none_is_refused_by_its_word(line: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        Composition.parse(line)


def test_shrinking_leaves_what_the_failure_needs() -> None:
    line = (
        'gemma2 data=packed precision=bf16 clip=0.1 : pp=2 zero=1 schedule=gpipe recompute=1 rest={"a":{"b":1,"c":2}}'
    )

    def fails(composition: Composition) -> bool:
        first = composition.executions[0]
        return composition.training.data == "packed" and first.pp > 1 and first.rest.get("a", {}) != {}

    assert str(shrink(Composition.parse(line), fails)) == 'llama data=packed : pp=2 rest={"a":{"b":1,"c":2}}'


def test_pairs_count_what_has_met() -> None:
    first = Composition(model="llama", training=Training(data="packed"), executions=(Execution(pp=2, zero=1),))
    other = Composition(model="gpt2", executions=(Execution(pp=2, zero=1), Execution(tp=2)))
    assert features(first) == {"data=packed", "pp=2", "zero=1"}
    counted = pairs([first, other])
    assert counted["pp=2", "zero=1"] == 2 and counted["data=packed", "pp=2"] == 1 and counted["pp=2", "resumed"] == 1
