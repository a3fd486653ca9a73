"""Describe a model or a tokenizer by name, without opening the model.

smollm2-135m  smollm2-135m:q8_0     zoo (fetched if missing)
qwen2.5  qwen3-0.6b                 shelf: a vocabulary of data/vocab, or published facts of a model
model.gguf  hf:ORG/NAME:Q4_K_M      header of the file
./folder  hf:ORG/NAME?revision=x    config.json, tokenizer.json and other small files; runs no code
tiny-hybrid                         the same, for a model included in the checkout
"""

import json
from dataclasses import replace
from functools import cache
from itertools import compress
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from specnb.compat.description import Description, State, state_of
from specnb.compat.gguf import read_gguf
from specnb.errors import InputError, did_you_mean
from specnb.fetch import HUB_GGUF, asking_hub, from_hub, hub_folder, reach_hub
from specnb.io import project_dir, read_json, read_toml, reading
from specnb.lm import files
from specnb.lm.vocab import (
    MAX_ID,
    Vocabulary,
    ids_in,
    kind_of,
    read_tokenizer,
    require_rows,
    spell_pieces,
    tokenizing,
)

HUB = "hf:"
"""Prefix of the name of a model on the hub."""
SMALL_FILES = CONFIG, TOKENIZER, TOKENIZER_CONFIG, GENERATION = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
)
LAYER_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
"""Names of the context length in configs of model families; the first that is present is used."""
META_KEY = b"specnb.vocab"


def describe(name: str | Path) -> Description:
    """Return the description of the model or tokenizer `name`.

    Options after "?" are ignored, except the `revision` of a model on the hub. Raises InputError
    for an unknown or damaged source, and FetchError if it cannot be fetched.
    """
    text, _, query = str(name).partition("?")
    revision = dict(parse_qsl(query)).get("revision", "main")
    if files.is_zoo_name(text):  # no copy is created for its header: it would state the same
        entry, _ = files.find_entry(text)
        described = read_gguf(files.zoo_file(entry.name))
    elif HUB_GGUF.fullmatch(text):
        described = read_gguf(from_hub(text, revision))
    elif text.startswith(HUB):
        described = read_hub(text, revision)
    elif text.lower().endswith(".gguf"):
        described = read_gguf(files.expand_home(text))
    elif text.lower() in shelf_names():
        described = read_shelf(text)
    elif (folder := files.local_folder(text)).is_dir():
        described = read_folder(folder)
    else:
        names = [*files.ENTRIES, *files.embedded_names(), *shelf_names()]
        raise InputError(
            f"{str(name)!r} is not a known model or tokenizer: {did_you_mean(text, names)}"
            "give a .gguf file, a folder, hf:ORG/NAME, "
            f"or one of {', '.join(names)}"
        )
    return replace(described, name=str(name))


# --- the shelf ------------------------------------------------------------------------------------


def shelf_folder() -> Path:
    """Return the folder of vocabularies (written by `data/vocab/build.py`) and facts."""
    return project_dir() / "data" / "vocab"


@cache
def shelf_facts() -> dict[str, dict[str, Any]]:
    """Return the models of facts.toml, whose header explains the keys."""
    return read_toml(shelf_folder() / "facts.toml")


@cache
def shelf_names() -> tuple[str, ...]:
    """Return the names that `read_shelf` accepts: vocabularies, then models of facts.toml."""
    return *sorted(path.stem for path in shelf_folder().glob("*.parquet")), *shelf_facts()


def read_shelf(name: str) -> Description:
    """Return the description of a vocabulary ("qwen2.5") or a model in facts.toml ("qwen3-0.6b").

    The `source` of a vocabulary is its file. That of a model starts with "facts:", then names the
    documents and the fields with llama.cpp's defaults; `from_memory` names facts that no document
    shows. A model has the pieces of its tokenizer family, padded to its row of logits. `hub` is
    where a tokenizer that cannot be shipped is available.
    """
    if (name := name.lower()) not in shelf_facts():
        return read_list(shelf_folder() / f"{name}.parquet")
    entry = shelf_facts()[name]
    defaults = (
        f"; llama.cpp's default: {', '.join(entry['defaults'])}" if "defaults" in entry else ""
    )
    facts = {
        key: entry[key] for key in entry.keys() & Description.__annotations__.keys() - {"tokenizer"}
    } | {
        "source": f"facts: {entry['source']}{defaults}",
        "state": State(entry["state"]),
        "mask": frozenset(entry.get("mask", ())),
        "from_memory": tuple(entry.get("from_memory", ())),
    }
    described = Description(name, **facts)
    if "tokenizer" not in entry:
        return replace(described, hub=f"{HUB}{entry['model']}")
    family = read_shelf(entry["tokenizer"])
    vocab = replace(
        family.vocab,
        pieces=family.vocab.pieces[: family.n_tokens],
        eog=frozenset(entry.get("eog", family.vocab.eog)),
        chat_template=None,  # it is the model's, not the tokenizer family's
        bos=described.bos,
        eos=described.eos,
        add_bos=described.add_bos,
    )
    return described.with_pieces(vocab, family.n_tokens, added=family.added, merges=family.merges)


@cache
def read_list(path: Path) -> Description:
    """Return the description in the parquet file at `path`.

    It has one row per id: `piece` (bytes; empty for padding), `special` (control token), `added`
    (added to the trained vocabulary). Other facts are in its metadata, as JSON.
    """
    from pyarrow import parquet

    file = parquet.ParquetFile(path)
    pieces, special, added = (column.to_pylist() for column in file.read(use_threads=False).columns)
    stated = json.loads(file.metadata.metadata[META_KEY])
    ids = range(len(pieces))
    vocab = Vocabulary(
        pieces=tuple(pieces),
        eog=frozenset(stated["eog"]),
        special=frozenset(compress(ids, special)),
        **{key: stated[key] for key in ("kind", "pre", "bos", "eos", "add_bos", "chat_template")},
    )
    facts = {key: stated[key] for key in ("pad", "eot", "add_eos", "merges")}
    described = Description(path.stem, str(path))
    return described.with_pieces(
        vocab, stated["n_tokens"], added=frozenset(compress(ids, added)), **facts
    )


# --- folders and tokenizers -----------------------------------------------------------------------


def read_hub(name: str, revision: str) -> Description:
    """Return what the small files of `hf:ORG/NAME` state.

    They are fetched once, into the hub's cache, and then used from there. `revision` is a branch, a
    tag or a commit. Raises FetchError if the files cannot be fetched, and otherwise as
    `read_folder`.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import validate_repo_id

    path = hub_folder(repository := name.removeprefix(HUB), revision)
    with asking_hub(name, f"a folder with {', '.join(SMALL_FILES[:3])}"):
        validate_repo_id(repository)
        if not (path / TOKENIZER).exists():
            if not path.is_dir():
                reach_hub()
            path = Path(
                snapshot_download(repository, revision=revision, allow_patterns=[*SMALL_FILES])
            )
    return replace(read_folder(path), source=name)


def read_folder(path: Path) -> Description:
    """Return what the small files of a folder state.

    Without config.json, `vocab_size` is the tokenizer's; without tokenizer.json, `vocab` is None.
    Raises InputError with file, key, value and remedy.
    """
    config, stated, generation = (
        read_json(path / file) if (path / file).exists() else {}
        for file in (CONFIG, TOKENIZER_CONFIG, GENERATION)
    )
    with reading(path / CONFIG):
        # keys of a multimodal model's language model take precedence
        text = config | (config.get("text_config") or {})
        kind = text.get("model_type")
        size = text.get("vocab_size")
        if size is not None and (not isinstance(size, int) or not 0 <= size <= MAX_ID):
            raise ValueError(f"vocab_size is {size!r}, expected 0 to {MAX_ID}")
        # mask tokens of PARD, and of the draft models that vLLM calls ptd
        mask = (text.get("pard_token"), text.get("ptd_token_id"))
        for file, values in ((CONFIG, config), (CONFIG, text), (GENERATION, generation)):
            require_rows(size or MAX_ID, path / file, values)
        described = Description(
            str(path),
            str(path),
            architecture=kind,
            vocab_size=size,
            n_ctx=next(filter(None, map(text.get, CONTEXT_KEYS)), None),
            n_layers=next(filter(None, map(text.get, LAYER_KEYS)), None),
            state=state_of(kind, text.get("layer_types") or ()),
            mask=frozenset(mask) - {None},
            **{
                key: ids[0]
                for key in ("bos", "eos", "pad")
                if (ids := ids_in(text.get(f"{key}_token_id")))
            },
        )
    if (path / TOKENIZER).exists():
        return _with_tokenizer(described, path / TOKENIZER, stated, generation, text, config)
    if not config:
        raise InputError(
            f"{path} has no {CONFIG} and no {TOKENIZER}: save it with transformers' save_pretrained"
        )
    return described


def _with_tokenizer(
    described: Description, path: Path, stated: dict, *configs: dict
) -> Description:
    """Add a tokenizer.json, opened with the `tokenizers` library as the engines open it.

    Ids, added tokens and the tokens put around a text come from the library. `stated` is
    tokenizer_config.json; `configs` may name end-of-generation tokens.
    """
    from tokenizers import Tokenizer

    state = read_tokenizer(path)
    with reading(path), tokenizing(path):
        library = Tokenizer.from_str(json.dumps(state))
        state = json.loads(library.to_str())  # adds the keys that older files omit
        # <|im_end|> in a text is ten characters, not one token
        library.encode_special_tokens = True
        added = library.get_added_tokens_decoder()
        names = map(library.id_to_token, range(1 + max(library.get_vocab().values())))
        pieces = spell_pieces(state, names, added)
        rows = described.vocab_size or len(pieces)
        whole = library.encode("x")
        is_added = whole.special_tokens_mask
        start = [*is_added, 0].index(0)
        before = whole.ids[:start]
        after = whole.ids[start + is_added.count(0) :]
        # if no file names BOS or EOS, they are the tokens that the tokenizer adds around a text
        ids = []
        for key, around in (("bos", before), ("eos", after), ("pad", ())):
            value = stated.get(f"{key}_token")
            text = value.get("content") if isinstance(value, dict) else value
            token = library.token_to_id(text) if text else None
            if text and token is None:
                raise ValueError(
                    f"it has no token {text!r}, which {TOKENIZER_CONFIG} names as {key}_token"
                )
            ids.append(
                next((i for i in (token, getattr(described, key), *around) if i is not None), None)
            )
        bos, eos, pad = ids
        require_rows(rows, path, {"bos_token_id": bos, "eos_token_id": eos})
        ends = {eos, *(i for config in configs for i in ids_in(config.get("eos_token_id")))}

    def encode(text: str) -> list[int]:
        with reading(path), tokenizing(text):
            return library.encode(text, add_special_tokens=False).ids

    vocab = Vocabulary(
        pieces=pieces[:rows],
        kind=kind_of(state),
        bos=bos,
        eos=eos,
        eog=frozenset(ends - {None}),
        special=frozenset(i for i, token in added.items() if token.special and i < rows),
        add_bos=bos in before,
    )
    added_ids = frozenset(i for i in added if i < rows)
    return described.with_pieces(
        vocab, len(pieces), pad=pad, add_eos=eos in after, added=added_ids, tokenizer=encode
    )
