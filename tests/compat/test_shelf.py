"""The shelf of vocabularies: lists are what their card says, facts name their source, broken files are refused."""

import base64
import hashlib
import io
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from specnb.compat import shelf, shelf_build, vocab_list
from specnb.compat.description import Description, Merges, State
from specnb.compat.states import state_of
from specnb.errors import InputError
from specnb.lm import zoo
from specnb.lm.vocab import Vocabulary, first_difference
from specnb.paths import project_dir

FOLDER = project_dir() / "data" / "vocab"
LISTS = sorted(path.stem for path in FOLDER.glob("*.parquet"))
MODELS = [name for name in shelf.names() if name not in LISTS]

REPORT = (
    "qwen2.5-coder-32b",
    "qwen2.5-coder-32b-instruct",
    "qwen2.5-0.5b-instruct",
    "deepseek-r1-distill-qwen-32b",
    "deepseek-r1-distill-qwen-1.5b",
    "pard-deepseek-r1-distill-qwen-1.5b",
    "pard-qwen3-0.6b",
    "qwen3-0.6b",
    "qwen3-coder-480b-a35b-instruct",
    "qwen3-next-80b-a3b-instruct",
    "llama-3.2-1b-instruct",
    "hermes-4-70b",
)

TOY = Description(
    name="toy",
    source="a test",
    vocab=Vocabulary(
        pieces=(b"<s>", b"</s>", b"a", b"\xff", b"ab", b"<think>", b"", b""),
        kind="bpe",
        pre="toy",
        bos=0,
        eos=1,
        eog=frozenset({1}),
        special=frozenset({0, 1}),
        add_bos=True,
        chat_template="{{ messages }}",
    ),
    n_tokens=6,
    vocab_size=8,
    bos=0,
    eos=1,
    eot=1,
    add_bos=True,
    add_eos=False,
    added=frozenset({0, 1, 5}),
    normalizer="add_space_prefix false",
    merges=Merges(1, "0" * 64),
)
CARD = {"title": "Toy", "model": "org/toy", "licence": "MIT", "source": "a test", "sha256": "1" * 64}


def toy_file(folder: Path, described: Description = TOY) -> Path:
    path = folder / "toy.parquet"
    vocab_list.write(path, described, **CARD)
    return path


def toy_shelf(folder: Path, facts: str = "", sources: str = "") -> Path:
    """A shelf with the one list "toy"."""
    digest = hashlib.sha256(toy_file(folder).read_bytes()).hexdigest()
    (folder / "SHA256SUMS").write_text(f"{digest}  toy.parquet\n")
    (folder / "facts.toml").write_text(facts)
    (folder / "sources.toml").write_text(sources)
    return folder


@pytest.fixture(scope="module")
def lists() -> dict[str, Description]:
    return {name: shelf.describe(name) for name in LISTS}


# the lists


def test_the_shelf_holds_at_least_twelve_vocabularies_and_every_model_of_the_report():
    assert len(LISTS) >= 12
    assert set(REPORT) <= set(MODELS)
    assert shelf.names() == [*LISTS, *MODELS]
    assert not set(LISTS) & set(MODELS)


@pytest.mark.parametrize("name", LISTS)
def test_a_list_is_what_its_card_says(name, lists):
    described, stated = vocab_list.read(FOLDER / f"{name}.parquet")
    source = shelf_build.sources()[name]
    row = next(line for line in (FOLDER / "README.md").read_text().splitlines() if line.startswith(f"| `{name}` |"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1:5] == [stated.model, f"{described.n_tokens:,}", f"{described.vocab_size:,}", stated.licence]
    assert cells[6] == f"`{described.vocab.digest}`" == f"`{stated.digest}`"
    assert (stated.model, stated.licence, stated.source_sha256) == (source.model, source.licence, source.sha256)
    assert source.file_name in cells[5] and source.member in stated.source and source.package in stated.source
    assert lists[name].vocab.digest == stated.digest


@pytest.mark.parametrize("name", LISTS)
def test_every_token_has_a_text_every_padding_row_has_none_and_named_ids_are_tokens(name, lists):
    described = lists[name]
    vocab, n = described.vocab, described.n_tokens
    assert all(vocab.pieces[:n]) and not any(vocab.pieces[n:])
    assert vocab.size == described.vocab_size >= n
    named = {i for i in (described.bos, described.eos, described.pad, described.eot) if i is not None}
    assert max(named | vocab.eog | vocab.special | described.added) < n
    assert described.eos is None or described.eos in vocab.eog
    assert not any(piece.startswith(b"[PAD1") for piece in vocab.pieces)


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3.5", "deepseek-v4", "gpt-2", "gemma-4", "phi-3"])
def test_pieces_are_bytes_not_their_spelling(name, lists):
    pieces = set(lists[name].vocab.pieces)
    assert {bytes([b]) for b in range(256)} <= pieces
    assert b" the" in pieces
    assert "Ġthe".encode() not in pieces and "▁the".encode() not in pieces


def test_the_lists_take_less_room_than_the_card_promises():
    sizes = [(FOLDER / f"{name}.parquet").stat().st_size for name in LISTS]
    assert sum(sizes) < 10_000_000 and max(sizes) < vocab_list.MAX_FILE_BYTES


def test_families_differ_where_they_should(lists):
    assert first_difference(lists["gpt-neox"].vocab, lists["mpt"].vocab) is None
    assert first_difference(lists["qwen2"].vocab, lists["qwen2.5"].vocab) == 151646
    assert first_difference(lists["qwen2.5"].vocab, lists["qwen3"].vocab) == 151665
    pairs = zip(lists["qwen2.5"].vocab.pieces, lists["deepseek-r1-distill-qwen"].vocab.pieces, strict=True)
    assert [i for i, (a, b) in enumerate(pairs) if a != b] == [*range(151643, 151650)]
    assert lists["qwen3.5"].n_tokens == 248077


@pytest.mark.model
def test_the_list_of_smollm2_is_the_zoos_model_and_can_be_made_again(tmp_path):
    from specnb.compat import gguf_header
    from specnb.lm import binding

    file = zoo.path("smollm2-135m")
    kept, real = shelf.describe("smollm2"), gguf_header.describe(file)
    with binding.header(file) as model:
        opened = binding.vocabulary(model)
    for vocab in (real.vocab, opened):
        for key in ("pieces", "kind", "pre", "bos", "eos", "eog", "special", "add_bos", "chat_template"):
            assert getattr(kept.vocab, key) == getattr(vocab, key), key
    for key in ("n_tokens", "vocab_size", "bos", "eos", "pad", "eot", "add_bos", "add_eos", "added", "merges"):
        assert getattr(kept, key) == getattr(real, key), key
    again, _ = vocab_list.read(shelf_build.build("smollm2", file, tmp_path))
    assert again.vocab.digest == kept.vocab.digest


# the facts


@pytest.mark.parametrize("name", MODELS)
def test_a_models_description_says_what_was_written_from_memory_and_what_is_llama_cpps(name):
    entry, described = shelf.facts(name), shelf.describe(name)
    assert described.name == name and described.source.startswith("facts: ")
    assert entry.source in described.source
    assert described.from_memory == entry.from_memory and "from memory" not in described.source
    said = described.source.partition("; llama.cpp's default: ")[2]
    assert tuple(said.split(", ")) == (entry.defaults or ("",))


@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_its_lists_pieces_its_own_row_of_logits_and_its_own_ids(name, lists):
    entry, described = shelf.facts(name), shelf.describe(name)
    assert described.state is State(state_of(entry.architecture))
    for key in ("architecture", "vocab_size", "bos", "eos", "pad", "eot", "add_bos", "add_eos", "n_ctx", "mask"):
        assert getattr(described, key) == getattr(entry, key), key
    if entry.tokenizer is None:
        assert described.vocab is None
        return
    family, vocab = lists[entry.tokenizer], described.vocab
    assert described.n_tokens == family.n_tokens
    assert vocab.size == entry.vocab_size
    assert vocab.pieces[: family.n_tokens] == family.vocab.pieces[: family.n_tokens]
    assert not any(vocab.pieces[family.n_tokens :])
    assert (vocab.bos, vocab.eos, vocab.add_bos) == (entry.bos, entry.eos, entry.add_bos)
    assert vocab.special == family.vocab.special and described.merges == family.merges
    assert all(i >= described.n_tokens for i in described.mask), "a mask token is no token of the target"


def test_the_size_mismatch_of_the_report_is_padding():
    large, small = shelf.describe("deepseek-r1-distill-qwen-32b"), shelf.describe("deepseek-r1-distill-qwen-1.5b")
    assert (large.vocab_size, small.vocab_size) == (152064, 151936)
    assert first_difference(large.vocab, small.vocab) == 151936, "the first row that only one of them has"
    assert (large.bos, large.add_bos, large.n_tokens) == (small.bos, small.add_bos, small.n_tokens)


# files of unknown origin


def test_what_is_written_is_read_back(tmp_path):
    read, stated = vocab_list.read(toy_file(tmp_path))
    for key in ("pieces", "kind", "pre", "bos", "eos", "eog", "special", "add_bos", "chat_template"):
        assert getattr(read.vocab, key) == getattr(TOY.vocab, key), key
    for key in ("n_tokens", "vocab_size", "bos", "eos", "pad", "eot", "add_bos", "add_eos", "added", "normalizer"):
        assert getattr(read, key) == getattr(TOY, key), key
    assert read.merges == TOY.merges and stated.licence == "MIT"
    assert [path.name for path in tmp_path.iterdir()] == ["toy.parquet"], "no partial file is left"


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_damaged_list_is_refused_or_says_the_same(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("damaged")
    good = toy_file(folder).read_bytes()
    bad = bytearray(good[: data.draw(st.integers(0, len(good)), label="kept")])
    for at, byte in data.draw(st.lists(st.tuples(st.integers(0, len(good)), st.integers(0, 255)), max_size=4)):
        if at < len(bad):
            bad[at] = byte
    try:
        read, _ = vocab_list.read(Path("bad.parquet"), bytes(bad))
    except InputError as error:
        assert str(error).startswith("bad.parquet: ") and "\n" not in str(error)
    else:
        assert read.vocab.pieces == TOY.vocab.pieces


def rewritten(path: Path, *, meta: dict | None = None, rows: int = 1, **options) -> bytes:
    """The file with other facts in its footer, its rows repeated, or other options of the writer."""
    file = parquet.ParquetFile(path)
    stated = json.loads(file.metadata.metadata[vocab_list.META_KEY]) | (meta or {})
    table = pa.concat_tables([file.read()] * rows).cast(vocab_list._schema())
    buffer = io.BytesIO()
    with parquet.ParquetWriter(buffer, table.schema, **({"use_dictionary": False} | options)) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({vocab_list.META_KEY: json.dumps(stated)})
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"meta": {"digest": "0" * 64}}, "digest"),
        ({"meta": {"n_tokens": 5}}, "named|padding row"),
        ({"meta": {"n_tokens": 9}}, "8 rows for 9 tokens"),
        ({"meta": {"eos": 6}}, "token 6 is named"),
        ({"meta": {"eog": [-1]}}, "eog"),
        ({"meta": {"eos": "1"}}, "eos"),
        ({"meta": {"surprise": 1}}, "surprise"),
        ({"rows": 2}, "padding row"),
        ({"use_dictionary": True}, "dictionary"),
    ],
)
def test_a_list_that_contradicts_itself_is_refused(change, said, tmp_path):
    with pytest.raises(InputError, match=said):
        vocab_list.read(Path("toy"), rewritten(toy_file(tmp_path), **change))


def test_an_unchanged_rewrite_is_read(tmp_path):
    assert vocab_list.read(Path("toy"), rewritten(toy_file(tmp_path)))[0].vocab.digest == TOY.vocab.digest


def test_bounds_hold_before_pieces_are_made(tmp_path, monkeypatch):
    path = toy_file(tmp_path)
    for name, limit, said in (
        ("MAX_FILE_BYTES", 100, "more than 100 bytes"),
        ("MAX_IDS", 7, "8 rows"),
        ("MAX_PIECES_BYTES", 8, "more than 8 bytes of pieces"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(vocab_list, name, limit)
            with pytest.raises(InputError, match=said):
                vocab_list.read(path)


def test_another_table_is_no_list(tmp_path):
    path = tmp_path / "x.parquet"
    parquet.write_table(pa.table({"piece": ["text, not bytes"]}), path)
    with pytest.raises(InputError, match="columns"):
        vocab_list.read(path)


def test_a_list_that_is_not_the_one_summed_up_is_not_read(tmp_path):
    folder = toy_shelf(tmp_path)
    assert shelf.describe("toy", folder).vocab.digest == TOY.vocab.digest
    toy_file(folder, replace(TOY, normalizer="another"))
    with pytest.raises(InputError, match=r"sha256 .* SHA256SUMS says"):
        shelf.describe("toy", folder)


def test_a_list_under_another_name_is_refused(tmp_path):
    folder = toy_shelf(tmp_path)
    shutil.move(folder / "toy.parquet", folder / "other.parquet")
    sums = (folder / "SHA256SUMS").read_text()
    (folder / "SHA256SUMS").write_text(sums.replace("toy.", "other."))
    with pytest.raises(InputError, match="it is the list 'toy'"):
        shelf.describe("other", folder)


@pytest.mark.parametrize(
    "line", ["", "x", f"{'0' * 64}  ../toy.parquet", f"{'0' * 64}  toy", f"{'0' * 63}  toy.parquet"]
)
def test_a_broken_line_of_sums_is_refused(line, tmp_path):
    folder = toy_shelf(tmp_path)
    (folder / "SHA256SUMS").write_text(line + "\n")
    with pytest.raises(InputError, match="SHA256SUMS:1"):
        shelf.names(folder)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("vocab_size = 8\nsurprise = 1", "surprise"),
        ("vocab_size = 0", "vocab_size"),
        ("vocab_size = '8'", "vocab_size"),
        ("vocab_size = 8\nbos = 8", "8 is more than the vocab_size 8"),
        ("vocab_size = 8\nmask = [9]", "9 is more than the vocab_size 8"),
        ("vocab_size = 8\nn_tokens = 9", "9 is more than the vocab_size 8"),
        ("eos = -1", "eos"),
        ("eos = true", "eos"),
        ("from_memory = ['bos']", "'bos', which the entry does not state"),
        ("defaults = ['bos']", "'bos', which the entry does not state"),
        ("state = 'liquid'", "state"),
        ("rope = { base = nan }", "base"),
        ("rope = { theta = 1.0 }", "theta"),
        ("tokenizer = '../toy'", "tokenizer"),
        ("tokenizer = 'missing'", "there is none"),
        ("tokenizer = 'toy'\nvocab_size = 5", "6 tokens"),
        ("tokenizer = 'toy'\nvocab_size = 8\nn_tokens = 7", "6 tokens"),
        ("= 1", "not valid TOML"),
    ],
)
def test_an_entry_that_cannot_be_is_refused(entry, said, tmp_path):
    folder = toy_shelf(tmp_path, f"[m]\nmodel = 'org/m'\nsource = 'a test'\n{entry}\n")
    with pytest.raises(InputError, match=said):
        shelf.describe("m", folder)


def test_an_entry_may_widen_the_row_of_logits(tmp_path):
    folder = toy_shelf(tmp_path, "[m]\nmodel = 'org/m'\nsource = 's'\ntokenizer = 'toy'\nvocab_size = 12\neos = 2\n")
    described = shelf.describe("m", folder)
    assert described.vocab.pieces == TOY.vocab.pieces[:6] + (b"",) * 6
    assert (described.eos, described.vocab.eos, described.bos) == (2, 2, None), "what is not stated is None"


def test_names_may_be_written_in_capitals():
    assert shelf.describe("Qwen3-0.6B").name == "qwen3-0.6b" and shelf.describe("GPT-2").name == "gpt-2"


def test_a_missing_file_is_named(tmp_path):
    for use in (shelf.names, shelf_build.sources):
        with pytest.raises(InputError, match="no such file"):
            use(tmp_path)
    (toy_shelf(tmp_path) / "toy.parquet").unlink()
    with pytest.raises(InputError, match=r"no such file.*toy\.parquet"):
        shelf.describe("toy", tmp_path)


def test_an_unknown_name_gets_the_nearest_ones():
    with pytest.raises(InputError, match=r"did you mean qwen2\.5"):
        shelf.describe("Qwen2.5-0.5B")


# making lists


def test_each_list_has_a_source_and_each_model_a_list():
    assert sorted(shelf_build.sources()) == LISTS
    assert {shelf.facts(name).tokenizer for name in MODELS} - {None} <= set(LISTS)


RANKS = {b"a": 0, b"b": 1, b"\xff": 2, b"ab": 3, b"abab": 4, b"abb": 5}
SOURCE = """
[made]
title = "Made"
model = "org/made"
licence = "MIT"
package = "p==1"
member = "p/made.tiktoken"
sha256 = "{sha256}"
pre = "gpt-2"
bos = 6
eos = 7
pad = 6
vocab_size = 10
added = ["<bos>", "<|im_end|>", "<think>"]
control = ["<bos>"]
"""


def test_a_list_is_made_from_tiktokens_ranks_and_the_added_tokens(tmp_path):
    file = tmp_path / "made.tiktoken"
    file.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in RANKS.items()))
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    folder = toy_shelf(tmp_path, sources=SOURCE.format(sha256=sha256))
    made, stated = vocab_list.read(shelf_build.build("made", file, tmp_path, folder))
    assert made.vocab.pieces == (*RANKS, b"<bos>", b"<|im_end|>", b"<think>", b"")
    assert (made.n_tokens, made.vocab_size, made.bos, made.eos, made.pad) == (9, 10, 6, 7, 6)
    assert made.vocab.special == {6, 7} and made.added == {6, 7, 8} and made.vocab.eog == {7}
    assert made.merges == Merges(3, hashlib.sha256(b"a b\nab ab\nab b\n").hexdigest())
    assert stated.source == "p/made.tiktoken of p==1" and stated.source_sha256 == sha256
    file.write_bytes(file.read_bytes() + b"YWE= 6\n")
    with pytest.raises(InputError, match="pinned"):
        shelf_build.build("made", file, tmp_path, folder)


def test_ranks_that_are_no_merges_give_none():
    assert shelf_build.merges_of(RANKS) == ["a b", "ab ab", "ab b"]
    assert shelf_build.merges_of(RANKS | {b"bab": 6, b"bbb": 7}) is None


def test_padding_is_what_stands_at_the_end_and_says_its_own_id():
    pieces = (b"a", b"[PAD1]", b"b", b"[PAD7]", b"[PAD4]", b"[PAD5]")
    vocab = Vocabulary(pieces=pieces, special=frozenset({5}))
    described = replace(TOY, vocab=vocab, n_tokens=6, vocab_size=6, added=frozenset({3, 4, 5}))
    stripped = shelf_build.without_padding(described)
    assert stripped.vocab.pieces == (*pieces[:4], b"", b"")
    assert (stripped.n_tokens, stripped.vocab.special, stripped.added) == (4, frozenset(), {3})


def test_reading_names_loads_no_engine_and_no_table_library():
    code = (
        "import sys; from specnb.compat import shelf; shelf.names();"
        "print(*{'torch', 'transformers', 'llama_cpp', 'pyarrow', 'pandas'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == ""
