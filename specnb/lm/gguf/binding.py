"""Bindings to llama.cpp's C API. Only this module imports llama_cpp.

llama.cpp logs to the Python logger `specnb.llama_cpp` instead of stderr. Function names are those
of llama.h.
"""

import ctypes
import logging
import os
import sys
import weakref
from collections import deque
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from specnb.errors import InputError, LoadError
from specnb.lm.gguf.header import sound_header
from specnb.lm.vocab import Vocabulary

SPIN_TURNS = "10000"
"""Iterations of libgomp's spin loop; its default, 300000, spins for milliseconds. With 1000, the
short operators of a torch model in the same process take 25 % longer; values above 10000 save no
time."""
ERROR = 4
"""ggml.h's log level of errors. All other messages become DEBUG, since every load warns."""

VOCAB_KINDS = {1: "spm", 2: "bpe", 3: "wpm", 4: "ugm", 5: "rwkv", 6: "plamo2"}

FILE_TYPES = {
    "f32": 0,
    "f16": 1,
    "q4_0": 2,
    "q4_1": 3,
    "q8_0": 7,
    "q2_k": 10,
    "q3_k_m": 12,
    "q4_k_m": 15,
    "q5_k_m": 17,
    "q6_k": 18,
    "bf16": 32,
}
"""Weight types that `requantize` can write, with llama.cpp's numbers (LLAMA_FTYPE_*)."""

KV_TYPES = {"f32": (0, 0, 4), "f16": (1, 1, 2), "mixed": (30, 1, 2)}
"""KV cache types: ggml's numbers for keys and values, and bytes per value. "mixed" is bf16 keys and
f16 values: with two types, flash attention on a CPU computes all rows with one kernel; with one
type, it uses other kernels for single rows after 256 tokens, and for 64 or more rows."""

MAX_BATCH = 512


class Library(NamedTuple):
    """The API, the last error messages, and the log callback, which must stay referenced."""

    api: ModuleType
    errors: deque[str]
    log_callback: object

    def reasons(self) -> str:
        """Return the error messages since `errors` was cleared."""
        return "; ".join(self.errors) or "no reason given"


@cache
def load_library() -> Library:
    """Import and initialize llama_cpp, and redirect its log. Raises LoadError if it is missing."""
    # torch loads libgomp, which reads the variable only once
    if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_TURNS)
    try:
        import llama_cpp
        import llama_cpp.llama_cpp as api
    except (ImportError, OSError, RuntimeError) as error:
        raise LoadError(
            f"cannot import llama_cpp ({error}): pip install 'specnb[llama]', or use "
            "NAME?backend=hf"
        ) from error
    logger = logging.getLogger("specnb.llama_cpp")
    logger.addHandler(logging.NullHandler())  # without a handler, Python writes errors to stderr
    errors = deque(maxlen=5)

    def receive(level: int, text: bytes, _user_data: object) -> None:
        line = text.decode("utf-8", errors="replace").strip()
        logger.log(logging.ERROR if level == ERROR else logging.DEBUG, "%s", line)
        if level == ERROR and line:
            errors.append(line)

    callback = llama_cpp.llama_log_callback(receive)
    api.llama_log_set(callback, ctypes.c_void_p(0))
    api.llama_backend_init()
    return Library(api, errors, callback)


class FileTokenizer:
    """llama.cpp's tokenizer and `vocab` of a GGUF file with a checked header, without weights."""

    def __init__(self, gguf: Path) -> None:
        self.model = open_model(gguf, vocab_only=True)
        weakref.finalize(self, load_library().api.llama_model_free, self.model)
        self.vocab = read_vocabulary(self.model)

    def __call__(self, text: str, *, special: bool = False) -> list[int]:
        return tokenize(self.model, self.vocab, text, special=special)


def open_model(
    path: Path, gpu_layers: int = 0, *, vocab_only: bool = False, repack: bool = True
) -> object:
    """Open a file with a checked header (llama_model_load_from_file). Raises LoadError."""
    lib = load_library()
    params = lib.api.llama_model_default_params()
    params.n_gpu_layers = gpu_layers
    params.vocab_only = vocab_only
    params.use_extra_bufts = repack
    lib.errors.clear()
    model = lib.api.llama_model_load_from_file(os.fsencode(path), params)
    if not model:
        raise LoadError(f"llama.cpp cannot open {path}: {lib.reasons()}")
    return model


def open_context(
    model: object, n_ctx: int, kv: str, threads: int, *, flash_attention: bool, planes: int
) -> object:
    """Create a context (llama_init_from_model) for one sequence of `n_ctx` tokens.

    Requests `planes` snapshots of a recurrent state, which some architectures do not support.
    Raises LoadError, also for encoders.
    """
    lib = load_library()
    params = lib.api.llama_context_default_params()
    params.n_ctx = n_ctx
    params.n_batch = params.n_ubatch = min(MAX_BATCH, params.n_ctx)
    params.n_seq_max = 1
    params.n_rs_seq = planes
    # one field for passes over one token, one for longer ones; unequal values would bias T(n)/T(1)
    params.n_threads = params.n_threads_batch = threads
    params.type_k, params.type_v, _ = KV_TYPES[kv]
    params.flash_attn_type = 1 if flash_attention else 0
    params.swa_full = True  # sliding-window layers keep all entries, so that a rewind is exact
    params.no_perf = True
    lib.errors.clear()
    context = lib.api.llama_init_from_model(model, params)
    if not context:
        raise LoadError(f"llama.cpp cannot create a context of {n_ctx} tokens: {lib.reasons()}")
    if not lib.api.llama_get_memory(context) or lib.api.llama_model_has_encoder(model):
        lib.api.llama_free(context)
        raise LoadError("got an encoder, expected a causal language model: load another GGUF")
    return context


def metadata(model: object, key: str) -> str | None:
    """Return a scalar of the GGUF header as text, or None if missing."""
    buffer = ctypes.create_string_buffer(512)
    n = load_library().api.llama_model_meta_val_str(model, key.encode(), buffer, len(buffer))
    return None if n < 0 else buffer.value.decode("utf-8", errors="replace")


def read_vocabulary(model: object) -> Vocabulary:
    """Read the vocabulary of an opened model through llama.cpp (about 50 ms for 50,000 ids).

    Raises LoadError if the file has no vocabulary.
    """
    api = load_library().api
    vocab = api.llama_model_get_vocab(model)
    size = api.llama_vocab_n_tokens(vocab)
    if api.llama_vocab_type(vocab) == 0:
        # llama.cpp aborts when a piece of such a vocabulary is read
        raise LoadError("tokenizer.ggml.model is none, expected a vocabulary: convert it again")
    buffer = ctypes.create_string_buffer(1024)

    def piece(token: int, room: ctypes.Array = buffer) -> bytes:
        n = api.llama_token_to_piece(vocab, token, room, len(room), 0, True)
        if n < 0:  # the buffer is too small
            return piece(token, ctypes.create_string_buffer(-n))
        return room.raw[:n]

    bos = api.llama_vocab_bos(vocab)  # negative if there is none
    eos = api.llama_vocab_eos(vocab)
    template = api.llama_model_chat_template(model, None)
    return Vocabulary(
        pieces=tuple(map(piece, range(size))),
        kind=VOCAB_KINDS.get(api.llama_vocab_type(vocab), "unknown"),
        pre=metadata(model, "tokenizer.ggml.pre") or "",
        bos=bos if bos >= 0 else None,
        eos=eos if eos >= 0 else None,
        eog=frozenset(i for i in range(size) if api.llama_vocab_is_eog(vocab, i)),
        special=frozenset(i for i in range(size) if api.llama_vocab_is_control(vocab, i)),
        add_bos=api.llama_vocab_get_add_bos(vocab),
        chat_template=template.decode("utf-8", errors="replace") if template else None,
    )


def tokenize(model: object, vocab: Vocabulary, text: str, *, special: bool) -> list[int]:
    """Return the token ids of `text` (llama_tokenize). Raises InputError if it has no encoding.

    Checks first that all characters, or their bytes, have tokens: otherwise some tokenizers of
    llama.cpp throw a C++ exception through the C API, which aborts the process.
    """
    api = load_library().api
    try:
        raw = text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(f"this text cannot be tokenized ({error}): correct it") from error
    if vocab.kind in ("spm", "rwkv"):
        for character in set(text):
            piece = character.encode()
            if piece not in vocab.texts and not vocab.texts.issuperset(bytes([b]) for b in piece):
                raise InputError(f"this tokenizer has no token for {character!r}: remove it")
    size = len(raw) + 8  # a token has at least one byte; BOS, EOS and a leading space may be added
    out = (api.llama_token * size)()
    n = api.llama_tokenize(
        api.llama_model_get_vocab(model), raw, len(raw), out, size, special, special
    )
    if n < 0:
        raise InputError(f"got a text of {size - 8} bytes that needs {-n} tokens: pass token ids")
    return list(out[:n])


def requantize(source: Path, dest: Path, type_name: str) -> None:
    """Write a copy of the GGUF `source` to `dest` with weights of `type_name` (see FILE_TYPES).

    The rounding errors of a quantized source and of the new type add up. Raises LoadError.
    """
    sound_header(source)
    lib = load_library()
    params = lib.api.llama_model_quantize_default_params()
    params.ftype = FILE_TYPES[type_name]
    params.allow_requantize = True
    lib.errors.clear()
    if lib.api.llama_model_quantize(os.fsencode(source), os.fsencode(dest), ctypes.byref(params)):
        raise LoadError(
            f"llama.cpp cannot requantize {source.name} to {type_name}: {lib.reasons()}"
        )
