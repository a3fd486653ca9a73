"""A GGUF header becomes a description, and a hostile one becomes one error in bounded memory."""

import gc
import hashlib
import struct
import time
import tracemalloc
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specnb.compat import gguf_reader
from specnb.compat.description import Description, Rope, State
from specnb.compat.gguf_header import describe
from specnb.errors import InputError
from specnb.lm import binding
from tests.tiny_models import BYTES, sentencepiece_tokens

U32, I32, F32, BOOL, STRING, ARRAY, U64 = 4, 5, 6, 7, 8, 9, 10
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
LETTERS = [chr(c) for c in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))] + [
    chr(0x100 + i) for i in range(68)
]
"""The alphabet of byte-level BPE, in no particular order."""


# --- headers written by hand, so that each field can be wrong --------------------------------------------------------


def text(value):
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def key_value(key, kind, packed):
    return text(key) + struct.pack("<I", kind) + packed


def strings(key, values):
    return key_value(key, ARRAY, struct.pack("<IQ", STRING, len(values)) + b"".join(map(text, values)))


def integers(key, values, kind=I32):
    return key_value(key, ARRAY, struct.pack(f"<IQ{len(values)}i", kind, len(values), *values))


def u32(key, value):
    return key_value(key, U32, struct.pack("<I", value))


def boolean(key, value):
    return key_value(key, BOOL, bytes([value]))


def string(key, value):
    return key_value(key, STRING, text(value))


def file_of(folder, *pairs, magic=b"GGUF", version=3, n_keys=None, n_tensors=0, rest=b""):
    path = folder / "model.gguf"
    n = len(pairs) if n_keys is None else n_keys
    path.write_bytes(magic + struct.pack("<IQQ", version, n_tensors, n) + b"".join(pairs) + rest)
    return path


def bpe_file(folder, tokens, *pairs, types=None, merges=("a b",), pre="gpt-2", arch="llama"):
    """A byte-level BPE; `types` are normal where not given."""
    return file_of(
        folder,
        string("general.architecture", arch),
        string("tokenizer.ggml.model", "gpt2"),
        string("tokenizer.ggml.pre", pre),
        strings("tokenizer.ggml.tokens", tokens),
        integers("tokenizer.ggml.token_type", types or [NORMAL] * len(tokens)),
        strings("tokenizer.ggml.merges", list(merges)),
        *pairs,
    )


def letters_and(*more):
    """All 256 letters, without which llama.cpp cannot load, then more tokens."""
    return [*LETTERS, *more]


def refused(path, *words):
    with pytest.raises(InputError) as caught:
        describe(path)
    message = str(caught.value)
    assert str(path) in message and "\n" not in message and len(message) < 500
    for word in words:
        assert word in message, message
    return message


# --- what a sound header says ----------------------------------------------------------------------------------------


@pytest.fixture
def written(tmp_path):
    """By gguf's own writer, with tensors of another width than the tokens."""
    path = tmp_path / "tiny.gguf"
    out = gguf.GGUFWriter(str(path), "qwen3next")
    out.add_name("Tiny")
    out.add_context_length(4096)
    out.add_rope_freq_base(10_000_000.0)
    out.add_rope_dimension_count(64)
    out.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    out.add_rope_scaling_factor(4.0)
    out.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_K_M)
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("qwen2")
    tokens = letters_and("ĠtheĊ", "<|im_end|>", "<|im_start|>", "[PAD259]")
    out.add_token_list(tokens)
    out.add_token_types([NORMAL] * 257 + [CONTROL, CONTROL, UNUSED])
    out.add_token_scores([0.0] * len(tokens))
    out.add_token_merges(["Ġ t", "h e"])
    out.add_eos_token_id(257)
    out.add_pad_token_id(258)
    out.add_add_bos_token(False)
    out.add_chat_template("{{ messages }}")
    out.add_tensor("token_embd.weight", np.zeros((272, 8), np.float32))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


def test_every_field_that_a_header_states(written):
    d = describe(written)
    assert (d.name, d.source, d.architecture, d.n_ctx) == ("Tiny", str(written), "qwen3next", 4096)
    assert d.rope == Rope(base=10_000_000.0, dims=64, scaling="yarn 4")
    assert (d.quantisation, d.state) == ("q4_k_m", State.HYBRID)
    assert (d.eos, d.pad, d.add_bos, d.add_eos) == (257, 258, False, False)
    assert d.vocab.chat_template == "{{ messages }}" and d.vocab.pre == "qwen2" and d.vocab.kind == "bpe"
    assert d.merges.count == 2 and d.merges.digest == hashlib.sha256("Ġ t\nh e\n".encode()).hexdigest()


def test_rows_of_the_embedding_are_ids_and_padding_is_no_token(written):
    """272 rows, 260 entries, the last of which a converter added."""
    d = describe(written)
    assert (d.vocab_size, d.vocab.size, d.n_tokens) == (272, 272, 259)
    assert d.vocab.pieces[256] == b" the\n" and d.vocab.pieces[257] == b"<|im_end|>"
    assert set(d.vocab.pieces[259:]) == {b""} and d.added == {257, 258}


def test_a_stated_vocab_size_pads_where_no_tensor_is_listed(tmp_path):
    d = describe(bpe_file(tmp_path, letters_and(), u32("llama.vocab_size", 300)))
    assert (d.vocab_size, d.vocab.size, d.n_tokens) == (300, 300, 256)


def test_every_byte_has_one_letter(tmp_path):
    pieces = describe(bpe_file(tmp_path, letters_and())).vocab.pieces
    assert {len(p) for p in pieces} == {1} and len(set(pieces)) == 256


def test_only_the_header_is_needed(written):
    """A first shard that was cut after its header, in the middle of a download."""
    whole = describe(written)
    header_end = written.read_bytes().rindex(b"token_embd.weight") + len(b"token_embd.weight") + 4 + 16 + 4 + 8
    written.write_bytes(written.read_bytes()[:header_end])
    cut = describe(written)
    assert cut.vocab.digest == whole.vocab.digest and cut.vocab_size == whole.vocab_size
    written.write_bytes(written.read_bytes()[:-1])
    refused(written, "ends inside")


@pytest.mark.parametrize("block", [1, 7, 100])
def test_the_window_may_be_of_any_size(written, monkeypatch, block):
    whole = describe(written)
    monkeypatch.setattr(gguf_reader, "BLOCK", block)
    cut = describe(written)
    assert cut.vocab.digest == whole.vocab.digest and cut.merges == whole.merges and cut.vocab_size == 272
    written.write_bytes(written.read_bytes() + bytes(100))
    data = bytearray(written.read_bytes())
    at = data.index(b"qwen3next.context_length") + len(b"qwen3next.context_length")
    data[at] = 99
    written.write_bytes(data)
    refused(written, "value type 99", f"byte {at + 4}")


def test_five_gigabytes_are_not_read(written):
    with written.open("r+b") as file:
        file.truncate(5 << 30)
    describe(written)  # imports are paid
    tracemalloc.start()
    start = time.perf_counter()
    describe(written)
    seconds, peak = time.perf_counter() - start, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert seconds < 1 and peak < 8 << 20


def test_arrays_nobody_asked_for_are_stepped_over(tmp_path):
    """Of any length: 64 MB of scores and a sparse gigabyte before the tokens."""
    scores = key_value("tokenizer.ggml.scores", ARRAY, struct.pack("<IQ", F32, 1 << 28))
    after = bpe_file(tmp_path, letters_and()).read_bytes()[24:]
    path = file_of(tmp_path, scores, n_keys=7)
    with path.open("r+b") as file:
        file.seek(0, 2)
        file.truncate(file.tell() + (4 << 28))
        file.seek(0, 2)
        file.write(after)
    assert describe(path).vocab.size == 256


def test_version_2_is_read_too(tmp_path):
    assert describe(file_of(tmp_path, string("general.architecture", "mamba"), version=2)).state is State.RECURRENT


def test_no_vocabulary_is_none(tmp_path):
    d = describe(file_of(tmp_path, string("tokenizer.ggml.model", "no_vocab"), u32("None.vocab_size", 7)))
    assert d.vocab is None and d.vocab_size == 7 and d.state is None and d.add_bos is None


@pytest.mark.parametrize(
    ("architecture", "state"),
    [
        ("llama", State.ATTENTION),
        ("mamba2", State.RECURRENT),
        ("rwkv7", State.RECURRENT),
        ("falcon-h1", State.HYBRID),
        ("qwen35moe", State.HYBRID),
        ("lfm2", State.HYBRID),
        ("kimi-linear", State.HYBRID),
        ("granitehybrid", State.HYBRID),
    ],
)
def test_state_by_architecture(tmp_path, architecture, state):
    assert describe(file_of(tmp_path, string("general.architecture", architecture))).state is state


def test_file_type_by_name_or_by_the_most_common_tensor_type(tmp_path):
    def tensor(name, dims, kind):
        return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, 0)

    f16 = tensor("a", (64, 64), 1) + tensor("b", (32,), 0) + tensor("c", (32,), 0)
    assert describe(file_of(tmp_path, n_tensors=3, rest=f16)).quantisation == "f16"
    assert describe(file_of(tmp_path, u32("general.file_type", 0))).quantisation == "f32"
    assert describe(file_of(tmp_path, u32("general.file_type", 999))).quantisation == "ftype999"
    assert describe(file_of(tmp_path)).quantisation is None


@pytest.mark.parametrize(
    ("pairs", "scaling"),
    [
        ([key_value("llama.rope.scaling.factor", F32, struct.pack("<f", 4))], "linear 4"),
        ([key_value("llama.rope.scale_linear", F32, struct.pack("<f", 2.5))], "linear 2.5"),
        ([string("llama.rope.scaling.type", "longrope")], "longrope"),
    ],
)
def test_rope_scaling_in_words(tmp_path, pairs, scaling):
    assert describe(file_of(tmp_path, string("general.architecture", "llama"), *pairs)).rope.scaling == scaling


def test_scaling_none_is_no_scaling(tmp_path):
    pairs = string("llama.rope.scaling.type", "none"), key_value("llama.rope.freq_base", F32, struct.pack("<f", 5e5))
    d = describe(file_of(tmp_path, string("general.architecture", "llama"), *pairs))
    assert d.rope == Rope(base=5e5, dims=None, scaling=None)


# --- as llama.cpp reads it -------------------------------------------------------------------------------------------


def as_llama_cpp(path):
    """Everything that llama.cpp says about the vocabulary must be what the header reader says."""
    d = describe(path)
    api = binding.library().api
    with binding.header(path) as model:
        vocab, raw = binding.vocabulary(model), api.llama_model_get_vocab(model)
        assert d.add_eos == api.llama_vocab_get_add_eos(raw)
        assert d.pad == (api.llama_vocab_pad(raw) if api.llama_vocab_pad(raw) >= 0 else None)
        assert d.eot in (None, api.llama_vocab_eot(raw))
    for field in ("pieces", "kind", "pre", "bos", "eos", "eog", "special", "add_bos", "chat_template"):
        assert getattr(d.vocab, field) == getattr(vocab, field), field
    assert d.vocab.digest == vocab.digest
    return d


FIM = ["<|fim_prefix|>", "<fim_suffix>", "<MID>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"]


@pytest.mark.parametrize(
    ("tokens", "types", "pairs"),
    [
        (["<|im_end|>"], [NORMAL], []),  # a control token that is not marked as one
        (["<|im_end|>", "<|endoftext|>", "<|end|>"], [CONTROL] * 3, []),
        (["<|im_end|>"], [UNUSED], []),  # its piece is its text, not b""
        (["<|unused1|>", "x y", "ÿ€", ""], [UNUSED, USER_DEFINED, UNKNOWN, NORMAL], []),
        (["not in the alphabet €"], [NORMAL], []),
        (["<｜end▁of▁sentence｜>"], [NORMAL], []),
        (FIM, [NORMAL] * 6, []),
        (FIM, [NORMAL] * 6, [u32("tokenizer.ggml.fim_pad_token_id", 3), u32("tokenizer.ggml.prefix_token_id", 4)]),
        (["<|return|>", "<|call|>", "<|end|>", "<|start|>", "<|channel|>"], [CONTROL] * 5, []),
        (["<|call|>", "<|end|>"], [CONTROL] * 2, []),
        (["<|return|>", "<|flush|>", "<|end|>"], [CONTROL] * 3, []),
        (["<|calls|>", "<|flush|>", "<|end|>"], [CONTROL] * 3, []),
        (["<|tool_response>", "</s>"], [CONTROL] * 2, []),
        (["</s>", "[e~[", "<turn|>", "<eos>"], [NORMAL] * 4, []),
        (["<|eom_id|>", "<|eot_id|>"], [CONTROL] * 2, [u32("tokenizer.ggml.eot_token_id", 5)]),
        (["e", "é€"][1:], [BYTE + 5], []),  # a type that nobody knows
        ([], [], [u32("tokenizer.ggml.eom_token_id", 9), u32("tokenizer.ggml.bos_token_id", 0)]),
        ([], [], [boolean("tokenizer.ggml.add_bos_token", 1), boolean("tokenizer.ggml.add_eos_token", 1)]),
        ([], [], [string("tokenizer.chat_template", "{{ x }}"), u32("tokenizer.ggml.padding_token_id", 3)]),
    ],
)
def test_special_tokens_and_odd_pieces_are_llama_cpps(tmp_path, tokens, types, pairs):
    path = bpe_file(tmp_path, letters_and(*tokens), *pairs, types=[NORMAL] * 256 + types)
    as_llama_cpp(path)


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "tekken", "qwen2", "glm4", "gemma4", "sarvam-moe", "smollm"])
def test_defaults_by_pre_tokenizer_are_llama_cpps(tmp_path, pre):
    as_llama_cpp(bpe_file(tmp_path, letters_and("▁a"), pre=pre))


def test_llama_cpps_default_ids_exist_only_where_the_vocabulary_has_them(tmp_path):
    assert as_llama_cpp(bpe_file(tmp_path, letters_and())).bos == 11
    few = file_of(
        tmp_path,
        string("general.architecture", "llama"),
        string("tokenizer.ggml.model", "gpt2"),
        strings("tokenizer.ggml.tokens", LETTERS[:5]),
        strings("tokenizer.ggml.merges", ["a b"]),
    )
    assert describe(few).bos is None and describe(few).vocab.eog == frozenset()


@pytest.mark.parametrize("model", ["llama", "t5", "bert"])
def test_sentencepiece_and_wordpiece_are_llama_cpps(tmp_path, model):
    tokens = [t.decode() for t in sentencepiece_tokens(all_bytes=True)]
    kinds = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL}
    kinds |= {b.decode(): BYTE for b in BYTES} if model != "bert" else {}  # on these llama.cpp ends the process
    path = file_of(
        tmp_path,
        string("general.architecture", "llama"),
        string("tokenizer.ggml.model", model),
        strings("tokenizer.ggml.tokens", tokens),
        key_value(
            "tokenizer.ggml.scores", ARRAY, struct.pack(f"<IQ{len(tokens)}f", F32, len(tokens), *range(len(tokens)))
        ),
        integers("tokenizer.ggml.token_type", [kinds.get(t, NORMAL) for t in tokens]),
    )
    d = as_llama_cpp(path)
    assert d.vocab.pieces[tokens.index("<0x0A>")] == (b"\n" if model != "bert" else b"<0x0A>")
    assert d.vocab.pieces[tokens.index("▁")] == b" "


def test_rwkv_escapes_are_resolved(tmp_path):
    tokens = ["<s>", r"\n", r"\x0a\xff", r"a\tb", r"\\", r"\"", "é"]
    pairs = string("tokenizer.ggml.model", "rwkv"), strings("tokenizer.ggml.tokens", tokens)
    d = describe(file_of(tmp_path, string("general.architecture", "rwkv7"), *pairs))
    assert d.vocab.pieces == (b"<s>", b"\n", b"\n\xff", b"a\tb", b"\\", b'"', "é".encode())
    as_llama_cpp(Path(d.source))


def test_encode_is_llama_cpps_without_special_tokens(tmp_path):
    path = bpe_file(tmp_path, letters_and("<|im_end|>"), types=[NORMAL] * 256 + [CONTROL])
    d = describe(path)
    ids = d.encode("a<|im_end|>é")
    assert 256 not in ids and d.vocab.raw_bytes(ids) == "a<|im_end|>é".encode()
    assert d.encode("") == []


def test_encode_refuses_what_would_end_the_process(tmp_path):
    tokens = ["<unk>", "<s>", "</s>", "▁", "a", "<0x0A>"]
    types = [UNKNOWN, CONTROL, CONTROL, NORMAL, NORMAL, BYTE]
    path = file_of(
        tmp_path,
        string("general.architecture", "llama"),
        string("tokenizer.ggml.model", "llama"),
        strings("tokenizer.ggml.tokens", tokens),
        key_value("tokenizer.ggml.scores", ARRAY, struct.pack("<IQ6f", F32, 6, *[0.0] * 6)),
        integers("tokenizer.ggml.token_type", types),
    )
    d = describe(path)
    assert d.vocab.raw_bytes(d.encode("a")).strip() == b"a"
    with pytest.raises(InputError, match="é"):
        d.encode("é")


def test_an_encoder_frees_its_model(tmp_path):
    d = describe(bpe_file(tmp_path, letters_and()))
    encode = d.encode
    encode("a")
    freed = []
    api = binding.library().api
    original = api.llama_model_free
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "llama_model_free", lambda model: (freed.append(1), original(model)))
        del d, encode
        gc.collect()
    assert freed == [1]


@pytest.mark.model
def test_the_real_header_is_what_llama_cpp_reads(opened):
    from specnb.lm import zoo

    path = zoo.path("smollm2-135m")
    d = as_llama_cpp(path)
    assert d.vocab.pieces == opened("smollm2-135m").vocab.pieces
    assert (d.n_tokens, d.vocab_size, d.n_ctx, d.quantisation) == (49152, 49152, 8192, "q4_1")
    assert d.rope == Rope(base=100_000.0, dims=64) and d.merges.count == 48900
    assert d.encode("Hello 12 é") == opened("smollm2-135m").encode("Hello 12 é", special=False)


# --- hostile files ---------------------------------------------------------------------------------------------------


def test_wrong_magic_version_and_byte_order(tmp_path):
    refused(file_of(tmp_path, magic=b"GGML"), "not a GGUF file", "GGML")
    refused(file_of(tmp_path, version=1), "version 1")
    refused(file_of(tmp_path, version=9), "version 9")
    refused(file_of(tmp_path, version=0), "version 0")
    refused(file_of(tmp_path, version=3 << 24), "big endian")
    empty = tmp_path / "model.gguf"
    empty.write_bytes(b"")
    refused(empty, "ends inside")


def test_what_is_no_file(tmp_path):
    refused(tmp_path, "no such model file")
    refused(tmp_path / "absent.gguf", "no such model file")
    with pytest.raises(InputError):
        describe("a\0b.gguf")


HUGE = 10**12


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda f: file_of(f, n_keys=HUGE), ["keys"]),
        (lambda f: file_of(f, n_keys=2**64 - 1), ["keys"]),
        (lambda f: file_of(f, n_tensors=HUGE), ["tensors"]),
        (lambda f: file_of(f, struct.pack("<Q", HUGE) + b"x" * 40), ["name of"]),
        (lambda f: file_of(f, key_value("a", STRING, struct.pack("<Q", HUGE) + b"x")), ["'a'", str(HUGE)]),
        (lambda f: file_of(f, key_value("a", STRING, struct.pack("<Q", 2**64 - 1))), ["'a'"]),
        (lambda f: file_of(f, key_value("a", ARRAY, struct.pack("<IQ", STRING, HUGE))), ["'a'", str(HUGE)]),
        (lambda f: file_of(f, key_value("a", ARRAY, struct.pack("<IQ", I32, 2**61))), ["'a'"]),
        (lambda f: file_of(f, key_value("a", ARRAY, struct.pack("<IQI", I32, 2, 0))), ["2 entries of 'a'", "4 bytes"]),
        (lambda f: file_of(f, key_value("a", ARRAY, struct.pack("<IQQ", STRING, 1, HUGE))), ["entry 0", "'a'"]),
        (lambda f: file_of(f, key_value("a", ARRAY, struct.pack("<IQ", ARRAY, 1))), ["array of arrays", "'a'"]),
        (lambda f: file_of(f, key_value("a", ARRAY, struct.pack("<IQ", 77, 1) + b"x" * 9)), ["unknown type 77"]),
        (lambda f: file_of(f, key_value("a", 13, b"xxxx")), ["value type 13", "'a'"]),
        (lambda f: file_of(f, key_value("a", BOOL, b"\7")), ["boolean 7"]),
        (lambda f: file_of(f, u32("a", 1), u32("a", 2)), ["'a'", "second time"]),
        (lambda f: file_of(f, u32(b"\xff\xfe", 1)), ["not UTF-8"]),
        (lambda f: file_of(f, n_tensors=1, rest=text("t") + struct.pack("<I", 5) + b"x" * 99), ["5 dimensions"]),
        (lambda f: file_of(f, n_tensors=1, rest=text("t") + struct.pack("<IQIQ", 1, 0, 0, 0)), ["shape"]),
    ],
)
def test_absurd_structure_is_one_error(tmp_path, make, words):
    refused(make(tmp_path), *words, "byte")


def test_strings_longer_than_any_memory_are_not_allocated(tmp_path):
    """In a file that is sparse and really is that long, so that only the limit can refuse."""
    for packed in (struct.pack("<Q", HUGE), struct.pack("<IQQ", STRING, 1, HUGE)):
        path = file_of(tmp_path, key_value("a", STRING if len(packed) == 8 else ARRAY, packed))
        with path.open("r+b") as file:
            file.truncate(2 * HUGE)
        tracemalloc.start()
        refused(path, "more than")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 8 << 20


@pytest.mark.parametrize("kind", [STRING, I32])
def test_arrays_longer_than_any_memory_are_not_allocated(tmp_path, kind):
    path = file_of(tmp_path, key_value("tokenizer.ggml.tokens", ARRAY, struct.pack("<IQ", kind, 10**11)))
    with path.open("r+b") as file:
        file.truncate(2 * HUGE)
    tracemalloc.start()
    refused(path, "tokenizer.ggml.tokens", "the most")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20


def test_a_header_without_end_stops_at_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_reader, "MAX_HEADER_BYTES", 100_000)
    monkeypatch.setattr(gguf_reader, "BLOCK", 1000)  # the limit is kept to within one block
    path = file_of(tmp_path, strings("a", ["x" * 60_000] * 2))
    refused(path, "header of more than 100000 bytes")


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        ([u32("tokenizer.ggml.tokens", 1)], ["tokenizer.ggml.tokens", "1", "array of strings"]),
        ([integers("tokenizer.ggml.tokens", [1])], ["array of strings"]),
        ([strings("tokenizer.ggml.tokens", [])], ["no token"]),
        ([], ["tokenizer.ggml.tokens", "None"]),
        ([strings("tokenizer.ggml.tokens", ["a", "b", "a"])], ["tokens[2]", "'a'", "token 0"]),
        ([strings("tokenizer.ggml.tokens", ["a", b"\xff"])], ["tokens[1]", "UTF-8"]),
        (
            [strings("tokenizer.ggml.tokens", ["a", "b"]), integers("tokenizer.ggml.token_type", [1])],
            ["tokenizer.ggml.token_type", "1 entries for 2 tokens"],
        ),
        (
            [strings("tokenizer.ggml.tokens", ["a"]), integers("tokenizer.ggml.token_type", [1], kind=F32)],
            ["tokenizer.ggml.token_type", "i32"],
        ),
        (
            [strings("tokenizer.ggml.tokens", ["<0xZZ>"]), integers("tokenizer.ggml.token_type", [BYTE])],
            ["tokens[0]", "<0xZZ>", "byte"],
        ),
        ([strings("tokenizer.ggml.tokens", ["a"]), u32("tokenizer.ggml.merges", 1)], ["tokenizer.ggml.merges"]),
        ([strings("tokenizer.ggml.tokens", ["€" * 5000])], ["tokens[0]", "alphabet"]),
        ([string("tokenizer.ggml.tokens", "x")], ["array of strings"]),
    ],
)
def test_a_vocabulary_that_cannot_be_is_one_error(tmp_path, pairs, words):
    path = file_of(tmp_path, string("general.architecture", "llama"), string("tokenizer.ggml.model", "gpt2"), *pairs)
    refused(path, *words)


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        (string("tokenizer.ggml.eos_token_id", "2"), ["eos_token_id", "integer"]),
        (boolean("tokenizer.ggml.eos_token_id", 1), ["eos_token_id", "integer"]),
        (u32("tokenizer.ggml.add_bos_token", 1), ["add_bos_token", "boolean"]),
        (u32("tokenizer.chat_template", 1), ["chat_template", "string"]),
        (string("tokenizer.chat_template", b"\xff"), ["chat_template", "UTF-8"]),
        (string("llama.context_length", "many"), ["llama.context_length", "'many'"]),
        (key_value("llama.rope.freq_base", F32, struct.pack("<f", float("nan"))), ["freq_base", "nan"]),
        (u32("llama.vocab_size", 2**32 - 1), ["4294967295"]),
        (u32("llama.vocab_size", 0), ["0"]),
    ],
)
def test_values_that_cannot_be_are_one_error(tmp_path, pair, words):
    refused(bpe_file(tmp_path, letters_and(), pair), *words)


@pytest.mark.parametrize(
    ("pair", "field", "expected"),
    [
        (u32("tokenizer.ggml.bos_token_id", 256), "bos", 11),
        (u32("tokenizer.ggml.padding_token_id", 2**32 - 1), "pad", None),
        (key_value("tokenizer.ggml.eos_token_id", I32, struct.pack("<i", -1)), "eos", 11),
    ],
)
def test_a_special_id_out_of_range_is_llama_cpps_default(tmp_path, pair, field, expected):
    """Old converters wrote -1 or the number of tokens for "none"; llama.cpp opens these files, and so must we."""
    assert getattr(describe(bpe_file(tmp_path, letters_and(), pair)), field) == expected


def test_a_later_shard_sends_to_the_first(tmp_path):
    def shard(number):
        pairs = [key_value(f"split.{key}", 2, struct.pack("<H", n)) for key, n in (("no", number), ("count", 3))]
        return file_of(tmp_path, *pairs, string("general.architecture", "llama"))

    assert describe(shard(0)).architecture == "llama"
    refused(shard(1), "shard 2 of 3", "first")


def test_unknown_kinds_of_tokenizers_are_refused_by_name(tmp_path):
    refused(file_of(tmp_path, string("tokenizer.ggml.model", "magic")), "'magic'", "gpt2", "tokenizer.ggml.model")


def test_pieces_do_not_grow_without_bound(tmp_path, monkeypatch):
    """llama.cpp writes a token's whole text for each letter of it that is none: squared length."""
    monkeypatch.setattr("specnb.compat.gguf_vocab.MAX_HEADER_BYTES", 1 << 20)
    refused(bpe_file(tmp_path, ["€" * 2000]), "pieces of more than")


@cache
def sound_bytes():
    with TemporaryDirectory() as folder:
        return bpe_file(
            Path(folder),
            [*LETTERS[:12], "<|im_end|>"],
            u32("tokenizer.ggml.eos_token_id", 12),
            u32("llama.context_length", 8),
            u32("llama.vocab_size", 13),
            boolean("tokenizer.ggml.add_bos_token", 0),
            types=[NORMAL] * 12 + [CONTROL],
        ).read_bytes()


def describe_bytes(data):
    """A description or an InputError, quickly; anything else escapes and fails the test."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "x.gguf"
        path.write_bytes(data)
        start = time.perf_counter()
        try:
            found = describe(path)
        except InputError as error:
            found = error
            assert str(path) in str(error)
        assert time.perf_counter() - start < 5
        return found


def test_every_truncation_is_refused():
    data = sound_bytes()
    assert isinstance(describe_bytes(data), Description)
    for n in range(len(data)):
        assert isinstance(describe_bytes(data[:n]), InputError), n


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_mutated_headers_are_read_or_refused(draw):
    data = bytearray(sound_bytes())
    for _ in range(draw.draw(st.integers(1, 4))):
        at = draw.draw(st.integers(0, len(data) - 1))
        data[at] = draw.draw(st.integers(0, 255))
    assert isinstance(describe_bytes(bytes(data)), Description | InputError)


@settings(max_examples=200, deadline=None)
@given(
    at=st.integers(4, len(sound_bytes()) - 8),
    value=st.sampled_from([0, 1, 2**16, 2**31, 2**32 - 1, 2**40, HUGE, 2**63, 2**64 - 1]),
    end=st.integers(0, 64),
)
def test_huge_numbers_anywhere_are_read_or_refused(at, value, end):
    data = bytearray(sound_bytes() + b"\0" * end)
    data[at : at + 8] = struct.pack("<Q", value)
    assert isinstance(describe_bytes(bytes(data)), Description | InputError)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
def test_noise_behind_the_magic_is_read_or_refused(noise):
    assert isinstance(describe_bytes(b"GGUF" + struct.pack("<I", 3) + noise), Description | InputError)
