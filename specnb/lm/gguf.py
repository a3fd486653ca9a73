"""A GGUF file run by llama.cpp, through the low-level binding.

The state is one sequence in llama.cpp's KV cache. Everything is validated before a call, because a failed
GGML_ASSERT ends the process (and a notebook's kernel with it). Greedy results depend on the width of a forward
only by rounding: llama.cpp uses other kernels for one token than for several.
"""

import ctypes
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil

from specnb.errors import EngineError, InputError, LoadError, RewindError
from specnb.lm import binding
from specnb.lm.base import Capabilities, check_forward, check_rewind
from specnb.lm.memory import Need, kv_bytes, require

KV_TYPES = {"f32": (0, 4), "f16": (1, 2)}
"""KV cache types: ggml's number and bytes per value."""

DEFAULT_N_CTX = 4096
MAX_BATCH = 512


class GgufModel:
    """llama.cpp behind the LanguageModel interface. Make one with `GgufModel.open`."""

    def __init__(self, model: object, context: object, *, name: str, caps: Capabilities, fixed_width: int) -> None:
        api = binding.library().api
        self.name = name
        self.vocab = binding.vocabulary(model)
        self.caps = caps
        self.n_past = 0
        self._api, self._model, self._context = api, model, context
        self._memory = api.llama_get_memory(context)
        self._fixed_width = fixed_width
        self._batch = api.llama_batch_init(caps.max_width, 0, 1)
        self._fields = _batch_views(self._batch, caps.max_width)

    @classmethod
    def open(
        cls,
        path: Path | str,
        *,
        name: str | None = None,
        n_ctx: int = 0,
        threads: int = 0,
        kv: str = "",
        gpu_layers: int = 0,
        flash_attention: bool = False,
        fixed_width: int = 0,
    ) -> "GgufModel":
        """Open a GGUF file.

        `n_ctx` tokens of context (0: the model's own, at most 4096); `threads` (0: physical cores available);
        `kv` type of the KV cache, f32 or f16 ("": f32 for float32 weights, else f16); `fixed_width` pads every
        shorter forward to that many tokens, so that all run the same kernels and plain decoding equals verification
        bit for bit, at the price of T(fixed_width) a plain step (0: off).

        Raises InputError (bad option), LoadError (not a GGUF, refused by llama.cpp), MemoryShortError.
        """
        path = Path(path)
        _check_file(path)
        if kv and kv not in KV_TYPES:
            raise InputError(f"unknown kv type {kv!r}; known: {', '.join(KV_TYPES)}")
        if min(n_ctx, threads, gpu_layers, fixed_width) < 0 or fixed_width > MAX_BATCH:
            raise InputError(
                f"n_ctx, threads, gpu_layers and fixed_width must be 0 or more (fixed_width at most {MAX_BATCH}); "
                f"got {n_ctx}, {threads}, {gpu_layers}, {fixed_width}"
            )
        name = name or path.name
        weights = path.stat().st_size
        if not gpu_layers:
            require(Need(weights, 0), device="cpu", what=name)
        model = _open_model(path, gpu_layers)
        try:
            dtype = _weight_type(model)
            kv = kv or ("f32" if dtype == "f32" else "f16")
            n_ctx = n_ctx or min(binding.library().api.llama_model_n_ctx_train(model), DEFAULT_N_CTX)
            if not gpu_layers:
                require(Need(weights, _state_bytes(model, n_ctx, kv)), device="cpu", what=name)
            context = _open_context(model, n_ctx, kv, threads or available_cores(), flash_attention)
        except BaseException:
            binding.library().api.llama_model_free(model)
            raise
        caps = _capabilities(model, context, dtype, kv, "cuda" if gpu_layers else "cpu")
        return cls(model, context, name=name, caps=caps, fixed_width=fixed_width)

    def forward(self, ids: Sequence[int], n_logits: int | None = None) -> np.ndarray:
        rows = check_forward(self, ids, n_logits)
        out = np.empty((rows, self.vocab.size), dtype=np.float32)
        first_row = len(ids) - rows  # ids before it need no logits
        for start in range(0, len(ids), self.caps.max_width):
            part = ids[start : start + self.caps.max_width]
            wanted = min(len(part), max(0, start + len(part) - first_row))
            done = max(0, start - first_row)
            self._decode(part, wanted, out[done : done + wanted])
        return out

    def _decode(self, ids: Sequence[int], n_logits: int, out: np.ndarray) -> None:
        """One llama_decode; fills `out (n_logits, vocab)`."""
        n = len(ids)
        pad = min(max(0, self._fixed_width - n), self.caps.n_ctx - self.n_past - n)
        width = n + pad
        token, position, wants = self._fields
        token[:n] = ids
        token[n:width] = ids[-1]
        position[:width] = np.arange(self.n_past, self.n_past + width)
        wants[:width] = 0
        # a padded forward asks for all rows: llama.cpp reuses its graph only for equal widths and equal row counts
        wants[0 if pad else n - n_logits : width] = 1
        self._batch.n_tokens = width
        code = self._api.llama_decode(self._context, self._batch)
        if code != 0:
            # whole or partial ubatches may have been stored: drop them, so that the state is what n_past says
            self._api.llama_memory_seq_rm(self._memory, 0, self.n_past, -1)
            raise EngineError(f"llama.cpp could not decode {n} tokens of {self.name} at position {self.n_past}: {code}")
        if n_logits:
            # llama.cpp's buffer is overwritten by its next call: copy the rows out
            shape = (width if pad else n_logits, self.vocab.size)
            rows = np.ctypeslib.as_array(self._api.llama_get_logits(self._context), shape=shape)
            out[:] = rows[n - n_logits : n] if pad else rows
        if pad and not self._api.llama_memory_seq_rm(self._memory, 0, self.n_past + n, -1):
            raise RewindError(f"llama.cpp did not remove {pad} padding tokens of {self.name}")
        self.n_past += n

    def rewind(self, n: int) -> None:
        check_rewind(self, n)
        if n == 0:
            return
        if not self._api.llama_memory_seq_rm(self._memory, 0, self.n_past - n, -1):
            raise RewindError(f"llama.cpp refused to remove the last {n} of {self.n_past} tokens of {self.name}")
        self.n_past -= n

    def reset(self) -> None:
        self._api.llama_memory_clear(self._memory, False)
        self.n_past = 0

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return binding.tokenize(self._model, text, special=special)

    def close(self) -> None:
        if self._context is None:
            return
        self._api.llama_batch_free(self._batch)
        self._api.llama_free(self._context)
        self._api.llama_model_free(self._model)
        self._context = self._model = None

    def locate_nonfinite(self, ids: Sequence[int]) -> str:
        """llama.cpp shows no intermediate values here: always ""."""
        return ""


def available_cores() -> int:
    """Physical cores this process may use: more threads than that make verification slower."""
    physical = psutil.cpu_count(logical=False) or 1
    try:
        allowed = len(psutil.Process().cpu_affinity())
    except AttributeError:  # macOS has no affinity
        allowed = physical
    return max(1, min(physical, allowed))


def _check_file(path: Path) -> None:
    if not path.is_file():
        raise InputError(f"no such model file: {path}")
    with path.open("rb") as f:
        magic = f.read(4)
    if magic != b"GGUF":
        raise LoadError(f"{path} is not a GGUF file (it starts with {magic!r}): fetch or convert it again")


def _open_model(path: Path, gpu_layers: int) -> object:
    lib = binding.library()
    params = lib.api.llama_model_default_params()
    params.n_gpu_layers = gpu_layers
    lib.errors.clear()
    model = lib.api.llama_model_load_from_file(str(path).encode(), params)
    if not model:
        raise LoadError(f"llama.cpp cannot open {path}: {'; '.join(lib.errors) or 'it gives no reason'}")
    return model


def _open_context(model: object, n_ctx: int, kv: str, threads: int, flash_attention: bool) -> object:
    lib = binding.library()
    params = lib.api.llama_context_default_params()
    params.n_ctx = n_ctx
    params.n_batch = params.n_ubatch = min(MAX_BATCH, n_ctx)
    params.n_seq_max = 1
    # width 1 and wider forwards take their threads from two fields; unequal ones would tilt T(n)/T(1)
    params.n_threads = params.n_threads_batch = threads
    params.type_k = params.type_v = KV_TYPES[kv][0]
    params.flash_attn_type = 1 if flash_attention else 0
    params.swa_full = True  # sliding-window layers keep every entry, so that a rewind is exact
    params.no_perf = True
    lib.errors.clear()
    context = lib.api.llama_init_from_model(model, params)
    if not context:
        raise LoadError(f"llama.cpp cannot make a context of {n_ctx} tokens: {'; '.join(lib.errors) or 'no reason'}")
    return context


def _state_bytes(model: object, n_ctx: int, kv: str) -> int:
    """Bytes of the KV cache; 0 for models without attention, whose state is small."""
    api = binding.library().api
    heads, kv_heads = api.llama_model_n_head(model), api.llama_model_n_head_kv(model)
    if heads < 1 or kv_heads < 1:
        return 0
    return kv_bytes(
        n_layers=api.llama_model_n_layer(model),
        n_kv_heads=kv_heads,
        head_dim=api.llama_model_n_embd(model) // heads,
        n_ctx=n_ctx,
        bytes_per_value=KV_TYPES[kv][1],
    )


def _weight_type(model: object) -> str:
    number = binding.metadata(model, "general.file_type") or ""
    names = {str(v): k for k, v in binding.FILE_TYPES.items()}
    return names.get(number, f"ftype{number}" if number else "unknown")


def _capabilities(model: object, context: object, dtype: str, kv: str, device: str) -> Capabilities:
    api = binding.library().api
    n_ctx, reason = api.llama_n_ctx(context), ""
    if api.llama_model_is_recurrent(model) or api.llama_model_is_hybrid(model):
        reason = "it has recurrent layers, whose state keeps no past to go back to"
    return Capabilities(
        engine="llama.cpp",
        device=device,
        dtype=dtype,
        n_ctx=n_ctx,
        max_width=min(api.llama_n_batch(context), n_ctx),
        rewind="none" if reason else "crop",
        rewind_depth=0 if reason else n_ctx,
        rewind_reason=reason,
        lossless_dtype=dtype == "f32" and kv == "f32",
    )


def _batch_views(batch: object, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """numpy views of the batch's token, position and logits fields; filling them costs 1 us, element-wise 8 us."""

    def view(pointer: object) -> np.ndarray:
        return np.ctypeslib.as_array(pointer, shape=(size,))

    view(batch.n_seq_id)[:] = 1
    for i in range(size):
        batch.seq_id[i][0] = ctypes.c_int32(0)
    return view(batch.token), view(batch.pos), view(batch.logits)
