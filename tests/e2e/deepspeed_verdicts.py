"""What DeepSpeed itself does with each rule's examples. It runs on a rank of its own.

One rank on the CPU. Each example goes through DeepSpeed's config parser as a file; with `engine` also
through `deepspeed.initialize`, with a one-layer model and, where the config names no optimizer, torch's SGD
or AdamW.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from harness.checking.registry import RULES


def parse(path: str) -> dict[str, object]:
    """How DeepSpeed's parser takes a file."""
    from deepspeed.runtime.config import DeepSpeedConfig

    try:
        config = DeepSpeedConfig(path)
    except Exception as error:
        return {"ok": False, "error": type(error).__name__, "text": str(error)}
    offload = config.zero_config.offload_optimizer
    return {
        "ok": True,
        "stage": int(config.zero_optimization_stage),
        "clipping": config.gradient_clipping,
        "offload": str(offload.device) if offload is not None else None,
    }


def start(path: str) -> dict[str, object]:
    """How DeepSpeed's engine takes a file."""
    import deepspeed
    import torch

    model = torch.nn.Linear(4, 4)
    named = "optimizer" in Path(path).read_text("utf-8").split("offload_optimizer")[0]
    optimizer = None if named else torch.optim.AdamW(model.parameters(), lr=1e-3)
    try:
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), optimizer=optimizer, config=path
        )
    except Exception as error:
        return {"ok": False, "error": type(error).__name__, "text": str(error)}
    contiguous = getattr(engine.optimizer, "contiguous_gradients", None)
    engine.destroy()
    return {"ok": True, "contiguous_gradients": contiguous}


def checkpointing(path: str) -> dict[str, object]:
    """How DeepSpeed's activation checkpointing takes a file."""
    from deepspeed.runtime.activation_checkpointing import checkpointing as module

    try:
        module.configure(None, deepspeed_config=path)
    except Exception as error:
        return {"ok": False, "error": type(error).__name__, "text": str(error)}
    return {"ok": True}


def pipeline(config: dict[str, object]) -> dict[str, object]:
    """How a PipelineEngine of one stage, an embedding and a head, takes a config, and its first step."""
    import deepspeed
    import torch
    from deepspeed.pipe import PipelineModule

    layers = [torch.nn.Embedding(8, 4), torch.nn.Linear(4, 8)]
    loss = torch.nn.functional.cross_entropy
    model = PipelineModule(layers, num_stages=1, loss_fn=lambda out, ids: loss(out.flatten(0, 1), ids.flatten()))
    try:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        ids = torch.arange(8).view(1, 8)
        engine.train_batch(iter([(ids, ids)] * engine.gradient_accumulation_steps()))
    except Exception as error:
        return {"ok": False, "error": type(error).__name__, "text": str(error)}
    return {"ok": True, "overlap_comm": getattr(engine.optimizer, "overlap_comm", None)}


def _not_compiled(builder: object) -> None:
    raise RuntimeError(f"{type(builder).__name__} is not compiled here")


def verdicts(with_engine: set[str]) -> dict[str, dict[str, dict[str, dict[str, object]]]]:
    """Return {code: {wrong|right: {parser|engine|...: outcome}}}; `with_engine` go through the engine too."""
    import deepspeed
    from deepspeed.ops.op_builder.cpu import FusedAdamBuilder

    # Else DeepSpeed compiles an all-reduce that nothing here uses, and waits for ever where one was killed doing so.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # Nor may Muon compile an Adam, which takes minutes: it has another for where that fails.
    FusedAdamBuilder.load = _not_compiled
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    outcomes: dict[str, dict[str, dict[str, dict[str, object]]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for rule in RULES:
            for side, text in (("wrong", rule.wrong), ("right", rule.right)):
                path = Path(folder) / f"{rule.code}-{side}.json"
                path.write_text(text, "utf-8")
                outcome: dict[str, dict[str, object]] = {"parser": parse(str(path))}
                if f"{rule.code}-{side}" in with_engine:
                    outcome["engine"] = start(str(path))
                if rule.code in ("DS701", "DS702"):
                    outcome["checkpointing"] = checkpointing(str(path))
                if rule.code in ("DS601", "DS602", "DS605"):
                    outcome["pipeline"] = pipeline(json.loads(text))
                outcomes.setdefault(rule.code, {})[side] = outcome
    return outcomes
