"""Rules about DeepSpeed's data efficiency library: curriculum learning and dynamic batching."""

from __future__ import annotations

from collections.abc import Iterator

from harness.config.rules.rule import Finding, rule
from harness.config.rules.view import RunView
from harness.config.text.diagnostic import Severity

SAMPLING = "/data_efficiency/data_sampling"


@rule("DS711", "curriculum-without-metrics", Severity.ERROR, claim="refuses")
def curriculum_without_metrics(view: RunView) -> Iterator[Finding]:
    """Curriculum learning is on, but its difficulty metrics are missing.

    Wrong: {"train_batch_size": 8, "data_efficiency": {"data_sampling": {"curriculum_learning": {"enabled": true}}}}
    Right: {"train_batch_size": 8, "data_efficiency": {"data_sampling": {"curriculum_learning": {"enabled": true,
           "curriculum_metrics": {}}}}}
    """
    here = f"{SAMPLING}/curriculum_learning"
    if view.get(f"{here}/enabled") and not view.has(f"{here}/curriculum_metrics"):
        yield Finding(
            pointer=f"{here}/enabled",
            message="curriculum_learning needs curriculum_metrics, which is missing",
            hint="add curriculum_metrics, or disable curriculum_learning",
            deepspeed="raises AssertionError",
        )


@rule("DS712", "dynamic-batching-without-tokens", Severity.ERROR, claim="refuses")
def dynamic_batching_without_tokens(view: RunView) -> Iterator[Finding]:
    """Dynamic batching is on, but the number of tokens in a batch is missing.

    Wrong: {"train_batch_size": 8, "data_efficiency": {"data_sampling": {"dynamic_batching": {"enabled": true}}}}
    Right: {"train_batch_size": 8, "data_efficiency": {"data_sampling": {"dynamic_batching": {"enabled": true,
           "max_tokens": 4096}}}}
    """
    here = f"{SAMPLING}/dynamic_batching"
    if view.get(f"{here}/enabled") and not view.has(f"{here}/max_tokens"):
        yield Finding(
            pointer=f"{here}/enabled",
            message="dynamic_batching needs max_tokens",
            hint="add max_tokens, the largest number of tokens in a batch",
            deepspeed="raises AssertionError",
        )
