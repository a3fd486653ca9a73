"""A GGUF file run by llama.cpp, through the low-level binding.

The state is one sequence in llama.cpp's KV cache. Everything is validated before a call, because a failed
GGML_ASSERT ends the process (and a notebook's kernel with it). Greedy results depend on the width of a forward
only by rounding: llama.cpp uses other kernels for one token than for several.
"""

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from specnb.errors import EngineError, InputError, RewindError
from specnb.lm import binding, gguf_open
from specnb.lm.base import Capabilities, check_forward, check_rewind
from specnb.lm.memory import Need, require


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
        self._lacks_bytes = self.vocab.kind == "spm" and not {bytes([b]) for b in range(256)} <= set(self.vocab.pieces)
        room = max(caps.max_width, fixed_width)
        self._batch = api.llama_batch_init(room, 0, 1)
        self._fields = _batch_views(self._batch, room)
        # a notebook cell that is run again drops its model without closing it
        self._free = weakref.finalize(self, _free, self._batch, context, model)
        self._free.atexit = False

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
        gguf_open.check_file(path)
        if kv and kv not in gguf_open.KV_TYPES:
            raise InputError(f"unknown kv type {kv!r}; known: {', '.join(gguf_open.KV_TYPES)}")
        asked = {"n_ctx": n_ctx, "threads": threads, "gpu_layers": gpu_layers, "fixed_width": fixed_width}
        for option, value in asked.items():
            if not 0 <= value <= gguf_open.LIMITS[option]:
                raise InputError(f"{option} is {value}: it must be 0 to {gguf_open.LIMITS[option]}")
        if gpu_layers and not binding.library().api.llama_supports_gpu_offload():
            raise InputError(f"gpu_layers is {gpu_layers}, but this llama.cpp is built without a GPU; use gpu_layers=0")
        name = name or path.name
        weights = path.stat().st_size
        if not gpu_layers:
            require(Need(weights, 0), device="cpu", what=name)
        model = gguf_open.open_model(path, gpu_layers)
        context = None
        try:
            dtype = gguf_open.weight_type(model)
            kv = kv or ("f32" if dtype == "f32" else "f16")
            n_ctx = n_ctx or min(binding.library().api.llama_model_n_ctx_train(model), gguf_open.DEFAULT_N_CTX)
            # padding lies beyond the context that the caller sees, so that the last forward is padded too
            room = n_ctx + fixed_width
            if not gpu_layers:
                require(Need(weights, gguf_open.state_bytes(model, room, kv)), device="cpu", what=name)
            if fixed_width and gguf_open.recurrent(model):
                raise InputError(f"{name} has recurrent layers: padding cannot be taken back, use fixed_width=0")
            settings = {
                "threads": threads or gguf_open.available_cores(),
                "kv": kv,
                "flash_attention": flash_attention,
                "fixed_width": fixed_width,
            }
            context = gguf_open.open_context(model, room, kv, settings["threads"], flash_attention)
            # flash attention rounds to 16 bits inside, for every type of cache
            exact = dtype == kv == "f32" and not flash_attention
            caps = gguf_open.capabilities(model, context, n_ctx, dtype, "gpu" if gpu_layers else "cpu")
            caps = replace(caps, lossless_dtype=exact, same_bits_up_to=fixed_width, details=settings)
            return cls(model, context, name=name, caps=caps, fixed_width=fixed_width)
        except BaseException:
            if context is not None:
                binding.library().api.llama_free(context)
            binding.library().api.llama_model_free(model)
            raise

    def forward(self, ids: Sequence[int], n_logits: int | None = None) -> np.ndarray:
        self._require_open()
        rows, before = check_forward(self, ids, n_logits), self.n_past
        out = np.empty((rows, self.vocab.size), dtype=np.float32)
        first_row = len(ids) - rows  # ids before it need no logits
        try:
            for start in range(0, len(ids), self.caps.max_width):
                part = ids[start : start + self.caps.max_width]
                wanted = min(len(part), max(0, start + len(part) - first_row))
                done = max(0, start - first_row)
                self._decode(part, wanted, out[done : done + wanted])
        except BaseException:  # an interrupt too: whole or partial pieces may be stored already
            self._go_back(before)
            raise
        return out

    def _decode(self, ids: Sequence[int], n_logits: int, out: np.ndarray) -> None:
        """One llama_decode; fills `out (n_logits, vocab)`."""
        n = len(ids)
        pad = max(0, self._fixed_width - n)
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
            raise EngineError(f"llama.cpp could not decode {n} tokens of {self.name} at position {self.n_past}: {code}")
        if n_logits:
            # llama.cpp's buffer is overwritten by its next call: copy the rows out
            shape = (width if pad else n_logits, self.vocab.size)
            rows = np.ctypeslib.as_array(self._api.llama_get_logits(self._context), shape=shape)
            out[:] = rows[n - n_logits : n] if pad else rows
        if pad and not self._api.llama_memory_seq_rm(self._memory, 0, self.n_past + n, -1):
            raise RewindError(f"llama.cpp did not remove {pad} padding tokens of {self.name}")
        self.n_past += n

    def _go_back(self, n: int) -> None:
        """The state of the first `n` tokens again; a recurrent state cannot go back and is emptied."""
        if self._api.llama_memory_seq_rm(self._memory, 0, n, -1):
            self.n_past = n
        else:
            self.reset()

    def rewind(self, n: int) -> None:
        self._require_open()
        check_rewind(self, n)
        if n == 0:
            return
        if not self._api.llama_memory_seq_rm(self._memory, 0, self.n_past - n, -1):
            raise RewindError(f"llama.cpp refused to remove the last {n} of {self.n_past} tokens of {self.name}")
        self.n_past -= n

    def reset(self) -> None:
        self._require_open()
        self._api.llama_memory_clear(self._memory, False)
        self.n_past = 0

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        self._require_open()
        if self._lacks_bytes and (missing := binding.unspellable(self.vocab, text)):
            raise InputError(f"the tokenizer of {self.name} has neither a token for {missing!r} nor for its bytes")
        return binding.tokenize(self._model, text, special=special)

    def _require_open(self) -> None:
        # llama.cpp would end the process on a freed context
        if self._context is None:
            raise InputError(f"{self.name} was closed: load it again")

    def close(self) -> None:
        self._free()
        self._context = self._model = None

    def locate_nonfinite(self, ids: Sequence[int]) -> str:
        """llama.cpp shows no intermediate values here: always ""."""
        return ""


def _free(batch: object, context: object, model: object) -> None:
    api = binding.library().api
    api.llama_batch_free(batch)
    api.llama_free(context)
    api.llama_model_free(model)


def _batch_views(batch: object, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """numpy views of the batch's token, position and logits fields; filling them costs 1 us, element-wise 8 us."""

    def view(pointer: object) -> np.ndarray:
        return np.ctypeslib.as_array(pointer, shape=(size,))

    view(batch.n_seq_id)[:] = 1
    for i in range(size):
        batch.seq_id[i][0] = ctypes.c_int32(0)
    return view(batch.token), view(batch.pos), view(batch.logits)
