"""A profile of two stages that take one and two seconds a pass, computed by hand."""

from __future__ import annotations

from harness.profile.record import RankProfile, Span, StepProfile


def instructions(*given: tuple[str, str, float, float]) -> list[Span]:
    counts: dict[str, int] = {}
    spans = []
    for kind, name, start, end in given:
        number = counts[name] = counts.get(name, -1) + 1
        spans.append(Span(kind=kind, name=name, start=start, end=end, micro_batch=number))
    return spans


FIRST = instructions(
    ("forward", "ForwardPass", 0.5, 1.5),
    ("send", "SendActivation", 1.5, 1.6),
    ("forward", "ForwardPass", 1.6, 2.6),
    ("receive", "RecvGrad", 2.6, 5.7),
    ("backward", "BackwardPass", 5.7, 6.7),
    ("send", "SendActivation", 6.7, 6.8),
    ("receive", "RecvGrad", 6.8, 10.0),
    ("backward", "BackwardPass", 10.0, 11.0),
    ("step", "OptimizerStep", 11.0, 11.5),
)
SECOND = instructions(
    ("receive", "RecvActivation", 0.25, 1.6),
    ("forward", "ForwardPass", 1.6, 3.6),
    ("backward", "BackwardPass", 3.6, 5.6),
    ("send", "SendGrad", 5.6, 5.7),
    ("receive", "RecvActivation", 5.7, 6.8),
    ("forward", "ForwardPass", 6.8, 8.0),
    ("backward", "BackwardPass", 8.0, 9.8),
    ("send", "SendGrad", 9.8, 10.0),
    ("step", "OptimizerStep", 10.0, 11.25),
)
MEMORY = {"parameters": 4, "gradients": 3, "optimizer": 8, "activations": 2, "other": 10, "peak": 27}


def profile(step: int = 3, run_id: str = "run") -> StepProfile:
    """Two ranks, two stages, two micro-batches."""
    layers = [
        Span(kind="forward", name="Layer", start=0.5, end=1.5, micro_batch=0, layer=0),
        Span(kind="backward", name="Layer", start=5.7, end=6.0, micro_batch=0, layer=0),
        Span(kind="recompute", name="Layer", start=6.0, end=6.5, micro_batch=0, layer=0),
        Span(kind="backward", name="Layer", start=6.5, end=6.7, micro_batch=0, layer=0),
    ]
    ranks = [
        RankProfile(
            rank=stage,
            stage=stage,
            dp_rank=0,
            tp_rank=0,
            host="here",
            start=0.25 * stage,
            end=spans[-1].end,
            instructions=spans,
            layers=layers if stage == 0 else [],
            memory_bytes=MEMORY,
        )
        for stage, spans in enumerate((FIRST, SECOND))
    ]
    return StepProfile(
        step=step,
        run_id=run_id,
        device="cpu",
        layout={"pipeline": 2, "data": 1, "tensor": 1},
        stage_boundaries=[0, 1, 2],
        layer_names=["Layer", "Layer"],
        micro_batches=2,
        ranks=ranks,
    )
