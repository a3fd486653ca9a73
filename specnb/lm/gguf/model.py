"""A GGUF file run by llama.cpp, through the low-level binding.

llama.cpp has other kernels for one token than for several, so that a token's bits depend on the width of its forward;
`exact` finds settings under which they do not. Everything is checked before a call, for a failed GGML_ASSERT ends the
process (and a notebook's kernel with it), and because `llama_memory_seq_rm` answers True to more than it can do: see
`PlaneRecorder`.
"""

import ctypes
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from threading import RLock
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import Field

from specnb.errors import EngineError, InputError, MemoryShortError, RewindError, StateError
from specnb.fetch import gguf_parts
from specnb.io import size_of
from specnb.lm.base import DEFAULT_N_CTX, Capabilities, Exact, kv_bytes
from specnb.lm.gguf import binding
from specnb.lm.gguf.binding import KV_TYPES, MAX_BATCH
from specnb.lm.gguf.header import ARCHITECTURE
from specnb.lm.probe import PROBED_WIDTHS, Certificate, certified
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
"""Planes that are asked for. From about 20 on llama.cpp ends the process for LFM2 (its graph has no room for more)."""

PARTIAL_ONLY = 1
"""LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY: the recurrent part of a state, without the attention entries."""

PADDINGS = {"": 1, ", single tokens fed as two": 2, ", forwards padded to at least 8": 8}
"""Ways to feed forwards, cheapest first, with the fewest tokens that are fed."""
ROOM = max(PADDINGS.values())
"""Tokens that padding needs behind the context that the caller sees."""
RECURRENT_KEYS = (".ssm.state_size", ".ssm.conv_kernel", ".wkv.head_size", ".shortconv.l_cache", ".kda.head_dim")
"""Ends of the header keys of recurrent layers (`llama-arch.cpp`: LLM_KV_SSM_…, LLM_KV_WKV_… and so on)."""
PAST = 255
"""Tokens before the probe: at 256 the cache grows to 512 entries, from where one token may get another kernel."""


@dataclass(frozen=True)
class Plan:
    """How a file is opened: the options of `GgufModel.open`, and what follows from them once the weights are open.

    `counts` are the numbers of threads to choose from; `paddings` those of PADDINGS that may be tried for equal bits at
    all widths, none for the fastest settings.
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
        """Tokens of the context with padding."""
        return self.n_ctx + ROOM

    def completed(self, model: object) -> "Plan":
        """Return the plan with the defaults of this model."""
        dtype = file_type(model)
        paddings = () if is_recurrent(model) else self.paddings
        # flash attention rounds to 16 bits inside, for every type of cache
        flash = bool(paddings) and "f32" not in (dtype, self.kv)
        kv = "mixed" if flash and not self.gpu_layers else "f32" if dtype == "f32" else "f16"
        trained = binding.load_library().api.llama_model_n_ctx_train(model)
        n_ctx = self.n_ctx or min(trained, DEFAULT_N_CTX)
        return replace(self, n_ctx=n_ctx, kv=self.kv or kv, paddings=paddings, flash=flash)

    def affordable_planes(self, model: object, name: str) -> int:
        """Return the planes to ask for, 0 where another strategy may serve and memory is short of them.

        Raises InputError for a strategy or depth that llama.cpp has not, MemoryShortError.
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
            raise InputError("llama.cpp does not show what enters a recurrence: rollback=replay needs ?backend=hf")
        if self.rollback not in (AUTO, "snapshots") or not is_recurrent(model):
            return 0
        if self.depth > DEPTH and (binding.metadata(model, ARCHITECTURE) or "").startswith("lfm2"):
            raise InputError(f"rollback_depth is {self.depth}, but llama.cpp fails on more than {DEPTH} for LFM2")
        return min(self.depth, max(0, min(MAX_BATCH, self.room) - 2))  # else a GGML_ASSERT ends the process


class GgufModel(RewindableModel):
    """llama.cpp behind the LanguageModel interface. Make one with `GgufModel.open`."""

    preferred = ("snapshots", "fused", "checkpoint", "recompute")

    def __init__(self, model: object, context: object, *, name: str, caps: Capabilities) -> None:
        self.name = name
        self.vocab = binding.read_vocabulary(model)
        self.caps = caps
        self._model, self._context = model, context
        self._engine = LlamaEngine(name, context, self.vocab.size, width=caps.max_width)
        # a notebook cell that is run again drops its model without closing it
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
        """Open a GGUF file. Positions and layers are 32-bit integers in llama.cpp, and too many threads crash it.

        `n_ctx` tokens of context (0: the model's own, at most 4096); `threads` (0: physical cores available, fewer
        while other processes take some); `kv` type of the KV cache, f32, f16 or mixed ("": f32 for
        float32 weights, mixed for flash attention, else f16); `gpu_layers` layers on a GPU, whose memory llama.cpp
        judges; `exact` whether a token is to have the same bits in forwards of every width, as a probe certifies:
        "auto" where that costs next to nothing (flash attention, weights not repacked), "true" also by padding
        forwards, "false" not; `rollback` how a recurrent state goes back (crop, snapshots, fused, checkpoint,
        recompute; "auto": the first that a probe finds exact), `rollback_depth` how many tokens llama.cpp keeps
        snapshots of. Raises InputError (bad option), LoadError (not a GGUF, refused by llama.cpp), MemoryShortError.
        """
        path = Path(path)
        name = name or path.name
        if gpu_layers and not binding.load_library().api.llama_supports_gpu_offload():
            raise InputError(f"gpu_layers is {gpu_layers}, but this llama.cpp is built without a GPU; use gpu_layers=0")
        n_bytes = 0 if gpu_layers else sum(map(size_of, gguf_parts(path)))
        require_memory(n_bytes, name=name)
        plan = partial(
            Plan, n_ctx=n_ctx, kv=kv, gpu_layers=gpu_layers, rollback=rollback, depth=rollback_depth, n_bytes=n_bytes,
            counts=[threads] if threads else thread_counts(available_cores()),
        )  # fmt: skip
        # passes of a recurrent model cannot be padded, and are not probed
        if exact != "false" and not states_recurrence(path):
            opened = cls._open(path, name, plan(paddings=[*PADDINGS] if exact == "true" else [""]))
            if exact == "true" or opened.caps.same_bits_up_to:
                return opened
            opened.close()
        return cls._open(path, name, plan(paddings=[]))

    @classmethod
    def _open(cls, path: Path, name: str, plan: "Plan") -> "GgufModel":
        """Open a file as planned, and certify it if there are paddings to try."""
        api = binding.load_library().api
        with ExitStack() as undo:
            # 1. weights: repacked ones multiply faster, but round by the width of a pass
            model = binding.open_model(path, plan.gpu_layers, repack=not plan.paddings)
            undo.callback(api.llama_model_free, model)
            # 2. a context, with room for padding and snapshots
            plan = plan.completed(model)
            planes = plan.affordable_planes(model, name)
            context = binding.open_context(
                model, plan.room, plan.kv, plan.counts[-1], flash_attention=plan.flash, planes=planes
            )
            undo.callback(api.llama_free, context)
            opened = cls(model, context, name=name, caps=_capabilities(model, context, plan))
            opened._path = path
            undo.pop_all()  # `close` frees both
            undo.callback(opened.close)
            # 3. rollback, with the planes that llama.cpp really made
            recorders = {"snapshots": partial(PlaneRecorder, opened._engine, api.llama_n_rs_seq(context))}
            opened._choose_rollback(recorders, plan.rollback)
            opened.caps = replace(opened.caps, rewind=opened.rollback.kind)
            # 4. certificate, and threads
            set_threads = opened._engine.set_threads
            any_time = False
            if plan.paddings:
                facts = _facts(model) | {
                    "gpu_layers": plan.gpu_layers, "dtype": opened.caps.dtype, "options": opened.caps.details,
                }  # fmt: skip
                probe = partial(certified, opened, plan.counts, set_threads, past=PAST, **facts)
                any_time = opened._certify(plan.paddings, probe)
            opened._follow_cores(plan.counts, set_threads, any_time=any_time)
            undo.pop_all()
        return opened

    def _certify(self, paddings: Sequence[str], probe: Callable[..., Certificate]) -> bool:
        """Feed forward passes by the one of `paddings` that `probe` certifies furthest; `caps` then say how far.

        Returns whether the number of threads changes no bit.
        """
        widest, best = Certificate(0, False), paddings[0]
        for padding in paddings:
            self._engine.padding = PADDINGS[padding]
            certificate = probe(padding=padding)
            if certificate.width > widest.width:
                widest, best = certificate, padding
            if certificate.width == max(PROBED_WIDTHS):
                break
        self._engine.padding = PADDINGS[best]
        attention = "flash attention, " if self.caps.details["flash_attention"] else ""
        by = {"exact_by": f"{attention}weights not repacked{best}"} if widest.width else {}
        self.caps = replace(self.caps, same_bits_up_to=widest.width, details={**self.caps.details, **by})
        return widest.any_threads

    def encode(self, text, *, special=True):
        self._require_open()
        with self._engine.lock:  # waits for a forward pass: `close` in another thread would free the model meanwhile
            self._require_open()
            return binding.tokenize(self._model, self.vocab, text, special=special)

    def open_engine(self, n_ctx: int) -> "LlamaEngine":
        """Open another engine over the same weights, without a rollback strategy."""
        self._require_open()
        kv, threads, flash = (self.caps.details[name] for name in ("kv", "threads", "flash_attention"))
        context = binding.open_context(self._model, n_ctx, kv, threads, flash_attention=flash)
        engine = LlamaEngine(self.name, context, self.vocab.size, width=MAX_BATCH)
        weakref.finalize(engine, binding.load_library().api.llama_free, context)
        return engine

    def close(self):
        if self._engine is not None:
            self._engine.close()
        self._free()
        self._engine = self._context = self._model = None


def _free(context: object, model: object) -> None:
    api = binding.load_library().api
    api.llama_free(context)
    api.llama_model_free(model)


def _capabilities(model: object, context: object, plan: "Plan") -> Capabilities:
    """Return what a context offers before a rollback strategy and a certificate were found."""
    api = binding.load_library().api
    reason = "it has recurrent layers, whose state keeps no past to go back to" if is_recurrent(model) else ""
    dtype = file_type(model)
    return Capabilities(
        engine="llama.cpp",
        device="gpu" if plan.gpu_layers else "cpu",
        dtype=dtype,
        n_ctx=plan.n_ctx,  # llama.cpp rounds a context up
        max_width=min(api.llama_n_batch(context), plan.n_ctx),
        rewind_reason=reason,
        lossless_dtype=dtype == plan.kv == "f32",
        details={"threads": plan.counts[-1], "kv": plan.kv, "flash_attention": plan.flash},
    )


def _facts(model: object) -> dict[str, Any]:
    """Whatever decides which kernels llama.cpp takes, but for the CPU; the number of bytes tells shapes and types."""
    api = binding.load_library().api
    sizes = ("size", "n_params", "n_layer", "n_embd", "n_head", "n_head_kv")
    facts = {name: getattr(api, f"llama_model_{name}")(model) for name in sizes}
    build = f"{version('llama-cpp-python')} {api.llama_print_system_info().decode()}"
    return facts | {"architecture": binding.metadata(model, ARCHITECTURE), "build": build}


def states_recurrence(path: Path) -> bool:
    """Tell by its header whether a file has layers with a recurrent state (RECURRENT_KEYS)."""
    return any(key.endswith(RECURRENT_KEYS) for key in binding.sound_header(path).values)


def is_recurrent(model: object) -> bool:
    """Tell whether some layers keep a recurrent state."""
    api = binding.load_library().api
    return bool(api.llama_model_is_recurrent(model) or api.llama_model_is_hybrid(model))


def file_type(model: object) -> str:
    """Return the type of most weights, as FILE_TYPES names it."""
    number = binding.metadata(model, "general.file_type") or "?"
    return {str(v): k for k, v in binding.FILE_TYPES.items()}.get(number, f"ftype{number}")


def state_bytes(model: object, n_ctx: int, kv: str, planes: int = 0) -> int:
    """Bytes of the KV cache and of the recurrent states with their `planes`, each counted as if all layers had it."""
    api = binding.load_library().api
    n_layers, arch = api.llama_model_n_layer(model), binding.metadata(model, ARCHITECTURE)
    # of a recurrent state: inner size x state size a layer, in float32 whatever the weights are
    sizes = [binding.metadata(model, f"{arch}.ssm.{key}") for key in ("inner_size", "state_size")]
    size = (1 + planes) * n_layers * math.prod(map(int, sizes)) * 4 if all(sizes) else 0
    heads, kv_heads = api.llama_model_n_head(model), api.llama_model_n_head_kv(model)
    return size + kv_bytes(n_layers, kv_heads, api.llama_model_n_embd(model) // max(heads, 1), n_ctx, KV_TYPES[kv][-1])


class SavedBlob(NamedTuple):
    """The recurrent part after `n_tokens` tokens, as llama.cpp writes it out."""

    n_tokens: int
    nbytes: int
    data: ctypes.Array


class LlamaEngine(Engine):
    """A context of llama.cpp with a state of `n_held` tokens.

    `width` is the widest decode; one of fewer than `padding` tokens is padded. The context is its owner's.
    """

    padding = 1

    def __init__(self, name: str, context: object, vocab_size: int, *, width: int) -> None:
        self.n_held = 0
        self.last_decoded = 0
        """Tokens of the last decode, as far as nothing but decoding came since."""
        self.name, self._context, self._vocab_size = name, context, vocab_size
        self._api = binding.load_library().api
        self._memory = self._api.llama_get_memory(context)
        self._width = width
        self.lock = RLock()
        """Held while llama.cpp works on the context, which two threads at once would end the process with."""
        room = width + ROOM
        self.batch = self._api.llama_batch_init(room, 0, 1)
        weakref.finalize(self, self._api.llama_batch_free, self.batch)
        np.ctypeslib.as_array(self.batch.n_seq_id, shape=(room,))[:] = 1
        for i in range(room):
            self.batch.seq_id[i][0] = 0
        # numpy views: filling them costs 1 us, element-wise 8 us
        fields = self.batch.token, self.batch.pos, self.batch.logits
        self._fields = [np.ctypeslib.as_array(field, shape=(room,)) for field in fields]

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other threads from the context. Raises StateError where one works on it, InputError where it is closed.

        llama.cpp ends the process where two threads use a context, or one uses a freed one.
        """
        if not self.lock.acquire(blocking=False):
            raise StateError(f"{self.name} is in use by another thread: load it once for each")
        try:
            if self._context is None:
                raise InputError(f"{self.name} was closed: load it again")
            yield
        finally:
            self.lock.release()

    def close(self) -> None:
        """Refuse everything from now on. Raises StateError while another thread uses the context."""
        with self.alone():
            self._context = None

    def set_threads(self, n: int) -> None:
        """Set the number of threads for all widths alike, as `binding.open_context` does."""
        with self.alone():
            self._api.llama_set_n_threads(self._context, n, n)

    def feed(self, ids, rows):
        with self.alone():
            return self._feed(ids, rows)

    def _feed(self, ids: Sequence[int], rows: int) -> np.ndarray:
        out = np.empty((rows, self._vocab_size), dtype=np.float32)
        first_row = len(ids) - rows  # ids before it need no logits
        for start in range(0, len(ids), self._width):
            part = ids[start : start + self._width]
            wanted = min(len(part), max(0, start + len(part) - first_row))
            done = max(0, start - first_row)
            self._decode(part, wanted, out[done : done + wanted])
        return out

    def _decode(self, ids: Sequence[int], n_logits: int, out: np.ndarray) -> None:
        """One llama_decode; fills `out (n_logits, vocab)`."""
        n, width = len(ids), max(len(ids), self.padding)
        # the head's product is as wide as the others; llama.cpp reuses its graph only for an equal number of rows
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
            raise EngineError(f"llama.cpp could not decode {n} tokens of {self.name} at position {self.n_held}: {code}")
        if n_logits:
            # llama.cpp's buffer is overwritten by its next call: copy the rows out
            logits = np.ctypeslib.as_array(self._api.llama_get_logits(self._context), shape=(rows, self._vocab_size))
            end = rows - (width - n)
            out[:] = logits[end - n_logits : end]
        self.n_held += n
        if width > n and not self.keep(self.n_held):
            raise RewindError(f"llama.cpp did not remove {width - n} padding tokens of {self.name}")
        self.last_decoded = n

    def keep(self, n):
        """As `Engine.keep`, and what llama.cpp's planes of a recurrence allow; what a decode that failed left, too."""
        with self.alone():
            self.last_decoded = 0
            if kept := self._api.llama_memory_seq_rm(self._memory, 0, n, -1):
                self.n_held = n
            return kept

    @property
    def state_bytes(self) -> int:
        """Bytes of the recurrent part of the state, as it is saved now; next to nothing while it is empty."""
        with self.alone():
            return self._api.llama_state_seq_get_size_ext(self._context, 0, PARTIAL_ONLY)

    def save(self):
        with self.alone():
            size = self.state_bytes
            data = (ctypes.c_uint8 * size)()
            if self._api.llama_state_seq_get_data_ext(self._context, data, size, 0, PARTIAL_ONLY) != size:
                raise EngineError(f"llama.cpp could not save the recurrent state of {self.name} ({size} bytes)")
            return SavedBlob(self.n_held, size, data)

    def restore(self, saved: SavedBlob):
        # First the recurrent part, then the entries of attention: the other way round llama.cpp refuses to remove
        # them, and the next decode is wrong without an error.
        with self.alone():
            size = saved.nbytes
            if self._api.llama_state_seq_set_data_ext(self._context, saved.data, size, 0, PARTIAL_ONLY) != size:
                raise EngineError(f"llama.cpp could not bring back the recurrent state of {self.name} ({size} bytes)")
            self.crop(self.n_held - saved.n_tokens)

    def clear(self):
        with self.alone():
            self._api.llama_memory_clear(self._memory, False)
            self.n_held = self.last_decoded = 0


class PlaneRecorder(Recorder):
    """llama.cpp's own snapshots: `n_rs_seq` planes with the state after each of a decode's last tokens.

    It has planes only of the last decode, and uses them up: to more than `last decode - 1` tokens, to a second call,
    or to one after a state was loaded it says True, and the next logits are wrong (0.3.36). So `reach` is what really
    can be taken back. It records always: there is nothing to begin, to stop or to undo.
    """

    def __init__(self, engine: LlamaEngine, depth: int) -> None:
        if not depth:
            raise InputError(f"llama.cpp keeps no snapshots for {engine.name}: use rollback=fused")
        self.depth = depth
        self._engine = engine

    @property
    def nbytes(self) -> int:
        """Bytes of all planes, used or not: each is as large as the state is saved now."""
        return self.depth * self._engine.state_bytes

    @property
    def reach(self) -> int:
        return max(0, min(self.depth, self._engine.last_decoded - 1))

    def take_back(self, n):
        if n:
            self._engine.crop(n)
