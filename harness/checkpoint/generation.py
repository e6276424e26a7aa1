"""Load a trained model with plain transformers, and tokenise a prompt for it, in the chat template if it is asked."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.checkpoint.integrity import is_checkpoint, listed_files, require_listed_weights
from harness.errors import UserError
from harness.hf.locate import ADAPTERS, model_directory, require_vocabulary
from harness.hf.template_process import TemplateProcess

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load(name: str) -> tuple[PreTrainedTokenizerBase, Any]:
    """Load the tokenizer and the model of a directory, a preset or a hub id; adapters are loaded with their base model.

    In a checkpoint, only files listed in its manifest are read.

    Raises:
        UserError: loading fails, or a checkpoint contains weights that are not in its manifest.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    directory = Path(name) if (Path(name) / ADAPTERS).is_file() else model_directory(name, "MODEL_DIR")
    require_listed_weights(directory)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with listed_files(directory) if is_checkpoint(directory) else nullcontext(directory) as folder:
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, ImportError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0].replace(str(folder), str(directory))
            raise UserError(f"cannot load {directory}: {reason}") from error
    require_vocabulary(tokenizer, directory)
    return tokenizer, model.eval().to("cuda" if torch.cuda.is_available() else "cpu")


def brings_template(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the tokenizer has a chat template other than the bytes tokenizer's, which always has one."""
    return bool(tokenizer.chat_template) and "harness_tokenizer" not in getattr(tokenizer, "init_kwargs", {})


def padding_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the padding id, or the end-of-sequence id if there is none."""
    found: int | None = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return found


def prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: str, *, chat: bool) -> list[int]:
    """Tokenise the prompt; with `chat`, as a user's message in the chat template. UserError for an empty prompt."""
    if chat:
        if not tokenizer.chat_template:
            raise UserError("--chat: the tokenizer has no chat template")
        message = [{"role": "user", "content": prompt}]
        template = TemplateProcess(tokenizer.get_chat_template(), tokenizer.special_tokens_map)
        (text,), _ = template.write(message, None, "--chat", add_generation_prompt=True)
        found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return found
    found = tokenizer(prompt)["input_ids"]
    if not found:
        raise UserError("--prompt is empty: give some text")
    return found
