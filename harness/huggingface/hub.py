"""Send a trained model to the hub."""

from __future__ import annotations

from pathlib import Path

from harness.errors import UserError, headline

MODEL_FILES = [
    *("*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json", "adapter_config.json"),
    *("tokenizer*", "special_tokens_map.json", "vocab*", "merges.txt", "*.model", "chat_template*", "README.md"),
]
"""The files of `output_dir` that belong to the model."""


def upload(
    folder: Path, message: str, *, repo_id: str | None, private: bool | None, token: str | None, revision: str | None
) -> str:
    """Upload the model in `folder` to the hub; return the commit's URL. UserError if that fails."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # its client's, whichever that is

    try:
        api = HfApi(token=token)
        done = api.upload_folder(
            repo_id=api.create_repo(repo_id or folder.name, private=private, exist_ok=True).repo_id,
            folder_path=folder,
            commit_message=message,
            revision=revision,
            allow_patterns=MODEL_FILES,
            # checkpoints, also those set aside, and models and adapters of earlier runs (`model.1`, `adapters.1`)
            ignore_patterns=["checkpoint-*/*", "*-checkpoint-*/*", "model.*/*", "adapters.*/*", "logs/*"],
        )
    except (HTTPError, OSError, ValueError) as error:  # no token, no network, no such name, no right
        raise UserError(f"push_to_hub: {headline(error)}; the model is in {folder}: `hf upload` can send it") from error
    return str(done.commit_url)
