"""From documents to tokens: the shared tokenizer, the streams on disk, and the batch of any step.

The batch of step n is a function of (seed, n): a run that resumes reads what the run without a
break would have read.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from specnb.errors import InputError

from . import corpus, shapes

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER_FILE = "tokenizer.json"
SOURCES_FILE = "sources.json"
STREAMS = ("train", "held_out")


@dataclass(frozen=True)
class Data:
    """Tokens ready for training: `train` and `held_out` are uint16, the end token between texts."""

    folder: Path
    train: np.ndarray
    held_out: np.ndarray
    facts: dict[str, Any]


def train_tokenizer(texts: Iterable[str], vocab_size: int = shapes.VOCAB_SIZE) -> "Tokenizer":
    """Byte-level BPE with GPT-2's splitting of words, as llama.cpp's pre-tokenizer `gpt-2` does.

    Every byte has a token, so nothing is unknown. The end token is id 0; besides the ends of texts
    only its own spelling gives it.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[shapes.END_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    if (
        tokenizer.get_vocab_size() != vocab_size
        or tokenizer.token_to_id(shapes.END_TEXT) != shapes.END_ID
    ):
        raise InputError(
            f"the corpus gives {tokenizer.get_vocab_size()} tokens, not {vocab_size}: "
            "it is too small; install the packages in corpus.LICENCES"
        )
    return tokenizer


def stream(tokenizer: "Tokenizer", texts: Iterable[str]) -> np.ndarray:
    """The texts as one uint16 stream, the end token before each and after the last."""
    ids = [shapes.END_ID]
    for text in texts:
        ids += [*tokenizer.encode(text, add_special_tokens=False).ids, shapes.END_ID]
    return np.asarray(ids, dtype=np.uint16)


def prepare(folder: Path, sources: Sequence[corpus.Package] | None = None) -> Data:
    """Read the corpus, train the tokenizer, write tokens and facts to `folder`; open what is there.

    The documents are shuffled with a fixed seed, so that neighboring windows are of different
    packages.
    """
    if (folder / SOURCES_FILE).is_file():  # written last
        return open_data(folder)
    sources = corpus.installed() if sources is None else sources
    training, held_out = corpus.split(corpus.documents(sources))
    tokenizer = train_tokenizer(document.text for document in training)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / TOKENIZER_FILE))
    order = np.random.default_rng(0).permutation(len(training))
    np.save(folder / "train.npy", stream(tokenizer, (training[i].text for i in order)))
    np.save(folder / "held_out.npy", stream(tokenizer, (document.text for document in held_out)))
    write_text(folder / "held_out.jsonl", "".join(_as_line(document) for document in held_out))
    facts = {
        "digest": corpus.corpus_digest(training),
        "documents": {"train": len(training), "held_out": len(held_out)},
        "characters": {"train": _size(training), "held_out": _size(held_out)},
        "sources": [
            {
                "package": source.package,
                "version": source.version,
                "licence": source.licence,
                "characters": _size(d for d in training if d.name.startswith(f"{source.package}/")),
            }
            for source in sources
        ],
    }
    write_text(folder / SOURCES_FILE, json.dumps(facts, indent=1))
    return open_data(folder)


def open_data(folder: Path) -> Data:
    """What `prepare` wrote. InputError if a part is missing or holds ids outside the vocabulary."""
    try:
        train, held_out = (
            np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in STREAMS
        )
        facts = json.loads((folder / SOURCES_FILE).read_text())
    except (OSError, ValueError) as error:
        raise InputError(
            f"no prepared corpus in {folder} ({error}): remove the folder to have it made again"
        ) from error
    for name, ids in (("train", train), ("held_out", held_out)):
        if (
            ids.ndim != 1
            or ids.dtype != np.uint16
            or not ids.size
            or ids.max() >= shapes.VOCAB_SIZE
        ):
            raise InputError(
                f"{folder / name}.npy is not a stream of uint16 ids below {shapes.VOCAB_SIZE}"
            )
    return Data(folder, train, held_out, facts)


def batch(ids: np.ndarray, *, step: int, batch_size: int, length: int, seed: int) -> np.ndarray:
    """The windows of one step, int64 `(batch_size, length + 1)`: input and, one later, targets.

    Each epoch cuts the stream at another offset and visits every window once, in another order.
    """
    windows = (len(ids) - 1) // length - 1  # one less, so that any offset fits
    if windows < batch_size:
        raise InputError(f"a stream of {len(ids)} tokens has no {batch_size} windows of {length}")
    epoch, place = divmod(step, windows // batch_size)
    rng = np.random.default_rng([seed, epoch])
    offset = int(rng.integers(length))
    chosen = rng.permutation(windows)[place * batch_size : (place + 1) * batch_size]
    return np.stack(
        [ids[offset + i * length : offset + (i + 1) * length + 1] for i in chosen]
    ).astype(np.int64)


def write_text(file: Path, text: str) -> None:
    """Whole or not at all."""
    part = file.with_name(f".{file.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(file)


def _as_line(document: corpus.Document) -> str:
    licence = corpus.LICENCES[document.name.split("/")[0]]
    return (
        json.dumps(
            {
                "name": document.name,
                "kind": document.kind,
                "licence": licence,
                "text": document.text,
            }
        )
        + "\n"
    )


def _size(documents: Iterable[corpus.Document]) -> int:
    return sum(len(document.text) for document in documents)
