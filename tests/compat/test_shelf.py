"""The shelf of vocabularies: they match their card and checksums, and can be rebuilt."""

import pytest

from data.vocab import build
from specnb.compat.read import read_shelf, shelf_folder, shelf_names
from specnb.io import digest
from specnb.lm.files import zoo_file

FOLDER = shelf_folder()
LISTS = sorted(path.stem for path in FOLDER.glob("*.parquet"))
MODELS = [name for name in shelf_names() if name not in LISTS]


def test_names_and_checksums_match_the_files():
    assert shelf_names() == (*LISTS, *MODELS) and len(LISTS) == 14 and len(MODELS) == 14
    assert sorted(build.sources()) == LISTS
    sums = dict(line.split()[::-1] for line in (FOLDER / build.SUMS).read_text().splitlines())
    assert sums == {path.name: digest(path) for path in FOLDER.glob("*.parquet")}
    assert read_shelf("Qwen3-0.6B").name == "qwen3-0.6b"


@pytest.mark.parametrize("name", LISTS)
def test_exactly_the_ids_below_n_tokens_have_texts_and_the_card_has_their_digest(name):
    described = read_shelf(name)
    vocab = described.vocab
    n = described.n_tokens
    assert all(vocab.pieces[:n]) and not any(vocab.pieces[n:])
    named = {described.bos, described.eos, described.pad, described.eot} - {None}
    assert max(named | vocab.eog | vocab.special | described.added) < n
    assert described.eos is None or described.eos in vocab.eog
    card = (FOLDER / "README.md").read_text()
    assert f"| {n:,} | {vocab.size:,} |" in card and build.digest_pieces(vocab.pieces) in card


@pytest.mark.model
@pytest.mark.slow
def test_the_vocabulary_of_smollm2_can_be_rebuilt(tmp_path):
    again = build.build("smollm2", zoo_file("smollm2-135m"), tmp_path)
    assert again.read_bytes() == (FOLDER / "smollm2.parquet").read_bytes()
