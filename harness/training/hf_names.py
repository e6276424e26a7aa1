"""What HuggingFace's Trainer takes and calls and this one does not: refused in one line that says what to use.

A method that is overridden here and never called, or a keyword that is dropped, would train something else in silence.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache

from harness.config.schema.suggest import nearest
from harness.errors import UserError, refuse_all

OPTIMIZER = "set optimizer and scheduler in the DeepSpeed JSON, or use the arguments"
LOADER = "give train_dataset, eval_dataset and data_collator"
LOSS = "give Trainer(loss_fn=...), which is called with (logits, labels)"
EVALUATION = "override evaluate(), or use a TrainerCallback with on_evaluate"
LOOP = "use a TrainerCallback"

METHODS = {
    "compute_loss": LOSS,
    "compute_loss_context_manager": LOSS,
    "training_step": f"here it takes no batch: {LOSS}, or {LOOP}",
    "prediction_step": EVALUATION,
    "evaluation_loop": EVALUATION,
    "create_optimizer": OPTIMIZER,
    "create_scheduler": OPTIMIZER,
    "create_optimizer_and_scheduler": OPTIMIZER,
    "get_optimizer_cls_and_kwargs": OPTIMIZER,
    "get_decay_parameter_names": OPTIMIZER,
    "get_train_dataloader": LOADER,
    "get_eval_dataloader": LOADER,
    "get_test_dataloader": LOADER,
    "_get_train_sampler": LOADER,
    "_get_eval_sampler": LOADER,
    "get_batch_samples": LOADER,
    "_prepare_inputs": LOADER,
    "log": "use a TrainerCallback with on_log",
    "hyperparameter_search": "start a run for each choice of arguments",
    "create_model_card": "write the README.md of output_dir yourself",
    "create_accelerator_and_postprocess": LOOP,
    "get_learning_rates": "see trainer.engine.learning_rate",
    "get_num_trainable_parameters": "see trainer.run.trainable.size(trained=True)",
    "num_examples": "take len(trainer.train_dataset)",
    "floating_point_ops": "`ds-harness estimate` counts them",
    "_save": "override save_model()",
    "_save_checkpoint": "override save_checkpoint()",
}

ARGUMENTS = {
    "tokenizer": "give it as processing_class",
    "optimizers": OPTIMIZER,
    "optimizer_cls_and_kwargs": OPTIMIZER,
    "model_init": "give the model, or a config, which is initialised from the seed",
}


def require_ours(kind: type, base: type, others: Iterable[str]) -> None:
    """UserError for a Trainer of a class `kind` that overrides what our Trainer `base` never calls, or is given keyword
    arguments, `others`, that it does not take."""
    _require_own_methods(kind, base)
    refuse_arguments(others, base, ARGUMENTS, "Trainer")


def _require_own_methods(kind: type, base: type) -> None:
    """UserError if `kind`, derived from our Trainer `base`, overrides a method that only HuggingFace's calls."""
    derived = [cls for cls in kind.__mro__ if cls not in base.__mro__]
    if not derived:
        return
    known = methods_of_transformers() | METHODS.keys()
    for cls in derived:
        for name in vars(cls):
            if name in known and (not hasattr(base, name) or _needs_more(getattr(cls, name), getattr(base, name))):
                remedy = METHODS.get(name, LOOP)
                raise UserError(
                    f"{cls.__name__}.{name} is a method of HuggingFace's Trainer that is not called here: {remedy}"
                )


def refuse_arguments(
    given: Iterable[str], function: Callable[..., object], remedies: Mapping[str, str], what: str
) -> None:
    """UserErrors for the keyword arguments `given`, which `function` does not take."""
    problems = []
    for name in given:
        close = nearest(name, inspect.signature(function).parameters)
        remedy = remedies.get(name) or (f"did you mean {close}?" if close else "leave it out")
        problems.append(f"{what} takes no {name}: {remedy}")
    refuse_all(problems)


@cache
def methods_of_transformers() -> frozenset[str]:
    """Return the methods of HuggingFace's Trainer; none where it cannot be imported."""
    try:
        from transformers import Trainer
    except (ImportError, RuntimeError):  # it needs accelerate, which we do not
        return frozenset()
    return frozenset(
        name for name, member in vars(Trainer).items() if inspect.isfunction(member) and name != "__init__"
    )


def _needs_more(method: Callable[..., object], of_base: Callable[..., object]) -> bool:
    """Whether a method must be given what the one that it overrides does not take."""
    takes = set(inspect.signature(of_base).parameters)
    return any(name not in takes for name in _required(method))


def _required(method: Callable[..., object]) -> Iterator[str]:
    for name, parameter in list(inspect.signature(method).parameters.items())[1:]:
        if parameter.default is parameter.empty and parameter.kind in (
            parameter.POSITIONAL_ONLY,
            parameter.POSITIONAL_OR_KEYWORD,
            parameter.KEYWORD_ONLY,
        ):
            yield name
