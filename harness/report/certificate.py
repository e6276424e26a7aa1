"""Certificates of `ds-harness verify`: what was compared for a config and a model, by which code, and with what result.

They are kept in the user's cache folder. The file name is a hash of everything that a certificate depends on: the
config as written, the layout, the model's config, the source of the harness and the versions of its libraries. A run
looks for the certificate under its own hash and copies it into `run.json`; if any of these has changed, it finds none.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from harness.atomic import replace_text
from harness.config import Resolved
from harness.config.values.json_file import object_or_empty
from harness.config.values.json_object import JsonObject
from harness.topology.env import cache_folder
from harness.wording import counted

EQUAL, DIFFERS, REFUSED, UNVERIFIED = "equal", "differs", "refused", "not verified"
"""Verdicts: all comparisons were equal; one differs; the run refuses the config; nothing could be compared."""
HARNESS = Path(__file__).resolve().parents[1]


def short_digest(content: object) -> str:
    """Return a short hash of JSON that does not depend on the order of keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:32]


@cache
def digest_of_code() -> str:
    """Return a short hash of the harness's own Python and JSON files."""
    found = hashlib.sha256()
    for path in sorted(HARNESS.rglob("*")):
        if path.suffix in (".py", ".json") and path.is_file():
            found.update(f"{path.relative_to(HARNESS)}\0".encode() + path.read_bytes())
    return found.hexdigest()[:32]


def layout_of(resolved: Resolved) -> JsonObject:
    """Return the settings that decide how ranks compute, after flags have changed them.

    The number of data-parallel ranks is not among them: it does not change what each rank computes.
    """
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
    """Return everything that a certificate depends on, besides the versions of libraries.

    Args:
        config: the DeepSpeed JSON as it is written.
        layout: from `layout_of`.
        model: the entries of the model's config that change what it computes.
    """
    return {
        "config": short_digest(config),
        "layout": dict(layout),
        "model": short_digest(model),
        "code": digest_of_code(),
    }


def of_run(
    config: Mapping[str, object], resolved: Resolved, model: Mapping[str, object], versions: Mapping[str, object]
) -> JsonObject | None:
    """Return the certificate of `ds-harness verify` for a run's config, model and code; None without one."""
    return find(subject(config, layout_of(resolved), model), versions)


def store(certificate: JsonObject) -> Path | None:
    """Write a certificate where runs look for it and return its path; None if the folder cannot be written."""
    path = _path(certificate["subject"], certificate["versions"])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(certificate, indent=2) + "\n")
    except OSError:
        return None
    return path


def find(subject: Mapping[str, object], versions: Mapping[str, object]) -> JsonObject | None:
    """Return the certificate for a run's subject and versions; None if there is none."""
    found = object_or_empty(_path(subject, versions))
    return found if found and (found.get("subject"), found.get("versions")) == (subject, versions) else None


def _path(subject: Mapping[str, object], versions: Mapping[str, object]) -> Path:
    return cache_folder() / "certificates" / f"{short_digest([subject, versions])}.json"


def told(certificate: Mapping[str, object]) -> str:
    """Summarise a certificate in a few words: its date, the number of trainings compared, the reason."""
    rows = certificate.get("compared")
    count = len(rows) if isinstance(rows, list) else 0
    words = [f"verified {str(certificate.get('date', ''))[:10]}", counted(count, "training"), certificate.get("reason")]
    return ", ".join(str(word) for word in words if word)
