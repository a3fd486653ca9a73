"""Descriptions of transformers folders and tokenizer.json files, without opening a model."""

import json
from operator import attrgetter

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer

from specnb.compat.description import State, state_of
from specnb.compat.gguf import read_gguf
from specnb.compat.read import read_folder
from specnb.lm.files import zoo_file
from specnb.lm.hf.files import dequantize_once
from specnb.lm.vocab import ALPHABET
from tests.compat.test_gguf import refused

LETTER = {b: c for c, b in ALPHABET.items()}


def byte_level_tokenizer(single="<|bos|> $A"):
    """Return a byte-level BPE as JSON: 256 letters, three merges, three added tokens.

    All added tokens except <thînk> are control tokens. `single` is the template.
    """
    vocab = {LETTER[b]: b for b in range(256)} | {"Ġt": 256, "he": 257, "Ġthe": 258}
    tokenizer = Tokenizer(models.BPE(vocab, [("Ġ", "t"), ("h", "e"), ("Ġt", "he")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_end|>"])
    tokenizer.add_tokens([AddedToken("<thînk>", normalized=False)])
    tokenizer.add_special_tokens(["<|bos|>"])
    special = [("<|im_end|>", 259), ("<|bos|>", 261)]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
    return json.loads(tokenizer.to_str())


BYTE_LEVEL = byte_level_tokenizer()
CONFIG = {
    "vocab_size": 272,
    "bos_token_id": 261,
    "eos_token_id": 259,
    "max_position_embeddings": 32768,
}
QWEN = {"model_type": "qwen2", **CONFIG}


def folder_of(path, tokenizer=None, config=QWEN, **files):
    """Write a folder of JSON files; `files` are further ones, by stem."""
    path.mkdir(exist_ok=True)
    named = {"tokenizer": tokenizer, "config": config, **files}
    for stem, value in named.items():
        if value is not None:
            (path / f"{stem}.json").write_text(
                value if isinstance(value, str) else json.dumps(value), encoding="utf-8"
            )
    return path


@pytest.fixture
def folder(tmp_path):
    stated = {"eos_token": {"content": "<|im_end|>"}, "pad_token": "<|im_end|>", "bos_token": None}
    ends = {"eos_token_id": [259, 260]}
    return folder_of(tmp_path / "m", BYTE_LEVEL, generation_config=ends, tokenizer_config=stated)


def test_all_fields_of_a_folder_are_read(folder):
    d = read_folder(folder)
    vocab = d.vocab
    assert d.name == d.source == str(folder) and d.n_ctx == 32768
    assert (d.architecture, d.state, vocab.kind) == ("qwen2", State.ATTENTION, "bpe")
    assert (d.bos, d.eos, d.pad, d.add_bos, d.add_eos) == (261, 259, 259, True, False)
    assert (vocab.eog, vocab.special, d.added) == ({259, 260}, {259, 261}, {259, 260, 261})
    assert (d.n_tokens, d.vocab_size, vocab.size) == (262, 272, 272)
    texts = (b" the", b"<|im_end|>", "<thînk>".encode(), b"<|bos|>", *[b""] * 10)
    assert b"".join(vocab.pieces[:256]) == bytes(range(256)) and vocab.pieces[258:] == texts
    bare = read_folder(folder_of(folder.with_name("bare"), None, {**QWEN, "pard_token": 271}))
    assert (bare.vocab, bare.vocab_size, bare.eos, bare.mask) == (None, 272, 259, {271})


def test_text_is_encoded_without_special_tokens(folder):
    d = read_folder(folder)
    ids = d.encode(" the<|im_end|>")
    assert ids[0] == 258 and 259 not in ids and d.vocab.raw_bytes(ids) == b" the<|im_end|>"


def test_older_and_nested_file_formats_are_read(tmp_path):
    """A tokenizer model without a type (GPT-2), and ids next to `text_config` (multimodal)."""
    tokenizer = byte_level_tokenizer()
    del tokenizer["model"]["type"]
    nested = {"model_type": "new", "text_config": {"vocab_size": 272}, "pad_token_id": 3}
    d = read_folder(folder_of(tmp_path / "m", tokenizer, nested))
    assert (d.vocab.kind, d.pad, d.vocab_size, d.architecture) == ("bpe", 3, 272, "new")


def test_sentencepiece_pieces_and_fallback_bytes(tmp_path):
    vocab = [(piece, -1.0) for piece in ("<unk>", "▁", "▁a", "<0x0A>", "<0xFF>", "b")]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.ByteFallback()
    tokenizer.add_special_tokens(["<unk>"])
    d = read_folder(folder_of(tmp_path / "m", tokenizer.to_str(), {"vocab_size": 6}))
    assert d.vocab.pieces == (b"<unk>", b" ", b" a", b"\n", b"\xff", b"b")
    assert d.vocab.kind == "ugm" and d.add_bos is False and d.bos is None


@pytest.mark.parametrize(
    ("architecture", "layer_types", "state"),
    [
        ("mamba2", [], State.RECURRENT),
        ("falcon-h1", [], State.HYBRID),
        (None, [], None),
        ("new", ["full_attention", "linear_attention"], State.HYBRID),
        ("new", ["linear_attention"], State.RECURRENT),
        ("new", ["hybrid"], State.HYBRID),
    ],
)
def test_state_by_architecture_or_layers(architecture, layer_types, state):
    assert state_of(architecture, layer_types) is state


@pytest.mark.parametrize(
    ("single", "expected"), [("<|bos|> $A", (True, False)), ("$A <|im_end|>", (False, True))]
)
def test_bos_and_eos_are_added_where_transformers_adds_them(tmp_path, single, expected):
    """tokenizer.json decides; next to it, the flags of tokenizer_config.json have no effect."""
    stated = {"bos_token": "<|bos|>", "eos_token": "<|im_end|>", "add_eos_token": True}
    stated |= {"add_bos_token": False, "tokenizer_class": "PreTrainedTokenizerFast"}
    folder = folder_of(tmp_path / "m", byte_level_tokenizer(single), tokenizer_config=stated)
    d = read_folder(folder)
    ids = AutoTokenizer.from_pretrained(folder)("x").input_ids
    assert (d.add_bos, d.add_eos) == expected == (ids[0] == 261, ids[-1] == 259)


@pytest.mark.model
def test_a_dequantized_folder_has_the_description_of_its_gguf():
    path = zoo_file("smollm2-135m")
    header = read_gguf(path)
    folder = read_folder(dequantize_once(path))
    facts = attrgetter("added", "pad", "add_eos", "n_ctx", "n_tokens", "vocab_size")
    assert facts(folder) == facts(header)
    facts = attrgetter("pieces", "special", "eog", "kind", "bos", "eos", "add_bos")
    assert facts(folder.vocab) == facts(header.vocab)
    text = "def f(x):\n    return 1234 # 日本 🙂\n"
    assert folder.encode(text) == header.encode(text)


@pytest.mark.parametrize(
    ("tokenizer", "files", "value"),
    [
        # not allocated
        (json.dumps(BYTE_LEVEL).replace('"a": 97', '"a": 4000000000'), {}, "4000000000"),
        (None, {"config": QWEN | {"pard_token": 272}}, "pard_token is 272"),
        (None, {"config": {"text_config": QWEN, "eos_token_id": [3, 272]}}, "eos_token_id is 272"),
        (BYTE_LEVEL, {"generation_config": {"eos_token_id": [259, 300]}}, "generation_config.json"),
        (BYTE_LEVEL, {"config": {"vocab_size": 261}}, "is 261"),
        (None, {"config": {"vocab_size": "many"}}, "'many'"),
        (None, {"config": {"layer_types": 3}}, "int"),
        (None, {"config": '{"vocab_size": 1'}, "JSON"),
        (BYTE_LEVEL, {"tokenizer_config": {"eos_token": "<nowhere>"}}, "<nowhere>"),
        (None, {"config": None}, "tokenizer.json"),
    ],
)
def test_invalid_files_raise_one_error_with_the_value(tmp_path, tokenizer, files, value):
    folder = folder_of(tmp_path / "m", tokenizer, **files)
    refused(folder, value, read_folder)
