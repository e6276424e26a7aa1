"""Check, run and DeepSpeed read a config alike: verdicts, values, and what is made of arguments."""

from __future__ import annotations

import json
import logging
from enum import Enum
from pathlib import PurePath
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from harness.checking import check, refusals, resolve, schema
from harness.checking.cli.pages import LENIENT, STRICTER
from harness.checking.registry import by_code
from harness.checking.schema import every_key
from harness.checking.schema.normalize import as_read
from harness.config import AutoValues
from harness.config.text.diagnostic import ConfigError, Severity
from harness.config.text.document import from_text
from harness.config.values.layout_keys import LEAST
from harness.config.values.pointers import lookup, put
from tests.unit.config.deepspeed_models import MODELS, attribute

VALUES = [None, True, 0, 2, -1, 0.5, 5e8, 1e12, "auto", "", "x", "8", "cpu", [], [1], {}, {"x": 1}]


def config(pointer: str, value: object) -> str:
    """The text of a config that is right but for one value."""
    *sections, name = pointer.split("/")[1:]
    data: dict = {"train_batch_size": 8}
    here = data
    for section in sections:
        here = here.setdefault(section, {})
    here[name] = value
    return json.dumps(data)


CHECKED = tuple(f"{pointer}/" for pointer, key in every_key() if "x-checked-if" in key.spec)
LATER = {
    pointer
    for pointer, key in every_key()
    if not key.is_section
    and (isinstance(key.spec.get("x-crashes"), str) or (pointer.startswith(CHECKED) and "x-crashes" not in key.spec))
}
"""Keys whose wrong values pass DeepSpeed's parser, and end the run when the engine starts or at the first step."""


def refused(text: str) -> bool:
    """Whether the check says that DeepSpeed's parser would refuse it."""
    try:
        found = check(from_text(text), target="deepspeed")
    except ConfigError:
        return True
    errors = [item.code for item in found if item.severity is Severity.ERROR and item.pointer not in LATER]
    return any(code.startswith("DS1") or by_code(code).claim == "refuses" for code in errors if code != "DS303")


@pytest.fixture(scope="module")
def deepspeed_refuses():
    """DeepSpeed's parser as a function from a text to whether it raises."""
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.utils import logger

    logger.setLevel(logging.CRITICAL)

    def refuses(text: str) -> bool:
        try:
            DeepSpeedConfig(json.loads(text))  # thousands of files would take more time than all the rest
        except Exception:
            return True
        return False

    yield refuses
    logger.setLevel(logging.INFO)


THIRDS = 3


@pytest.mark.parametrize("third", [0, *(pytest.param(n, marks=pytest.mark.thorough) for n in range(1, THIRDS))])
def test_every_key_with_every_kind_of_value(third, deepspeed_refuses):
    """In three parts, of which each has every key, and of every three keys every value."""
    excused = STRICTER | LENIENT
    wrong = []
    for number, pointer in enumerate(sorted({pointer for pointer, _ in every_key()} - excused.keys())):
        for value in VALUES[(number + third) % THIRDS :: THIRDS]:
            text = config(pointer, value)
            batch_by_auto = value == "auto" and pointer.count("/") == 1  # a rule of its own: nobody resolves it
            if not batch_by_auto and refused(text) != deepspeed_refuses(text):
                wrong.append(text)
    assert not wrong


@pytest.mark.parametrize("pointer", sorted(STRICTER | LENIENT))
def test_what_is_excused_does_differ(pointer, deepspeed_refuses):
    values = [*VALUES, 1e-10, False]
    assert any(refused(config(pointer, value)) != deepspeed_refuses(config(pointer, value)) for value in values)


CHOICES = st.sampled_from([*VALUES, *LEAST.values(), False, 1, 3, 1.5, 2.0, "2", "true", "best", "Uniform", "nvme"])
EDITS = st.lists(st.tuples(st.sampled_from([*LEAST, *(pointer for pointer, _ in every_key())]), CHOICES), max_size=4)
# what excludes what, and old forms beside new ones, is seldom drawn from a thousand keys
PAIRED = st.fixed_dictionaries(
    {},
    optional={
        "bf16": st.sampled_from([{"enabled": 1}, {"enabled": "auto"}, {"enabled": "yes"}, {}, None, False]),
        "bfloat16": st.sampled_from([{"enabled": True}, {"enabled": "0"}]),
        "fp16": st.sampled_from([{"enabled": True}, {"enabled": 0}, {"enabled": "on"}]),
        "zero_optimization": st.sampled_from(
            [True, False, {"stage": "2"}, {"stage": 3.0}, {"cpu_offload_param": True}]
        ),
        "pipeline": st.sampled_from([{"stages": 2, "partition": "fair"}, {"stages": 2.0}, {"partition": "type:["}, {}]),
        "tensor_parallel": st.sampled_from([{"autotp_size": "2"}, {"autotp_size": 0}, {"autotp_size": True}]),
        "expert_parallel": st.sampled_from([{"enabled": True, "autoep_size": 2}, {"enabled": "true"}]),
        "sequence_parallel_size": st.sampled_from([1, 2, "2"]),
        "gradient_accumulation_steps": st.sampled_from([1, 2, 3, "auto", None]),
        "train_batch_size": st.sampled_from([1, 4, 6, "auto", None]),
        "optimizer": st.sampled_from([{"type": "Lamb"}, {"type": "SGD", "params": {"lr": 0.1}}, {"type": "AdamW"}]),
    },
)


@settings(max_examples=100)
@given(PAIRED, EDITS, st.sampled_from([1, 2, 4]))
def test_check_and_run_refuse_the_same_configs_in_the_same_words(paired, edits, world_size):
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1} | json.loads(json.dumps(paired))
    for pointer, value in edits:
        try:
            put(config, pointer, value)
        except (AttributeError, TypeError):
            continue  # below something that is no object
    if config["train_micro_batch_size_per_gpu"] in (None, "auto"):
        config["train_micro_batch_size_per_gpu"] = 1  # else the arguments' default takes part
    document = from_text(json.dumps(config))
    expected = refusals(check(document, world_size=world_size))
    try:
        resolve(document, AutoValues(world_size=world_size))
        refused = []
    except ConfigError as error:
        refused = error.diagnostics
    assert [str(item) for item in refused] == [str(item) for item in expected]


FIELDS = [
    (pointer, name, field)
    for pointer, path in MODELS.items()
    for name, field in attribute(path).model_fields.items()
    if not {"array", "object"} & set(schema.find(f"{pointer}/{field.alias or name}").types)
]
SCALARS = st.sampled_from([None, True, False, 0, 1, 2, 0.5, 2.0, 5e8, "", "2", "2.0", "1e3", "yes", "off", "cpu", "x"])


@settings(max_examples=300)
@given(st.sampled_from(FIELDS), SCALARS | st.integers() | st.booleans())
def test_a_value_is_read_as_deepspeeds_own_model_reads_it(place, value):
    pointer, name, field = place
    assume(name != "overlap_comm" or value is not None)  # DeepSpeed's model decides it by the stage then
    try:
        theirs = getattr(attribute(MODELS[pointer])(**{field.alias or name: value}), name)
    except Exception:
        return  # refused: the verdicts are compared above
    config: dict[str, Any] = {}
    put(config, f"{pointer}/{field.alias or name}", value)
    ours = lookup(as_read(config), f"{pointer}/{field.alias or name}")
    if isinstance(theirs, PurePath):
        ours = type(theirs)(ours)
    assert ours == (theirs.value if isinstance(theirs, Enum) else theirs)
