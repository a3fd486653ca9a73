"""A GGUF file run by llama.cpp, through the low-level binding.

Greedy results depend on the width of a forward only by rounding: llama.cpp uses other kernels for one token than for
several.
"""

import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from specnb.errors import InputError, MemoryShortError
from specnb.lm.base import Capabilities, check_forward
from specnb.lm.cache import size_of
from specnb.lm.gguf import binding
from specnb.lm.gguf import open as gguf_open
from specnb.lm.gguf.engine import LlamaEngine, PlaneRecorder
from specnb.lm.memory import gguf_parts
from specnb.lm.rollback import AUTO, GoesBack, Recompute, Rollback, check_options, choose

if TYPE_CHECKING:
    from specnb.lm.gguf.tensors import Watch


DEPTH = 16
"""Planes that are asked for. From about 20 on llama.cpp ends the process for LFM2 (its graph has no room for more)."""

PREFERRED = ("snapshots", "fused", "checkpoint", "recompute")


def planes_wanted(model: object, kind: str, depth: int, n_ubatch: int) -> int:
    """How many planes to ask the context for (`n_rs_seq`). Raises InputError for an unknown way back or depth."""
    if kind == "replay":
        raise InputError("llama.cpp does not show what enters a recurrence: rollback=replay needs ?backend=hf")
    check_options(kind, depth)
    if kind not in (AUTO, "snapshots") or not gguf_open.recurrent(model):
        return 0
    if depth > DEPTH and (binding.metadata(model, "general.architecture") or "").startswith("lfm2"):
        raise InputError(f"rollback_depth is {depth}, but llama.cpp fails on more than {DEPTH} for LFM2")
    return min(depth, max(0, n_ubatch - 2))  # else a GGML_ASSERT ends the process


class GgufModel(GoesBack):
    """llama.cpp behind the LanguageModel interface. Make one with `GgufModel.open`."""

    def __init__(
        self,
        model: object,
        context: object,
        *,
        name: str,
        caps: Capabilities,
        fixed_width: int,
        watch: "Watch | None" = None,
    ) -> None:
        self.name = name
        self.vocab = binding.vocabulary(model)
        self.caps = caps
        self._model, self._context = model, context
        self._lacks_bytes = self.vocab.kind == "spm" and not {bytes([b]) for b in range(256)} <= set(self.vocab.pieces)
        self._engine = LlamaEngine(
            name, context, self.vocab.size, width=caps.max_width, fixed_width=fixed_width, watch=watch
        )
        # a notebook cell that is run again drops its model without closing it
        self._free = weakref.finalize(self, _free, self._engine.batch, context, model, watch)
        self._free.atexit = False
        self.rollback: Rollback = Recompute(self._engine)
        """The way back, and what it has cost."""

    @classmethod
    def open(
        cls,
        path: Path | str,
        watch: "Watch | None" = None,
        *,
        name: str | None = None,
        n_ctx: int = 0,
        threads: int = 0,
        kv: str = "",
        gpu_layers: int = 0,
        flash_attention: bool = False,
        fixed_width: int = 0,
        rollback: str = AUTO,
        rollback_depth: int = DEPTH,
    ) -> "GgufModel":
        """Open a GGUF file.

        `n_ctx` tokens of context (0: the model's own, at most 4096); `threads` (0: physical cores available);
        `kv` type of the KV cache, f32 or f16 ("": f32 for float32 weights, else f16); `fixed_width` pads every
        shorter forward to that many tokens, so that all run the same kernels and plain decoding equals verification
        bit for bit, at the price of T(fixed_width) a plain step (0: off); `rollback` how the state of a recurrent
        model goes back (crop, snapshots, fused, checkpoint, recompute; "auto": the first that a probe finds exact),
        and `rollback_depth` how many tokens of it llama.cpp keeps snapshots of; `watch` is shown what is computed.

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
        weights = sum(size_of(part) for part in gguf_parts(path))
        share = gguf_open.gpu_share(path, gpu_layers)
        gguf_open.require_room(name, weights, 0, share)
        api = binding.library().api
        with ExitStack() as undo:
            model = gguf_open.open_model(path, gpu_layers)
            undo.callback(api.llama_model_free, model)
            dtype = gguf_open.weight_type(model)
            kv = kv or ("f32" if dtype == "f32" else "f16")
            n_ctx = n_ctx or min(api.llama_model_n_ctx_train(model), gguf_open.DEFAULT_N_CTX)
            # padding lies beyond the context that the caller sees, so that the last forward is padded too
            room = n_ctx + fixed_width
            recurrent = gguf_open.recurrent(model)
            if fixed_width and recurrent:
                raise InputError(f"{name} has recurrent layers: padding cannot be taken back, use fixed_width=0")
            threads = threads or gguf_open.available_cores()
            planes = planes_wanted(model, rollback, rollback_depth, min(gguf_open.MAX_BATCH, room))
            try:
                state = gguf_open.state_bytes(model, room, kv, planes)
                gguf_open.require_room(name, weights, state, share, loaded=True)
            except MemoryShortError:
                if rollback != AUTO or not planes:
                    raise
                planes = 0  # another way back needs none
                gguf_open.require_room(name, weights, gguf_open.state_bytes(model, room, kv), share, loaded=True)
            context = gguf_open.open_context(model, room, kv, threads, flash_attention, planes, watch)
            undo.callback(api.llama_free, context)
            caps = Capabilities(
                engine="llama.cpp",
                device="gpu" if gpu_layers else "cpu",
                dtype=dtype,
                n_ctx=n_ctx,  # llama.cpp rounds a context up
                max_width=min(api.llama_n_batch(context), n_ctx),
                rewind="recompute",  # until another way back is chosen
                rewind_depth=n_ctx,
                rewind_reason="it has recurrent layers, whose state keeps no past to go back to" if recurrent else "",
                # flash attention rounds to 16 bits inside, for every type of cache
                lossless_dtype=dtype == kv == "f32" and not flash_attention,
                same_bits_up_to=fixed_width,
                details={
                    "threads": threads,
                    "kv": kv,
                    "flash_attention": flash_attention,
                    "fixed_width": fixed_width,
                },
            )
            opened = cls(model, context, name=name, caps=caps, fixed_width=fixed_width, watch=watch)
            undo.pop_all()
        try:
            opened._choose_rollback(rollback)
        except BaseException:
            opened.close()
            raise
        return opened

    def _choose_rollback(self, kind: str) -> None:
        planes = binding.library().api.llama_n_rs_seq(self._context)  # what became of those asked for
        recorders = {"snapshots": partial(PlaneRecorder, self._engine, planes)}
        self.rollback = choose(self, self._engine, recorders, kind, PREFERRED)
        self.caps = replace(self.caps, rewind=self.rollback.kind)

    def forward(self, ids: Sequence[int], n_logits: int | None = None) -> np.ndarray:
        self._require_open()
        rows, before = check_forward(self, ids, n_logits), self.n_past
        try:
            return self.rollback.forward(ids, rows)
        except BaseException:  # an interrupt too: whole or partial pieces may be stored already
            self._go_back(before)
            raise

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        self._require_open()
        if self._lacks_bytes and (missing := binding.unspellable(self.vocab, text)):
            raise InputError(f"the tokenizer of {self.name} has neither a token for {missing!r} nor for its bytes")
        return binding.tokenize(self._model, text, special=special)

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()  # llama.cpp would end the process on a freed context
        self._free()
        self._engine = self._context = self._model = None

    def locate_nonfinite(self, ids: Sequence[int]) -> str:
        """llama.cpp shows no intermediate values here: always ""."""
        return ""


def _free(batch: object, context: object, model: object, _watch: "Watch | None") -> None:
    """`_watch` is held until here: llama.cpp calls into it as long as the context lives."""
    api = binding.library().api
    api.llama_batch_free(batch)
    api.llama_free(context)
    api.llama_model_free(model)
