"""llama.cpp's C interface, opened once: the only module that imports llama_cpp.

Its log lines go to the Python logger `specnb.llama_cpp` instead of stderr. Function names are llama.h's.
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
from specnb.lm.gguf.header import Header, read_header
from specnb.lm.vocab import Vocabulary

SPIN_TURNS = "10000"
"""Turns of a loop in which libgomp's threads wait; its default, 300000, spins for milliseconds. With 1000 the many
short operators of a torch model in the same process take a quarter more time; from 10000 on nothing is gained."""
ERROR = 4
"""ggml.h's level of errors. Warnings greet every load ("n_ctx < n_ctx_train"): with all else they are DEBUG here."""

VOCAB_KINDS = {1: "spm", 2: "bpe", 3: "wpm", 4: "ugm", 5: "rwkv", 6: "plamo2"}

FILE_TYPES = {
    "f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7, "q2_k": 10, "q3_k_m": 12,
    "q4_k_m": 15, "q5_k_m": 17, "q6_k": 18, "bf16": 32,
}  # fmt: skip
"""Weight types that `requantize` writes, with llama.cpp's number (LLAMA_FTYPE_*)."""

KV_TYPES = {"f32": (0, 0, 4), "f16": (1, 1, 2), "mixed": (30, 1, 2)}
"""KV cache types: ggml's numbers for keys and values, and bytes per value. "mixed" is bf16 and f16: of two types flash
attention on a CPU computes all rows alike; of one type it has other kernels for one row beyond 256 tokens, and for 64
rows or more."""

MAX_BATCH = 512


class Library(NamedTuple):
    """The binding, the last error lines, and the log callback (a collected callback would crash the next log line)."""

    api: ModuleType
    errors: deque[str]
    log_callback: object

    def reasons(self) -> str:
        """The error lines since `errors` was cleared."""
        return "; ".join(self.errors) or "it gives no reason"


@cache
def load_library() -> Library:
    """Import llama_cpp, route its logs, start its backend. Raises LoadError with the remedy when it is not there."""
    if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:  # torch loads libgomp, which reads it once
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_TURNS)
    try:
        import llama_cpp
        import llama_cpp.llama_cpp as api
    except (ImportError, OSError, RuntimeError) as error:
        raise LoadError(f"llama_cpp fails ({error}): pip install 'specnb[llama]', or use NAME?backend=hf") from error
    logger = logging.getLogger("specnb.llama_cpp")
    logger.addHandler(logging.NullHandler())  # else Python itself writes errors that nobody listens to, to stderr
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
    """llama.cpp's tokenizer of a GGUF, and its `vocab`: no weights are read. Freed with this object."""

    def __init__(self, gguf: Path) -> None:
        self.model = open_model(gguf, vocab_only=True)
        weakref.finalize(self, load_library().api.llama_model_free, self.model)
        self.vocab = read_vocabulary(self.model)

    def __call__(self, text: str, *, special: bool = False) -> list[int]:
        return tokenize(self.model, self.vocab, text, special=special)


def open_model(path: Path, gpu_layers: int = 0, *, vocab_only: bool = False, repack: bool = True) -> object:
    """llama_model_load_from_file; LoadError with llama.cpp's own reason or that of `read_header`."""
    sound_header(path)
    lib = load_library()
    params = lib.api.llama_model_default_params()
    params.n_gpu_layers, params.vocab_only, params.use_extra_bufts = gpu_layers, vocab_only, repack
    lib.errors.clear()
    model = lib.api.llama_model_load_from_file(os.fsencode(path), params)
    if not model:
        raise LoadError(f"llama.cpp cannot open {path}: {lib.reasons()}")
    return model


def sound_header(path: Path) -> Header:
    """Return the checked header of a file.

    Raises LoadError for one on which llama.cpp would end the process; generation can go on
    without a drafter that does not load.
    """
    try:
        return read_header(path)
    except InputError as error:
        raise LoadError(str(error)) from error


def open_context(model: object, n_ctx: int, kv: str, threads: int, *, flash_attention: bool, planes: int = 0) -> object:
    """llama_init_from_model: one sequence of `n_ctx` tokens, every entry kept, equal threads for all widths.

    `planes` snapshots of a recurrent state are asked for; architectures that have none get none.
    """
    lib = load_library()
    params = lib.api.llama_context_default_params()
    params.n_ctx = n_ctx
    params.n_batch = params.n_ubatch = min(MAX_BATCH, params.n_ctx)
    params.n_seq_max = 1
    params.n_rs_seq = planes
    # width 1 and wider forwards take their threads from two fields; unequal ones would tilt T(n)/T(1)
    params.n_threads = params.n_threads_batch = threads
    params.type_k, params.type_v, _ = KV_TYPES[kv]
    params.flash_attn_type = 1 if flash_attention else 0
    params.swa_full = True  # sliding-window layers keep every entry, so that a rewind is exact
    params.no_perf = True
    lib.errors.clear()
    context = lib.api.llama_init_from_model(model, params)
    if not context:
        raise LoadError(f"llama.cpp cannot make a context of {n_ctx} tokens: {lib.reasons()}")
    if not lib.api.llama_get_memory(context) or lib.api.llama_model_has_encoder(model):
        lib.api.llama_free(context)
        raise LoadError("this model is an encoder, not a causal language model: it predicts no next token")
    return context


def metadata(model: object, key: str) -> str | None:
    """One scalar of the GGUF header, as text."""
    buffer = ctypes.create_string_buffer(512)
    n = load_library().api.llama_model_meta_val_str(model, key.encode(), buffer, len(buffer))
    return None if n < 0 else buffer.value.decode("utf-8", errors="replace")


def read_vocabulary(model: object) -> Vocabulary:
    """Read the vocabulary of an opened model through llama.cpp (about 50 ms for 50,000 ids).

    Raises LoadError for a file that holds none.
    """
    api = load_library().api
    vocab = api.llama_model_get_vocab(model)
    size = api.llama_vocab_n_tokens(vocab)
    if api.llama_vocab_type(vocab) == 0:
        # llama.cpp ends the process when a vocabulary of this kind is asked for a piece
        raise LoadError("this GGUF holds no vocabulary (its tokenizer.ggml.model names none): convert it again")
    buffer = ctypes.create_string_buffer(1024)

    def piece(token: int, room: ctypes.Array = buffer) -> bytes:
        n = api.llama_token_to_piece(vocab, token, room, len(room), 0, True)
        return room.raw[:n] if n >= 0 else piece(token, ctypes.create_string_buffer(-n))  # the length needed

    bos, eos = api.llama_vocab_bos(vocab), api.llama_vocab_eos(vocab)  # negative where there is none
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
    """Token ids of `text` (llama_tokenize). Raises InputError for a text that `vocab`, the model's, cannot spell.

    On a character that has no token, and whose bytes have none, llama.cpp's code for some kinds throws through its C
    interface, which ends the process.
    """
    api = load_library().api
    try:
        raw = text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(f"this text cannot be tokenized: {error}") from error
    if vocab.kind in ("spm", "rwkv"):
        unknown = [c for c in set(text) if c.encode() not in vocab.texts]
        if missing := [c for c in unknown if not vocab.texts.issuperset(bytes([b]) for b in c.encode())]:
            raise InputError(f"this tokenizer has neither a token for {missing[0]!r} nor for its bytes")
    size = len(raw) + 8  # a token has at least one byte; BOS, EOS and a leading space may be added
    out = (api.llama_token * size)()
    n = api.llama_tokenize(api.llama_model_get_vocab(model), raw, len(raw), out, size, special, special)
    if n < 0:
        raise InputError(f"llama.cpp cannot tokenize this text of {len(raw)} bytes (it asks for {-n} tokens)")
    return list(out[:n])


def requantize(source: Path, dest: Path, type_name: str) -> None:
    """Write a copy of the GGUF `source` to `dest` with weights of `type_name` (see FILE_TYPES). Raises LoadError.

    Going down from a quantised file adds its error to the new one's.
    """
    sound_header(source)
    lib = load_library()
    params = lib.api.llama_model_quantize_default_params()
    params.ftype = FILE_TYPES[type_name]
    params.allow_requantize = True
    lib.errors.clear()
    if lib.api.llama_model_quantize(os.fsencode(source), os.fsencode(dest), ctypes.byref(params)):
        raise LoadError(f"llama.cpp could not requantise {source.name} to {type_name}: {lib.reasons()}")
