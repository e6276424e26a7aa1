"""Tell from a config.json alone whether a model's family can be trained at all. No torch, no transformers."""

from __future__ import annotations

from collections.abc import Mapping

from harness.config.model.plans import families_of_matrix
from harness.config.model.shape import is_model_type, read_model_config
from harness.errors import UserError

LAYOUTS = ("pipeline", "tensor", "zero3")
REFUSED = "refused: "


def require_trainable_family(source: str) -> None:
    """Call `require_trainable_config` for a model that the user names."""
    require_trainable_config(read_model_config(source), is_model_type(source))


def require_trainable_config(config: Mapping[str, object], is_type_alone: bool) -> None:
    """Raise UserError, with the reason, for a family that no layout could train when the matrix was made.

    Also raise it if config.json lacks `is_decoder` and the family is a decoder only with it. Without this check such a
    run would end with the same reason, but only after the model has been built. A config with a plan of its own always
    passes, and so does every config if the matrix was made with another version of transformers.
    """
    text = config.get("text_config")
    parts = [config, *([text] if isinstance(text, Mapping) else [])]
    rows = families_of_matrix()
    part = next((part for part in parts if str(part.get("model_type")) in rows), None)
    if part is None or any(key.startswith("base_model_") for part in parts for key in part):
        return
    family = str(part["model_type"])
    if all(rows[family].get(layout, "").startswith(REFUSED) for layout in LAYOUTS):
        reason = rows[family][LAYOUTS[0]].removeprefix(REFUSED).removeprefix(f"model type {family!r}: ")
        reason = reason.replace(f"model type {family!r}", "it", 1)
        raise UserError(f"model type {family!r} cannot be trained: {reason}; see docs/models.md for those that can")
    is_encoder = part.get("is_decoder") is not True and not is_type_alone
    if is_encoder and rows[family].get("is_decoder") == "needed":
        raise UserError(
            f"model type {family!r}: its logits depend on later tokens, so it is not a causal decoder: set is_decoder "
            "to true in its config.json"
        )
