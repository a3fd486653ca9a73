"""GGUF files in llama.cpp: what cannot be opened is one clear error, and no argument ends the process."""

import logging
import subprocess
import sys

import numpy as np
import psutil
import pytest

from specnb.errors import CapacityError, InputError, LoadError, MemoryShortError
from specnb.lm import memory
from specnb.lm.gguf import binding
from specnb.lm.gguf import open as gguf_open
from specnb.lm.gguf.model import GgufModel
from tests.tiny_models import bert_gguf, llama_gguf, mamba_gguf

IDS = [4, 9, 6, 7, 8, 11, 5, 10]
CUTS = (4, 8, 16, 23, 24, 40, 100, 500, 1500, 2600, 20_000, -1)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return llama_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture
def model(file):
    made = GgufModel.open(file, threads=1)
    yield made
    made.close()


def in_a_process_of_its_own(*lines: str) -> str:
    """Run what might crash; the output, or a failure that shows how it died."""
    code = "\n".join(("from specnb.errors import *", "from specnb.lm.gguf import binding",
                      "from specnb.lm.gguf.model import GgufModel", *lines))  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"exit {done.returncode}: {done.stderr[-800:]}"
    return done.stdout.strip()


def test_what_is_no_gguf_file_is_refused(tmp_path):
    for path in (tmp_path / "absent.gguf", tmp_path):
        with pytest.raises(InputError, match="no such model file"):
            GgufModel.open(path)
    for content in (b"", b"GG", b"hello, I am text", b"PK\3\4"):
        (tmp_path / "bad.gguf").write_bytes(content)
        with pytest.raises(LoadError, match="not a GGUF file"):
            GgufModel.open(tmp_path / "bad.gguf")


def test_a_truncated_file_is_refused_wherever_it_ends(file, tmp_path):
    """In a process of its own: an abort there would be this test's failure, not the end of the suite."""
    data = file.read_bytes()
    for cut in CUTS:
        (tmp_path / f"cut{cut}.gguf").write_bytes(data[:cut])
    (tmp_path / "loose.gguf").write_bytes(data + b"behind the end")
    said = in_a_process_of_its_own(
        "from pathlib import Path",
        f"for path in sorted(Path({str(tmp_path)!r}).glob('cut*.gguf')):",
        "    for opener in (GgufModel.open, lambda p: binding.header(p).__enter__(),",
        "                   lambda p: binding.requantize(p, p.with_suffix('.out'), 'q8_0')):",
        "        try:",
        "            opener(path)",
        "        except LoadError as error:",
        "            assert str(path.name) in str(error) and len(str(error)) > 60, error",
        "        else:",
        "            raise SystemExit(f'{path} opened')",
        f"GgufModel.open(Path({str(tmp_path)!r}) / 'loose.gguf').forward([5])",
        "print('refused')",
    )
    assert said == "refused"


@pytest.mark.parametrize(
    "options",
    [{"n_ctx": -1}, {"threads": -1}, {"fixed_width": -1}, {"gpu_layers": -1}, {"fixed_width": 513}, {"kv": "q4"},
     {"threads": 100_000}, {"n_ctx": 2**31}],
)  # fmt: skip
def test_a_bad_option_is_refused_with_its_value(file, options):
    with pytest.raises(InputError, match=str(next(iter(options.values())))):
        GgufModel.open(file, **options)


def test_a_gpu_that_this_build_lacks_is_refused(file):
    if binding.library().api.llama_supports_gpu_offload():
        pytest.skip("this llama.cpp is built for a GPU")
    with pytest.raises(InputError, match="built without a GPU"):
        GgufModel.open(file, gpu_layers=1)


def test_a_context_too_large_for_the_memory_is_refused_before_it_is_made(file):
    with pytest.raises(MemoryShortError, match="n_ctx"):
        GgufModel.open(file, n_ctx=2**30)


def test_memory_is_asked_of_the_gpu_too_and_of_all_parts(file, monkeypatch, tmp_path):
    monkeypatch.setattr(binding.library().api, "llama_supports_gpu_offload", lambda: True)
    asked = []
    monkeypatch.setattr(gguf_open, "require", lambda need, **where: asked.append((need.total, where)))
    monkeypatch.setattr(binding, "gpu_free_bytes", lambda: 77)
    GgufModel.open(file, threads=1, gpu_layers=1).close()  # of two and the output
    before, on_gpu, after, state = asked
    size, margin = file.stat().st_size, 256 << 20
    assert before == (round(size * 2 / 3) + margin, {"name": file.name})
    assert on_gpu == (round(size / 3) + margin, {"name": file.name, "device": "the GPU", "free": 77})
    assert after[0] > before[0] and margin < state[0] < margin + size / 3
    monkeypatch.setattr(gguf_open, "require", memory.require)
    with pytest.raises(MemoryShortError, match="GPU"):
        GgufModel.open(file, gpu_layers=99)
    monkeypatch.setattr(binding, "gpu_free_bytes", lambda: None)  # no figure: what stays here is asked for
    monkeypatch.setattr(memory, "free_bytes", lambda device: margin - 1)
    with pytest.raises(MemoryShortError, match=file.name):
        GgufModel.open(file, gpu_layers=99)
    parts = [tmp_path / f"m-0000{i}-of-00002.gguf" for i in (1, 2)]
    parts[0].write_bytes(file.read_bytes())
    parts[1].write_bytes(bytes(1000))
    monkeypatch.setattr(memory, "free_bytes", lambda device: margin + size + 999)
    with pytest.raises(MemoryShortError, match=parts[0].name):
        GgufModel.open(parts[0])


def test_llama_cpp_tells_the_free_memory_of_its_devices(monkeypatch):
    monkeypatch.setattr(binding, "GPU", 0)  # the processor's number
    assert 0 < binding.gpu_free_bytes() <= psutil.virtual_memory().total
    monkeypatch.setattr(binding, "GPU", 99)
    assert binding.gpu_free_bytes() is None


@pytest.mark.parametrize("kv", ["f32", "f16"])
@pytest.mark.parametrize("flash", [False, True])
def test_caches_and_attentions_agree_and_only_float32_claims_exact_widths(file, model, kv, flash):
    other = GgufModel.open(file, threads=1, kv=kv, flash_attention=flash)
    rows = other.forward(IDS)
    assert other.caps.lossless_dtype == (kv == "f32" and not flash)
    np.testing.assert_allclose(rows, model.forward(IDS), atol=1e-4 if other.caps.lossless_dtype else 0.02)
    other.reset()
    single = np.concatenate([other.forward([i]) for i in IDS])
    np.testing.assert_allclose(single, rows, atol=2e-5 if other.caps.lossless_dtype else 0.02)
    other.close()


def test_the_context_is_the_one_asked_for(file):
    """llama.cpp rounds contexts up to 256; the caller's number holds. Without one: the model's own."""
    assert GgufModel.open(file, threads=1).caps.n_ctx == 64
    small = GgufModel.open(file, n_ctx=5, threads=1)
    assert (small.caps.n_ctx, small.caps.max_width, small.caps.rewind_depth) == (5, 5, 5)
    small.forward(IDS[:5])
    with pytest.raises(CapacityError, match="holds 5 tokens"):
        small.forward([5])


def test_two_models_in_one_process_do_not_meet(file, tmp_path):
    one = GgufModel.open(file, threads=1)
    two = GgufModel.open(llama_gguf(tmp_path / "two.gguf", seed=1), threads=1)
    expected = [m.forward(IDS) for m in (one, two)]
    assert np.abs(expected[0] - expected[1]).max() > 0.1
    for m in (one, two):
        m.reset()
    rows = [[m.forward([i]) for m in (one, two)] for i in IDS]
    for k, m in enumerate((one, two)):
        np.testing.assert_allclose(np.concatenate([r[k] for r in rows]), expected[k], atol=1e-4)
        assert m.n_past == len(IDS)
    one.close()
    two.rewind(3)
    np.testing.assert_allclose(two.forward(IDS[5:]), expected[1][5:], atol=1e-4)
    two.close()


@pytest.mark.parametrize("n_ctx", [4, 30])
@pytest.mark.parametrize("width", [3, 6, 40])
def test_a_fixed_width_gives_the_same_bits_up_to_the_end_of_the_context(file, n_ctx, width):
    model = GgufModel.open(file, n_ctx=n_ctx, fixed_width=width, threads=1)
    ids = (IDS * 4)[:n_ctx]

    def rows(step):
        model.reset()
        return np.concatenate([model.forward(ids[i : i + step]) for i in range(0, n_ctx, step)])

    single = rows(1)
    assert model.n_past == n_ctx and single.shape == (n_ctx, 64)
    for step in range(2, min(width, n_ctx) + 1):
        np.testing.assert_array_equal(rows(step), single)
    model.rewind(2)
    np.testing.assert_array_equal(model.forward(ids[-2:], 1), single[-1:])
    with pytest.raises(CapacityError):
        model.forward([5])
    model.close()


def test_a_recurrent_model_goes_back_by_what_its_architecture_allows(tmp_path):
    file = mamba_gguf(tmp_path / "mamba.gguf")
    model = GgufModel.open(file, threads=1)
    assert model.caps.rewind == "fused"
    whole = model.forward(IDS)
    model.rewind(2)
    np.testing.assert_allclose(model.forward(IDS[-2:]), whole[-2:], atol=1e-4)
    model.reset()
    np.testing.assert_allclose(np.concatenate([model.forward([i]) for i in IDS]), whole, atol=1e-4)
    model.close()
    with pytest.raises(InputError, match="fixed_width=0"):
        GgufModel.open(file, fixed_width=4, threads=1)
    for kind, why in {"crop": "recurrent layers", "snapshots": "no snapshots", "replay": "backend=hf"}.items():
        with pytest.raises(InputError, match=why):
            GgufModel.open(file, threads=1, rollback=kind)
    with pytest.raises(InputError, match=r"unknown rollback 'chekpoint'; did you mean checkpoint\?"):
        GgufModel.open(file, threads=1, rollback="chekpoint")
    with pytest.raises(InputError, match="rollback_depth is 0"):
        GgufModel.open(file, threads=1, rollback_depth=0)


def test_a_hybrid_model_counts_as_recurrent(model, monkeypatch):
    monkeypatch.setattr(binding.library().api, "llama_model_is_hybrid", lambda _model: True)
    assert gguf_open.recurrent(model._model)


def test_what_would_end_the_process_is_an_error(file, tmp_path):
    """A closed model, a file without a vocabulary, an encoder, a character without tokens."""
    llama_gguf(tmp_path / "bare.gguf", vocab=False)
    bert_gguf(tmp_path / "bert.gguf")
    llama_gguf(tmp_path / "bytes.gguf", all_bytes=True)
    said = in_a_process_of_its_own(
        "def refused(error, call):",
        "    try:",
        "        raise SystemExit(f'not refused: {call()}')",
        "    except error as reason:",
        "        print(reason)",
        f"model = GgufModel.open({str(file)!r}, threads=1)",
        "assert model.vocab.decode(model.encode('ab c')) == ' ab c'",
        "refused(InputError, lambda: model.encode('abc Z'))",
        f"print(GgufModel.open({str(tmp_path / 'bytes.gguf')!r}).encode('🙂')[1:])",
        "model.forward([5]); model.close(); model.close()",
        "for call in (lambda: model.forward([5]), lambda: model.rewind(1), model.reset, lambda: model.encode('a')):",
        "    refused(InputError, call)",
        f"for name in ({str(tmp_path / 'bare.gguf')!r}, {str(tmp_path / 'bert.gguf')!r}):",
        "    refused(LoadError, lambda: GgufModel.open(name, threads=1))",
    ).splitlines()
    assert len(said) == 8 and "'Z'" in said[0] and all(file.name in line for line in said[2:6])
    assert said[1] == str([259, *(3 + b for b in "🙂".encode())])


def test_a_requantised_file_has_the_type_asked_for(file, tmp_path):
    binding.requantize(file, tmp_path / "out.gguf", "f16")
    assert GgufModel.open(tmp_path / "out.gguf", threads=1).caps.dtype == "f16"


def test_log_lines_go_to_the_logger_and_not_to_stderr(file, tmp_path, caplog, capfd):
    (tmp_path / "bad.gguf").write_bytes(file.read_bytes()[:1500])
    with caplog.at_level(logging.DEBUG, logger="specnb.llama_cpp"):
        GgufModel.open(file, threads=1).close()
        with pytest.raises(LoadError):
            GgufModel.open(tmp_path / "bad.gguf")
    seen = [r for r in caplog.records if r.name == "specnb.llama_cpp"]
    assert len(seen) > 20 and any(r.levelno == logging.ERROR for r in seen)
    assert not any("\n" in r.getMessage() for r in seen)
    assert capfd.readouterr() == ("", "")


def test_errors_that_nobody_listens_to_stay_off_stderr(tmp_path):
    """Python prints errors of loggers without a handler; the exception already says them."""
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(50))
    code = ("from specnb.lm.gguf.model import GgufModel", "try:", f"    GgufModel.open({str(tmp_path / 'bad.gguf')!r})",
            "except RuntimeError:", "    pass")  # fmt: skip
    done = subprocess.run([sys.executable, "-c", "\n".join(code)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_log_levels_and_lines(caplog):
    """ggml's levels 1 to 4 are debug, info, warn, error; 5 continues the line before. Info is too much for INFO."""
    log = binding.library().log_callback
    with caplog.at_level(logging.DEBUG, logger="specnb.llama_cpp"):
        for level, text in [
            (1, b"d\n"),
            (2, b"i\n"),
            (3, b"w\n"),
            (4, b"e "),
            (5, b"more\ntwo"),
            (5, b"\n"),
            (0, b"0\xff\n"),
        ]:
            log(level, text, None)
    levels = {r.getMessage(): r.levelno for r in caplog.records}
    debug, info, error = logging.DEBUG, logging.INFO, logging.ERROR
    assert levels == {"d": debug, "i": debug, "w": info, "e more": error, "two": error, "0\ufffd": debug}
    assert list(binding.library().errors)[-2:] == ["e more", "two"]


def test_threads_default_to_the_physical_cores_that_are_allowed(monkeypatch):
    monkeypatch.setattr(gguf_open.psutil, "cpu_count", lambda logical: 8)
    monkeypatch.setattr(gguf_open.psutil, "Process", lambda: type("P", (), {"cpu_affinity": lambda self: [0, 1]})())
    assert gguf_open.available_cores() == 2
    monkeypatch.setattr(gguf_open.psutil, "cpu_count", lambda logical: None)
    assert gguf_open.available_cores() == 1
