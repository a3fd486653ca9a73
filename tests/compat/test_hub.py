"""Tokenizers from the hub: its own library against a hub on this machine. What is fetched, which revision, who may."""

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from specnb.compat import shelf
from specnb.compat.check import Verdict, check
from specnb.compat.read import describe
from specnb.errors import FetchError
from tests.compat.test_folder import byte_level_tokenizer, folder_of

LLAMA = "meta-llama/Llama-3.2-1B-Instruct"
COMMITS = {"main": "a" * 40, "older": "b" * 40}


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as its library asks for: a repository's files at a revision, their heads, their bytes."""

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.answer()

    def do_GET(self):
        self.answer()

    def answer(self):
        self.server.asked.append(self.path)
        path = self.path.partition("?")[0]
        allowed = self.headers.get("Authorization") == "Bearer hf_granted" or "gated" not in path
        if path.startswith("/api/models/"):
            return self.listing(path)
        if not allowed:
            return self.send(403, b"", {"X-Error-Code": "GatedRepo"})
        head, _, name = path.rpartition("/")
        revision = next((r for r, commit in COMMITS.items() if head.endswith((commit, r))), "main")
        data = self.server.files[revision].get(name)
        if data is None:
            return self.send(404, b"", {"X-Error-Code": "EntryNotFound"})
        etag = hashlib.sha256(data).hexdigest()
        return self.send(200, data, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMITS[revision]})

    def listing(self, path):
        """The repository at a revision, or the list of its files."""
        repo, kind, revision = re.fullmatch(r"/api/models/(\w[^/]*/[^/]+)/(revision|tree)/([^/]+)", path).groups()
        revision = next((r for r, commit in COMMITS.items() if revision in (r, commit)), None)
        if revision is None:
            return self.send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        files = self.server.files[revision]
        oid = {name: hashlib.sha1(data).hexdigest() for name, data in files.items()}
        tree = [{"type": "file", "path": name, "size": len(files[name]), "oid": oid[name]} for name in files]
        whole = {"id": repo, "sha": COMMITS[revision], "siblings": [{"rfilename": name} for name in files]}
        return self.send(200, json.dumps(tree if kind == "tree" else whole).encode())

    def send(self, code, data, headers=()):
        self.send_response(code)
        for key, value in {"Content-Length": str(len(data)), **dict(headers)}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    from huggingface_hub import constants

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    older = byte_level_tokenizer()
    older["model"]["vocab"].pop(next(p for p, i in older["model"]["vocab"].items() if i == 258))
    older["model"]["merges"].pop()
    server.files, server.asked = {}, []
    for revision, tokenizer in (("main", byte_level_tokenizer()), ("older", older)):
        folder = folder_of(tmp_path / revision, tokenizer)
        server.files[revision] = {path.name: path.read_bytes() for path in folder.iterdir()}
        server.files[revision] |= {"model.safetensors": b"x" * 5000, "modeling_own.py": b"raise SystemExit"}
    threading.Thread(target=server.serve_forever, daemon=True).start()
    here = f"http://127.0.0.1:{server.server_port}"
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, here)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", here)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    yield server
    server.shutdown()
    server.server_close()


def test_a_tokenizer_is_fetched_without_weights_and_without_code(hub, tmp_path):
    d = describe("hf:org/tiny")
    assert d.vocab.size == 272 and d.name == "hf:org/tiny"
    assert not any("safetensors" in path or path.endswith(".py") for path in hub.asked)
    there = {path.name for path in (tmp_path / "hub").rglob("snapshots/*/*")}
    assert "tokenizer.json" in there and not there & {"model.safetensors", "modeling_own.py"}


@pytest.mark.parametrize("revision", ["older", COMMITS["older"]])
def test_the_revision_is_the_one_that_was_asked_for(hub, revision):
    older, newer = describe(f"hf:org/tiny?revision={revision}&backend=hf"), describe("hf:org/tiny")
    assert older.vocab.digest != newer.vocab.digest and older.n_tokens != newer.n_tokens
    assert older.name == f"hf:org/tiny?revision={revision}&backend=hf"


def test_a_gated_model_is_one_error_with_the_remedy_and_is_read_by_who_may(hub, monkeypatch):
    with pytest.raises(FetchError, match=r"hf:org/gated is gated: accept its licence .*hf auth login") as caught:
        describe("hf:org/gated")
    assert "\n" not in str(caught.value)
    monkeypatch.setenv("HF_TOKEN", "hf_granted")
    assert describe("hf:org/gated").vocab.size == 272


def test_a_family_that_may_not_be_shipped_is_compared_once_its_name_on_the_hub_is_given(hub):
    """The verdict on facts alone says which name that is."""
    draft = shelf.describe("smollm2")
    report = check(shelf.describe("llama-3.2-1b-instruct"), draft)
    (pieces,) = (f for f in report.findings if f.topic == "pieces")
    name = next(word for word in pieces.remedy.split() if word.startswith("hf:"))
    assert report.verdict is Verdict.UNKNOWN and name == f"hf:{LLAMA}"
    assert check(describe(name), draft).verdict is Verdict.TRANSLATION
    assert any(LLAMA in path for path in hub.asked)
