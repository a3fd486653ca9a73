"""GGUF headers are described as llama.cpp reads them; damaged ones raise one error."""

import json
import struct
import subprocess
import sys
from dataclasses import asdict
from itertools import product, starmap

import numpy as np
import pytest

from specnb.compat.description import State
from specnb.compat.gguf import read_gguf
from specnb.errors import InputError
from specnb.io import digest
from specnb.lm.files import zoo_file
from specnb.lm.gguf import binding
from specnb.lm.gguf.header import read_header
from tests.tiny_models import llama_gguf, sentencepiece_tokens

U32 = 4
I32 = 5
F32 = 6
BOOL = 7
STRING = 8
ARRAY = 9
U64 = 10
NORMAL = 1
UNKNOWN = 2
CONTROL = 3
UNUSED = 5
BYTE = 6
LETTERS = [*map(chr, (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100 + 68)))]
"""The alphabet of byte-level BPE, in no particular order."""


def text(value):
    return struct.pack("<Q", len(value.encode())) + value.encode()


def key_value(key, kind, data):
    return text(key) + struct.pack("<I", kind) + data


def packed(value):
    """Return the type and bytes of a bool, number or text, or a list of texts, floats or int32."""
    match value:
        case str():
            return STRING, text(value)
        case list():
            kinds, data = zip(*map(packed, value), strict=True)
            kind = I32 if kinds[0] == U32 else kinds[0]
            return ARRAY, struct.pack("<IQ", kind, len(value)) + b"".join(data)
        case bool():
            kind, code = BOOL, "?"
        case float():
            kind, code = F32, "f"
        case _:
            kind, code = (I32, "i") if value < 0 else (U32, "I") if value < 2**32 else (U64, "Q")
    return kind, struct.pack("<" + code, value)


def pair(key, value):
    """Pack a key and a value."""
    return key_value(key, *packed(value))


def file_of(folder, *pairs, tensors=()):
    """Write a file that is only a header; `tensors`: names and shapes, fastest dimension first."""
    infos = [
        text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 0, 0)
        for name, shape in tensors
    ]
    path = folder / "model.gguf"
    path.write_bytes(
        b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(pairs)) + b"".join([*pairs, *infos])
    )
    return path


def ggml(**values):
    """Return the key-value pairs of a tokenizer."""
    return [pair(f"tokenizer.ggml.{key}", value) for key, value in values.items()]


def bpe_file(folder, tokens=(), *pairs, types=None, pre="gpt-2"):
    """Write a byte-level BPE: the 256 letters that llama.cpp needs, then `tokens` (normal)."""
    types = [NORMAL] * 256 + (types or [NORMAL] * len(tokens))
    stated = ggml(
        model="gpt2", pre=pre, tokens=[*LETTERS, *tokens], token_type=types, merges=["a b"]
    )
    return file_of(folder, pair("general.architecture", "llama"), *stated, *pairs)


def refused(path, value, read=read_gguf):
    """Require one line that names the file and the value."""
    with pytest.raises(InputError) as caught:
        read(path)
    error = str(caught.value)
    assert str(path) in error and value in error and "\n" not in error


def test_all_fields_of_a_header_are_read(tmp_path):
    """The first part of a split file, cut after its header; llama.cpp lacks its architecture."""
    tokens = [*LETTERS, "ĠtheĊ", "<|im_end|>", "<|im_start|>", "[PAD259]"]
    types = [NORMAL] * 257 + [CONTROL, CONTROL, UNUSED]
    facts = {
        "general.architecture": "qwen3next",
        "general.name": "Tiny",
        "qwen3next.context_length": 4096,
        "split.no": 0,
        "split.count": 2,
        "tokenizer.chat_template": "{{ messages }}",
    }
    ids = {"eos_token_id": 257, "padding_token_id": 258, "eot_token_id": 0, "add_bos_token": False}
    merges = {"merges": ["Ġ t", "h e"]}
    stated = ggml(model="gpt2", pre="qwen2", tokens=tokens, token_type=types, **merges, **ids)
    rows = [("token_embd.weight", (8, 272))]
    path = file_of(tmp_path, *starmap(pair, facts.items()), *stated, tensors=rows)
    d = read_gguf(path)
    vocab = d.vocab
    assert (d.name, d.source, d.architecture, d.n_ctx) == ("Tiny", str(path), "qwen3next", 4096)
    assert d.state == State.HYBRID
    assert (d.eos, d.pad, d.eot, d.add_bos, d.add_eos) == (257, 258, 0, False, False)
    assert (d.vocab_size, vocab.size, d.n_tokens) == (272, 272, 259) and d.added == {257, 258}
    assert vocab.pieces[256] == b" the\n" and set(vocab.pieces[259:]) == {b""}
    assert (vocab.chat_template, vocab.pre, vocab.kind) == ("{{ messages }}", "qwen2", "bpe")
    assert d.merges == {"count": 2, "digest": digest("Ġ t\nh e\n".encode())}
    ids = d.encode("the<|im_end|>é")
    assert 257 not in ids and vocab.raw_bytes(ids) == "the<|im_end|>é".encode()
    assert read_gguf(file_of(tmp_path, pair("general.name", "Bare"))).vocab is None
    path.write_bytes(path.read_bytes()[:-1])
    refused(path, "a buffer of")


def as_llama_cpp(path):
    """Return the description of a file, and check it against llama.cpp's own reading."""
    d = read_gguf(path)
    api = binding.load_library().api
    llama = binding.FileTokenizer(path)
    vocab = llama.vocab
    raw = api.llama_model_get_vocab(llama.model)
    assert d.add_eos == api.llama_vocab_get_add_eos(raw)
    assert d.pad == (api.llama_vocab_pad(raw) if api.llama_vocab_pad(raw) >= 0 else None)
    assert asdict(d.vocab) == asdict(vocab)
    return d


def test_missing_and_out_of_range_values_get_llama_cpps_defaults(tmp_path):
    """Old converters wrote -1 or the token count for "none"; llama.cpp opens it: so must we."""
    for pre, bos in (("llama-bpe", 11), ("glm4", None)):
        d = as_llama_cpp(bpe_file(tmp_path, ["▁a"], pre=pre))
        assert (d.add_bos, d.bos) == (bool(bos), bos)
    unmerged = read_gguf(file_of(tmp_path, *ggml(model="gpt2", pre="gpt-2", tokens=LETTERS)))
    assert unmerged.merges is None and len(unmerged.encode("the")) == 3
    out = ggml(bos_token_id=256, padding_token_id=2**32 - 1, eos_token_id=2**32 - 1)
    d = read_gguf(bpe_file(tmp_path, [], *out))
    assert (d.bos, d.pad, d.eos) == (11, None, 11)


def test_sentencepiece_and_wordpiece_match_llama_cpp(tmp_path):
    whole = sentencepiece_tokens(all_bytes=True)
    d = as_llama_cpp(llama_gguf(tmp_path / "spm.gguf", all_bytes=True))
    assert d.vocab.pieces[whole.index(b"<0x0A>")] == b"\n"
    tokens = [token.decode() for token in whole]
    types = [UNKNOWN, CONTROL, CONTROL, *[NORMAL] * (len(tokens) - 3)]
    for model in ("t5", "bert"):
        stated = ggml(model=model, tokens=tokens, scores=[0.0] * len(tokens), token_type=types)
        d = as_llama_cpp(file_of(tmp_path, pair("general.architecture", "llama"), *stated))
        assert d.vocab.pieces[tokens.index("▁")] == b" "


@pytest.mark.model
def test_a_real_header_matches_llama_cpp(opened):
    d = as_llama_cpp(zoo_file("smollm2-135m"))
    model = opened("smollm2-135m")
    assert d.vocab.pieces == model.vocab.pieces and d.merges["count"] == 48900
    assert (d.n_tokens, d.vocab_size, d.n_ctx) == (49152, 49152, 8192)
    assert d.encode("Hello 12 é") == model.encode("Hello 12 é", special=False)


SOUND = {"model": "gpt2", "tokens": LETTERS}


@pytest.mark.parametrize(
    ("value", "pairs"),
    [
        ("shard 2 ", [pair("split.no", 1), pair("split.count", 3)]),
        ("tokenizer.ggml.tokens", ggml(model="gpt2")),
        ("1 int32", ggml(**SOUND, token_type=[1])),  # these files end llama.cpp's process
        ("<0x0A>", ggml(model="bert", tokens=["<0x0A>"], token_type=[BYTE])),
        ("merges is 1", ggml(**SOUND, merges=1)),
        ("4294967295", [*ggml(**SOUND), pair("None.vocab_size", 2**32 - 1)]),
    ],
)
def test_an_invalid_header_raises_one_error_with_the_value(tmp_path, value, pairs):
    refused(file_of(tmp_path, *pairs), value)


# ---- odd files: `describe` and `load` raise one clear error or none, and the process survives

OPEN = """
import json, sys
from pathlib import Path
from specnb.compat.read import describe
from specnb.errors import SpecnbError
from specnb.lm.load import load

def run(path):
    model = load(path, n_ctx=16, threads=1, exact="false")
    model.encode("ab")
    model.forward([5])
    model.close()

for path in sorted(Path(sys.argv[1]).glob("*.gguf")):
    print(path.stem, end=" ", flush=True)
    said = []
    for use in (describe, run):
        try:
            use(path)
            said.append("")
        except SpecnbError as error:
            said.append(str(error))
    print(json.dumps(said), flush=True)
"""


WRONG = ("many", [2, 2, 2], 2**63, -1)
"""Invalid sizes: of another type, one for each layer, too large, negative."""
TOKENS = "tokenizer.ggml.tokens"
REFUSED = {  # values by keys
    "llama.block_count llama.attention.head_count llama.attention.head_count_kv": (
        0,
        513,
        2**32 - 1,
        *WRONG,
    ),
    "llama.nextn_predict_layers llama.expert_count llama.expert_used_count": (3, 2**31, *WRONG),
    "llama.expert_group_count": (3, 2**31, *WRONG),
    "llama.embedding_length llama.feed_forward_length": (0, 2**31, *WRONG),
    "llama.attention.layer_norm_rms_epsilon": (-1.0, float("nan")),
    "llama.rope.scaling.type": ("bogus", ""),
    "general.alignment": (0, 1, 3, 8, "many", 2**32 - 1),
    "general.architecture": ("../../x", "", "\x1b[2J", "bert", "dflash", ["llama", "x"], 7),
    f"{TOKENS} tokenizer.ggml.token_type": ([1] * 10, "x"),
    "tokenizer.ggml.scores": ([1.0] * 10, "x"),
    "tokenizer.ggml.model": ("magic", 7),
}
OPENED = {
    "llama.attention.layer_norm_rms_epsilon": (0.0,),
    "llama.rope.scaling.type": ("none",),
    "general.alignment": (32,),
}
EITHER = {  # opened or refused
    "llama.context_length llama.rope.dimension_count llama.vocab_size": (0, 2**31, *WRONG),
    "tokenizer.ggml.bos_token_id tokenizer.ggml.eos_token_id": (10**9, "x", -1),
    "tokenizer.ggml.unknown_token_id tokenizer.ggml.padding_token_id": (10**9, "x", -1),
    "tokenizer.chat_template": (7,),
}
ENDLESS = [
    (STRING, struct.pack("<Q", 2**63)),
    (ARRAY, struct.pack("<IQ", U32, 2**62)),
    (ARRAY, struct.pack("<IQ", STRING, 2**40)),
    (ARRAY, struct.pack("<IQIQ", ARRAY, 1, U32, 0)),
    (99, b""),
]
"""Values longer than the file, nested, or of an unknown type."""


def odd_files(path):
    """Yield variants of the model file at `path`: name, bytes, and whether they must be refused.

    (None: either is fine.)
    """
    whole = path.read_bytes()
    header = read_header(path)
    size = sum(map(len, header.packed.values()))
    n_shapes = len(header.shapes)

    def made(changed=b"", key="", *, n_tensors=n_shapes, n_keys=None, version=3):
        pairs = [*(header.packed | {key: changed}).values()]
        gap = (size - sum(map(len, pairs)) - len(pair("gap", ""))) % 32  # keeps the alignment
        pairs.append(pair("gap", "x" * gap))
        n_keys = sum(map(bool, pairs)) if n_keys is None else n_keys
        counts = struct.pack("<IQQ", version, n_tensors, n_keys)
        return b"GGUF" + counts + b"".join(pairs) + whole[24 + size :]

    yield "magic", b"GGML" + whole[4:], True
    yield "text", b"hello" * 100, True
    yield "no tokens", made(key=TOKENS), True
    for n in (0, 1, 8, 20, 100, 1500, len(whole) // 2, len(whole) - 1):
        yield f"cut {n}", whole[:n], True
    for n in (0, 1, 3 << 24, 2**32 - 1):
        yield f"version {n}", made(version=n), True
    for n in (0, 3, 2**31, 2**63, 2**64 - 1):
        yield f"keys {n}", made(n_keys=n), True
        yield f"tensors {n}", made(n_tensors=n), True
    for i, value in enumerate(ENDLESS):
        yield f"endless {i}", made(key_value("a", *value)), True
    for at, byte in np.random.default_rng(0).integers((24 + size, 256), size=(60, 2)).tolist():
        yield f"{at} is {byte}", whole[:at] + bytes([byte]) + whole[at + 1 :], None
    tokens = [token.decode() for token in header.values[TOKENS]]
    repeated = {TOKENS: ([*tokens[:-1], tokens[5]], [*tokens[:-2], "q\0a", "q\0b"], tokens[:50])}
    for must, table in ((True, repeated), (True, REFUSED), (False, OPENED), (None, EITHER)):
        for keys, values in table.items():
            for key, value in product(keys.split(), values):
                yield f"{key} {value}", made(pair(key, value), key), must


def test_odd_files_raise_one_clear_error_and_never_end_the_process(tmp_path):
    names, files, must = zip(*odd_files(llama_gguf(tmp_path / "base", all_bytes=True)), strict=True)
    for i, data in enumerate(files):
        (tmp_path / f"{i:03d}.gguf").write_bytes(data)
    run = subprocess.run(
        [sys.executable, "-c", OPEN, tmp_path], capture_output=True, text=True, timeout=100
    )
    lines = run.stdout.splitlines()
    assert run.returncode == 0 and len(lines) == len(files) > 100, (lines[-1:], run.stderr[-500:])
    for name, refused, line in zip(names, must, lines, strict=True):
        number, said = line.split(" ", 1)
        errors = json.loads(said)
        assert refused is None or bool(errors[1]) == refused, name
        for error in filter(None, errors):
            assert number in error and "\n" not in error and len(error) < 700, (name, error)
