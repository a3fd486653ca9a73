"""GGUF headers are described as llama.cpp reads them; damaged ones raise one error."""

import hashlib
import json
import struct
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specnb.compat.check import Severity, Verdict, check
from specnb.compat.description import Description, State
from specnb.compat.gguf import read_gguf
from specnb.errors import InputError
from specnb.lm.files import zoo_file
from specnb.lm.gguf import binding
from specnb.lm.gguf.header import read_header
from tests.tiny_models import BYTES, llama_gguf, sentencepiece_tokens

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
USER_DEFINED = 4
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
        case bool():
            return BOOL, bytes([value])
        case float():
            return F32, struct.pack("<f", value)
        case int() if value < 0:
            return I32, struct.pack("<i", value)
        case int():
            return (
                (U32, struct.pack("<I", value))
                if value < 2**32
                else (U64, struct.pack("<Q", value))
            )
        case str():
            return STRING, text(value)
    members = [packed(member) for member in value]
    kind = I32 if isinstance(value[0], int) else members[0][0]
    return ARRAY, struct.pack("<IQ", kind, len(value)) + b"".join(data for _, data in members)


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


def refused(path, value):
    with pytest.raises(InputError) as caught:
        read_gguf(path)
    assert (
        str(path) in str(caught.value)
        and value in str(caught.value)
        and "\n" not in str(caught.value)
    )


def test_all_fields_of_a_header_are_read(tmp_path):
    """The first part of a split file, cut after its header; llama.cpp lacks its architecture."""
    tokens = [*LETTERS, "ĠtheĊ", "<|im_end|>", "<|im_start|>", "[PAD259]"]
    types = [NORMAL] * 257 + [CONTROL, CONTROL, UNUSED]
    facts = {
        "general.architecture": "qwen3next",
        "general.name": "Tiny",
        "qwen3next.context_length": 4096,
    }
    facts |= {"split.no": 0, "split.count": 2, "tokenizer.chat_template": "{{ messages }}"}
    ids = {"eos_token_id": 257, "padding_token_id": 258, "eot_token_id": 0, "add_bos_token": False}
    stated = ggml(
        model="gpt2", pre="qwen2", tokens=tokens, token_type=types, merges=["Ġ t", "h e"], **ids
    )
    rows = [("token_embd.weight", (8, 272))]
    path = file_of(tmp_path, *(pair(*fact) for fact in facts.items()), *stated, tensors=rows)
    d = read_gguf(path)
    assert (d.name, d.source, d.architecture, d.n_ctx) == ("Tiny", str(path), "qwen3next", 4096)
    assert d.state == State.HYBRID
    assert (d.eos, d.pad, d.eot, d.add_bos, d.add_eos) == (257, 258, 0, False, False)
    assert (d.vocab_size, d.vocab.size, d.n_tokens) == (272, 272, 259) and d.added == {257, 258}
    assert d.vocab.pieces[256] == b" the\n" and set(d.vocab.pieces[259:]) == {b""}
    assert (
        d.vocab.chat_template == "{{ messages }}"
        and d.vocab.pre == "qwen2"
        and d.vocab.kind == "bpe"
    )
    assert d.merges == {"count": 2, "digest": hashlib.sha256("Ġ t\nh e\n".encode()).hexdigest()}
    ids = d.encode("the<|im_end|>é")
    assert 257 not in ids and d.vocab.raw_bytes(ids) == "the<|im_end|>é".encode()
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
    for field in (
        "pieces",
        "kind",
        "pre",
        "bos",
        "eos",
        "eog",
        "special",
        "add_bos",
        "chat_template",
    ):
        assert getattr(d.vocab, field) == getattr(vocab, field), field
    return d


def test_missing_and_out_of_range_values_get_llama_cpps_defaults(tmp_path):
    """Old converters wrote -1 or the token count for "none"; llama.cpp opens it: so must we."""
    for pre, bos in (("llama-bpe", 11), ("glm4", None)):
        d = as_llama_cpp(bpe_file(tmp_path, ["▁a"], pre=pre))
        assert d.add_bos == (bos is not None) and d.bos == bos
    unmerged = read_gguf(file_of(tmp_path, *ggml(model="gpt2", pre="gpt-2", tokens=LETTERS)))
    assert unmerged.merges is None and len(unmerged.encode("the")) == 3
    out = ggml(bos_token_id=256, padding_token_id=2**32 - 1, eos_token_id=2**32 - 1)
    d = read_gguf(bpe_file(tmp_path, [], *out))
    assert (d.bos, d.pad, d.eos) == (11, None, 11)


@pytest.mark.parametrize("model", ["llama", "t5", "bert"])
def test_sentencepiece_and_wordpiece_match_llama_cpp(tmp_path, model):
    tokens = [t.decode() for t in sentencepiece_tokens(all_bytes=True)]
    kinds = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL}
    # in bert files, they end llama.cpp's process
    kinds |= {b.decode(): BYTE for b in BYTES} if model != "bert" else {}
    types = [kinds.get(t, NORMAL) for t in tokens]
    scores = [float(i) for i in range(len(tokens))]
    stated = ggml(model=model, tokens=tokens, scores=scores, token_type=types)
    d = as_llama_cpp(file_of(tmp_path, pair("general.architecture", "llama"), *stated))
    assert d.vocab.pieces[tokens.index("<0x0A>")] == (b"\n" if model != "bert" else b"<0x0A>")
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
        ("b'a'", ggml(model="gpt2", tokens=["a", "b", "a"])),  # these files end llama.cpp's process
        ("1 int32", ggml(**SOUND, token_type=[1])),
        ("<0x0A>", ggml(model="bert", tokens=["<0x0A>"], token_type=[BYTE])),
        ("merges is 1", ggml(**SOUND, merges=1)),
        ("'magic'", ggml(model="magic", tokens=LETTERS)),  # llama.cpp raises this error
        ("4294967295", [*ggml(**SOUND), pair("None.vocab_size", 2**32 - 1)]),
    ],
)
def test_an_invalid_header_raises_one_error_with_the_value(tmp_path, value, pairs):
    refused(file_of(tmp_path, *pairs), value)


@given(
    changes=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=4),
    kept=st.floats(0, 1),
)
def test_a_damaged_header_is_read_or_refused(tmp_path_factory, changes, kept):
    folder = tmp_path_factory.mktemp("damaged")
    path = bpe_file(folder, ["<|im_end|>"], pair("llama.vocab_size", 257))
    data = bytearray(path.read_bytes())
    for place, byte in changes:
        data[int(place * (len(data) - 1))] = byte
    path.write_bytes(data[: int(kept * len(data))] if kept < 0.5 else data)
    try:
        assert isinstance(read_gguf(path), Description)
    except InputError as error:
        assert str(path) in str(error)


@pytest.mark.parametrize("vocabulary", [True, False])
@pytest.mark.parametrize("rows", [256, 300])
def test_a_draft_head_uses_the_targets_vocabulary(tmp_path, rows, vocabulary):
    """Its file may have no tokens: the number of rows decides. A finding names the engine."""
    target = read_gguf(bpe_file(tmp_path))
    tokens = {"tokens": LETTERS, "merges": ["a b"]} if vocabulary else {}
    facts = [pair("general.architecture", "dflash"), pair("dflash.vocab_size", rows)]
    stated = ggml(model="gpt2" if vocabulary else "no_vocab", mask_token_id=255, **tokens)
    draft = read_gguf(file_of(tmp_path, *facts, *stated))
    report = check(target, draft)
    wider = Verdict.SLICING if vocabulary else Verdict.IMPOSSIBLE
    assert draft.mask == {255} and report.verdict is (Verdict.DROP_IN if rows == 256 else wider)
    assert report.transformers.accepts is False and report.llama_cpp.accepts is True
    (modified,) = (f for f in report.findings if f.topic == "modified draft")
    assert (
        "255" in modified.draft
        and "draft-dflash" in modified.remedy
        and modified.severity is Severity.BREAKS
    )
    refused(
        file_of(tmp_path, *facts, *ggml(model="no_vocab", mask_token_id=rows)),
        f"mask_token_id is {rows}",
    )


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


class Odd:
    """A valid model file, to be rewritten with changes."""

    def __init__(self, path):
        self.data = path.read_bytes()
        self.header = read_header(path)
        start = 24 + sum(map(len, self.header.packed.values()))
        end = start + sum(
            24 + len(name) + 8 * len(shape) for name, shape in self.header.shapes.items()
        )
        self.infos = self.data[start:end]
        self.tensors = self.data[-(-end // 32) * 32 :]

    def made(self, pairs=None, *, n_tensors=None, n_keys=None, version=3, without=()):
        pairs = {k: v for k, v in (self.header.packed | (pairs or {})).items() if k not in without}
        counts = [len(self.header.shapes), len(pairs)]
        counts = [
            n if given is None else given
            for n, given in zip(counts, (n_tensors, n_keys), strict=True)
        ]
        head = (
            b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(pairs.values()) + self.infos
        )
        return head + bytes(-len(head) % 32) + self.tensors


WRONG = ("many", [2, 2, 2], 2**63, -1)
"""Invalid sizes: of another type, one for each layer, too large, negative."""
STATED = [  # keys, values, and whether they must be refused (None: either is fine)
    *(
        (f"llama.{name}", (0, 513, 2**32 - 1, *WRONG), True)
        for name in ("block_count", "attention.head_count", "attention.head_count_kv")
    ),
    *(
        (f"llama.{name}", (3, 2**31, *WRONG), True)
        for name in (
            "nextn_predict_layers",
            "expert_count",
            "expert_used_count",
            "expert_group_count",
        )
    ),
    *(
        (f"llama.{name}", (0, 2**31, *WRONG), True)
        for name in ("embedding_length", "feed_forward_length")
    ),
    *(
        (f"llama.{name}", (0, 2**31, *WRONG), None)
        for name in ("context_length", "rope.dimension_count", "vocab_size")
    ),
    ("llama.attention.layer_norm_rms_epsilon", (-1.0, float("nan")), True),
    ("llama.attention.layer_norm_rms_epsilon", (0.0,), False),
    ("llama.rope.scaling.type", ("bogus", ""), True),
    ("llama.rope.scaling.type", ("none",), False),
    ("general.alignment", (0, 1, 3, 8, "many", 2**32 - 1), True),
    ("general.alignment", (32,), False),
    ("general.architecture", ("../../x", "", "\x1b[2J", "bert", "dflash", ["llama", "x"], 7), True),
    ("tokenizer.ggml.tokens", ([1, 2, 3], "abc"), True),
    ("tokenizer.ggml.token_type", ([1] * 10, "x"), True),
    ("tokenizer.ggml.scores", ([1.0] * 10, "x"), True),
    ("tokenizer.ggml.model", ("magic", 7), True),
    *(
        (f"tokenizer.ggml.{name}_token_id", (10**9, "x", -1), None)
        for name in ("bos", "eos", "unknown", "padding")
    ),
    ("tokenizer.chat_template", (7,), None),
]
ENDLESS = [
    (STRING, struct.pack("<Q", 2**63)),
    (ARRAY, struct.pack("<IQ", U32, 2**62)),
    (ARRAY, struct.pack("<IQ", STRING, 2**40)),
    (ARRAY, struct.pack("<IQIQ", ARRAY, 1, U32, 0)),
    (99, b""),
]
"""Values longer than the file, nested, or of an unknown type."""


def odd_files(odd):
    """Return the bytes by name, and whether they must be refused (None: either is fine)."""
    files = {
        f"cut {n}": (odd.data[:n], True)
        for n in (0, 1, 8, 20, 100, 1500, len(odd.data) // 2, len(odd.data) - 1)
    }
    files |= {"magic": (b"GGML" + odd.data[4:], True), "text": (b"hello" * 100, True)}
    files |= {f"version {n}": (odd.made(version=n), True) for n in (0, 1, 3 << 24, 2**32 - 1)}
    for n in (0, 3, 2**31, 2**63, 2**64 - 1):
        files |= {
            f"keys {n}": (odd.made(n_keys=n), True),
            f"tensors {n}": (odd.made(n_tensors=n), True),
        }
    tokens = [token.decode() for token in odd.header.values["tokenizer.ggml.tokens"]]
    repeated = ([*tokens[:-1], tokens[5]], [*tokens[:-2], "q\0a", "q\0b"], tokens[:50])
    for key, values, must in (*STATED, ("tokenizer.ggml.tokens", repeated, True)):
        files |= {f"{key} {value}": (odd.made({key: pair(key, value)}), must) for value in values}
    files["no tokens"] = odd.made(without=["tokenizer.ggml.tokens"]), True
    return files | {
        f"endless {i}": (odd.made({"": key_value("a", *value)}), True)
        for i, value in enumerate(ENDLESS)
    }


def test_odd_files_raise_one_clear_error_and_never_end_the_process(tmp_path):
    files = odd_files(Odd(llama_gguf(tmp_path / "base", all_bytes=True)))
    for i, (data, _) in enumerate(files.values()):
        (tmp_path / f"{i:03d}.gguf").write_bytes(data)
    run = subprocess.run(
        [sys.executable, "-c", OPEN, tmp_path], capture_output=True, text=True, timeout=100
    )
    lines = run.stdout.splitlines()
    assert run.returncode == 0 and len(lines) == len(files) > 100, (lines[-1:], run.stderr[-500:])
    for (name, (_, must)), line in zip(files.items(), lines, strict=True):
        number, said = line.split(" ", 1)
        described, loaded = json.loads(said)
        assert must is None or bool(loaded) == must, name
        for error in (described, loaded):
            assert not error or (number in error and "\n" not in error and len(error) < 700), (
                name,
                error,
            )
