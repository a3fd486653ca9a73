"""A GGUF file described from its header: no tensor is read, so a first part that was cut after its header will do.

The vocabulary is what llama.cpp makes of it, from a copy of the header's key-values. The key-values and the list of
tensors are read here (versions 2 and 3, little endian; format: ggml/docs/gguf.md). `gguf.GGUFReader` takes 10 s and
490 MB more for 150,000 tokens, where this takes 0.2 s and 20 MB, and it refuses a file whose tensors are cut off.
"""

import hashlib
import mmap
import re
import struct
import tempfile
import weakref
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from specnb.compat.description import Description, Merges, state_of
from specnb.errors import InputError, LoadError
from specnb.lm.gguf import binding
from specnb.lm.vocab import Vocabulary

STRING, ARRAY = 8, 9
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
"""struct's code of each GGUF value type of fixed width."""

CONTROL, USER_DEFINED, BYTE = 3, 4, 6  # gguf.TokenType
AGAIN = "the file is damaged or incomplete: fetch or convert it again"
ARCHITECTURE, MODEL, MERGES = "general.architecture", "tokenizer.ggml.model", "tokenizer.ggml.merges"
TOKENS, TYPES = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"
BYTE_TEXT = re.compile(rb"<0x[0-9A-F]{2}>")
MAX_ROWS = 2_000_000
"""No embedding has as many rows: a larger number is damage."""
NORMALIZER_KEYS = ("add_space_prefix", "remove_extra_whitespaces", "normalizer.lowercase", "normalizer.strip_accents")
END_OF_TURN = frozenset(
    "<|eot_id|> <|im_end|> <|end|> <end_of_turn> <|endoftext|> <|end_of_text|> <EOT> _<EOT> [EOT] "
    "<｜end▁of▁sentence｜> <end_of_utterance>".encode().split()
)
"""Where a header names no end of turn, llama.cpp takes one of these, and of several any."""


@dataclass(frozen=True)
class Header:
    """What a GGUF says before its tensors. `packed` holds each key with its value as they stand in the file.

    Of the tensors `shapes` are known by name, the fastest dimension first.
    """

    path: Path
    values: dict[str, Any]
    packed: dict[str, bytes]
    shapes: dict[str, tuple[int, ...]]

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """Return the value of `key`, `default` where it is not stated. Raises InputError for another type."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.fault(key, value, f"expected {getattr(kind, '__name__', kind)}")
        return value

    def fault(self, key: str, value: object, why: str) -> InputError:
        """The error that names the file, the key, its value, what is wrong with it and the remedy."""
        shown = repr(value) if isinstance(value, str | bytes | int | float | None) else type(value).__name__
        return InputError(f"{self.path}: {key} is {shown[:80]}: {why}; {AGAIN}")


def describe(path: Path | str) -> Description:
    """What the header of a GGUF file states, its defaults being llama.cpp's.

    `encode` is llama.cpp's own tokenizer, `normalizer` lists the header's flags as written, `quantisation` is the file
    type ("q4_k_m"), `eot` is None where several texts could be it. Raises InputError naming file, offset or key, value
    and remedy.
    """
    header = read_header(Path(path))
    if number := header.get("split.no", int):
        raise InputError(
            f"{path} is shard {number + 1} of {header.values.get('split.count', 'several')} (split.no is {number}): "
            "give the first, which holds the header of the whole"
        )
    architecture = header.get(ARCHITECTURE, str)
    described = Description(
        name=header.get("general.name", str) or header.path.stem,
        source=str(path),
        architecture=architecture,
        vocab_size=_rows(header, architecture),
        n_ctx=header.get(f"{architecture}.context_length", int),
        quantisation=_quantisation(header),
        state=state_of(architecture),
        normalizer=_normalizer(header),
    )
    return described if header.get(MODEL, str, "none") in ("none", "no_vocab") else _with_vocab(header, described)


# --- the header ------------------------------------------------------------------------------------------------------


def read_header(path: Path) -> Header:
    """The header of the file at `path`. Raises InputError, naming file, offset and value, for one that is not sound."""
    if not path.is_file():
        raise InputError(f"no such model file: {path}")
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(path, data)
    except (OSError, ValueError) as error:  # mmap: an empty file
        if isinstance(error, InputError):
            raise
        raise InputError(f"cannot read {path}: {error}") from error


def _parse(path: Path, data: mmap.mmap) -> Header:
    at = _Cursor(path, data)
    magic = at.take(4)
    if magic != b"GGUF":
        raise InputError(f"{path} is not a GGUF file: it starts with {magic!r} instead of b'GGUF'")
    version = at.number("<I")
    if version not in (2, 3):
        raise InputError(
            f"{path} is GGUF version {version:#x} (big endian from 0x10000 on); 2 and 3 in little endian are read: "
            "convert it again"
        )
    n_tensors, n_keys = at.number("<Q"), at.number("<Q")
    values: dict[str, Any] = {}
    packed: dict[str, bytes] = {}
    for _ in range(n_keys):
        start, key = at.place, at.text()
        if key in values:
            raise at.error(f"has the key {key!r} a second time")
        values[key] = _value(at, key)
        packed[key] = data[start : at.place]
    return Header(path, values, packed, dict(_tensor(at) for _ in range(n_tensors)))


def _value(at: "_Cursor", key: str) -> Any:
    """A number, text or bool; of arrays a list of bytes, or a numpy array."""
    kind = at.number("<I")
    if kind == STRING:
        return at.text()
    n = None
    if kind == ARRAY:
        kind, n = at.number("<I"), at.number("<Q")
        if kind == STRING:
            return [at.string() for _ in range(n)]
    if kind not in SCALARS:
        raise at.error(f"gives {key!r} the unknown value type {kind}")
    code = SCALARS[kind]
    return at.number(code) if n is None else np.frombuffer(at.take(n * struct.calcsize(code)), dtype=code)


def _tensor(at: "_Cursor") -> tuple[str, tuple[int, ...]]:
    name, n_dims = at.text(), at.number("<I")
    shape = struct.unpack(f"<{n_dims}Q", at.take(8 * n_dims))
    at.take(4 + 8)  # its type, and where its data starts
    return name, shape


class _Cursor:
    """A position in a file; nothing is taken that is not there, whatever lengths are announced."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.place, self._data = path, 0, data

    def error(self, fault: str) -> InputError:
        return InputError(f"{self.path} {fault} (byte {self.place}): {AGAIN}")

    def take(self, n: int) -> bytes:
        start, end = self.place, self.place + n
        if end > len(self._data):
            raise self.error(f"ends inside its header: {n} bytes are announced, {len(self._data) - start} are left")
        self.place = end
        return self._data[start:end]

    def number(self, code: str) -> int | float | bool:
        return struct.unpack(code, self.take(struct.calcsize(code)))[0]

    def string(self) -> bytes:
        return self.take(self.number("<Q"))

    def text(self) -> str:
        return self.string().decode("utf-8", errors="replace")


# --- the vocabulary --------------------------------------------------------------------------------------------------


def _with_vocab(header: Header, described: Description) -> Description:
    types = _sound_types(header)
    encode = _Encoder(header)
    vocab, api = encode.vocab, binding.library().api
    raw = api.llama_model_get_vocab(encode.model)
    n, size = vocab.size, max(vocab.size, described.vocab_size or 0)
    texts = header.values[TOKENS]
    n_known = n
    while n_known and texts[n_known - 1] == b"[PAD%d]" % (n_known - 1):  # rows that a converter added as padding
        n_known -= 1
    marked = {i for i, kind in enumerate(types[:n_known]) if kind in (CONTROL, USER_DEFINED)}
    certain = "tokenizer.ggml.eot_token_id" in header.values or len(END_OF_TURN.intersection(texts)) == 1
    return replace(
        described,
        vocab=replace(vocab, pieces=(*vocab.pieces, *[b""] * (size - n))),
        n_tokens=n_known,
        vocab_size=size,
        bos=vocab.bos,
        eos=vocab.eos,
        pad=_known(api.llama_vocab_pad(raw)),
        eot=_known(api.llama_vocab_eot(raw)) if certain else None,
        add_bos=vocab.add_bos,
        add_eos=api.llama_vocab_get_add_eos(raw),
        added=vocab.special | marked,
        merges=_merges(header),
        encode=encode,
    )


def _known(token: int) -> int | None:
    return token if token >= 0 else None


def _sound_types(header: Header) -> list[int]:
    """The types of the tokens, none where none are stated.

    Raises InputError for lists on which llama.cpp ends the process or reads beyond their end.
    """
    texts = header.get(TOKENS, list)
    if not texts:
        raise header.fault(TOKENS, texts, "it lists no token")
    counts = Counter(text.partition(b"\0")[0] for text in texts)  # as C strings
    twice = next((text for text, n in counts.items() if n > 1 and text), None)
    if twice is not None:
        raise header.fault(TOKENS, twice, "two tokens have this text")
    header.get(MERGES, list)
    for key, dtype in ((TYPES, np.int32), ("tokenizer.ggml.scores", np.float32)):
        stored = header.get(key, np.ndarray)
        if stored is not None and (len(stored), stored.dtype) != (len(texts), dtype):
            raise header.fault(key, f"{len(stored)} {stored.dtype}", f"expected {len(texts)} {dtype.__name__}")
    header.get("tokenizer.ggml.precompiled_charsmap", np.ndarray)
    types = header.get(TYPES, np.ndarray, np.zeros(0)).tolist()
    of_bytes = [text for text, kind in zip(texts, types, strict=False) if kind == BYTE]
    wrong = next((text for text in of_bytes if header.values[MODEL] == "bert" or not BYTE_TEXT.fullmatch(text)), None)
    if wrong is not None:
        raise header.fault(TOKENS, wrong, "a token of the type byte must read <0x00> to <0xFF>, and WordPiece has none")
    return types


class _Encoder:
    """llama.cpp's tokenizer of a GGUF, opened from its key-values alone, and closed with this object."""

    def __init__(self, header: Header) -> None:
        binding.library()
        self._path, opened = header.path, ExitStack()
        try:
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder, "vocabulary.gguf")
                file.write_bytes(_key_values(header))
                self.model = opened.enter_context(binding.header(file))
            weakref.finalize(self, opened.close)
            self.vocab: Vocabulary = binding.vocabulary(self.model)
        except LoadError as error:
            reason = str(error).removeprefix(f"llama.cpp cannot read the header of {file}: ")
            raise InputError(f"llama.cpp cannot read the vocabulary of {header.path}: {reason[:300]}") from error

    def __call__(self, text: str) -> list[int]:
        # on such a character llama.cpp ends the process
        if self.vocab.kind in ("spm", "rwkv") and (missing := binding.unspellable(self.vocab, text)):
            raise InputError(f"the tokenizer of {self._path} has neither a token for {missing!r} nor for its bytes")
        return binding.tokenize(self.model, text, special=False)


def _key_values(header: Header) -> bytes:
    """A GGUF without tensors: the tokenizer under an architecture that every llama.cpp knows."""
    kept = [pair for key, pair in header.packed.items() if key.startswith("tokenizer.") or key == "general.name"]
    kept.append(_packed(ARCHITECTURE, struct.pack("<I", STRING) + _length("llama")))
    if MERGES not in header.values:  # llama.cpp asks for some; lists that were not made by merging have none
        kept.append(_packed(MERGES, struct.pack("<IIQ", ARRAY, STRING, 0)))
    return b"GGUF" + struct.pack("<IQQ", 3, 0, len(kept)) + b"".join(kept)


def _packed(key: str, value: bytes) -> bytes:
    return _length(key) + value


def _length(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


# --- other facts -----------------------------------------------------------------------------------------------------


def _rows(header: Header, architecture: str | None) -> int | None:
    """The width of a row of logits: the embedding's, where tensors are listed, else the one that is stated."""
    shape = header.shapes.get("token_embd.weight", ())
    rows = shape[1] if len(shape) == 2 else header.get(f"{architecture}.vocab_size", int)
    if rows is not None and not 0 < rows <= MAX_ROWS:
        raise header.fault("the number of rows of the embedding", rows, f"{MAX_ROWS} are the most that is read")
    return rows


def _merges(header: Header) -> Merges | None:
    stored = header.get(MERGES, list)
    if stored is None:
        return None
    return Merges(len(stored), hashlib.sha256(b"".join(merge + b"\n" for merge in stored)).hexdigest())


def _quantisation(header: Header) -> str | None:
    from gguf.constants import LlamaFileType

    stated = header.get("general.file_type", int)
    names = {int(t): t.name for t in LlamaFileType}
    name = None if stated is None else names.get(stated, f"ftype{stated}")
    return name and name.removeprefix("MOSTLY_").removeprefix("ALL_").lower()


def _normalizer(header: Header) -> str | None:
    stated = [(key, header.values.get(f"tokenizer.ggml.{key}")) for key in NORMALIZER_KEYS]
    return ", ".join(f"{key} {str(value).lower()}" for key, value in stated if isinstance(value, bool)) or None
