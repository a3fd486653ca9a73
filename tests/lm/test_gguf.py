"""GGUF files in llama.cpp: bad files and arguments raise one error, and never abort the process."""

import gguf
import numpy as np
import pytest

from specnb import machine
from specnb.errors import CapacityError, InputError, LoadError, MemoryShortError
from specnb.lm.gguf import binding
from specnb.lm.gguf.header import read_header
from specnb.lm.gguf.model import GgufModel
from specnb.lm.load import load
from tests.tiny_models import llama_gguf, mamba_gguf

IDS = [4, 9, 6, 7, 8, 11, 5, 10]
CUTS = (0, 4, 100, 1500, 20_000, -1)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return llama_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def test_other_files_and_truncated_ones_are_rejected(file, tmp_path, capfd):
    with pytest.raises(InputError, match="absent"):
        load(tmp_path / "absent.gguf")
    data = file.read_bytes()
    path = tmp_path / "cut.gguf"
    for content in (*(data[:cut] for cut in CUTS), b"hello, I am text"):
        path.write_bytes(content)
        for use in (GgufModel.open, lambda p: binding.requantize(p, tmp_path / "out", "q8_0")):
            with pytest.raises(LoadError, match=r"cut\.gguf") as caught:
                use(path)
            assert "no reason" not in str(caught.value)
    assert capfd.readouterr() == ("", "")  # llama.cpp's log is redirected


def test_invalid_options_and_those_not_for_recurrent_models_are_rejected(file, tmp_path):
    recurrent = mamba_gguf(tmp_path / "mamba.gguf")
    for path, option, value in (
        (recurrent, "rollback", "crop"),
        (recurrent, "rollback", "snapshots"),
        (recurrent, "rollback", "replay"),
        (file, "rollback", "chekpoint"),
        (file, "rollback_depth", 0),
        (file, "n_ctx", -1),
        (file, "n_ctx", 2**31),
        (file, "threads", -1),
        (file, "threads", 100_000),
        (file, "exact", "maybe"),
        (file, "gpu_layers", -1),
        (file, "kv", "q4"),
    ):
        with pytest.raises(InputError, match=str(value)):
            load(path, **{option: value})


def test_memory_for_all_parts_and_the_context_is_checked_first(file, tmp_path, monkeypatch):
    with pytest.raises(MemoryShortError, match="n_ctx"):
        GgufModel.open(file, n_ctx=2**30)
    parts = [tmp_path / f"m-0000{i}-of-00002.gguf" for i in (1, 2)]
    parts[0].write_bytes(file.read_bytes())
    parts[1].write_bytes(bytes(1000))
    both = machine.need_bytes(file.stat().st_size + 1000)
    monkeypatch.setattr(machine, "free_bytes", lambda device: both - 1)
    with pytest.raises(MemoryShortError, match=parts[0].name):
        GgufModel.open(parts[0])


@pytest.mark.parametrize("kv", ["f16", "mixed"])
def test_cache_types_agree_and_only_float32_is_lossless(file, files, kv):
    for path in (file, files["q8_0"]):
        model = GgufModel.open(path, threads=1)
        other = GgufModel.open(path, threads=1, kv=kv)
        assert model.caps.lossless_dtype == (path == file) and not other.caps.lossless_dtype
        np.testing.assert_allclose(other.forward(IDS), model.forward(IDS), atol=0.1)
        model.close()
        other.close()


# ---- bit-identical logits at all widths


@pytest.fixture(scope="module")
def files(file, tmp_path_factory):
    """The tiny model in several types, which use different kernels."""
    folder = tmp_path_factory.mktemp("types")
    made = {kind: folder / f"{kind}.gguf" for kind in ("f16", "bf16", "q8_0", "q4_0", "q4_1")}
    for kind, path in made.items():
        binding.requantize(file, path, kind)
    return {"f32": file} | made


@pytest.mark.parametrize("n_ctx", [4, 30, 0])
@pytest.mark.parametrize("exact", ["auto", "true"])
@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1"])
def test_the_certificate_holds_up_to_the_end_of_the_context(files, kind, exact, n_ctx):
    model = GgufModel.open(files[kind], n_ctx=n_ctx, exact=exact, threads=1)
    n_ctx = model.caps.n_ctx
    widest = model.caps.same_bits_up_to
    ids = (IDS * 8)[:n_ctx]

    def rows(step):
        model.reset()
        return np.concatenate([model.forward(ids[i : i + step]) for i in range(0, n_ctx, step)])

    single = rows(1)
    assert model.n_past == n_ctx and ("exact_by" in model.caps.details) == (widest > 0)
    for step in range(2, widest + 1):
        np.testing.assert_array_equal(rows(step), single, err_msg=f"width {step}")
    model.rewind(2)
    np.testing.assert_allclose(model.forward(ids[-2:]), single[-2:], atol=0 if widest > 1 else 0.1)
    with pytest.raises(CapacityError):
        model.forward([5])
    model.close()


def test_auto_is_exact_if_that_is_free_and_otherwise_fastest(files, tmp_path):
    for kind, path in (files | {"recurrent": mamba_gguf(tmp_path / "mamba.gguf")}).items():
        model = GgufModel.open(path)
        fastest = GgufModel.open(path, exact="false")
        assert fastest.caps.same_bits_up_to == 0
        if model.caps.same_bits_up_to:
            assert model._engine.padding == 1, kind
        else:
            assert model.caps == fastest.caps, kind
        for each in (model, fastest):
            each.close()


def test_calls_on_which_llama_cpp_would_abort_raise_errors(file, tmp_path):
    """A closed model, a file without a vocabulary, a character without tokens."""
    model = GgufModel.open(file, threads=1)
    assert model.vocab.decode(model.encode("ab c")) == " ab c"
    with pytest.raises(InputError, match="'Z'"):
        model.encode("abc Z")
    recurrent = GgufModel.open(mamba_gguf(tmp_path / "mamba.gguf"), threads=1)
    for each in (model, recurrent):
        each.forward([5])
        for _ in range(2):
            each.close()
        for use in (lambda m: m.forward([5]), lambda m: m.rewind(1), lambda m: m.reset()):
            with pytest.raises(InputError, match="was closed"):
                use(each)
    with pytest.raises(InputError, match="was closed"):
        model.encode("a")
    bare = llama_gguf(tmp_path / "bare.gguf", vocab=False)
    with pytest.raises(LoadError, match="vocabulary"):
        GgufModel.open(bare, threads=1)


# ---- tensors


def test_a_tensor_is_read_as_it_was_quantized(files):
    exact, *others = (
        gguf.dequantize(*reversed(read_header(path).rows("token_embd.weight")))
        for path in files.values()
    )
    assert exact.shape == (64, 32)
    for got in others:
        np.testing.assert_allclose(got, exact, atol=0.2)
