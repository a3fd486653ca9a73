"""The shelf of vocabularies: they match their card and checksums, and can be rebuilt."""

import hashlib
import json

import pytest
from pyarrow import parquet

from data.vocab import build
from specnb.compat.description import Description
from specnb.compat.read import META_KEY, read_shelf, shelf_folder, shelf_names
from specnb.lm.files import zoo_file

FOLDER = shelf_folder()
LISTS = sorted(path.stem for path in FOLDER.glob("*.parquet"))
MODELS = [name for name in shelf_names() if name not in LISTS]


@pytest.fixture(scope="module")
def lists() -> dict[str, Description]:
    return {name: read_shelf(name) for name in LISTS}


def test_names_and_checksums_match_the_files():
    assert shelf_names() == (*LISTS, *MODELS) and len(LISTS) == 14 and len(MODELS) == 14
    assert sorted(build.sources()) == LISTS
    sums = dict(line.split()[::-1] for line in (FOLDER / build.SUMS).read_text().splitlines())
    assert sums == {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in FOLDER.glob("*.parquet")
    }
    assert read_shelf("Qwen3-0.6B").name == "qwen3-0.6b"


@pytest.mark.parametrize("name", LISTS)
def test_a_vocabulary_matches_its_card(name, lists):
    described = lists[name]
    footer = parquet.read_metadata(FOLDER / f"{name}.parquet").metadata
    stated = json.loads(footer[META_KEY])
    source = build.sources()[name]
    vocab = described.vocab
    n = described.n_tokens
    row = next(
        line
        for line in (FOLDER / "README.md").read_text().splitlines()
        if line.startswith(f"| `{name}` |")
    )
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1:5] == [stated["model"], f"{n:,}", f"{described.vocab_size:,}", stated["licence"]]
    assert cells[6] == f"`{build.digest_pieces(vocab.pieces)}`" == f"`{stated['digest']}`"
    assert (stated["model"], stated["source_sha256"]) == (source.model, source.sha256)
    assert (
        all(vocab.pieces[:n]) and not any(vocab.pieces[n:]) and vocab.size == described.vocab_size
    )
    named = {
        i for i in (described.bos, described.eos, described.pad, described.eot) if i is not None
    }
    assert max(named | vocab.eog | vocab.special | described.added) < n
    assert described.eos is None or described.eos in vocab.eog


@pytest.mark.model
@pytest.mark.slow
def test_the_vocabulary_of_smollm2_can_be_rebuilt(tmp_path):
    again = build.build("smollm2", zoo_file("smollm2-135m"), tmp_path)
    assert again.read_bytes() == (FOLDER / "smollm2.parquet").read_bytes()
