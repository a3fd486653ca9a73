"""A transformers folder, a tokenizer.json, a hub id or a tiktoken file becomes a description; no model opens."""

import base64
import hashlib
import json
import shutil
import subprocess
import sys
import time
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specnb.compat import hf_folder, hf_tokenizer, shelf, tiktoken_file
from specnb.compat.description import Description, Rope, State
from specnb.compat.hf_folder import describe
from specnb.compat.pieces import ALPHABET
from specnb.errors import FetchError, InputError
from specnb.lm import bounded_json

LETTER = {b: c for c, b in ALPHABET.items()}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
HUGE = 10**12


AS_OBJECT = {"__type": "AddedToken", "content": "<|im_end|>", "special": True}


def letters(raw):
    return "".join(LETTER[b] for b in raw)


def added(i, content, special=True):
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": i, "content": content, "special": special, **flags}


def byte_level_tokenizer():
    """256 letters, three merges, and three added tokens of which one is no control token."""
    vocab = {LETTER[b]: b for b in range(256)}
    vocab |= {letters(b" t"): 256, letters(b"he"): 257, letters(b" the"): 258}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [added(259, "<|im_end|>"), added(260, "<think>", special=False), added(261, "<|bos|>")],
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]},
        "pre_tokenizer": BYTE_LEVEL,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<|bos|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<|bos|>": {"id": "<|bos|>", "ids": [261], "tokens": ["<|bos|>"]}},
        },
        "decoder": BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [["Ġ", "t"], ["h", "e"], ["Ġt", "he"]],
        },
    }


def sentencepiece_tokenizer():
    vocab = [["<unk>", 0.0], ["▁", -1.0], ["▁a", -2.0], ["<0x0A>", -3.0], ["<0xFF>", -4.0], ["b", -5.0]]
    return {
        "version": "1.0",
        "added_tokens": [added(0, "<unk>")],
        "normalizer": None,
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {"type": "Unigram", "unk_id": 0, "vocab": vocab, "byte_fallback": True},
    }


CONFIG = {
    "model_type": "qwen2",
    "vocab_size": 272,
    "bos_token_id": 261,
    "eos_token_id": 259,
    "max_position_embeddings": 32768,
    "rope_theta": 1e6,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "torch_dtype": "bfloat16",
}


def folder_of(path, tokenizer=None, config=CONFIG, **files):
    """`files` are the other json files, by stem."""
    path.mkdir(exist_ok=True)
    named = {"tokenizer": tokenizer, "config": config, **files}
    for stem, value in named.items():
        if value is not None:
            (path / f"{stem}.json").write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
    return path


@pytest.fixture
def folder(tmp_path):
    return folder_of(
        tmp_path / "Model-1",
        byte_level_tokenizer(),
        generation_config={"eos_token_id": [259, 260]},
        tokenizer_config={"eos_token": AS_OBJECT, "pad_token": "<|im_end|>", "bos_token": None},
    )


def refused(source, *words):
    with pytest.raises(InputError) as caught:
        describe(source)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 600
    for word in words:
        assert word in message, message
    return message


# --- what a folder says ----------------------------------------------------------------------------------------------


def test_every_field_that_a_folder_states(folder):
    (folder / "chat_template.jinja").write_text("{{ x }}")
    d = describe(folder)
    assert (d.name, d.source, d.architecture, d.state) == ("Model-1", str(folder), "qwen2", State.ATTENTION)
    assert (d.bos, d.eos, d.pad, d.add_bos, d.add_eos) == (261, 259, 259, True, False)
    assert d.vocab.eog == {259, 260} and d.vocab.special == {259, 261} and d.added == {259, 260, 261}
    assert (d.n_ctx, d.rope, d.quantisation) == (32768, Rope(base=1e6, dims=16), "bfloat16")
    assert (d.vocab.kind, d.vocab.pre, d.normalizer) == ("bpe", "bytelevel", "NFC Lowercase")
    assert d.vocab.chat_template == "{{ x }}"
    assert d.merges.count == 3 and d.merges.digest == hashlib.sha256("Ġ t\nh e\nĠt he\n".encode()).hexdigest()


def test_padding_is_rows_without_a_token(folder):
    d = describe(folder)
    assert (d.n_tokens, d.vocab_size, d.vocab.size) == (262, 272, 272)
    assert d.vocab.pieces[:256] == tuple(bytes([b]) for b in range(256)) and d.vocab.pieces[258] == b" the"
    assert d.vocab.pieces[259] == b"<|im_end|>" and set(d.vocab.pieces[262:]) == {b""}


def test_an_id_that_nobody_has_has_no_text(tmp_path):
    tokenizer = changed("added_tokens", to=[])
    tokenizer["post_processor"] = None
    tokenizer["model"]["vocab"]["ab"] = 262
    d = describe(folder_of(tmp_path / "m", tokenizer, {"vocab_size": 272}))
    assert d.vocab.pieces[259:263] == (b"", b"", b"", b"ab") and d.n_tokens == 263


@pytest.mark.parametrize(
    "tokens",
    [
        [added(265, "<|a|>"), added(259, "<|b|>"), added(270, "<|c|>")],  # with holes, and not in order
        [added(259, "<|b|>"), added(260, letters(b" t")), added(65, "<|c|>")],  # a text of the vocabulary; its id
        [added(3, letters(b" t")), added(7, "<|b|>")],
    ],
)
def test_added_tokens_have_the_ids_that_the_library_gives_them(tmp_path, tokens):
    from tokenizers import Tokenizer

    tokenizer = changed("added_tokens", to=tokens)
    tokenizer["post_processor"] = None
    d = describe(folder_of(tmp_path / "m", tokenizer, {}))
    library = Tokenizer.from_file(str(tmp_path / "m" / "tokenizer.json"))
    assert d.added == d.vocab.special == {library.token_to_id(token["content"]) for token in tokens}
    for token in tokens:
        assert d.vocab.pieces[library.token_to_id(token["content"])] == token["content"].encode()
    assert d.n_tokens == library.get_vocab_size()


def test_fewer_rows_than_tokens_cut_the_vocabulary(tmp_path):
    d = describe(folder_of(tmp_path / "m", byte_level_tokenizer(), {"vocab_size": 260}))
    assert (d.n_tokens, d.vocab_size, d.vocab.size) == (262, 260, 260)
    assert d.added == {259} and d.vocab.special == {259}


def test_pieces_and_special_ids_are_those_of_the_torch_engine(folder):
    """One meaning of an id in the whole package: as `lm.hf_files` reads the opened tokenizer."""
    from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config

    from specnb.lm.hf_files import vocabulary

    # AutoTokenizer would take Qwen's own class, which adds tokens that it misses
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<|bos|>", eos_token="<|im_end|>"
    )
    config = Qwen2Config(**{k: v for k, v in CONFIG.items() if k != "model_type"})
    theirs = vocabulary(tokenizer, config, GenerationConfig(eos_token_id=[259, 260]))
    ours = describe(folder).vocab
    assert ours.pieces == theirs.pieces
    for field in ("kind", "pre", "bos", "eos", "eog", "special", "add_bos"):
        assert getattr(ours, field) == getattr(theirs, field), field


def test_sentencepiece_pieces_and_fallback_bytes(tmp_path):
    d = describe(folder_of(tmp_path / "m", sentencepiece_tokenizer(), {"vocab_size": 6}))
    assert d.vocab.pieces == (b"<unk>", b" ", b" a", b"\n", b"\xff", b"b")
    assert (d.vocab.kind, d.vocab.pre, d.normalizer, d.merges) == ("ugm", "metaspace", None, None)
    assert d.add_bos is False and d.bos is None


def test_a_byte_level_piece_outside_the_alphabet_is_its_text(tmp_path):
    tokenizer = changed("model", "vocab", "a€", to=259)
    tokenizer["added_tokens"], tokenizer["post_processor"] = [], None
    d = describe(folder_of(tmp_path / "m", tokenizer, {}))
    assert d.vocab.pieces[259] == "a€".encode()


def test_a_nested_text_config_holds(tmp_path):
    nested = {**CONFIG, "model_type": "qwen3_5_text", "rope_parameters": {"rope_theta": 5e6, "rope_type": "default"}}
    d = describe(folder_of(tmp_path / "m", byte_level_tokenizer(), {"model_type": "qwen3_5", "text_config": nested}))
    assert (d.architecture, d.state, d.vocab_size, d.rope.base) == ("qwen3_5_text", State.HYBRID, 272, 5e6)


@pytest.mark.parametrize(
    ("config", "rope"),
    [
        ({"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 4}}, Rope(1e4, None, "linear 4")),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0}}, Rope(5e5, None, "llama3 8")),
        ({"rope_theta": 1e4, "head_dim": 128, "partial_rotary_factor": 0.25}, Rope(1e4, 32, None)),
        ({"vocab_size": 300}, None),
    ],
)
def test_rope_in_its_spellings(tmp_path, config, rope):
    assert describe(folder_of(tmp_path / "m", byte_level_tokenizer(), config)).rope == rope


@pytest.mark.parametrize(
    ("config", "state"),
    [
        ({"model_type": "mamba2"}, State.RECURRENT),
        ({"model_type": "falcon_h1"}, State.HYBRID),
        ({"model_type": "new", "layer_types": ["full_attention", "linear_attention"]}, State.HYBRID),
        ({"model_type": "new", "layer_types": ["linear_attention"]}, State.RECURRENT),
        ({"model_type": "gemma3_text", "layer_types": ["full_attention", "sliding_attention"]}, State.ATTENTION),
        ({}, None),
    ],
)
def test_state_by_model_type_or_layers(tmp_path, config, state):
    assert describe(folder_of(tmp_path / "m", byte_level_tokenizer(), config)).state is state


def test_quantised_weights_by_method(tmp_path):
    config = {**CONFIG, "quantization_config": {"quant_method": "gptq", "bits": 4}}
    assert describe(folder_of(tmp_path / "m", None, config)).quantisation == "gptq 4"


@pytest.mark.parametrize(
    "config", [{"pard_token": 271}, {"ptd_token_id": 271}, {"dflash_config": {"mask_token_id": 271}}]
)
def test_mask_tokens_of_modified_drafts(tmp_path, config):
    assert describe(folder_of(tmp_path / "m", byte_level_tokenizer(), {**CONFIG, **config})).mask == {271}


@pytest.mark.parametrize("own", [{}, {"add_bos_token": False, "add_eos_token": True}])
@pytest.mark.parametrize(
    ("single", "expected"), [(["BOS", "A"], (True, False)), (["A", "EOS"], (False, True)), (["A"], (False, False))]
)
def test_bos_and_eos_are_added_where_transformers_adds_them(tmp_path, own, single, expected):
    """By tokenizer.json; the flags of tokenizer_config.json do nothing beside one."""
    from transformers import AutoTokenizer

    steps = {
        "A": {"Sequence": {"id": "A", "type_id": 0}},
        "BOS": {"SpecialToken": {"id": "<|bos|>", "type_id": 0}},
        "EOS": {"SpecialToken": {"id": "<|im_end|>", "type_id": 0}},
    }
    tokenizer = byte_level_tokenizer()
    tokenizer["post_processor"]["single"] = [steps[name] for name in single]
    tokenizer["post_processor"]["special_tokens"]["<|im_end|>"] = {
        "id": "<|im_end|>",
        "ids": [259],
        "tokens": ["<|im_end|>"],
    }
    own = {"bos_token": "<|bos|>", "eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast", **own}
    folder = folder_of(tmp_path / "m", tokenizer, tokenizer_config=own)
    d = describe(folder)
    ids = AutoTokenizer.from_pretrained(folder)("x").input_ids
    assert (d.add_bos, d.add_eos) == expected == (ids[0] == 261, ids[-1] == 259)


def test_bert_and_sequences_of_processors_wrap_too(tmp_path):
    tokenizer = byte_level_tokenizer()
    bert = {"type": "RobertaProcessing", "sep": ["<|im_end|>", 259], "cls": ["<|bos|>", 261]}
    tokenizer["post_processor"] = {"type": "Sequence", "processors": [BYTE_LEVEL, bert]}
    d = describe(folder_of(tmp_path / "m", tokenizer))
    assert (d.add_bos, d.add_eos) == (True, True)


def test_chat_templates_in_their_three_places(tmp_path, folder):
    own = {"chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]}
    assert describe(folder_of(folder, tokenizer_config=own)).vocab.chat_template == "D"
    assert describe(folder_of(folder, tokenizer_config={"chat_template": "S"})).vocab.chat_template == "S"
    (folder / "chat_template.jinja").write_text("J")
    assert describe(folder).vocab.chat_template == "J"


def test_special_tokens_map_names_what_the_config_does_not(tmp_path):
    files = {"special_tokens_map": {"eos_token": "<think>"}, "tokenizer_config": {"pad_token": "<|im_end|>"}}
    d = describe(folder_of(tmp_path / "m", byte_level_tokenizer(), {"vocab_size": 272, "eos_token_id": 259}, **files))
    assert (d.eos, d.pad) == (260, 259) and d.vocab.eog == {259, 260}


def test_a_folder_without_a_tokenizer_states_its_config(tmp_path):
    d = describe(folder_of(tmp_path / "m", None))
    assert d.vocab is None and (d.vocab_size, d.eos, d.n_tokens, d.encode) == (272, 259, None, None)


def test_merges_have_one_digest_in_both_spellings(tmp_path):
    tokenizer = byte_level_tokenizer()
    pairs = describe(folder_of(tmp_path / "a", tokenizer)).merges
    tokenizer["model"]["merges"] = ["Ġ t", "h e", "Ġt he"]
    assert describe(folder_of(tmp_path / "b", tokenizer)).merges == pairs
    tokenizer["model"]["merges"] = ["h e", "Ġ t", "Ġt he"]  # the order is the rule
    assert describe(folder_of(tmp_path / "c", tokenizer)).merges != pairs


def test_a_space_inside_a_merged_piece_is_written_as_converters_write_it(tmp_path):
    """As gguf's own reader of tokenizer.json: else "a b" + "c" and "a" + "b c" would be one rule."""
    tokenizer = changed("model", "merges", to=[["a b", "c"], ["a", "b c"]])
    expected = hashlib.sha256("aĠb c\na bĠc\n".encode()).hexdigest()
    assert describe(folder_of(tmp_path / "m", tokenizer)).merges.digest == expected


def test_ends_are_gathered_from_every_config(tmp_path):
    config = {"eos_token_id": 260, "text_config": {"vocab_size": 272, "eos_token_id": [259, 258]}}
    d = describe(folder_of(tmp_path / "m", byte_level_tokenizer(), config, generation_config={"eos_token_id": 257}))
    assert d.vocab.eog == {257, 258, 259, 260} and d.eos == 259


# --- a tokenizer alone, encode ---------------------------------------------------------------------------------------


def test_a_tokenizer_alone(folder):
    d = describe(folder / "tokenizer.json")
    assert (d.n_tokens, d.vocab_size, d.architecture, d.n_ctx) == (262, 262, None, None)
    assert d.bos == 261 and d.add_bos and d.eos is None and d.vocab.eog == frozenset()


def test_encode_is_the_real_tokenizer_without_special_tokens(folder):
    d = describe(folder)
    ids = d.encode(" the<|im_end|>é")
    assert ids[0] == 258 and 259 not in ids and 261 not in ids
    assert d.vocab.raw_bytes(ids).decode() == " the<|im_end|>é"


def test_encode_of_a_file_the_library_refuses_is_one_error(folder):
    tokenizer = byte_level_tokenizer()
    tokenizer["model"]["merges"] = [["Ġ", "nowhere"]]
    d = describe(folder_of(folder, tokenizer))
    with pytest.raises(InputError, match=r"tokenizer\.json"):
        d.encode("x")


def test_a_panic_of_the_library_is_one_error_and_an_interrupt_is_none(folder, monkeypatch):
    """Its panics derive from BaseException, as does Ctrl-C."""
    import tokenizers

    def raising(error):
        def from_file(_path):
            raise error

        return type("Library", (), {"from_file": staticmethod(from_file)})

    panic = type("PanicException", (BaseException,), {})
    monkeypatch.setattr(tokenizers, "Tokenizer", raising(panic("index out of bounds")))
    with pytest.raises(InputError, match="out of bounds"):
        describe(folder).encode("x")
    monkeypatch.setattr(tokenizers, "Tokenizer", raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        describe(folder).encode("x")


def test_describing_loads_no_engine_and_no_tokenizer_library(folder):
    code = (
        f"from specnb.compat.read import describe\nd = describe({str(folder)!r})\nimport sys\n"
        "print(sorted({'torch', 'transformers', 'llama_cpp', 'tokenizers', 'huggingface_hub'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


@pytest.mark.model
def test_the_dequantised_folder_is_its_gguf():
    from specnb.compat import gguf_header
    from specnb.lm import zoo
    from specnb.lm.dequantise import dequantised

    gguf = zoo.path("smollm2-135m")
    theirs, ours = gguf_header.describe(gguf), describe(dequantised(gguf))
    assert ours.vocab.pieces == theirs.vocab.pieces and ours.vocab.digest == theirs.vocab.digest
    for field in (
        "merges",
        "added",
        "bos",
        "eos",
        "pad",
        "add_bos",
        "add_eos",
        "n_ctx",
        "rope",
        "n_tokens",
        "vocab_size",
    ):
        assert getattr(ours, field) == getattr(theirs, field), field
    for field in ("special", "eog", "kind", "chat_template"):
        assert getattr(ours.vocab, field) == getattr(theirs.vocab, field), field
    text = "def f(x):\n    return 1234 # 日本 🙂\n"
    assert ours.encode(text) == theirs.encode(text)


# --- hostile files ---------------------------------------------------------------------------------------------------


def changed(*path, to):
    """The byte-level tokenizer with one value replaced."""
    tokenizer = byte_level_tokenizer()
    node = tokenizer
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = to
    return tokenizer


@pytest.mark.parametrize(
    ("tokenizer", "words"),
    [
        (changed("model", "vocab", "a", to=-1), ["model.vocab['a']", "-1"]),
        (changed("model", "vocab", "a", to=HUGE), ["model.vocab['a']", str(HUGE)]),
        (changed("model", "vocab", "a", to=98), ["model.vocab", "98", "too"]),
        (changed("model", "vocab", "a", to=1.5), ["model.vocab['a']", "1.5"]),
        (changed("model", "vocab", "a", to=True), ["model.vocab['a']", "True"]),
        (changed("model", "vocab", "a", to=None), ["model.vocab['a']", "None"]),
        (changed("model", "vocab", to={}), ["model.vocab"]),
        (changed("model", "vocab", to=[["a", 0.0], ["a", 0.0]]), ["model.vocab[1]", "'a'"]),
        (changed("model", "vocab", to=[["a", 0.0], 7]), ["model.vocab[1]", "7"]),
        (changed("model", "vocab", to="text"), ["model.vocab"]),
        (changed("model", "vocab", "\ud800", to=261), ["no text"]),
        (changed("model", to=[]), ["model", "object"]),
        (changed("model", to=None), ["model"]),
        (changed("model", "type", to=3), ["model.type", "3"]),
        (changed("model", "merges", to=7), ["model.merges"]),
        (changed("model", "merges", to=[["a"]]), ["model.merges[0]"]),
        (changed("added_tokens", 0, "id", to=-3), ["added_tokens[0].id", "-3"]),
        (changed("added_tokens", 0, "id", to=260), ["added_tokens[1].id", "260"]),
        (changed("added_tokens", 0, "content", to="<think>"), ["added_tokens[1].id", "<think>"]),
        (changed("added_tokens", 0, "content", to=None), ["added_tokens[0].content"]),
        (changed("added_tokens", 0, "special", to="yes"), ["added_tokens[0].special", "yes"]),
        (changed("added_tokens", to={"a": 1}), ["added_tokens"]),
        (changed("added_tokens", to=["a"]), ["added_tokens[0]"]),
        (changed("normalizer", to="NFC"), ["normalizer"]),
        (changed("post_processor", to=[1]), ["post_processor"]),
    ],
)
def test_a_tokenizer_that_cannot_be_is_one_error(tmp_path, tokenizer, words):
    folder = folder_of(tmp_path / "m", tokenizer)
    refused(folder, str(folder / "tokenizer.json"), *words)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"vocab_size": -1}, ["vocab_size", "-1"]),
        ({"vocab_size": HUGE}, ["vocab_size", str(HUGE)]),
        ({"vocab_size": "many"}, ["vocab_size", "'many'"]),
        ({"vocab_size": 2.5}, ["vocab_size", "2.5"]),
        ({"vocab_size": True}, ["vocab_size", "True"]),
        ({"eos_token_id": -1}, ["eos_token_id", "-1"]),
        ({"eos_token_id": 4000}, ["eos_token_id", "4000", "262 ids"]),
        ({"eos_token_id": [259, "x"]}, ["eos_token_id", "'x'"]),
        ({"rope_theta": "x"}, ["rope_theta", "'x'"]),
        ('{"rope_theta": 1e999}', ["rope_theta", "inf"]),
        ({"rope_theta": 10**400}, ["rope_theta"]),
        ({"layer_types": [1]}, ["layer_types[0]"]),
        ({"layer_types": "full"}, ["layer_types"]),
        ({"text_config": 3}, ["text_config", "3"]),
        ({"model_type": {}}, ["model_type"]),
        ({"max_position_embeddings": 2**70}, ["max_position_embeddings"]),
        ('{"vocab_size": NaN}', ["vocab_size", "nan"]),
        ('{"rope_theta": NaN}', ["rope_theta", "nan"]),
        ({"pad_token_id": -2}, ["pad_token_id", "-2"]),
        ('{"vocab_size": 1, "vocab_size": 2}', ["vocab_size", "twice"]),
        ('{"vocab_size": 1', ["JSON"]),
        ("[]", ["list"]),
        ("", ["JSON"]),
        ("[" * 100_000, ["deeply"]),
        ('{"a":' * 100_000, ["deeply"]),
        ('{"vocab_size": ' + "9" * 5000 + "}", ["JSON"]),
    ],
)
def test_a_config_that_cannot_be_is_one_error(tmp_path, config, words):
    folder = folder_of(tmp_path / "m", byte_level_tokenizer(), config)
    refused(folder, str(folder / "config.json"), *words)


def test_odd_values_that_real_configs_have(tmp_path):
    """Infinity in a field that nobody reads, one key twice with one value, a padding id of -1."""
    config = '{"vocab_size": 272, "time_step_limit": [0.0, Infinity], "vocab_size": 272, "pad_token_id": -1}'
    d = describe(folder_of(tmp_path / "m", byte_level_tokenizer(), config))
    assert d.vocab_size == 272 and d.pad is None


def test_special_tokens_that_the_tokenizer_does_not_have(tmp_path):
    own = {"eos_token": "<nowhere>"}
    refused(folder_of(tmp_path / "m", byte_level_tokenizer(), tokenizer_config=own), "eos_token", "<nowhere>")
    refused(folder_of(tmp_path / "m", tokenizer_config={"eos_token": 3}), "eos_token", "3")


def test_deep_rules_are_read_without_recursion(tmp_path):
    """As deep as JSON may be, and then a little deeper."""
    rule = {"type": "NFC"}
    for _ in range(400):
        rule = {"type": "Sequence", "normalizers": [rule]}
    assert describe(folder_of(tmp_path / "m", changed("normalizer", to=rule))).normalizer == "NFC"


def test_files_of_absurd_size_are_not_read(folder):
    for name in ("config.json", "tokenizer.json"):
        keep = (folder / name).read_bytes()
        with (folder / name).open("r+b") as file:
            file.truncate(1 << 40)
        if name == "config.json":
            tracemalloc.start()
            refused(folder, name, "bytes")
            assert tracemalloc.get_traced_memory()[1] < 64 << 20
            tracemalloc.stop()
        (folder / name).write_bytes(keep)


def test_the_size_of_a_tokenizer_is_bounded(folder, monkeypatch):
    monkeypatch.setattr("specnb.compat.hf_tokenizer.MAX_TOKENIZER_BYTES", 1000)
    refused(folder, "tokenizer.json", "more than 1000 bytes")


def test_what_is_no_text_is_one_error(folder):
    (folder / "tokenizer.json").write_bytes(b'{"a": "\xff"}')
    refused(folder, "tokenizer.json", "UTF-8")


def test_other_tokenizers_are_named_with_the_remedy(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    refused(folder_of(tmp_path), "tokenizer.model", "save_pretrained")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "no tokenizer.json")
    refused(tmp_path / "absent", "no such file")


SOUND = json.dumps(byte_level_tokenizer(), ensure_ascii=False).encode()


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_mutated_tokenizers_are_read_or_refused(tmp_path_factory, data):
    raw = bytearray(SOUND)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at : at + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
    path = tmp_path_factory.getbasetemp() / "mutated.json"
    path.write_bytes(raw)
    start = time.perf_counter()
    try:
        assert isinstance(describe(path), Description)
    except InputError as error:
        assert str(path) in str(error)
    assert time.perf_counter() - start < 5


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
CONFIG_KEYS = (
    *CONFIG,
    "text_config",
    "rope_parameters",
    "rope_scaling",
    "layer_types",
    "pard_token",
    "head_dim",
    "dtype",
)
OWN_KEYS = ("bos_token", "eos_token", "add_bos_token", "chat_template", "pad_token")


@settings(max_examples=150, deadline=None)
@given(
    config=st.dictionaries(st.sampled_from(CONFIG_KEYS), JSON, max_size=4),
    own=st.dictionaries(st.sampled_from(OWN_KEYS), JSON, max_size=2),
    rule=st.dictionaries(st.sampled_from(["type", "single", "processors", "cls"]), JSON, max_size=2),
)
def test_any_values_are_read_or_refused(tmp_path_factory, config, own, rule):
    tokenizer = changed("post_processor", to=rule)
    folder = folder_of(tmp_path_factory.getbasetemp() / "any", tokenizer, config, tokenizer_config=own)
    try:
        assert isinstance(describe(folder), Description)
    except InputError as error:
        assert str(folder) in str(error)


# --- the hub ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The hub library's own cache, and no network."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def test_a_hub_id_is_read_from_the_hubs_cache(hub, folder):
    repo = hub / "models--org--tiny"
    revision = "0123456789abcdef0123456789abcdef01234567"
    shutil.copytree(folder, repo / "snapshots" / revision)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(revision)
    d = describe("hf:org/tiny")
    assert (d.name, d.source) == ("org/tiny", "hf:org/tiny")
    assert d.vocab.digest == describe(folder).vocab.digest


def test_a_hub_that_cannot_be_reached_is_a_fetch_error(hub):
    with pytest.raises(FetchError, match=r"hf:org/absent.*folder") as caught:
        describe("hf:org/absent")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["hf:", "hf:a/b/c", "hf:../etc", "hf:a b", "hf:org/--x"])
def test_what_is_no_hub_id(hub, name):
    refused(name, "hf:ORG/NAME")


def test_only_small_files_are_asked_for(monkeypatch, folder):
    import huggingface_hub

    asked = {}
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda repo, **o: asked.update(o, repo=repo) or str(folder)
    )
    describe("hf:org/tiny")
    patterns = [*hf_folder.SMALL_FILES, *hf_folder.OTHER_TOKENIZERS]
    assert asked == {"repo": "org/tiny", "revision": "main", "allow_patterns": patterns}
    assert not any("safetensors" in name or name.endswith((".bin", ".py")) for name in asked["allow_patterns"])


# --- tiktoken --------------------------------------------------------------------------------------------------------


def tiktoken(path, *lines):
    path.write_bytes(b"\n".join(lines))
    return path


def line(piece, i):
    return base64.b64encode(piece) + b" %d" % i


def test_a_tiktoken_file_is_pieces_by_rank(tmp_path):
    path = tiktoken(tmp_path / "o.tiktoken", line(b"\xff", 2), line(b" the", 0), b"", line(b"a", 4))
    d = tiktoken_file.describe(path)
    assert d.vocab.pieces == (b" the", b"", b"\xff", b"", b"a") and (d.n_tokens, d.vocab_size) == (5, 5)
    assert d.bos is None and d.encode is None and d.vocab.special == frozenset()


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([line(b"a", 0), line(b"b", 0)], ["line 2", "'b'", "0"]),
        ([line(b"a", 0), line(b"a", 1)], ["line 2", "'a'", "1"]),
        ([b"YQ== -1"], ["line 1", "-1"]),
        ([b"YQ== 9999999999999"], ["line 1"]),
        ([b"YQ=="], ["line 1", "1 words"]),
        ([b"Y!Q== 0"], ["line 1", "base64"]),
        ([b"YQ= 0"], ["line 1", "base64"]),
        ([b"YQ== \xb2"], ["line 1"]),
        ([], ["no token"]),
    ],
)
def test_a_tiktoken_file_that_cannot_be_is_one_error(tmp_path, lines, words):
    path = tiktoken(tmp_path / "o.tiktoken", *lines)
    with pytest.raises(InputError) as caught:
        tiktoken_file.describe(path)
    for word in (str(path), *words):
        assert word in str(caught.value)


def test_json_of_a_bounded_size_only(tmp_path):
    path = tmp_path / "x.json"
    path.write_text('{"a": 1}')
    assert bounded_json.read_json(path, 8, 2).values == {"a": 1}
    with pytest.raises(InputError, match="more than 7 bytes"):
        bounded_json.read_json(path, 7, 2)


def peak_of(read):
    tracemalloc.start()
    try:
        read()
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak


SMALLEST = ["[]", "{}", '"ab"', "1000", "1", "[[]]", "[1]", "1.5", '{"a":{}}', "null"]


@pytest.mark.parametrize("value", SMALLEST)
def test_what_is_parsed_takes_no_more_than_is_promised_for_its_values(tmp_path, value):
    """The values that cost most for their text; 24 bytes a byte without the count."""
    path = tmp_path / "x.json"
    text = '{"a":[' + ",".join([value] * 60_000) + "]}"
    path.write_text(text)
    marks = sum(map(text.count, "[{,:"))
    peak = peak_of(lambda: bounded_json.read_json(path, 1 << 24, marks))
    assert peak < bounded_json.BYTES_A_VALUE * marks + 4 * len(text)
    with pytest.raises(InputError, match=f"about {marks} values, more than {marks - 1}"):
        bounded_json.read_json(path, 1 << 24, marks - 1)


def test_a_tokenizer_of_nested_lists_is_refused_before_it_is_parsed(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text('{"model":[' + "[]," * 8_000_000 + "[]]}")

    def read():
        with pytest.raises(InputError, match="values, more than"):
            describe(path)

    assert peak_of(read) < 3 * path.stat().st_size
    folder = folder_of(tmp_path / "m", byte_level_tokenizer())
    (folder / "config.json").write_text('{"a":[' + "[]," * 1_000_000 + "[]]}")
    refused(folder, "config.json", "values")


def test_the_count_leaves_room_for_the_largest_known_tokenizers():
    gemma = shelf.describe("gemma-4")
    assert 2 * gemma.n_tokens + 3 * gemma.merges.count < hf_tokenizer.MAX_TOKENIZER_VALUES / 3
