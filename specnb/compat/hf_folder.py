"""A transformers folder, a lone tokenizer.json or a hub id, described from its small files: no weights, no code run."""

from pathlib import Path
from typing import Any

from specnb.compat.description import HUB, Description, Rope, state_of
from specnb.compat.hf_tokenizer import MAX_ID, Tokenizer, encoder, read_tokenizer
from specnb.errors import FetchError, InputError
from specnb.lm.bounded_json import Node, read_json, read_text
from specnb.lm.vocab import Vocabulary

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
TOKENIZER_CONFIG, SPECIAL_MAP = "tokenizer_config.json", "special_tokens_map.json"
GENERATION, TEMPLATE = "generation_config.json", "chat_template.jinja"
SMALL_FILES = (CONFIG, TOKENIZER, TOKENIZER_CONFIG, SPECIAL_MAP, GENERATION, TEMPLATE)
# fetched too, a few megabytes: to say that a tokenizer is there in a form that is not read
OTHER_TOKENIZERS = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")

MAX_CONFIG_BYTES = 16 << 20
MAX_CONFIG_VALUES = 1_000_000
MAX_TEMPLATE_BYTES = 4 << 20
MAX_CONTEXT = 1 << 40
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
    return _of_file(path)


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


def _of_file(path: Path) -> Description:
    tokenizer = read_tokenizer(path)
    none = Node(path, "", {})
    return _tokenized(tokenizer, none, none, none, None, {"name": path.parent.resolve().name, "source": str(path)})


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
    facts = {"name": name, "source": source, **_model_facts(config)}
    if not has_tokenizer:
        text = _text_config(config)
        special = {key: _first_id(text, f"{key}_token_id") for key in ("bos", "eos", "pad")}
        return Description(**facts, **special, vocab_size=_vocab_size(config))
    merged = Node(own.path, "", {**special_map.values, **own.values})
    return _tokenized(read_tokenizer(folder / TOKENIZER), merged, config, generation, _template(folder, own), facts)


def _optional(path: Path) -> Node:
    return read_json(path, MAX_CONFIG_BYTES, MAX_CONFIG_VALUES) if path.exists() else Node(path, "", {})


def _template(folder: Path, own: Node) -> str | None:
    """A chat template: its own file, or in tokenizer_config.json, where it may be a list with one named default."""
    if (folder / TEMPLATE).exists():
        return read_text(folder / TEMPLATE, MAX_TEMPLATE_BYTES)
    if isinstance(own.values.get("chat_template"), list):
        named = {node.text("name"): node.text("template") for node in own.nodes("chat_template")}
        return named.get("default")
    return own.text("chat_template")


def _tokenized(
    tokenizer: Tokenizer, own: Node, config: Node, generation: Node, template: str | None, facts: dict[str, Any]
) -> Description:
    """`own` is tokenizer_config.json over special_tokens_map.json; all but the tokenizer may be empty."""
    text = _text_config(config)
    n_tokens = len(tokenizer.pieces)
    size = _vocab_size(config) or n_tokens
    special = {
        key: _special(tokenizer, own, f"{key}_token", _first_id(text, f"{key}_token_id"))
        for key in ("bos", "eos", "pad")
    }
    bos = special["bos"] = _or_first(tokenizer, special["bos"], tokenizer.prefix)
    eos = special["eos"] = _or_first(tokenizer, special["eos"], tokenizer.suffix)
    eog = _ids(generation, "eos_token_id") | _ids(text, "eos_token_id") | _ids(config, "eos_token_id")
    eog |= frozenset() if eos is None else {eos}
    _require_known(config, max(size, n_tokens), special, eog)
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


def _special(tokenizer: Tokenizer, own: Node, key: str, fallback: int | None) -> int | None:
    """The id of a special token: by its text, which is also given as {"content": …}, else as the config has it."""
    stated = own.values.get(key)
    text = own.node(key).text("content") if isinstance(stated, dict) else own.text(key)
    if text is None:
        return fallback
    found = tokenizer.id_of(text)
    if found is None:
        raise own.fault(key, text, f"{tokenizer.path.name} has no such token")
    return found


def _or_first(tokenizer: Tokenizer, i: int | None, around: tuple[str, ...]) -> int | None:
    """Where no file names BOS or EOS, what the tokenizer puts around a text is it."""
    return tokenizer.id_of(around[0]) if i is None and around else i


def _adds(tokenizer: Tokenizer, bos: int | None, eos: int | None) -> tuple[bool, bool]:
    """Whether a text gets BOS before it and EOS after it.

    The tokenizer.json decides: beside one, transformers 5 drops `add_bos_token` and `add_eos_token` of
    tokenizer_config.json.
    """
    before, after = ({tokenizer.id_of(text) for text in texts} for texts in (tokenizer.prefix, tokenizer.suffix))
    return bos is not None and bos in before, eos is not None and eos in after


def _require_known(config: Node, n: int, special: dict[str, int | None], eog: frozenset[int]) -> None:
    stated = [*((f"{key}_token_id", i) for key, i in special.items()), *(("eos_token_id", i) for i in sorted(eog))]
    for key, i in stated:
        if i is not None and i >= n:
            raise config.fault(key, i, f"there are {n} ids")


def _text_config(config: Node) -> Node:
    """The language model's own part of a config: its `text_config`, where it has one (multimodal models)."""
    nested = config.node("text_config")
    return nested if nested.values else config


def _model_facts(config: Node) -> dict[str, Any]:
    """Fields of a Description. Raises InputError for values of another type or out of any range."""
    text = _text_config(config)
    kind = text.text("model_type") or config.text("model_type")
    layers = text.get("layer_types", list, "a list of texts") or []
    for i, layer in enumerate(layers):
        if not isinstance(layer, str):
            raise text.fault(f"layer_types[{i}]", layer, "it must be a text")
    lengths = (text.count(key, MAX_CONTEXT) for key in CONTEXT_KEYS)
    return {
        "architecture": kind,
        "n_ctx": next((n for n in lengths if n), None),
        "rope": _rope(text),
        "quantisation": _quantisation(config, text),
        "state": state_of(kind, layers),
        "mask": _mask(text),
    }


def _mask(text: Node) -> frozenset[int]:
    """Tokens that stand for positions to be drafted: of PARD, of the draft models that vLLM calls ptd, of DFlash."""
    places = ((text, "pard_token"), (text, "ptd_token_id"), (text.node("dflash_config"), "mask_token_id"))
    found = (node.count(key, MAX_ID) for node, key in places)
    return frozenset(i for i in found if i is not None)


def _vocab_size(config: Node) -> int | None:
    """Rows of logits."""
    text = _text_config(config)
    found = text.count("vocab_size", MAX_ID)
    return config.count("vocab_size", MAX_ID) if found is None else found


def _ids(node: Node, key: str) -> frozenset[int]:
    """An id or a list of ids."""
    value = node.values.get(key)
    found = value if isinstance(value, list) else [] if value is None else [value]
    for i in found:
        if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < MAX_ID:
            raise node.fault(key, i, f"an id is an integer from 0 to {MAX_ID - 1}")
    return frozenset(found)


def _first_id(node: Node, key: str) -> int | None:
    """An id, or the first of a list of ids. A padding id of -1 is none: so the first Llamas wrote it."""
    value = node.values.get(key)
    if key == "pad_token_id" and value == -1:
        return None
    _ids(node, key)
    return next(iter(value), None) if isinstance(value, list) else value


def _rope(text: Node) -> Rope | None:
    """transformers 5 writes `rope_parameters`; before that it was `rope_theta` and `rope_scaling`."""
    parameters = text.node("rope_parameters")
    scaling = parameters if parameters.values else text.node("rope_scaling")
    base = scaling.number("rope_theta") or text.number("rope_theta") or text.number("rotary_emb_base")
    kind = scaling.text("rope_type") or scaling.text("type")
    factor = scaling.number("factor")
    named = None if kind in (None, "default") else kind if factor is None else f"{kind} {factor:g}"
    return None if base is None and named is None else Rope(base, _rotated(text, scaling), named)


def _rotated(text: Node, scaling: Node) -> int | None:
    dims = text.count("head_dim", MAX_ID)
    width, heads = text.count("hidden_size", MAX_CONTEXT), text.count("num_attention_heads", MAX_CONTEXT)
    if dims is None and width and heads:
        dims = width // heads
    share = scaling.number("partial_rotary_factor") or text.number("partial_rotary_factor") or 1.0
    return None if dims is None else int(dims * share)


def _quantisation(config: Node, text: Node) -> str | None:
    """ "gptq 4" where the weights are quantised, else the type they are stored in."""
    quantised = config.node("quantization_config")
    if method := quantised.text("quant_method"):
        bits = quantised.count("bits", 64)
        return method if bits is None else f"{method} {bits}"
    named = (text.text(key) or config.text(key) for key in ("dtype", "torch_dtype"))
    return next((name for name in named if name), None)
