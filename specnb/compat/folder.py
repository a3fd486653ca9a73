"""A transformers folder, a lone tokenizer.json or a hub id, described from its small files: no weights, no code run.

The tokenizer is opened by the `tokenizers` library, as the engines open it: ids, added tokens and what is put around a
text are the library's answers.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from specnb.compat.description import HUB, MAX_ID, Description, state_of
from specnb.errors import InputError
from specnb.fetch import asking_hub, reach_hub
from specnb.io import read_json, reading
from specnb.lm.vocab import Vocabulary, kind_of, spelling_of

SMALL_FILES = CONFIG, TOKENIZER, TOKENIZER_CONFIG, GENERATION = (
    "config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"
)  # fmt: skip

LAYER_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
"""Names that model families give to the context length; the first that is stated holds."""


def describe(source: Path | str, *, revision: str = "main") -> Description:
    """A folder, a tokenizer.json, or `hf:ORG/NAME`, whose small files are fetched once into the hub's own cache.

    What that cache holds is taken as it is.

    `revision` of a hub model is a branch, a tag or a commit.

    Without config.json `vocab_size` is the tokenizer's; without tokenizer.json `vocab` is None. Raises InputError
    naming file, key, value and remedy; FetchError if the hub cannot give the files.
    """
    text, path = str(source), Path(source)
    if text.startswith(HUB):
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        fetch = partial(snapshot_download, text.removeprefix(HUB), revision=revision, allow_patterns=[*SMALL_FILES])
        with asking_hub(text, f"a folder with {', '.join(SMALL_FILES[:3])}"):
            with suppress(LocalEntryNotFoundError):
                path = Path(fetch(local_files_only=True))
            if not (path / TOKENIZER).exists():
                if not path.is_dir():
                    reach_hub()
                path = Path(fetch())
    if not path.is_dir():
        return Description(text, text, **_tokenizer(path, {}, {}, {}))
    config, tokenizer_config, generation = (
        read_json(path / file) if (path / file).exists() else {} for file in (CONFIG, TOKENIZER_CONFIG, GENERATION)
    )
    facts = _model(path, config)
    if (path / TOKENIZER).exists():
        facts |= _tokenizer(path / TOKENIZER, tokenizer_config, config, generation)
    elif not config:
        raise InputError(f"{source} has no {CONFIG} and no {TOKENIZER}: save it with transformers' save_pretrained")
    return Description(text, text, **facts)


# --- the tokenizer ---------------------------------------------------------------------------------------------------


def _tokenizer(path: Path, stated: dict, config: dict, generation: dict) -> dict[str, Any]:
    """Fields of a Description; `stated` is tokenizer_config.json, and all but the tokenizer may be empty."""
    from tokenizers import Tokenizer

    state = read_json(path)
    with reading(path):
        library = Tokenizer.from_str(json.dumps(state))
        library.encode_special_tokens = True  # <|im_end|> in a text is ten characters, not one token
        added = library.get_added_tokens_decoder()
        pieces = _pieces(state, library, added)
        n_tokens = len(pieces)
        text, size = _text_config(config), _vocab_size(config) or n_tokens
        before, after = _around(library)
        # where no file names BOS or EOS, what the tokenizer puts around a text is it
        bos, eos, pad = (
            next(iter([*_named(path, library, stated, key), *_ids(text, f"{key}_token_id"), *around]), None)
            for key, around in (("bos", before), ("eos", after), ("pad", []))
        )
        ends = [eos] if eos is not None else []
        eog = frozenset(ends).union(*(_ids(part, "eos_token_id") for part in (generation, text, config)))

    def encode(text: str) -> list[int]:
        with reading(path):
            return library.encode(text, add_special_tokens=False).ids

    vocab = Vocabulary(
        pieces=(*pieces[:size], *(b"" for _ in range(size - n_tokens))),
        kind=kind_of(state),
        bos=bos,
        eos=eos,
        eog=eog,
        special=frozenset(i for i, token in added.items() if token.special and i < size),
        add_bos=bos is not None and bos in before,
    )
    return {
        "vocab": vocab,
        "n_tokens": n_tokens,
        "vocab_size": size,
        "bos": bos,
        "eos": eos,
        "pad": pad,
        "add_bos": vocab.add_bos,
        "add_eos": eos is not None and eos in after,
        "added": frozenset(i for i in added if i < size),
        "tokenizer": encode,
    }


def _pieces(state: dict, library: Any, added: Mapping[int, Any]) -> list[bytes]:
    """The bytes of ids 0..n-1; b"" for an id that is skipped."""
    vocab, spelled = library.get_vocab(with_added_tokens=True), spelling_of(state)
    if (last := max(vocab.values())) >= MAX_ID:
        raise ValueError(f"the largest id is {last}, expected less than {MAX_ID}")
    pieces = [b""] * (1 + last)
    for piece, i in vocab.items():
        pieces[i] = added[i].content.encode() if i in added else spelled(piece)
    return pieces


def _around(library: Any) -> tuple[list[int], list[int]]:
    """The ids that a text gets before and after it."""
    whole, plain = library.encode("x").ids, library.encode("x", add_special_tokens=False).ids
    at = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), 0)
    return whole[:at], whole[at + len(plain) :]


def _named(path: Path, library: Any, stated: dict, key: str) -> list[int]:
    """The id of a special token by its text, which is also given as {"content": …}; none where it is not stated."""
    value = stated.get(f"{key}_token")
    text = value.get("content") if isinstance(value, dict) else value
    token = text and library.token_to_id(text)
    if text and token is None:
        raise InputError(f"{path} has no token {text!r}, which {TOKENIZER_CONFIG} names as {key}_token")
    return [token] if text else []


# --- the config ------------------------------------------------------------------------------------------------------


def _text_config(config: dict) -> dict:
    """The language model's own part of a config: its `text_config`, where it has one (multimodal models)."""
    return config.get("text_config") or config


def _model(path: Path, config: dict) -> dict[str, Any]:
    """Fields of a Description."""
    with reading(path / CONFIG):
        text = _text_config(config)
        kind = text.get("model_type") or config.get("model_type")
        special = {key: _ids(text, f"{key}_token_id") for key in ("bos", "eos", "pad")}
        # tokens that stand for positions to be drafted: of PARD, of the draft models that vLLM calls ptd, of DFlash
        flash = text.get("dflash_config") or {}
        mask = (text.get("pard_token"), text.get("ptd_token_id"), flash.get("mask_token_id"))
        return {
            "architecture": kind,
            "vocab_size": _vocab_size(config),
            "n_ctx": next((n for key in CONTEXT_KEYS if (n := text.get(key))), None),
            "n_layers": next((n for key in LAYER_KEYS if (n := text.get(key))), None),
            "state": state_of(kind, text.get("layer_types") or ()),
            "mask": frozenset(i for i in mask if i is not None),
            **{key: ids[0] for key, ids in special.items() if ids},
        }


def _vocab_size(config: dict) -> int | None:
    """Rows of logits."""
    size = _text_config(config).get("vocab_size", config.get("vocab_size"))
    if size is not None and (not isinstance(size, int) or not 0 <= size <= MAX_ID):
        raise ValueError(f"vocab_size is {size!r}, expected 0 to {MAX_ID}")
    return size


def _ids(config: dict, key: str) -> list[int]:
    """The ids that are stated, one or a list. An id of -1 is none: so the first Llamas wrote their padding."""
    value = config.get(key)
    return [i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int) and i >= 0]
