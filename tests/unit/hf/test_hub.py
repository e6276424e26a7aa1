"""Ids of the hub: from a cache made by hand, from a hub on this machine, and errors of one line without one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Barrier, Thread

import pytest
from huggingface_hub import constants
from transformers import AutoModelForCausalLM

from harness.arguments.themes.script import ScriptArguments
from harness.cli import main
from harness.config.model import hub
from harness.data.tokenizer import ByteTokenizer, load_tokenizer
from harness.errors import UserError
from harness.hf.locate import PRESETS, model_directory
from harness.hf.skeleton import read_source

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    source = read_source("tiny-llama")
    AutoModelForCausalLM.from_config(source.config).save_pretrained(folder)
    ByteTokenizer().save_pretrained(folder)
    (folder / "pytorch_model.bin").write_bytes(b"not needed")
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return folder


def store(cache: Path, model: Path, name: str = "org/tiny", branch: str = "main") -> Path:
    """Put a model into the cache, as a download leaves it."""
    folder = cache / f"models--{name.replace('/', '--')}"
    shutil.copytree(model, folder / "snapshots" / COMMIT)
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs" / branch).write_text(COMMIT)
    return folder / "snapshots" / COMMIT


def test_a_model_in_the_cache_is_read_by_its_id(cache: Path, model: Path) -> None:
    snapshot = store(cache, model)
    assert model_directory("org/tiny") == snapshot == model_directory(f"org/tiny@{COMMIT}")
    assert read_source("org/tiny").weights == snapshot
    assert isinstance(load_tokenizer("org/tiny"), ByteTokenizer)
    assert main(["check", "zero3", "--model", "org/tiny", "--world_size", "2"]) == 0


def test_a_revision_is_that_of_the_flag(cache: Path, model: Path) -> None:
    snapshot = store(cache, model, branch="v2")
    script = ScriptArguments(model_name_or_path="org/tiny", model_revision="v2")
    assert model_directory(script.model) == snapshot
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set: unset it, run `hf download org/tiny`"):
        model_directory("org/tiny")
    with pytest.raises(UserError, match="only models of the hub have revisions"):
        ScriptArguments(model_name_or_path="tiny-llama", model_revision="v2")


def test_what_is_not_whole_is_not_trained_from_random_weights(cache: Path, model: Path) -> None:
    (store(cache, model) / "model.safetensors").unlink()
    with pytest.raises(UserError, match="not in the cache of the hub"):
        model_directory("org/tiny")


def test_a_path_or_a_misspelt_preset_never_asks_the_hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("tiny-lama", "runs/mine/model", "./mine", "/no/where"):
        with pytest.raises(UserError, match=r"no config\.json in a directory of that name"):
            model_directory(name)
    assert not cache.exists()


class Hub(BaseHTTPRequestHandler):
    """The part of the hub's protocol that a download uses; `folder` holds the files of org/tiny, others are gated."""

    folder: Path
    asked: list[str]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.asked.append(f"{self.command} {self.path}")
        path = self.path.partition("?")[0]
        if "org/tiny" not in path:
            return self._send(b"{}", status=403, headers={"X-Error-Code": "GatedRepo", "X-Error-Message": "Ask first."})
        if path.startswith("/api/"):
            files = [{"rfilename": file.name} for file in self.folder.iterdir()]
            if "/tree/" in path:
                files = [{"type": "file", "path": f["rfilename"], "size": 1, "oid": "x"} for f in files]
                return self._send(json.dumps(files).encode())
            return self._send(json.dumps({"id": "org/tiny", "sha": COMMIT, "siblings": files}).encode())
        content = (self.folder / path.rpartition("/")[2]).read_bytes()
        return self._send(content, headers={"ETag": f'"{len(content)}"', "X-Repo-Commit": COMMIT})

    def _send(self, content: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def own_hub(model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    kind = type("OwnHub", (Hub,), {"folder": model, "asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    Thread(target=server.serve_forever, daemon=True).start()
    yield kind
    server.shutdown()


def test_what_is_missing_is_downloaded_once_and_only_what_is_needed(own_hub: type[Hub], cache: Path) -> None:
    start, found = Barrier(3), []

    def rank() -> None:
        start.wait()
        found.append(model_directory("org/tiny"))

    ranks = [Thread(target=rank) for _ in range(3)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    assert found == [cache / "models--org--tiny" / "snapshots" / COMMIT] * 3
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {file.name for file in found[0].iterdir()}
    assert sum("GET" in line and line.endswith("model.safetensors") for line in own_hub.asked) == 1
    assert not any("pytorch_model.bin" in line for line in own_hub.asked)


def test_a_gated_model_is_the_hubs_own_words_in_one_line(own_hub: type[Hub]) -> None:
    with pytest.raises(UserError, match=r"--model_name_or_path org/gated: .*the hub says: ") as caught:
        model_directory("org/gated")
    assert "\n" not in str(caught.value) and "gated" in str(caught.value)


def test_presets_and_folders_go_before_the_hub(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(PRESETS / "tiny-llama", tmp_path / "org" / "tiny")
    monkeypatch.chdir(tmp_path)
    assert model_directory("org/tiny") == Path("org/tiny") and hub.cached("org/tiny") is None
