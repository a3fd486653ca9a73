"""A transformers folder, a lone tokenizer.json or a hub id, described from its small files: no weights, no code run.

The tokenizer is opened by the `tokenizers` library, as the engines open it: ids, added tokens and what is put around a
text are the library's answers.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specnb.compat.description import HUB, Description, Merges, state_of
from specnb.errors import InputError, SpecnbError
from specnb.fetch import asking_hub
from specnb.io import read_json
from specnb.lm.vocab import Vocabulary, kind_of, rule_names, spelling_of

CONFIG, TOKENIZER, TOKENIZER_CONFIG = "config.json", "tokenizer.json", "tokenizer_config.json"
SPECIAL_MAP, GENERATION = "special_tokens_map.json", "generation_config.json"
SMALL_FILES = (CONFIG, TOKENIZER, TOKENIZER_CONFIG, SPECIAL_MAP, GENERATION)

MAX_ID = 4_000_000
MAX_TOKENIZER_BYTES, MAX_CONFIG_BYTES = 128 << 20, 16 << 20
LAYER_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
"""Names that model families give to the context length; the first that is stated holds."""


def describe(source: Path | str, *, revision: str = "main") -> Description:
    """A folder, a tokenizer.json, or `hf:ORG/NAME`, whose small files are fetched once into the hub's own cache.

    `revision` of a hub model is a branch, a tag or a commit.

    Without config.json `vocab_size` is the tokenizer's; without tokenizer.json `vocab` is None. `normalizer` names the
    steps ("NFC"). Raises InputError naming file, key, value and remedy; FetchError if the hub cannot give the files.
    """
    text, path = str(source), Path(source)
    if text.startswith(HUB):
        from huggingface_hub import snapshot_download

        with asking_hub(text, f"a folder with {', '.join(SMALL_FILES[:3])}"):
            path = Path(snapshot_download(text.removeprefix(HUB), revision=revision, allow_patterns=[*SMALL_FILES]))
    elif not path.is_dir():
        return _described(text, path, None)
    if not any((path / file).exists() for file in (CONFIG, TOKENIZER)):
        raise InputError(
            f"{source} has neither a {CONFIG} nor a {TOKENIZER}: save a tokenizer with transformers' "
            "AutoTokenizer.from_pretrained(…).save_pretrained(…), which writes one"
        )
    return _described(text, path / TOKENIZER, path)


def _described(name: str, tokenizer: Path, folder: Path | None) -> Description:
    """From a tokenizer.json, which a folder with a config may lack, and the folder's other files."""
    config, special_map, tokenizer_config, generation = (
        read_json(folder / file, MAX_CONFIG_BYTES) if folder and (folder / file).exists() else {}
        for file in (CONFIG, SPECIAL_MAP, TOKENIZER_CONFIG, GENERATION)
    )
    opened = _tokenizer(tokenizer) if folder is None or tokenizer.exists() else None
    with _reading(folder or tokenizer):
        facts = {"name": name, "source": name, **_model_facts(config)}
        if opened is None:
            ids = {key: _ids(_text_config(config), f"{key}_token_id") for key in ("bos", "eos", "pad")}
            special = {key: stated[0] for key, stated in ids.items() if stated}
            return Description(**facts, **special, vocab_size=_vocab_size(config))
        return _tokenized(opened, special_map | tokenizer_config, config, generation, facts)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Make one InputError, which names the file, of an object of another form than expected."""
    try:
        yield
    except SpecnbError:
        raise
    except BaseException as error:
        # the library raises plain Exceptions, and its panics derive from BaseException
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise InputError(
            f"{path} does not have the expected form ({type(error).__name__}: {str(error)[:200]}): correct it, "
            "or fetch it again"
        ) from error


# --- the tokenizer ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer.json as JSON and as the library opens it. `added` are the ids of added tokens, with their entries."""

    path: Path
    state: dict[str, Any]
    library: Any
    added: Mapping[int, Any]

    def encode(self, text: str) -> list[int]:
        """Special tokens are neither added nor looked for."""
        with _reading(self.path):
            return self.library.encode(text, add_special_tokens=False).ids

    def around(self) -> tuple[list[int], list[int]]:
        """The ids that a text gets before and after it."""
        whole, plain = self.library.encode("x").ids, self.library.encode("x", add_special_tokens=False).ids
        at = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), 0)
        return whole[:at], whole[at + len(plain) :]


def _tokenizer(path: Path) -> Tokenizer:
    state = read_json(path, MAX_TOKENIZER_BYTES)
    with _reading(path):
        from tokenizers import Tokenizer as Library

        library = Library.from_str(json.dumps(state))
        library.encode_special_tokens = True  # <|im_end|> in a text is ten characters, not one token
        return Tokenizer(path, state, library, library.get_added_tokens_decoder())


def _pieces(tokenizer: Tokenizer) -> list[bytes]:
    """The bytes of ids 0..n-1; b"" for an id that is skipped."""
    vocab, spelled = tokenizer.library.get_vocab(with_added_tokens=True), spelling_of(tokenizer.state)
    if (last := max(vocab.values())) >= MAX_ID:
        raise ValueError(f"the largest id is {last}, expected less than {MAX_ID}")
    pieces = [b""] * (1 + last)
    for piece, i in vocab.items():
        pieces[i] = tokenizer.added[i].content.encode() if i in tokenizer.added else spelled(piece)
    return pieces


def _rule(merge: str | list[str]) -> bytes:
    """A merge rule, stored as "left right" or ["left", "right"], as a GGUF states it: a space in a piece is U+0120."""
    parts = [merge] if isinstance(merge, str) else [part.replace(" ", "\u0120") for part in merge]
    return " ".join(parts).encode("utf-8", "surrogatepass")


def _tokenized(
    tokenizer: Tokenizer, stated: dict, config: dict, generation: dict, facts: dict[str, Any]
) -> Description:
    """`stated` is tokenizer_config.json over special_tokens_map.json; all but the tokenizer may be empty."""
    text, pieces = _text_config(config), _pieces(tokenizer)
    n_tokens = len(pieces)
    size = _vocab_size(config) or n_tokens
    merges = tokenizer.state["model"].get("merges")
    before, after = tokenizer.around()
    # where no file names BOS or EOS, what the tokenizer puts around a text is it
    bos, eos, pad = (
        next(iter([*_special(tokenizer, stated, f"{key}_token"), *_ids(text, f"{key}_token_id"), *around]), None)
        for key, around in (("bos", before), ("eos", after), ("pad", []))
    )
    eog = frozenset([eos] if eos is not None else []).union(
        *(_ids(part, "eos_token_id") for part in (generation, text, config))
    )
    unknown = [i for i in {bos, eos, pad, *eog} - {None} if not 0 <= i < max(size, n_tokens)]
    if unknown:
        raise ValueError(f"a special token has the id {unknown[0]}, expected one of {max(size, n_tokens)} ids")
    add_bos = bos is not None and bos in before
    vocab = Vocabulary(
        pieces=(*pieces[:size], *(b"" for _ in range(size - n_tokens))),
        kind=kind_of(tokenizer.state),
        pre=((tokenizer.state.get("pre_tokenizer") or {}).get("type") or "").lower(),
        bos=bos,
        eos=eos,
        eog=eog,
        special=frozenset(i for i, token in tokenizer.added.items() if token.special and i < size),
        add_bos=add_bos,
    )
    return Description(
        **facts,
        vocab=vocab,
        n_tokens=n_tokens,
        vocab_size=size,
        bos=bos,
        eos=eos,
        pad=pad,
        add_bos=add_bos,
        add_eos=eos is not None and eos in after,
        added=frozenset(i for i in tokenizer.added if i < size),
        normalizer=" ".join(n for n in rule_names(tokenizer.state.get("normalizer")) if n != "Sequence") or None,
        merges=None if merges is None else Merges.of(list(map(_rule, merges))),
        encode=tokenizer.encode,
    )


def _special(tokenizer: Tokenizer, stated: dict, key: str) -> list[int]:
    """The id of a special token by its text, which is also given as {"content": …}; none where it is not stated."""
    value = stated.get(key)
    text = value.get("content") if isinstance(value, dict) else value
    token = text and tokenizer.library.token_to_id(text)
    if text and token is None:
        raise InputError(f"{tokenizer.path} has no token {text!r}, which {TOKENIZER_CONFIG} names as {key}")
    return [token] if text else []


# --- the config ------------------------------------------------------------------------------------------------------


def _text_config(config: dict) -> dict:
    """The language model's own part of a config: its `text_config`, where it has one (multimodal models)."""
    return config.get("text_config") or config


def _model_facts(config: dict) -> dict[str, Any]:
    """Fields of a Description."""
    text = _text_config(config)
    kind = text.get("model_type") or config.get("model_type")
    # tokens that stand for positions to be drafted: of PARD, of the draft models that vLLM calls ptd, of DFlash
    flash = text.get("dflash_config") or {}
    mask = (text.get("pard_token"), text.get("ptd_token_id"), flash.get("mask_token_id"))
    return {
        "architecture": kind,
        "n_ctx": next((n for key in CONTEXT_KEYS if (n := text.get(key))), None),
        "n_layers": next((n for key in LAYER_KEYS if (n := text.get(key))), None),
        "state": state_of(kind, text.get("layer_types") or ()),
        "mask": frozenset(i for i in mask if i is not None),
    }


def _vocab_size(config: dict) -> int | None:
    """Rows of logits."""
    size = _text_config(config).get("vocab_size", config.get("vocab_size"))
    if size is not None and (not isinstance(size, int) or not 0 <= size <= MAX_ID):
        raise ValueError(f"vocab_size is {size!r}, expected 0 to {MAX_ID}")
    return size


def _ids(config: dict, key: str) -> list[int]:
    """An id or a list of ids. An id of -1 is none: so the first Llamas wrote their padding."""
    value = config.get(key)
    return [i for i in (value if isinstance(value, list) else [value]) if i not in (None, -1)]
