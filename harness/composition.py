"""Put the core and its parts together: the only module that imports both.

A part whose folder is not installed is absent. `from harness import Trainer` is the Trainer of this module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from harness.arguments.themes.preferences import PreferenceArguments
from harness.installed import config_check, is_installed, require_installed, watch
from harness.resilience.placement import advise_run
from harness.training.parts import Parts
from harness.training.trainer import Trainer as CoreTrainer
from harness.uncaught import show_in_one_line

if TYPE_CHECKING:
    from harness.preferences.objective import Preferences


def installed_parts() -> Parts:
    """Return all parts that are installed."""
    parts = Parts(check_config=config_check(), placement_advice=advise_run, watch=watch())
    adding: dict[str, Callable[[Parts], Parts]] = {
        "harness.data": _with_data,
        "harness.extras": _with_extras,
        "harness.huggingface": _with_huggingface,
        "harness.planner": _with_planner,
        "harness.report": _with_report,
        "harness.verify": _with_verify,
    }
    for folder, add in adding.items():
        if is_installed(folder):
            parts = add(parts)
    return parts


def _with_data(parts: Parts) -> Parts:
    from harness.data.inputs import part

    return replace(parts, data=part)


def _with_extras(parts: Parts) -> Parts:
    from harness.extras import best_model, output_checks
    from harness.extras.compression import of_run as compression
    from harness.extras.early_stopping import EarlyStoppingCallback
    from harness.extras.expert_exchange.exchange import exchange_tokens
    from harness.extras.exporting.exporter import Exporter
    from harness.extras.fp8.layers import fp8_layers
    from harness.extras.fusing import fusing
    from harness.extras.given_optimizer.user_optimizer import of_run as user_optimizer
    from harness.extras.host_collectives import carry_on_host
    from harness.extras.lora import adapted
    from harness.extras.measured_costs import measured_costs
    from harness.extras.monitors import Monitors
    from harness.extras.progress import ProgressCallback
    from harness.extras.pushing import pushing
    from harness.extras.read_ahead import ReadAhead
    from harness.extras.rebalancing.rebalancer import Rebalancer
    from harness.extras.rollback import Rollback
    from harness.extras.router_loss import router_capture

    return replace(
        parts,
        adapters=adapted,
        best_model=best_model,
        compression=compression,
        early_stopping=EarlyStoppingCallback,
        exporting=Exporter,
        fp8=fp8_layers,
        fusing=fusing,
        host_collectives=carry_on_host,
        measure_layers=measured_costs,
        monitors=Monitors,
        output_checks=output_checks,
        progress=ProgressCallback,
        pushing=pushing,
        read_ahead=ReadAhead,
        rebalancer=Rebalancer,
        rollback=Rollback,
        routers=router_capture,
        token_exchange=exchange_tokens,
        user_optimizer=user_optimizer,
    )


def _with_huggingface(parts: Parts) -> Parts:
    from harness.command_line.other_programs import notes
    from harness.huggingface.callbacks import accept_callback

    accept = partial(accept_callback, early_stopping=parts.early_stopping)
    return replace(parts, argument_notes=notes, accept_callback=accept)


def _with_planner(parts: Parts) -> Parts:
    from harness.planner.forecast import forecast

    return replace(parts, forecast=forecast)


def _with_report(parts: Parts) -> Parts:
    from harness.report.profile.profiler import ProfileCallback
    from harness.report.provenance import provenance

    return replace(parts, profiling=ProfileCallback, provenance=provenance)


def _with_verify(parts: Parts) -> Parts:
    from harness.verify.packing import require_packable
    from harness.verify.sharding import verify_plan

    parts = replace(parts, verify_sharding=verify_plan, require_packable=require_packable)
    if is_installed("harness.context_parallel"):
        from harness.verify.token_split import token_split_support

        parts = replace(parts, plan_tokens=token_split_support)
    return parts


def preferences(given: PreferenceArguments) -> Preferences | None:
    """Return the objective that the flags ask for; None for the next token. UserError without that part."""
    if given.preference is None:
        return None
    require_installed("harness.preferences", f"--preference {given.preference}")
    from harness.preferences.objective import Preferences

    return Preferences(given)


if TYPE_CHECKING or is_installed("harness.huggingface"):
    from harness.huggingface.trainer import HuggingFaceTrainer as BaseTrainer
else:
    BaseTrainer = CoreTrainer


class Trainer(BaseTrainer):
    __doc__ = CoreTrainer.__doc__

    parts: ClassVar[Parts] = installed_parts()

    def _require_known(self, others: Mapping[str, object]) -> None:
        show_in_one_line()  # an error here usually ends the program: print it without a traceback
        super()._require_known(others)
