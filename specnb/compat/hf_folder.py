"""A transformers folder, a lone tokenizer.json or a hub id, described from its small files: no weights, no code run."""

from pathlib import Path
from typing import Any

from specnb.compat.description import HUB, Description, Rope, state_of
from specnb.compat.hf_tokenizer import MAX_ID, Tokenizer, encoder, read_tokenizer, reading
from specnb.errors import FetchError, InputError
from specnb.io import read_json, read_text
from specnb.lm.vocab import Vocabulary

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
TOKENIZER_CONFIG, SPECIAL_MAP = "tokenizer_config.json", "special_tokens_map.json"
GENERATION, TEMPLATE = "generation_config.json", "chat_template.jinja"
SMALL_FILES = (CONFIG, TOKENIZER, TOKENIZER_CONFIG, SPECIAL_MAP, GENERATION, TEMPLATE)
# fetched too, a few megabytes: to say that a tokenizer is there in a form that is not read
OTHER_TOKENIZERS = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")

MAX_CONFIG_BYTES = 16 << 20
MAX_TEMPLATE_BYTES = 4 << 20
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
"""Names that model families give to the context length; the first that is stated holds."""


def describe(source: Path | str, *, revision: str = "main") -> Description:
    """A folder, a tokenizer.json, or `hf:ORG/NAME`, whose small files are fetched once into the hub's own cache.

    `revision` of a hub model is a branch, a tag or a commit.

    Without config.json `vocab_size` is the tokenizer's; without tokenizer.json `vocab` is None. `normalizer` names the
    steps ("NFC"). Raises InputError naming file, key, value and remedy; FetchError if the hub cannot give the files.
    """
    text = str(source)
    if text.startswith(HUB):
        return _of_folder(_fetched(text.removeprefix(HUB), revision), name=text.removeprefix(HUB), source=text)
    path = Path(source)
    if path.is_dir():
        return _of_folder(path, name=path.resolve().name, source=text)
    facts = {"name": path.parent.resolve().name, "source": str(path)}
    return _tokenized(read_tokenizer(path), {}, {}, {}, None, facts)


def _fetched(repo: str, revision: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HFValidationError

    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=[*SMALL_FILES, *OTHER_TOKENIZERS]))
    except HFValidationError as error:
        raise InputError(f"{HUB}{repo} is no hub id ({str(error).splitlines()[0]}): write hf:ORG/NAME") from error
    except GatedRepoError as error:
        raise FetchError(
            f"{HUB}{repo} is gated: accept its licence on the model's page of the hub, log in with `hf auth login` (or "
            f"set HF_TOKEN), and ask again; or give a folder with {', '.join(SMALL_FILES[:3])}"
        ) from error
    except Exception as error:  # the hub's library raises its own errors, those of its transport, and OSError
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise FetchError(
            f"cannot fetch the tokenizer of {HUB}{repo} ({revision}): {reason.rstrip('.')}. Check the name and the "
            f"network (a private model needs a login), or give a folder with {', '.join(SMALL_FILES[:3])}"
        ) from error


def _of_folder(folder: Path, *, name: str, source: str) -> Description:
    has_config, has_tokenizer = ((folder / file).exists() for file in (CONFIG, TOKENIZER))
    others = [file for file in OTHER_TOKENIZERS if (folder / file).exists()]
    if not has_tokenizer and (others or not has_config):
        found = f"its tokenizer is {others[0]}" if others else "nor a config.json"
        raise InputError(
            f"{source} has no tokenizer.json ({found}): save it with transformers' "
            "AutoTokenizer.from_pretrained(…).save_pretrained(…), which writes one"
        )
    config, special_map, own, generation = (
        _optional(folder / file) for file in (CONFIG, SPECIAL_MAP, TOKENIZER_CONFIG, GENERATION)
    )
    tokenizer = read_tokenizer(folder / TOKENIZER) if has_tokenizer else None
    with reading(folder):
        facts = {"name": name, "source": source, **_model_facts(config)}
        if tokenizer is None:
            special = {key: _first_id(_text_config(config), f"{key}_token_id") for key in ("bos", "eos", "pad")}
            return Description(**facts, **special, vocab_size=_vocab_size(config))
        return _tokenized(tokenizer, special_map | own, config, generation, _template(folder, own), facts)


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path, MAX_CONFIG_BYTES) if path.exists() else {}


def _template(folder: Path, own: dict) -> str | None:
    """A chat template: its own file, or in tokenizer_config.json, where it may be a list with one named default."""
    if (folder / TEMPLATE).exists():
        return read_text(folder / TEMPLATE, MAX_TEMPLATE_BYTES)
    stored = own.get("chat_template")
    return {t["name"]: t["template"] for t in stored}.get("default") if isinstance(stored, list) else stored


def _tokenized(
    tokenizer: Tokenizer, own: dict, config: dict, generation: dict, template: str | None, facts: dict[str, Any]
) -> Description:
    """`own` is tokenizer_config.json over special_tokens_map.json; all but the tokenizer may be empty."""
    text = _text_config(config)
    n_tokens = len(tokenizer.pieces)
    size = _vocab_size(config) or n_tokens
    special = {
        key: _special(tokenizer, own, f"{key}_token", _first_id(text, f"{key}_token_id"))
        for key in ("bos", "eos", "pad")
    }
    # where no file names BOS or EOS, what the tokenizer puts around a text is it
    for key, around in (("bos", tokenizer.prefix), ("eos", tokenizer.suffix)):
        if special[key] is None and around:
            special[key] = tokenizer.id_of(around[0])
    bos, eos = special["bos"], special["eos"]
    eog = _ids(generation, "eos_token_id") | _ids(text, "eos_token_id") | _ids(config, "eos_token_id")
    eog |= frozenset() if eos is None else {eos}
    _require_known(max(size, n_tokens), special, eog)
    add_bos, add_eos = _adds(tokenizer, bos, eos)
    vocab = Vocabulary(
        pieces=(*tokenizer.pieces[:size], *(b"" for _ in range(size - n_tokens))),
        kind=tokenizer.kind,
        pre=tokenizer.pre,
        bos=bos,
        eos=eos,
        eog=eog,
        special=frozenset(i for i in tokenizer.special if i < size),
        add_bos=add_bos,
        chat_template=template,
    )
    return Description(
        **facts,
        **special,
        vocab=vocab,
        n_tokens=n_tokens,
        vocab_size=size,
        add_bos=add_bos,
        add_eos=add_eos,
        added=frozenset(i for i in tokenizer.added.values() if i < size),
        normalizer=tokenizer.normalizer,
        merges=tokenizer.merges,
        encode=encoder(tokenizer.path),
    )


def _special(tokenizer: Tokenizer, own: dict, key: str, fallback: int | None) -> int | None:
    """The id of a special token: by its text, which is also given as {"content": …}, else as the config has it."""
    stated = own.get(key)
    text = stated.get("content") if isinstance(stated, dict) else stated
    if text is None:
        return fallback
    found = tokenizer.id_of(text)
    if found is None:
        raise InputError(f"{tokenizer.path} has no token {text!r}, which {TOKENIZER_CONFIG} names as {key}")
    return found


def _adds(tokenizer: Tokenizer, bos: int | None, eos: int | None) -> tuple[bool, bool]:
    """Whether a text gets BOS before it and EOS after it.

    The tokenizer.json decides: beside one, transformers 5 drops `add_bos_token` and `add_eos_token` of
    tokenizer_config.json.
    """
    before, after = ({tokenizer.id_of(text) for text in texts} for texts in (tokenizer.prefix, tokenizer.suffix))
    return bos is not None and bos in before, eos is not None and eos in after


def _require_known(n: int, special: dict[str, int | None], eog: frozenset[int]) -> None:
    stated = [*((f"{key}_token_id", i) for key, i in special.items()), *(("eos_token_id", i) for i in sorted(eog))]
    for key, i in stated:
        if i is not None and not 0 <= i < n:
            raise ValueError(f"{key} is {i}, expected one of {n} ids")


def _text_config(config: dict) -> dict:
    """The language model's own part of a config: its `text_config`, where it has one (multimodal models)."""
    return config.get("text_config") or config


def _model_facts(config: dict) -> dict[str, Any]:
    """Fields of a Description."""
    text = _text_config(config)
    kind = text.get("model_type") or config.get("model_type")
    return {
        "architecture": kind,
        "n_ctx": next((n for key in CONTEXT_KEYS if (n := text.get(key))), None),
        "rope": _rope(text),
        "quantisation": _quantisation(config, text),
        "state": state_of(kind, text.get("layer_types") or ()),
        "mask": _mask(text),
    }


def _mask(text: dict) -> frozenset[int]:
    """Tokens that stand for positions to be drafted: of PARD, of the draft models that vLLM calls ptd, of DFlash."""
    flash = text.get("dflash_config") or {}
    ids = (text.get("pard_token"), text.get("ptd_token_id"), flash.get("mask_token_id"))
    return frozenset(i for i in ids if i is not None)


def _vocab_size(config: dict) -> int | None:
    """Rows of logits."""
    size = _text_config(config).get("vocab_size", config.get("vocab_size"))
    if size is not None and (not isinstance(size, int) or not 0 <= size <= MAX_ID):
        raise ValueError(f"vocab_size is {size!r}, expected 0 to {MAX_ID}")
    return size


def _ids(config: dict, key: str) -> frozenset[int]:
    """An id or a list of ids."""
    value = config.get(key)
    return frozenset() if value is None else frozenset(value if isinstance(value, list) else [value])


def _first_id(config: dict, key: str) -> int | None:
    """An id, or the first of a list of ids. A padding id of -1 is none: so the first Llamas wrote it."""
    value = config.get(key)
    if key == "pad_token_id" and value == -1:
        return None
    return next(iter(value), None) if isinstance(value, list) else value


def _rope(text: dict) -> Rope | None:
    """transformers 5 writes `rope_parameters`; before that it was `rope_theta` and `rope_scaling`."""
    scaling = text.get("rope_parameters") or text.get("rope_scaling") or {}
    base = scaling.get("rope_theta") or text.get("rope_theta") or text.get("rotary_emb_base")
    kind = scaling.get("rope_type") or scaling.get("type")
    factor = scaling.get("factor")
    named = None if kind in (None, "default") else kind if factor is None else f"{kind} {factor:g}"
    return None if base is None and named is None else Rope(base and float(base), _rotated(text, scaling), named)


def _rotated(text: dict, scaling: dict) -> int | None:
    dims = text.get("head_dim")
    width, heads = text.get("hidden_size"), text.get("num_attention_heads")
    if dims is None and width and heads:
        dims = width // heads
    share = scaling.get("partial_rotary_factor") or text.get("partial_rotary_factor") or 1.0
    return None if dims is None else int(dims * share)


def _quantisation(config: dict, text: dict) -> str | None:
    """ "gptq 4" where the weights are quantised, else the type they are stored in."""
    quantised = config.get("quantization_config") or {}
    if method := quantised.get("quant_method"):
        bits = quantised.get("bits")
        return method if bits is None else f"{method} {bits}"
    names = (part.get(key) for key in ("dtype", "torch_dtype") for part in (text, config))
    return next((name for name in names if name), None)
