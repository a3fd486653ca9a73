"""A folder and its GGUF by `data.models.convert` are one model: both engines agree on logits.

The models are tiny and random, with norms, gates and decays far from their initialization, so that
every error in the conversion of a weight is detected.
"""

import json
import re
import shutil
from contextlib import closing

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from data.models import convert
from data.models.convert import write_gguf
from specnb.errors import InputError, LoadError
from specnb.lm.files import embedded_names, local_file, local_folder, parse
from specnb.lm.gguf import binding
from specnb.lm.gguf.model import GgufModel
from specnb.lm.hf.files import quiet, tokenizer_vocabulary
from tests.tiny_hybrids import CORPUS, END, MODELS, byte_level, hybrid_folder, save_tokenizer

IDS = np.random.default_rng(0).integers(1, 400, 32).tolist()
BATCH = 20
TEXTS = (
    "def f(x):\n    return x[1:-1] * 3.14159\n\n\n",
    "日本語のテキスト、混合 with English。",
    "🙂🙃 family: 👩‍👩‍👧 flag 🇩🇪",
    "  two  spaces\t\ttabs \n\n  newline  ",
    "don't we'LL 2026-11-21 1e-5 ½ ²",
    f"a{END}b",
    "e\u0301te\u0301 नमस्ते 2026 20262027",
    "\u00a0nbsp\u2003em\u3000ideographic\r\n",
    "state \U0010ffff of Ω a layer\x1f",
    "",
)


def split(pattern):
    return pre_tokenizers.Split(Regex(pattern), "isolated")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("models")
    with quiet():
        return {name: hybrid_folder(base / name, name) for name in MODELS}


@pytest.fixture
def copy(folders, tmp_path):
    """Return a copy of this model's folder, to be modified."""
    return lambda name: shutil.copytree(folders[name], tmp_path / "model")


def torch_logits(folder):
    with quiet(), torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        return model(torch.tensor([IDS])).logits[0].numpy()


def llama_logits(gguf):
    """Return logits of a batch, then of single tokens: llama.cpp has separate code for them."""
    with closing(GgufModel.open(gguf, threads=1)) as model:
        return np.concatenate(
            [model.forward(IDS[:BATCH]), *(model.forward([i]) for i in IDS[BATCH:])]
        )


@pytest.mark.parametrize(
    ("name", "dtype", "close"),
    [
        *((name, "f32", 1e-4) for name in MODELS),
        ("qwen35-grouped", "f16", 0.02),
        ("mamba2", "bf16", 0.2),
    ],
)
def test_torch_and_llama_compute_the_same_logits(name, dtype, close, folders, tmp_path):
    gguf = write_gguf(folders[name], tmp_path / "model.gguf", dtype=dtype)
    expected = torch_logits(folders[name])
    rows = llama_logits(gguf)
    spread = np.ptp(expected)
    assert spread > 4 and np.abs(rows - expected).max() < close * spread
    weights = (folders[name] / "model.safetensors").stat().st_size  # in float32
    assert (gguf.stat().st_size < 0.7 * weights) == (dtype != "f32")


@pytest.mark.parametrize("name", embedded_names())
def test_the_shipped_gguf_equals_its_folder_and_its_float32_copy(name, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECNB_CACHE", str(tmp_path))
    folder = local_folder(name)
    files = []
    for kind in ("f16", "f32"):
        files.append(local_file(parse(name, backend="llama", weights=kind)))
        files.append(write_gguf(folder, tmp_path / f"{kind}.gguf", dtype=kind))
    assert files[0].read_bytes() == files[1].read_bytes()
    assert np.array_equal(*map(llama_logits, files[2:]))


# Tokenizers are written by name if llama.cpp has their expression, otherwise rejected (see below).


def words_of(pre):
    return convert.PRE_TYPES[pre]["steps"][0]["pattern"]["Regex"]


TOKENIZERS = {
    "gpt-2": lambda: byte_level([]),
    "smollm": byte_level,
    "smollm without some bytes": lambda: byte_level(all_bytes=False),
    "qwen2": lambda: byte_level([split(words_of("qwen2"))]),
    "llama-bpe": lambda: byte_level([split(words_of("llama-bpe"))], ignore_merges=True),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_both_engines_have_equal_vocabularies_and_split_text_equally(name, copy, tmp_path):
    folder = copy("lfm2")
    save_tokenizer(TOKENIZERS[name](), folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    expected = tokenizer_vocabulary(tokenizer, AutoConfig.from_pretrained(folder), None)
    llama = binding.FileTokenizer(write_gguf(folder, tmp_path / "model.gguf"))
    assert llama.vocab.pre == name.partition(" ")[0]
    for field in ("pieces", "bos", "eos", "eog", "special", "add_bos", "kind"):
        assert getattr(llama.vocab, field) == getattr(expected, field), field
    for text in (*TEXTS, CORPUS):
        assert llama(text, special=True) == tokenizer(text).input_ids, text


# Damaged folders raise one error.


def config(**changes):
    def change(folder):
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def weights(damage):
    def change(folder):
        tensors = load_file(folder / "model.safetensors")
        damage(tensors)
        save_file(tensors, folder / "model.safetensors")

    return change


def tokenizer(steps=None, normalizer=None, tokens=()):
    def change(folder):
        changed = byte_level(steps)
        changed.normalizer = normalizer
        changed.add_tokens([*tokens])
        save_tokenizer(changed, folder)

    return change


NORM = "model.norm.weight"
BROKEN = {
    "gpt2": config(model_type="gpt2"),
    "layer_types": config(layer_types=["sliding_attention"] * 4, sliding_window=8),
    "linear": config(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}),
    NORM: weights(lambda tensors: tensors.pop(NORM)),
    "f16 does not hold": weights(lambda tensors: tensors["model.embed_tokens.weight"].fill_(1e6)),
    "Split": tokenizer([split(r"\p{L}+|\d")]),
    "NFKC": tokenizer(normalizer=normalizers.NFKC()),
    "<x>": tokenizer(tokens=[AddedToken("<x>", lstrip=True)]),
}


@pytest.mark.parametrize("value", BROKEN)
def test_a_damaged_or_unsupported_folder_raises_one_error_with_the_value(value, copy, tmp_path):
    folder = copy("qwen3")
    BROKEN[value](folder)
    with pytest.raises((InputError, LoadError), match=re.escape(value)):
        write_gguf(folder, tmp_path / "model.gguf")
