"""Mutated configs: whatever stands in the file, checking, fixing and printing end in findings, never a
traceback.

`FUZZ_EXAMPLES=100000 pytest tests/unit/config/test_fuzz.py` runs as many; the default keeps the tests
quick.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from harness.checking import check, resolve
from harness.checking.cli.fix import fix
from harness.checking.cli.render import FORMATS, render
from harness.checking.registry import RULES
from harness.checking.rules.view import TARGETS
from harness.checking.schema import every_key
from harness.config import AutoValues
from harness.config.text.diagnostic import ConfigError
from harness.config.text.document import from_bytes

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "60"))
PRESETS = [path.read_text("utf-8") for path in sorted((ROOT / "ds_configs").glob("*.json"))]
TEXTS = PRESETS + [rule.wrong for rule in RULES]
NAMES = sorted({pointer.rsplit("/", 1)[1] for pointer, _ in every_key()} | {"elasticity", "amp", "a/b", "~", ""})
BITS = [
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    '"',
    "'",
    "'''",
    "#",
    "//",
    "/*",
    "\\",
    "\\ud800",
    "\n",
    "\0",
    "True",
    "1e999",
    "9" * 5000,
]

RAW = st.builds(
    lambda text, at, size, bit: text[: at % (len(text) + 1)] + bit + text[at % (len(text) + 1) + size :],
    st.sampled_from(TEXTS),
    st.integers(0, 5000),
    st.integers(0, 12),
    st.sampled_from(BITS) | st.text(max_size=3),
).map(lambda text: text.encode("utf-8", "surrogatepass"))
SCALARS = st.sampled_from([None, True, False, "auto", "8", "cpu", "x", "", [], [1, "a"]]) | st.integers() | st.floats()
TREES = st.recursive(SCALARS, lambda tree: st.dictionaries(st.sampled_from(NAMES), tree, max_size=5), max_leaves=25)
BUILT = st.dictionaries(st.sampled_from(NAMES), TREES, max_size=6).map(lambda data: json.dumps(data).encode())


@settings(max_examples=EXAMPLES, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(RAW | BUILT | st.binary(max_size=60), st.sampled_from(TARGETS), st.sampled_from([None, 1, 6]))
def test_nothing_but_findings_comes_out(raw, target, world_size):
    try:
        document = from_bytes(raw, "fuzz.json")
    except ConfigError as error:
        assert len(error.diagnostics) == 1 and "\n" not in str(error)
        return
    findings = check(document, world_size=world_size, target=target)
    for style in FORMATS:
        render(findings, style, {"fuzz.json": document.text}, colour=True, files=1).encode("utf-8")
    fixed = fix(document, world_size=world_size, target=target)
    again = fix(
        from_bytes(fixed.text.encode("utf-8", "surrogatepass"), "fuzz.json"), world_size=world_size, target=target
    )
    assert again.text == fixed.text
    try:
        resolved = resolve(document, AutoValues(world_size=world_size or 1, hidden_size=64))
        assert resolved.train_batch == resolved.micro_batch * resolved.accumulation * resolved.batch_ranks
    except ConfigError as error:
        assert error.diagnostics
