"""From a written name to an engine and its options: every form, and an error with a way out for the rest."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from specnb.decode.generate import generate
from specnb.errors import InputError, LoadError, MemoryShortError
from specnb.lm import load as loading
from specnb.lm import memory, zoo
from specnb.lm.hf.files import NOTE, dequantised
from specnb.lm.load import load, local_file, parse, room_for_both, weights_bytes
from specnb.lm.toy import markov
from specnb.measure.pair import run_pair
from tests.tiny_hybrids import hybrid_folder
from tests.tiny_models import llama_gguf, torch_folder

FORMS = {
    "smollm2-135m": ("zoo", "smollm2-135m", "llama", {}),
    "smollm2-135m:f16": ("zoo", "smollm2-135m:f16", "llama", {}),
    "smollm2-135m?backend=hf&dtype=bfloat16": ("zoo", "smollm2-135m", "hf", {"dtype": "bfloat16"}),
    "smollm2-135m:q8_0?n_ctx=64&fixed_width=5": (
        "zoo", "smollm2-135m:q8_0", "llama", {"n_ctx": "64", "fixed_width": "5"}),
    "model.gguf": ("gguf", "model.gguf", "llama", {}),
    "/some where/model.gguf?backend=hf": ("gguf", "/some where/model.gguf", "hf", {}),
    "hf:ORG/NAME": ("hf", "ORG/NAME", "hf", {}),
    "hf:ORG/NAME?revision=v1.0": ("hf", "ORG/NAME", "hf", {"revision": "v1.0"}),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_every_form_of_a_name(name):
    where, source, backend, options = FORMS[name]
    spec = parse(name)
    assert (spec.where, spec.source, spec.backend, dict(spec.options)) == (where, source, backend, options)
    assert parse(spec.text) == spec and spec.text == name.replace(" ", " ")


def test_a_folder_is_a_transformers_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for name in ("./folder", "folder", str(tmp_path / "folder")):
        assert (parse(name).where, parse(name).backend, parse(name).source) == ("hf", "hf", name)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert parse("~/folder").where == "hf"
    assert local_file(parse("~/model.gguf")) == tmp_path / "model.gguf"
    assert local_file(parse("folder")) is None


def test_keyword_options_win_and_are_part_of_the_name():
    spec = parse("smollm2-135m?backend=hf&dtype=bfloat16&n_ctx=8", dtype="float16", backend="llama")
    assert spec.backend == "llama" and dict(spec.options) == {"dtype": "float16", "n_ctx": "8"}
    assert parse("model.gguf", n_ctx=8).text == "model.gguf?n_ctx=8"
    assert parse("model.gguf?n_ctx=4&n_ctx=8").options["n_ctx"] == "8"
    assert parse("smollm2-135m", backend="hf") == dataclasses.replace(parse("smollm2-135m?backend=hf"))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("smollm2-135", "did you mean smollm2-135m"),
        ("smollm-135m", "did you mean smollm2-135m"),
        ("gpt-17", "known are smollm2-135m"),
        ("", "unknown model in ''"),
        ("?backend=hf", "unknown model in ''"),
        ("ORG/NAME", "no such folder: ORG/NAME .a model on a hub is hf:"),
        ("./nowhere", "no such folder"),
        ("~nobody-of-this-name/x", "no such folder"),
        ("a" * 5000, "unknown model"),
        ("a\0b", "unknown model"),
        ("smollm2-135m?backend=vllm", "unknown backend 'vllm'.*known: llama, hf"),
        ("smollm2-135m?backend", "cannot read the options 'backend'.*NAME.backend=hf"),
        ("smollm2-135m?&&", "cannot read the options"),
        ("hf:ORG/NAME?backend=llama", "is on a hub; llama.cpp opens .gguf files and local folders: download it first"),
    ],
)
def test_a_name_that_means_nothing_is_refused(name, says):
    with pytest.raises(InputError, match=says):
        parse(name)


def test_llama_cpp_opens_a_folder_of_a_known_family_by_converting_it_once(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECNB_CACHE", str(tmp_path / "cache"))
    folder = hybrid_folder(tmp_path / "hybrid", "qwen35")
    name = f"{folder}?backend=llama&weights=f32&threads=1"
    made = local_file(parse(name))
    assert made == local_file(parse(name)) and made.is_file() and made.parent == tmp_path / "cache" / "converted"
    assert local_file(parse(name.replace("f32", "f16"))) != made
    (folder / "generation_config.json").unlink()  # part of what is read
    assert local_file(parse(name)) != made
    model, torch = load(name), load(folder)
    assert (model.caps.engine, model.name) == ("llama.cpp", name)
    np.testing.assert_allclose(model.forward([5, 6, 7]), torch.forward([5, 6, 7]), atol=1e-3)
    model.close()


def test_a_folder_that_cannot_be_converted_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECNB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(InputError, match=r"config\.json"):
        load(tmp_path, backend="llama")
    with pytest.raises(InputError, match="model_type 'llama': known are qwen3_5_text"):
        load(torch_folder(tmp_path / "llama"), backend="llama")
    with pytest.raises(InputError, match="unknown dtype 'q4_0'"):
        load(torch_folder(tmp_path / "again"), backend="llama", weights="q4_0")
    with pytest.raises(InputError, match="hf has no option 'weights'"):
        load(tmp_path, weights="f16")


def test_a_corrupt_folder_behind_llama_is_a_load_error_and_a_draft_falls_back(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECNB_CACHE", str(tmp_path / "cache"))
    folder = hybrid_folder(tmp_path / "hybrid", "qwen3")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    name = f"{folder}?backend=llama"
    with pytest.raises(LoadError, match="hybrid"):
        load(name)
    generation = generate(markov(8), [1], drafter=name, max_new_tokens=2)
    assert "LoadError" in generation.fallback and len(generation.token_ids) == 2
    (folder / "config.json").write_text("{")
    target = str(torch_folder(tmp_path / "target"))
    assert "LoadError" in generate(target, [1], drafter=str(folder), max_new_tokens=2).fallback


@pytest.mark.parametrize(
    "damage", [lambda data: data[: len(data) // 2], lambda data: bytes([*data[:-1], data[-1] ^ 1])]
)
def test_damaged_copies_in_the_cache_are_made_again(file, tmp_path, monkeypatch, damage):
    monkeypatch.setenv("SPECNB_CACHE", str(tmp_path / "cache"))
    converted = local_file(parse(f"{hybrid_folder(tmp_path / 'hybrid', 'qwen3')}?backend=llama"))
    with pytest.warns(UserWarning):
        folder = dequantised(file)
    copies = [converted, folder / "model.safetensors", folder / "tokenizer.json", folder / NOTE]
    sound = [copy.read_bytes() for copy in copies]
    for copy, data in zip(copies, sound, strict=True):
        copy.write_bytes(damage(data))
    local_file(parse(f"{tmp_path / 'hybrid'}?backend=llama"))
    with pytest.warns(UserWarning):
        dequantised(file)
    assert [copy.read_bytes() for copy in copies] == sound


# ---- room for two


def pair_with(monkeypatch, free_mib: int, target: str, draft: str | None, **options):
    monkeypatch.setattr(memory, "free_bytes", lambda device: {"cpu": free_mib << 20}[device])
    return room_for_both(target, draft, **options)


def test_a_draft_is_weighed_beside_its_target_before_either_is_loaded(file, monkeypatch):
    names = ("smollm2-135m:f32", "smollm2-135m:f16")  # 515 and 258 MiB, and a margin of 256 each
    assert pair_with(monkeypatch, 1300, *names) == (names[1], None)
    assert pair_with(monkeypatch, 1280, *names)[0] is None
    assert "MemoryShortError" in pair_with(monkeypatch, 1280, *names)[1]
    with pytest.raises(MemoryShortError, match=names[1]):
        pair_with(monkeypatch, 1280, *names, strict=True)
    for draft in (None, "lookup", "self", "medusa", "smolm2"):  # no model, or none that can be weighed
        assert pair_with(monkeypatch, 0, names[0], draft) == (draft, None)
    on_gpu = (names[0], f"{names[1]}?gpu_layers=99")
    assert pair_with(monkeypatch, 1000, *on_gpu) == (on_gpu[1], None)
    monkeypatch.setattr(loading, "load", lambda *_, **__: pytest.fail("a model was opened"))
    with pytest.raises(MemoryShortError):
        run_pair(*names, "a", strict=True)
    with pytest.raises(MemoryShortError):
        generate(names[0], "a", drafter=names[1], strict=True)


def test_weights_are_those_of_all_parts_and_of_the_type_asked_for(tmp_path):
    for i in (1, 2, 3):
        (tmp_path / f"big-0000{i}-of-00003.gguf").write_bytes(b"x" * i)
    assert weights_bytes(parse(str(tmp_path / "big-00001-of-00003.gguf"))) == 6
    entry = zoo.ENTRIES["smollm2-135m"]
    assert weights_bytes(parse("smollm2-135m")) == entry.member_bytes
    assert weights_bytes(parse("smollm2-135m?backend=hf&dtype=bfloat16")) == 2 * entry.parameters
    folder = torch_folder(tmp_path / "folder")  # stored as float32
    stored = (folder / "model.safetensors").stat().st_size
    assert weights_bytes(parse(str(folder))) == stored
    assert (
        weights_bytes(parse(f"{folder}?dtype=float16"))
        == weights_bytes(parse(f"{folder}?backend=llama"))
        == stored // 2
    )
    assert weights_bytes(parse("hf:org/name")) == 0


@pytest.fixture
def file(tmp_path):
    return llama_gguf(tmp_path / "tiny model?.gguf".replace("?", ""), all_bytes=True)


def options_of(name, **options):
    spec = parse(name, **options)
    return loading._typed(loading._opener(spec.backend), spec)


def test_options_take_the_types_that_the_engine_states():
    written = options_of("m.gguf?n_ctx=64&flash_attention=TRUE&kv=f16&threads=2")
    assert written == {"n_ctx": 64, "flash_attention": True, "kv": "f16", "threads": 2}
    assert options_of("m.gguf?flash_attention=0") == {"flash_attention": False}
    given = options_of("m.gguf", n_ctx=np.int64(64), flash_attention=False, kv="")
    assert given == {"n_ctx": 64, "flash_attention": False, "kv": ""}
    assert options_of("hf:o/n?exact=false&dtype=float16") == {"exact": False, "dtype": "float16"}


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("m.gguf?n_ctx=many", {}, "n_ctx='many' is not"),
        ("m.gguf?n_ctx=1.5", {}, "n_ctx='1.5' is not"),
        ("m.gguf?n_ctx=", {}, "n_ctx='' is not"),
        ("m.gguf?flash_attention=yes", {}, "flash_attention='yes' is not"),
        ("m.gguf", {"n_ctx": 1.5}, "n_ctx=1.5 is not"),
        ("m.gguf", {"n_ctx": None}, "n_ctx=None is not"),
        ("m.gguf", {"kv": 16}, "kv=16 is not"),
        ("m.gguf", {"flash_attention": 1}, "flash_attention=1 is not"),
        ("m.gguf?dtype=float32", {}, "llama has no option 'dtype'; known: backend, n_ctx"),
        ("hf:o/n?kv=f16", {}, "hf has no option 'kv'; known: backend, dtype"),
        ("m.gguf?name=x", {}, "no option 'name'"),
    ],
)
def test_an_option_that_is_unknown_or_of_the_wrong_type_is_refused(name, options, says):
    with pytest.raises(InputError, match=says):
        options_of(name, **options)


def test_load_opens_files_and_folders_and_keeps_their_name(file, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECNB_CACHE", str(tmp_path / "cache"))
    folder = torch_folder(tmp_path / "folder")
    with pytest.warns(UserWarning, match=r"otherwise than llama\.cpp"):  # a tokenizer of 300 tokens without merges
        dequantised = load(f"{file}?backend=hf&n_ctx=16")
    models = [
        load(f"{file}?n_ctx=16&threads=1"),
        load(Path(file), n_ctx=16, threads=1),
        dequantised,
        load(folder, n_ctx=16),
    ]
    assert [m.caps.engine for m in models] == ["llama.cpp", "llama.cpp", "torch", "torch"]
    assert [m.caps.n_ctx for m in models] == [16] * 4
    assert models[0].name == models[1].name == f"{parse(str(file), n_ctx=16, threads=1).text}"
    rows = [m.forward([5, 6, 7]) for m in models[:3]]
    np.testing.assert_array_equal(rows[0], rows[1])
    np.testing.assert_allclose(rows[2], rows[0], atol=1e-4)
    for m in models:
        m.close()


def test_load_passes_on_what_the_engine_says(tmp_path):
    with pytest.raises(InputError, match="no such model file"):
        load("~nobody-of-this-name/x.gguf")
    with pytest.raises(InputError, match="empty"):
        load("hf:")
    with pytest.raises(InputError, match=r"no config\.json"):
        load(tmp_path)
    (tmp_path / "text.gguf").write_text("I was renamed")
    for backend in ("llama", "hf"):
        with pytest.raises(LoadError, match=r"text\.gguf"):
            load(tmp_path / "text.gguf", backend=backend)
