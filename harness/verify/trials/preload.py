"""Import and read what the first engines of a process do, so that ranks forked from it need not."""

from importlib import import_module

from deepspeed.accelerator import get_accelerator

from harness.checking import schema
from harness.topology.agreement import code_version

for name in (
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.muon.original_muon",
    "torch._subclasses.schema_check_mode",
    "transformers.models.auto.modeling_auto",
):
    import_module(name)
if get_accelerator().device_name() == "cpu":  # on a GPU it would open a CUDA context, which no fork can use
    _ = import_module("deepspeed.ops").__compatible_ops__  # computed once: it starts a compiler
_ = schema.root(), code_version()
import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("")  # made once, for all families
