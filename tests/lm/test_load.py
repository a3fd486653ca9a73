"""Model names: all forms, their options, and errors with a remedy for invalid names."""

from unittest.mock import Mock

import numpy as np
import pytest
import torch

from specnb import machine
from specnb.compat.read import describe
from specnb.decode.generate import generate
from specnb.errors import FetchError, InputError
from specnb.lm.files import ENTRIES, local_file, parse, typed_options, weights_bytes
from specnb.lm.load import load
from specnb.lm.toy import markov
from tests.tiny_models import llama_gguf, torch_folder

FORMS = {
    "smollm2-135m": ("zoo", "smollm2-135m", "llama", {}),
    "smollm2-135m?backend=hf&dtype=bfloat16": ("zoo", "smollm2-135m", "hf", {"dtype": "bfloat16"}),
    "smollm2-135m:q8_0?n_ctx=64&exact=true": (
        "zoo",
        "smollm2-135m:q8_0",
        "llama",
        {"n_ctx": "64", "exact": "true"},
    ),
    "model.gguf": ("gguf", "model.gguf", "llama", {}),
    "/some where/model.gguf?backend=hf": ("gguf", "/some where/model.gguf", "hf", {}),
    "hf:ORG/NAME-GGUF:Q4_K_M?n_ctx=64": (
        "hub",
        "hf:ORG/NAME-GGUF:Q4_K_M",
        "llama",
        {"n_ctx": "64"},
    ),
    "hf:ORG/NAME/deep/file.gguf?backend=hf": ("hub", "hf:ORG/NAME/deep/file.gguf", "hf", {}),
    "hf:ORG/NAME?revision=v1.0": ("hf", "ORG/NAME", "hf", {"revision": "v1.0"}),
}
NO_NAMES = {
    "smollm-135m": "did you mean smollm2-135m",
    "?backend=hf": "unknown model in ''",
    ":q4_0": "unknown model in ':q4_0'",
    "smollm2-135m:": "unknown type",
    "smollm2-135m:../../x?backend=hf": "choose from f32, f16",
    "ORG/NAME": "hf:ORG/NAME",
    "hf:ORG/NAME/deep": "no such folder: hf:ORG/NAME/deep",
    "ORG/NAME-GGUF:Q4_K_M": "hf:ORG/NAME-GGUF:Q4_K_M",
    "~nobody-of-this-name/x": "no such folder",
    "a" * 5000: "unknown model",
    "smollm2-135m?backend=vllm": "unknown backend 'vllm'",
    "smollm2-135m?backend": "cannot read the options 'backend'",
    "hf:ORG/NAME?backend=llama": "is on a hub",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder that also contains the cache."""
    monkeypatch.setenv("SPECNB_CACHE", str(tmp_path / "cache"))
    return tmp_path


def test_all_forms_of_names_parse_and_keyword_options_take_precedence(tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    (tmp_path / "model.gguf").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    folders = {
        name: ("hf", name, "hf", {})
        for name in ("./folder", "folder", str(tmp_path / "folder"), "~/folder")
    }
    for name, expected in (FORMS | folders).items():
        spec = parse(name)
        assert (spec.where, spec.source, spec.backend, spec.options) == expected
        assert parse(spec.text) == spec and spec.text == name
    assert local_file(parse("~/model.gguf")) == tmp_path / "model.gguf"
    spec = parse("smollm2-135m?backend=hf&dtype=bfloat16&n_ctx=8", dtype="float16", backend="llama")
    assert spec.backend == "llama" and spec.options == {"dtype": "float16", "n_ctx": "8"}


def test_dtype_auto_depends_on_the_hardware_and_is_resolved_in_the_name(monkeypatch):
    for flag, dtype in (("avx512_bf16", "bfloat16"), ("bf16", "bfloat16"), ("avx2", "float32")):
        monkeypatch.setattr(machine, "cpuinfo", lambda flag=flag: (None, frozenset({flag})))
        text = parse("smollm2-135m:f16?backend=hf&dtype=auto").text
        assert text == f"smollm2-135m:f16?backend=hf&dtype={dtype}"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for known, dtype in ((True, "bfloat16"), (False, "float32")):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", Mock(return_value=known))
        assert parse("hf:ORG/NAME", dtype="auto", device="cuda:0").options["dtype"] == dtype


def test_invalid_names_are_rejected():
    for name, reason in NO_NAMES.items():
        with pytest.raises(InputError, match=reason):
            parse(name)


def test_llama_cpp_opens_the_gguf_next_to_a_folder(folder):
    gguf = folder / "tiny.f16.gguf"
    name = f"{torch_folder(folder / 'tiny')}?backend=llama"
    with pytest.raises(InputError, match=f"got the folder .*{gguf}"):
        load(name)
    gguf.touch()
    assert local_file(parse(name)) == gguf
    with pytest.raises(InputError, match="q4_0"):
        load(f"{name}&weights=q4_0")


# ---- GGUFs of a hub

REPOSITORY = [
    "README.md",
    "mmproj-Q8_0.gguf",
    "tiny-q8_0.gguf",
    "tiny-IQ8_0.gguf",
    "a.F16.gguf",
    "b.F16.gguf",
    *(f"Q2_K/tiny-Q2_K-0000{i}-of-00002.gguf" for i in (2, 1)),
]


@pytest.fixture
def hub(folder, monkeypatch):
    """A fake hub with a tiny model; returns the list of (repository, file, revision) downloaded."""
    snapshot = folder / "hub" / "models--ORG--NAME" / "snapshots" / "v1"
    fetched = []

    def download(repository, name, *, revision):
        fetched.append((repository, name, revision))
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        return str(llama_gguf(snapshot / name, all_bytes=True))

    monkeypatch.setenv("https_proxy", "http://proxy.invalid")  # so that no network is used
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(
        "huggingface_hub.list_repo_files", lambda repository, *, revision: REPOSITORY
    )
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    return fetched


def test_a_hub_gguf_opens_by_type_or_name_and_is_downloaded_once(hub, monkeypatch):
    model = load("hf:ORG/NAME:Q8_0?revision=v1&threads=1", n_ctx=16)
    assert model.caps.engine == "llama.cpp"
    model.close()
    assert hub == [("ORG/NAME", "tiny-q8_0.gguf", "v1")]
    parts = local_file(parse("hf:ORG/NAME:q2_k?revision=v1"))
    assert parts.name == "tiny-Q2_K-00001-of-00002.gguf"
    assert [name for _, name, _ in hub[1:]] == REPOSITORY[:-3:-1]
    assert weights_bytes(parse("hf:ORG/NAME:Q2_K?revision=v1")) == 2 * parts.stat().st_size
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    # from the cache
    assert local_file(parse("hf:ORG/NAME/tiny-q8_0.gguf?revision=v1")).name == "tiny-q8_0.gguf"
    assert describe("hf:ORG/NAME:Q8_0?revision=v1").vocab.size == model.vocab.size and len(hub) == 3
    with pytest.raises(FetchError, match=r"HF_HUB_OFFLINE.*\.gguf"):
        load("hf:ORG/NAME/other.gguf")


def test_missing_or_ambiguous_types_and_a_missing_network_raise_errors(hub, monkeypatch):
    for kind, value in {"F16": r"a\.F16\.gguf or b", "Q3_K": "Q3_K.*tiny-q8_0"}.items():
        with pytest.raises(InputError, match=value):
            load(f"hf:ORG/NAME:{kind}")
    monkeypatch.setattr("specnb.fetch.getproxies", dict)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert (
        "FetchError"
        in generate(markov(8), [1], drafter="hf:ORG/NAME:Q8_0", max_new_tokens=2).fallback
    )
    assert hub == []


def test_weights_count_all_parts_in_the_requested_type(tmp_path):
    for i in (1, 2, 3):
        (tmp_path / f"big-0000{i}-of-00003.gguf").write_bytes(b"x" * i)
    folder = torch_folder(tmp_path / "folder")  # stored as float32
    stored = (folder / "model.safetensors").stat().st_size
    entry = ENTRIES["smollm2-135m"]
    sizes = {
        str(tmp_path / "big-00001-of-00003.gguf"): 6,
        "smollm2-135m": entry.member_bytes,
        "smollm2-135m?backend=hf&dtype=int4": entry.member_bytes,
        "smollm2-135m:q8_0?backend=hf": 4 * entry.parameters,  # float32 by default
        "smollm2-135m?backend=hf&dtype=bfloat16": 2 * entry.parameters,
        str(folder): stored,
        f"{folder}?dtype=float16": stored // 2,
        f"{folder}?backend=llama": stored // 2,
        "hf:org/name": 0,
    }
    assert {name: weights_bytes(parse(name)) for name in sizes} == sizes


# ---- options


def test_options_are_converted_to_types_and_invalid_ones_are_rejected():
    written = typed_options(parse("m.gguf?n_ctx=64&exact=TRUE&kv=f16"))
    assert written == {"n_ctx": 64, "exact": "true", "kv": "f16"}
    given = typed_options(parse("hf:o/n?dtype=float16", exact=False, n_ctx=np.int64(8)))
    assert given == {"dtype": "float16", "exact": "false", "n_ctx": 8}
    for name in ("m.gguf?n_ctx=1.5", "m.gguf?threads=few", "m.gguf?dtype=f", "hf:o/n?kv=f"):
        with pytest.raises(InputError, match=name.partition("?")[2].partition("=")[0]):
            typed_options(parse(name))
