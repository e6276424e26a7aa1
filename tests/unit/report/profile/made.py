"""A profile of two stages that take one and two seconds a pass, computed by hand."""

from __future__ import annotations

from dataclasses import replace

from harness.report.profile.record import RankProfile, Span, StepProfile


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


def several_chunks() -> StepProfile:
    """Two stages of two parts, folded, and one micro-batch: 0 and 3 on the first stage, 1 and 2 on the second."""

    def spans(*given: tuple[str, str, int, float, float]) -> list[Span]:
        return [Span(kind=k, name=n, chunk=p, start=a, end=b, micro_batch=0) for k, n, p, a, b in given]

    first = spans(
        ("forward", "ForwardPass", 0, 0.0, 1.0),
        ("send", "SendActivation", 0, 1.0, 1.1),
        ("receive", "RecvActivation", 3, 1.1, 3.5),
        ("forward", "ForwardPass", 3, 3.5, 4.5),
        ("backward", "BackwardPass", 3, 4.5, 6.5),
        ("send", "SendGrad", 3, 6.5, 6.6),
        ("receive", "RecvGrad", 0, 6.6, 11.0),
        ("backward", "BackwardPass", 0, 11.0, 13.0),
    )
    second = spans(
        ("receive", "RecvActivation", 1, 0.5, 1.2),
        ("forward", "ForwardPass", 1, 1.2, 2.2),
        ("send", "SendActivation", 1, 2.2, 2.25),
        ("receive", "RecvActivation", 2, 2.25, 2.3),
        ("forward", "ForwardPass", 2, 2.3, 3.3),
        ("send", "SendActivation", 2, 3.3, 3.4),
        ("receive", "RecvGrad", 2, 3.4, 6.7),
        ("backward", "BackwardPass", 2, 6.7, 8.7),
        ("send", "SendGrad", 2, 8.7, 8.75),
        ("receive", "RecvGrad", 1, 8.75, 8.8),
        ("backward", "BackwardPass", 1, 8.8, 10.8),
        ("send", "SendGrad", 1, 10.8, 10.9),
    )
    ranks = [
        replace(rank, start=0.0, end=own[-1].end, instructions=own, layers=[])
        for rank, own in zip(profile().ranks, (first, second), strict=True)
    ]
    return replace(
        profile(),
        stage_boundaries=[0, 1, 2, 4, 5],
        layer_names=["Layer"] * 5,
        micro_batches=1,
        ranks=ranks,
        schedule="zero-bubble-v",
        chunks_per_stage=2,
    )


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
