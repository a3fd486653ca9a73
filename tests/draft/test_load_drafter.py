"""Drafters by name: vocabularies are compared, and a failure to load is a recorded fallback."""

from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from specnb.decode.generate import generate
from specnb.draft import model as module
from specnb.draft.load import join_engine, load_drafter
from specnb.draft.model import ModelDrafter, refuse_copy
from specnb.errors import FetchError, InputError, LoadError, MemoryShortError, VocabularyMismatch
from specnb.lm import files, toy
from specnb.lm.files import name_copy
from specnb.lm.gguf import binding


def loading(monkeypatch, model=None, error=None):
    """Replace `load`: it returns a toy model that records its closing, or raises `error`."""
    load = Mock(return_value=model, side_effect=error)
    monkeypatch.setattr(module, "load", load)
    if model:
        model.close = Mock()
    return load


def test_a_draft_model_that_does_not_fit_the_target_is_rejected_and_closed(monkeypatch):
    model = toy.cyclic(5)
    load = loading(monkeypatch, model)
    made = load_drafter("small.gguf", toy.cyclic(5), n_ctx=64)
    assert made.drafter.model is model and made.fallback is None
    load.assert_called_once_with("small.gguf", n_ctx=64)
    model.close.assert_not_called()
    model.vocab = replace(model.vocab, pieces=(b"v", b"w", b"x", b"y", b"z"), kind="wpm")
    with pytest.raises(VocabularyMismatch, match="wpm"):
        load_drafter("other", toy.cyclic(5))
    model.close.assert_called_once()


def test_drafters_that_do_not_fit_the_target_are_rejected():
    target = toy.cyclic(5)
    for drafter in (target, ModelDrafter(target)):
        with pytest.raises(InputError, match="its own drafter"):
            generate(target, [0], drafter=drafter)
    with pytest.raises(VocabularyMismatch, match="token id 5"):
        generate(target, [0], drafter=ModelDrafter(toy.cyclic(6)))
    with pytest.raises(InputError, match=r"type.*DrafterBase"):
        generate(target, [0], drafter=ModelDrafter)


def test_a_draft_model_that_fails_to_load_is_a_fallback_with_the_reason(monkeypatch):
    for kind in (LoadError, MemoryShortError, FetchError):
        loading(monkeypatch, error=kind("the reason"))
        loaded = load_drafter("x", toy.cyclic(5))
        assert loaded.drafter is None and loaded.fallback == f"{kind.__name__}: the reason"
        with pytest.raises(kind, match="the reason"):
            load_drafter("x", toy.cyclic(5), strict=True)


def test_self_is_a_quantized_copy_of_a_zoo_model(monkeypatch):
    load = loading(monkeypatch, toy.cyclic(5))
    target = toy.cyclic(5)
    for target.name in ("smollm2-135m:f16", "smollm2-135m?backend=hf&dtype=bfloat16"):
        load_drafter("self", target)
        load.assert_called_with("smollm2-135m:q4_0")


JOINED = {  # draft and target: the opened draft
    "d.gguf?n_ctx=64 smollm2-135m?backend=hf&dtype=bfloat16&device=cpu": (
        "d.gguf?backend=hf&n_ctx=64&dtype=bfloat16&device=cpu"
    ),
    "smollm2-135m:q4_0?dtype=float16 m.gguf?backend=hf&dtype=float32": (
        "smollm2-135m:q4_0?backend=hf&dtype=float16"
    ),
    "d.gguf m.gguf?backend=hf&dtype=int4": "d.gguf?backend=hf&dtype=int4&coarse=true",
    "d.gguf?coarse=false m.gguf?backend=hf&dtype=int4": (
        "d.gguf?backend=hf&coarse=false&dtype=int4"
    ),
    "d.gguf?backend=llama m.gguf?backend=hf&dtype=int4": "d.gguf?backend=llama",
    "d.gguf smollm2-135m": "d.gguf",
    "hf:ORG/NAME smollm2-135m?backend=hf&dtype=bfloat16": "hf:ORG/NAME",
    "lookup m.gguf?backend=hf&dtype=int4": "lookup",
    "d.gguf cyclic": "d.gguf",
}


@pytest.mark.parametrize("names", JOINED)
def test_a_draft_model_opens_in_the_engine_of_a_torch_target_by_default(names):
    draft, target = names.split()
    assert join_engine(draft, target) == JOINED[names] == join_engine(JOINED[names], target)


def test_the_joined_name_is_opened(monkeypatch):
    load = loading(monkeypatch, toy.cyclic(5))
    target = toy.cyclic(5)
    target.name = "m.gguf?backend=hf&dtype=float32"
    load_drafter("d.gguf", target)
    load.assert_called_once_with("d.gguf?backend=hf&dtype=float32")


def test_a_quantized_copy_is_cached_by_content(monkeypatch, tmp_path):
    source = tmp_path / "m.gguf"
    requantize = Mock(
        side_effect=lambda path, dest, kind: dest.write_bytes(path.read_bytes() + kind.encode())
    )
    monkeypatch.setenv("SPECNB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(binding, "requantize", requantize)
    source.write_bytes(b"GGUF one")
    first = name_copy(str(source))
    assert Path(first).read_bytes() == b"GGUF oneq4_0" and first.endswith(".q4_0.gguf")
    assert name_copy(f"{source}?backend=hf") == first and requantize.call_count == 1
    source.write_bytes(b"GGUF two!")
    assert name_copy(str(source)) != first and requantize.call_count == 2
    # listed models, with and without a listed copy of this type
    assert name_copy("smollm2-135m") == "smollm2-135m:q4_0"
    monkeypatch.setattr(files, "zoo_file", lambda name: source)
    assert Path(name_copy("qwen2.5-coder-1.5b")).read_bytes() == b"GGUF two!q4_0"
    with pytest.raises(InputError, match="hf:ORG/NAME"):
        refuse_copy("hf:ORG/NAME")
