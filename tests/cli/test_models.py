"""`specnb models verify`: what the cache holds, and whether it is as it was made."""

import json

from specnb.lm.zoo import made_once


def test_verify_names_the_damaged_file_and_ends_with_one(specnb, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECNB_CACHE", str(tmp_path))
    file = made_once(tmp_path / "converted" / "tiny.gguf", lambda path: path.write_bytes(b"weights"), n_bytes=1)
    row = {"name": "converted/tiny.gguf", "path": str(file), "ok": True}
    code, out, _ = specnb("models", "verify", "--json")
    assert code == 0 and json.loads(out) == [row]
    file.write_bytes(b"weightz")
    code, out, _ = specnb("models", "verify", "--json")
    assert code == 1 and json.loads(out) == [row | {"ok": False}]
    code, out, _ = specnb("models", "verify")
    assert code == 1 and "tiny.gguf" in out
