"""The flags of the layout."""

from dataclasses import dataclass
from typing import ClassVar

from harness.arguments.flags import Flags, flag


@dataclass(kw_only=True)
class LayoutArguments(Flags):
    """How ranks share the model. They override the DeepSpeed JSON."""

    TITLE: ClassVar[str] = "Layout"

    pipeline_parallel_size: int | None = flag(None, "pipeline stages; overrides pipeline.stages", least=1)
    tensor_parallel_size: int | None = flag(
        None, "tensor-parallel ranks; overrides tensor_parallel.autotp_size", least=1
    )
    expert_parallel_size: int | None = flag(
        None,
        "tensor-parallel ranks that divide the experts among them; overrides expert_parallel.autoep_size",
        least=1,
        hf_only=True,
    )
    rebalance_steps: int | None = flag(
        None,
        "steps between comparisons of the pipeline's stages; layers move where that saves more than 5% of a step",
        least=1,
    )
