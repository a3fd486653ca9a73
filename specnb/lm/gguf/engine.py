"""One sequence in llama.cpp: decode, drop, save and bring back. What `rollback` builds on.

Everything is checked before a call, for a failed GGML_ASSERT ends the process (and a notebook's kernel with it), and
because `llama_memory_seq_rm` answers True to more than it can do: see `PlaneRecorder`.
"""

import ctypes
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from specnb.errors import EngineError, InputError, RewindError
from specnb.lm.gguf import binding

if TYPE_CHECKING:
    from specnb.lm.gguf.tensors import Watch

PARTIAL_ONLY = 1
"""LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY: the recurrent part of a state, without the attention entries."""


@dataclass(frozen=True)
class SavedBlob:
    """The recurrent part after `n_tokens` tokens, as llama.cpp writes it out."""

    n_tokens: int
    data: ctypes.Array

    @property
    def nbytes(self) -> int:
        return len(self.data)


class LlamaEngine:
    """A context of llama.cpp with a state of `held` tokens (the interface is `rollback.Engine`).

    `width` is the widest decode; shorter ones are padded to `fixed_width` (0: not). The batch lives in llama.cpp and
    is freed by its owner.
    """

    def __init__(
        self,
        name: str,
        context: object,
        vocab_size: int,
        *,
        width: int,
        fixed_width: int,
        watch: "Watch | None" = None,
    ) -> None:
        self.held = 0
        self.last_decoded = 0
        """Tokens of the last decode, as far as nothing but decoding came since."""
        self.name, self._context, self._vocab_size = name, context, vocab_size
        self._api = binding.library().api
        self._memory = self._api.llama_get_memory(context)
        self._width, self._fixed_width, self._watch = width, fixed_width, watch
        room = max(width, fixed_width)
        self.batch = self._api.llama_batch_init(room, 0, 1)
        self._fields = _batch_views(self.batch, room)

    def close(self) -> None:
        """Say so from now on: llama.cpp would end the process on a freed context."""
        self._context = None

    def _require_open(self) -> None:
        if self._context is None:
            raise InputError(f"{self.name} was closed: load it again")

    def feed(self, ids: Sequence[int], rows: int) -> np.ndarray:
        self._require_open()
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
        n = len(ids)
        pad = max(0, self._fixed_width - n)
        width = n + pad
        token, position, wants = self._fields
        token[:n] = ids
        token[n:width] = ids[-1]
        position[:width] = np.arange(self.held, self.held + width)
        wants[:width] = 0
        # a padded forward asks for all rows: llama.cpp reuses its graph only for equal widths and equal row counts
        wants[0 if pad else n - n_logits : width] = 1
        self.batch.n_tokens = width
        self.last_decoded = 0
        rows = width if pad else n_logits
        with self._watch.decoding(token[:width], self.held, rows, pad) if self._watch else nullcontext():
            code = self._api.llama_decode(self._context, self.batch)
        if code != 0:
            raise EngineError(f"llama.cpp could not decode {n} tokens of {self.name} at position {self.held}: {code}")
        if n_logits:
            # llama.cpp's buffer is overwritten by its next call: copy the rows out
            shape = (rows, self._vocab_size)
            logits = np.ctypeslib.as_array(self._api.llama_get_logits(self._context), shape=shape)
            out[:] = logits[n - n_logits : n] if pad else logits
        if pad and not self._remove_from(self.held + n):
            raise RewindError(f"llama.cpp did not remove {pad} padding tokens of {self.name}")
        self.held += n
        self.last_decoded = n

    def _remove_from(self, position: int) -> bool:
        self._require_open()
        return self._api.llama_memory_seq_rm(self._memory, 0, position, -1)

    def crop(self, n: int) -> None:
        """Drop the last `n` tokens: entries of attention, and what llama.cpp's planes of a recurrence allow."""
        if not self._remove_from(self.held - n):
            raise RewindError(f"llama.cpp refused to remove the last {n} of {self.held} tokens of {self.name}")
        self.held -= n
        self.last_decoded = 0

    def keep(self, n: int) -> bool:
        """Drop whatever a decode that failed left behind the first `n` tokens; False when that cannot be done."""
        if kept := self._remove_from(n):
            self.held = n
        return kept

    @property
    def state_bytes(self) -> int:
        """Bytes of the recurrent part of the state, as it is saved now; next to nothing while it is empty."""
        self._require_open()
        return self._api.llama_state_seq_get_size_ext(self._context, 0, PARTIAL_ONLY)

    def save(self) -> SavedBlob:
        size = self.state_bytes
        data = (ctypes.c_uint8 * size)()
        if self._api.llama_state_seq_get_data_ext(self._context, data, size, 0, PARTIAL_ONLY) != size:
            raise EngineError(f"llama.cpp could not save the recurrent state of {self.name} ({size} bytes)")
        return SavedBlob(self.held, data)

    def restore(self, saved: SavedBlob) -> None:
        self._require_open()
        # First the recurrent part, then the entries of attention: the other way round llama.cpp refuses to remove
        # them, and the next decode is wrong without an error.
        size = saved.nbytes
        if self._api.llama_state_seq_set_data_ext(self._context, saved.data, size, 0, PARTIAL_ONLY) != size:
            raise EngineError(f"llama.cpp could not bring back the recurrent state of {self.name} ({size} bytes)")
        self.last_decoded = 0
        if not self._remove_from(saved.n_tokens):
            raise RewindError(f"llama.cpp refused to remove what {self.name} holds behind {saved.n_tokens} tokens")
        self.held = saved.n_tokens

    def clear(self) -> None:
        self._require_open()
        self._api.llama_memory_clear(self._memory, False)
        self.held = self.last_decoded = 0


class PlaneRecorder:
    """llama.cpp's own snapshots: `n_rs_seq` planes with the state after each of a decode's last tokens.

    llama.cpp takes back up to `n_rs_seq` tokens, but has planes only of the last decode, and uses them up: to more
    than `last decode - 1` tokens, to a second call, or to one after a state was loaded it says True, and the next
    logits are wrong (0.3.36). So `reach` is what really can be taken back.
    """

    spans_forwards = False
    base = None

    def __init__(self, engine: LlamaEngine, depth: int) -> None:
        if not depth:
            raise InputError(f"llama.cpp keeps no snapshots for {engine.name}: use rollback=fused")
        self.depth = depth
        self._engine = engine

    @property
    def nbytes(self) -> int:
        """Of all planes, used or not: each is as large as the state is saved now."""
        return self.depth * self._engine.state_bytes

    @property
    def reach(self) -> int:
        return max(0, min(self.depth, self._engine.last_decoded - 1))

    def begin(self) -> None:
        """llama.cpp records always."""

    def take_back(self, n: int) -> None:
        if n:
            self._engine.crop(n)

    def stop(self) -> None:
        """There is nothing to forget."""

    def uninstall(self) -> None:
        """There is nothing to undo."""


def _batch_views(batch: object, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """numpy views of the batch's token, position and logits fields; filling them costs 1 us, element-wise 8 us."""

    def view(pointer: object) -> np.ndarray:
        return np.ctypeslib.as_array(pointer, shape=(size,))

    view(batch.n_seq_id)[:] = 1
    for i in range(size):
        batch.seq_id[i][0] = ctypes.c_int32(0)
    return view(batch.token), view(batch.pos), view(batch.logits)
