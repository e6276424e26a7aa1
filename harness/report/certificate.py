"""Certificates of `ds-harness verify`: what was compared for a config and a model, by which code, and with what result.

They lie in a folder of the user's, under a name made of what they hold for: the config as it is written, the layout,
the model's config, the code of the harness and the versions of what it stands on. A run that finds the one of its own
copies it into `run.json`; a change of any of these leaves it behind.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

from harness.checkpoint.atomic import replace_text
from harness.config import Resolved
from harness.config.values.json_file import read_json
from harness.config.values.json_object import JsonObject
from harness.topology.env import cache_folder
from harness.wording import counted

EQUAL, DIFFERS, REFUSED, UNVERIFIED = "equal", "differs", "refused", "not verified"
"""What a certificate says: of all that was compared; that the run refuses it; that nothing could be compared."""
HARNESS = Path(__file__).resolve().parents[1]


def digest(content: object) -> str:
    """Return a short hash of JSON, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:32]


@cache
def digest_of_code() -> str:
    """Return a short hash of the harness's own source, and of its plans."""
    found = hashlib.sha256()
    for path in sorted(HARNESS.rglob("*")):
        if path.suffix in (".py", ".json") and path.is_file():
            found.update(f"{path.relative_to(HARNESS)}\0".encode() + path.read_bytes())
    return found.hexdigest()[:32]


def layout_of(resolved: Resolved) -> JsonObject:
    """Return what decides how ranks compute, as flags may have changed it; how many data ranks there are does not."""
    names = (
        "pp_size",
        "tp_size",
        "cp_size",
        "ep_size",
        "zero_stage",
        "precision",
        "schedule",
        "activation_checkpoint_interval",
    )
    return {name: getattr(resolved, name) for name in names}


def subject(config: Mapping[str, object], layout: Mapping[str, object], model: Mapping[str, object]) -> JsonObject:
    """Return what a certificate holds for.

    Args:
        config: the DeepSpeed JSON as it is written.
        layout: as `layout_of` says it.
        model: what its config says of the computation.
    """
    return {"config": digest(config), "layout": dict(layout), "model": digest(model), "code": digest_of_code()}


def store(certificate: JsonObject) -> Path | None:
    """Keep a certificate where runs look for it; None if there is no room for it."""
    path = _path(certificate["subject"], certificate["versions"])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(certificate, indent=2) + "\n")
    except OSError:
        return None
    return path


def find(subject: Mapping[str, object], versions: Mapping[str, object]) -> JsonObject | None:
    """Return the certificate that holds for a run; None if there is none."""
    with suppress(OSError, ValueError):
        found = read_json(_path(subject, versions))
        if isinstance(found, dict) and found.get("subject") == subject and found.get("versions") == versions:
            return found
    return None


def _path(subject: Mapping[str, object], versions: Mapping[str, object]) -> Path:
    return cache_folder() / "certificates" / f"{digest([subject, versions])}.json"


def told(certificate: Mapping[str, object]) -> str:
    """Return when, on what and why a certificate says so, in a few words."""
    rows = certificate.get("compared")
    count = len(rows) if isinstance(rows, list) else 0
    words = [f"verified {str(certificate.get('date', ''))[:10]}", counted(count, "training"), certificate.get("reason")]
    return ", ".join(str(word) for word in words if word)
