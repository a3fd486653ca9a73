"""A GGUF model in llama.cpp, through the low-level bindings.

llama.cpp uses different kernels for one token and for several, so the bits of a token's logits
depend on the width of the forward pass; `exact` selects settings that avoid this. All arguments are
checked before a call, because a failed GGML_ASSERT ends the process (and the notebook's kernel),
and because `llama_memory_seq_rm` may return True although it fails: see `PlaneRecorder`.
"""

import ctypes
import math
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from threading import RLock
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import Field

from specnb.errors import EngineError, InputError, MemoryShortError, StateError
from specnb.fetch import gguf_parts
from specnb.io import size_of
from specnb.lm.base import DEFAULT_N_CTX, Capabilities, Exact, kv_bytes
from specnb.lm.gguf import binding
from specnb.lm.gguf.binding import KV_TYPES, MAX_BATCH
from specnb.lm.gguf.header import ARCHITECTURE, sound_header
from specnb.lm.probe import PROBED_WIDTHS, certified
from specnb.lm.rollback import (
    AUTO,
    Engine,
    Recompute,
    Recorder,
    RewindableModel,
    RollbackDepth,
    RollbackKind,
)
from specnb.machine import available_cores, require_memory, thread_counts

DEPTH = 16
"""Default number of planes (state snapshots). With 20, llama.cpp's graph is too small for LFM2."""

PARTIAL_ONLY = 1
"""LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY: the recurrent part of a state, no attention entries."""

PADDINGS = {"": 1, ", single tokens fed as two": 2, ", forwards padded to at least 8": 8}
"""Minimum number of tokens per forward pass, by padding mode, cheapest first."""
ROOM = max(PADDINGS.values())
"""Extra context for padding, in tokens."""
RECURRENT_KEYS = (
    ".ssm.state_size",
    ".ssm.conv_kernel",
    ".wkv.head_size",
    ".shortconv.l_cache",
    ".kda.head_dim",
)
"""Suffixes of header keys of recurrent layers (`llama-arch.cpp`: LLM_KV_SSM_…, LLM_KV_WKV_…)."""
PAST = 255
"""Tokens before the probe: at 256 the cache grows to 512 entries, and kernels may change."""


@dataclass(frozen=True)
class Plan:
    """Settings for opening a file: the options of `GgufModel.open`, completed after loading.

    `counts` are the candidate numbers of threads. `paddings` are the keys of PADDINGS to try for
    equal bits at all widths (none: the fastest settings).
    """

    n_ctx: int
    kv: str
    gpu_layers: int
    rollback: str
    depth: int
    n_bytes: int
    counts: Sequence[int]
    paddings: Sequence[str]
    flash: bool = False

    @property
    def room(self) -> int:
        """Length of the context in tokens, including padding."""
        return self.n_ctx + ROOM

    def completed(self, model: object) -> "Plan":
        """Return the plan with this model's defaults for unset options."""
        dtype = file_type(model)
        paddings = () if is_recurrent(model) else self.paddings
        # flash attention rounds to 16 bits internally, for all cache types
        flash = bool(paddings) and "f32" not in (dtype, self.kv)
        kv = "f32" if dtype == "f32" else "f16"
        if flash and not self.gpu_layers:
            kv = "mixed"
        trained = binding.load_library().api.llama_model_n_ctx_train(model)
        n_ctx = self.n_ctx or min(trained, DEFAULT_N_CTX)
        return replace(self, n_ctx=n_ctx, kv=self.kv or kv, paddings=paddings, flash=flash)

    def affordable_planes(self, model: object, name: str) -> int:
        """Return the number of planes to request; 0 if memory is short and `rollback` is "auto".

        Raises MemoryShortError, and InputError for an unsupported strategy or depth.
        """
        planes = self._planes(model)
        try:
            require_memory(self.n_bytes, state_bytes(model, self.room, self.kv, planes), name=name)
        except MemoryShortError:
            if self.rollback != AUTO:
                raise
            planes = 0
            require_memory(self.n_bytes, state_bytes(model, self.room, self.kv), name=name)
        return planes

    def _planes(self, model: object) -> int:
        if self.rollback == "replay":
            raise InputError(
                "rollback=replay needs inputs that llama.cpp does not expose: use ?backend=hf, "
                "or rollback=snapshots"
            )
        if self.rollback not in (AUTO, "snapshots") or not is_recurrent(model):
            return 0
        if self.depth > DEPTH and (binding.metadata(model, ARCHITECTURE) or "").startswith("lfm2"):
            raise InputError(
                f"rollback_depth is {self.depth}, but llama.cpp fails on more than {DEPTH} for LFM2"
            )
        # more would fail a GGML_ASSERT
        return min(self.depth, max(0, min(MAX_BATCH, self.room) - 2))


class GgufModel(RewindableModel):
    """A `LanguageModel` in llama.cpp. Create it with `GgufModel.open`."""

    preferred = ("snapshots", "fused", "checkpoint", "recompute")

    def __init__(self, model: object, context: object, name: str, plan: Plan) -> None:
        api = binding.load_library().api
        dtype = file_type(model)
        self.name = name
        self.vocab = binding.read_vocabulary(model)
        self.caps = Capabilities(
            engine="llama.cpp",
            device="gpu" if plan.gpu_layers else "cpu",
            dtype=dtype,
            n_ctx=plan.n_ctx,  # llama.cpp rounds the context length up
            max_width=min(api.llama_n_batch(context), plan.n_ctx),
            rewind_reason="it has recurrent layers, whose state cannot be cropped"
            if is_recurrent(model)
            else "",
            lossless_dtype=dtype == plan.kv == "f32",
            details={"threads": plan.counts[-1], "kv": plan.kv, "flash_attention": plan.flash},
        )
        self._model = model
        self._engine = LlamaEngine(name, context, self.vocab.size, width=self.caps.max_width)
        # rerunning a notebook cell drops its model without closing it
        self._free = weakref.finalize(self, _free, context, model)
        self._free.atexit = False
        self.rollback = Recompute(self._engine)

    @classmethod
    def open(
        cls,
        path: Path | str,
        *,
        name: str | None = None,
        n_ctx: Annotated[int, Field(ge=0, le=2**31 - 1024)] = 0,
        threads: Annotated[int, Field(ge=0, le=512)] = 0,
        kv: Literal["", "f32", "f16", "mixed"] = "",
        gpu_layers: Annotated[int, Field(ge=0, lt=2**31)] = 0,
        exact: Exact = "auto",
        rollback: RollbackKind = AUTO,
        rollback_depth: RollbackDepth = DEPTH,
    ) -> "GgufModel":
        """Open a GGUF file. Beyond the upper limits of the options, llama.cpp crashes.

        Args:
            n_ctx: context length in tokens (0: the model's limit, at most 4096).
            threads: 0 for all available physical cores, fewer while other processes use some.
            kv: type of the KV cache, f32, f16 or mixed ("": f32 for float32 weights, mixed for
                flash attention on a CPU, else f16).
            gpu_layers: layers on the GPU; llama.cpp checks the GPU's memory.
            exact: whether logits must be bit-identical at all widths of a forward pass, as a probe
                certifies: "auto" if that is nearly free (flash attention, weights not repacked),
                "true" also with padding, "false" never.
            rollback: strategy for a recurrent state (crop, snapshots, fused, checkpoint, recompute;
                "auto": the first that a probe finds exact).
            rollback_depth: number of tokens for which llama.cpp keeps snapshots.

        Raises InputError (option), LoadError (not a GGUF, or not supported), MemoryShortError.
        """
        path = Path(path)
        name = name or path.name
        if gpu_layers and not binding.load_library().api.llama_supports_gpu_offload():
            raise InputError(
                f"gpu_layers is {gpu_layers}, but this llama.cpp is built without GPU support; "
                "use gpu_layers=0"
            )
        n_bytes = 0 if gpu_layers else sum(map(size_of, gguf_parts(path)))
        require_memory(n_bytes, name=name)
        # passes of a recurrent model cannot be padded, and are not probed
        recurrent = any(key.endswith(RECURRENT_KEYS) for key in sound_header(path).values)
        plan = Plan(
            n_ctx=n_ctx,
            kv=kv,
            gpu_layers=gpu_layers,
            rollback=rollback,
            depth=rollback_depth,
            n_bytes=n_bytes,
            counts=[threads] if threads else thread_counts(available_cores()),
            paddings=[*PADDINGS] if exact == "true" else [""],
        )
        if exact != "false" and not recurrent:
            opened = cls._open(path, name, plan)
            if exact == "true" or opened.caps.same_bits_up_to:
                return opened
            opened.close()
        return cls._open(path, name, replace(plan, paddings=[]))

    @classmethod
    def _open(cls, path: Path, name: str, plan: Plan) -> "GgufModel":
        """Open a file according to `plan`; certify it if the plan has paddings."""
        api = binding.load_library().api
        with ExitStack() as undo:
            # 1. weights: repacked ones are faster, but their rounding depends on the pass width
            model = binding.open_model(path, plan.gpu_layers, repack=not plan.paddings)
            undo.callback(api.llama_model_free, model)
            # 2. context, with room for padding and snapshots
            plan = plan.completed(model)
            planes = plan.affordable_planes(model, name)
            context = binding.open_context(
                model,
                plan.room,
                plan.kv,
                plan.counts[-1],
                flash_attention=plan.flash,
                planes=planes,
            )
            undo.callback(api.llama_free, context)
            opened = cls(model, context, name, plan)
            undo.pop_all()  # `close` frees both
            undo.callback(opened.close)
            # 3. rollback, with the number of planes that llama.cpp created
            recorders = {
                "snapshots": partial(PlaneRecorder, opened._engine, api.llama_n_rs_seq(context))
            }
            opened._choose_rollback(recorders, plan.rollback)
            opened.caps = replace(opened.caps, rewind=opened.rollback.kind)
            # 4. certificate, and threads
            any_time = bool(plan.paddings) and opened._certify(plan)
            opened._follow_cores(plan.counts, any_time=any_time)
            undo.pop_all()
        return opened

    def _certify(self, plan: Plan) -> bool:
        """Select the padding of `plan` with the largest certified width, and set `caps`.

        Returns whether results are bit-identical for all numbers of threads.
        """
        engine = self._engine
        details = self.caps.details
        facts = _facts(self._model)
        certificates = {}
        for padding in plan.paddings:
            engine.padding = PADDINGS[padding]
            certificates[padding] = certified(
                self,
                plan.counts,
                engine.set_threads,
                past=PAST,
                padding=padding,
                gpu_layers=plan.gpu_layers,
                dtype=self.caps.dtype,
                options=details,
                **facts,
            )
            if certificates[padding].width == max(PROBED_WIDTHS):
                break
        # of equal widths, the first padding is the cheapest
        best = max(certificates, key=lambda padding: certificates[padding].width)
        engine.padding = PADDINGS[best]
        width, any_threads = certificates[best]
        if width:
            attention = "flash attention, " if details["flash_attention"] else ""
            details["exact_by"] = f"{attention}weights not repacked{best}"
        self.caps = replace(self.caps, same_bits_up_to=width)
        return width > 0 and any_threads

    def encode(self, text, *, special=True):
        # the lock: so that `close` in another thread cannot free the model meanwhile
        with self._require_open().lock:
            self._require_open()
            return binding.tokenize(self._model, self.vocab, text, special=special)

    def close(self):
        if self._engine is not None:
            self._engine.close()
        self._free()
        self._engine = self._model = None


def _free(context: object, model: object) -> None:
    api = binding.load_library().api
    api.llama_free(context)
    api.llama_model_free(model)


def _facts(model: object) -> dict[str, Any]:
    """Return what determines llama.cpp's kernels besides the CPU; sizes imply shapes and types."""
    api = binding.load_library().api
    sizes = ("size", "n_params", "n_layer", "n_embd", "n_head", "n_head_kv")
    facts = {name: getattr(api, f"llama_model_{name}")(model) for name in sizes}
    build = f"{version('llama-cpp-python')} {api.llama_print_system_info().decode()}"
    return facts | {"architecture": binding.metadata(model, ARCHITECTURE), "build": build}


def is_recurrent(model: object) -> bool:
    """Return whether any layer has a recurrent state."""
    api = binding.load_library().api
    return bool(api.llama_model_is_recurrent(model) or api.llama_model_is_hybrid(model))


def file_type(model: object) -> str:
    """Return the type of most weights, as in FILE_TYPES if known."""
    number = binding.metadata(model, "general.file_type") or "?"
    return {str(v): k for k, v in binding.FILE_TYPES.items()}.get(number, f"ftype{number}")


def state_bytes(model: object, n_ctx: int, kv: str, planes: int = 0) -> int:
    """Return an upper bound on the size of a state, in bytes.

    Counts a KV cache and a recurrent state for all layers; each plane is another copy of the
    recurrent states.
    """
    api = binding.load_library().api
    n_layers = api.llama_model_n_layer(model)
    arch = binding.metadata(model, ARCHITECTURE)
    # a recurrent state has inner size x state size float32 values per layer
    sizes = [binding.metadata(model, f"{arch}.ssm.{key}") for key in ("inner_size", "state_size")]
    size = (1 + planes) * n_layers * math.prod(map(int, sizes)) * 4 if all(sizes) else 0
    head_dim = api.llama_model_n_embd(model) // max(api.llama_model_n_head(model), 1)
    kv_heads = api.llama_model_n_head_kv(model)
    return size + kv_bytes(n_layers, kv_heads, head_dim, n_ctx, KV_TYPES[kv][-1])


class SavedBlob(NamedTuple):
    """The recurrent part of a state after `n_tokens` tokens, as serialized by llama.cpp."""

    n_tokens: int
    nbytes: int
    data: ctypes.Array


class LlamaEngine(Engine):
    """A llama.cpp context with a state of `n_held` tokens.

    `width` is the maximum number of tokens per decode. A decode of fewer than `padding` tokens is
    padded. The caller owns the context.
    """

    padding = 1

    def __init__(self, name: str, context: object, vocab_size: int, *, width: int) -> None:
        self.n_held = 0
        self.last_decoded = 0
        """Number of tokens of the last decode, 0 after any other operation on the state."""
        self.name = name
        self._context = context
        self._vocab_size = vocab_size
        self._api = binding.load_library().api
        self._memory = self._api.llama_get_memory(context)
        self._width = width
        self.lock = RLock()
        """Held while llama.cpp uses the context: concurrent use would abort the process."""
        room = width + ROOM
        self.batch = self._api.llama_batch_init(room, 0, 1)
        weakref.finalize(self, self._api.llama_batch_free, self.batch)
        np.ctypeslib.as_array(self.batch.n_seq_id, shape=(room,))[:] = 1
        for i in range(room):
            self.batch.seq_id[i][0] = 0
        # numpy views: filling them takes 1 us, setting single elements 8 us
        fields = self.batch.token, self.batch.pos, self.batch.logits
        self._fields = [np.ctypeslib.as_array(field, shape=(room,)) for field in fields]

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Lock the context, since llama.cpp aborts on concurrent use and on use after it is freed.

        Raises StateError if another thread uses it, InputError if it is closed.
        """
        if not self.lock.acquire(blocking=False):
            raise StateError(f"{self.name} is in use by another thread: load one model per thread")
        try:
            if self._context is None:
                raise InputError(f"{self.name} was closed: load it again")
            yield
        finally:
            self.lock.release()

    def close(self) -> None:
        """Disable the engine. Raises StateError while another thread uses the context."""
        with self.alone():
            self._context = None

    def set_threads(self, n: int) -> None:
        """Set the number of threads for all widths, as `binding.open_context` does."""
        with self.alone():
            self._api.llama_set_n_threads(self._context, n, n)

    def feed(self, ids, rows):
        out = np.empty((rows, self._vocab_size), dtype=np.float32)
        first_row = len(ids) - rows  # earlier ids need no logits
        with self.alone():
            for start in range(0, len(ids), self._width):
                part = ids[start : start + self._width]
                rows_of_part = slice(
                    max(0, start - first_row), max(0, start + len(part) - first_row)
                )
                self._decode(part, out[rows_of_part])
        return out

    def _decode(self, ids: Sequence[int], out: np.ndarray) -> None:
        """Call llama_decode once, and write the last logits to `out (n_logits, vocab)`."""
        n = len(ids)
        n_logits = len(out)
        width = max(n, self.padding)
        # lm_head is padded, too; llama.cpp reuses its graph for an equal number of rows
        rows = max(width - n + n_logits, self.padding) if n_logits else 0
        token, position, wants = self._fields
        token[:n] = ids
        token[n:width] = ids[-1]
        position[:width] = np.arange(self.n_held, self.n_held + width)
        wants[:width] = 0
        wants[width - rows : width] = 1
        self.batch.n_tokens = width
        self.last_decoded = 0
        code = self._api.llama_decode(self._context, self.batch)
        if code != 0:
            raise EngineError(
                f"llama.cpp could not decode {n} tokens of {self.name} at position {self.n_held}: "
                f"it returned {code}"
            )
        if n_logits:
            # copy the rows: the next call overwrites llama.cpp's buffer
            logits = np.ctypeslib.as_array(
                self._api.llama_get_logits(self._context), shape=(rows, self._vocab_size)
            )
            end = rows - (width - n)
            out[:] = logits[end - n_logits : end]
        self.n_held += width
        if width > n:
            self.crop(width - n)  # the padding
        self.last_decoded = n

    def keep(self, n):
        """Drop entries as `Engine.keep` does, including those of a failed decode.

        Also restores a recurrent state if llama.cpp has its plane.
        """
        with self.alone():
            self.last_decoded = 0
            if removed := self._api.llama_memory_seq_rm(self._memory, 0, n, -1):
                self.n_held = n
            return removed

    @property
    def state_bytes(self) -> int:
        """Bytes of the recurrent part of the state if saved now; nearly 0 for an empty state."""
        with self.alone():
            return self._api.llama_state_seq_get_size_ext(self._context, 0, PARTIAL_ONLY)

    def save(self):
        with self.alone():
            size = self.state_bytes
            data = (ctypes.c_uint8 * size)()
            n_saved = self._api.llama_state_seq_get_data_ext(
                self._context, data, size, 0, PARTIAL_ONLY
            )
            if n_saved != size:
                raise EngineError(
                    f"llama.cpp could not save the recurrent state of {self.name} ({size} bytes)"
                )
            return SavedBlob(self.n_held, size, data)

    def restore(self, saved: SavedBlob):
        # The order matters: if attention entries are removed before the recurrent part is restored,
        # llama.cpp does not remove them, and the next decode returns wrong logits without an error.
        with self.alone():
            size = saved.nbytes
            n_restored = self._api.llama_state_seq_set_data_ext(
                self._context, saved.data, size, 0, PARTIAL_ONLY
            )
            if n_restored != size:
                raise EngineError(
                    f"llama.cpp could not restore the recurrent state of {self.name} ({size} bytes)"
                )
            self.crop(self.n_held - saved.n_tokens)

    def clear(self):
        with self.alone():
            self._api.llama_memory_clear(self._memory, False)
            self.n_held = self.last_decoded = 0


class PlaneRecorder(Recorder):
    """llama.cpp's own snapshots: `n_rs_seq` planes, the states after a decode's last tokens.

    They cover only the last decode, and only once: if more than `last decode - 1` tokens are
    removed, on a second call, or after a state was loaded, llama.cpp returns True but the next
    logits are wrong (llama-cpp-python 0.3.36). `reach` is the number of tokens that can be rolled
    back correctly. llama.cpp always records, so `begin` and `stop` do nothing.
    """

    def __init__(self, engine: LlamaEngine, depth: int) -> None:
        if not depth:
            raise InputError(f"llama.cpp has no snapshots for {engine.name}: use rollback=fused")
        self.depth = depth
        self._engine = engine

    @property
    def nbytes(self) -> int:
        """Bytes of all planes, used or not: each has the size of the current recurrent state."""
        return self.depth * self._engine.state_bytes

    @property
    def reach(self) -> int:
        return max(0, min(self.depth, self._engine.last_decoded - 1))

    def take_back(self, n):
        if n:
            self._engine.crop(n)
