"""A causal LM of transformers, run by torch through our own loop: `generate` is never called.

The state is a KV cache that keeps every position, so that a rewind of any depth is exact (also for models with
sliding windows: the mask, not the cache, forgets). `position_ids` are always passed; several model families
count from 0 when they are not.
"""

import inspect
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from transformers import Cache, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from specnb.errors import EngineError, InputError, SpecnbError
from specnb.lm import hf_files, hf_state
from specnb.lm.base import Capabilities, check_forward, check_rewind
from specnb.lm.hf_attention import LANES, MAX_ROWS, use_rowwise

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PREFILL_WIDTH = 512
FIRST_ROOM = 256


class KeptPastLayer(DynamicLayer):
    """KV of one layer, `(batch, kv_heads, length, head_dim)`, in a buffer that doubles when it is full.

    transformers' own layer copies the whole cache at every step (torch.cat); here a step writes its new rows in
    place, and a crop only moves the end.
    """

    def __init__(self) -> None:
        super().__init__()
        self._length = 0

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object):
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self._length + key_states.shape[-2]
        if self.keys.numel() == 0 or end > self.keys.shape[-2]:
            self.keys = self._grown(self.keys, key_states, end)
            self.values = self._grown(self.values, value_states, end)
        self.keys[:, :, self._length : end] = key_states
        self.values[:, :, self._length : end] = value_states
        self._length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def _grown(self, old: torch.Tensor, new: torch.Tensor, end: int) -> torch.Tensor:
        batch, heads, _, dim = new.shape
        room = new.new_zeros(batch, heads, max(FIRST_ROOM, -(-2 * end // LANES) * LANES), dim)
        if self._length:
            room[:, :, : self._length] = old[:, :, : self._length]
        return room

    def get_seq_length(self) -> int:
        return self._length

    def keep(self, length: int) -> None:
        """Forget what lies behind the first `length` positions."""
        self._length = min(self._length, length)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` positions (transformers counts them negative)."""
        self._length -= abs(tokens_to_remove)

    def reset(self) -> None:
        super().reset()
        self._length = 0


class HfModel:
    """transformers behind the LanguageModel interface. Make one with `HfModel.open`."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        name: str,
        n_ctx: int = 0,
        exact: bool = True,
    ) -> None:
        self.name = name
        self.n_past = 0
        config = model.config.get_text_config(decoder=True)
        self.vocab = hf_files.vocabulary(tokenizer, config, model.generation_config)
        self._model, self._tokenizer = model.eval(), tokenizer
        self._state_argument = hf_state.argument(model)
        self._reason = _why_not_croppable(model)
        self._rowwise = exact and not self._reason and use_rowwise(model)
        self._cache = self._new_cache()
        self._one_by_one = False
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        n_ctx = hf_files.context(model.config, n_ctx, name)
        self._last = n_ctx - 1
        parameter = next(model.parameters())
        self._device = parameter.device
        self.caps = Capabilities(
            engine="torch",
            device=str(parameter.device),
            dtype=str(parameter.dtype).removeprefix("torch."),
            n_ctx=n_ctx,
            max_width=n_ctx,
            rewind="none" if self._reason else "crop",
            rewind_depth=0 if self._reason else n_ctx,
            rewind_reason=self._reason,
            lossless_dtype=parameter.dtype == torch.float32,
            details={"threads": torch.get_num_threads(), "attention": config._attn_implementation},
        )
        self._one_by_one = hf_state.doubtful(model) and hf_state.blocks_forget(self)
        if self._rowwise and hf_state.same_bits(self):
            self.caps = replace(self.caps, same_bits_up_to=MAX_ROWS)

    @classmethod
    def open(
        cls,
        source: Path | str,
        *,
        name: str | None = None,
        dtype: str = "float32",
        device: str = "cpu",
        n_ctx: int = 0,
        threads: int = 0,
        exact: bool = True,
        revision: str = "main",
    ) -> "HfModel":
        """Open a folder, a hub id or a GGUF file (dequantised once into a cached folder).

        `dtype` float32, bfloat16 or float16; `device` cpu or cuda[:n]; `n_ctx` most tokens of state (0: the
        model's own, at most 4096); `threads` for torch (0: left alone; it holds for the whole process);
        `exact` makes bfloat16 and float16 on a CPU give a token the same logits at every width (see
        `hf_attention`; false: transformers' own attention, a little faster).

        Raises InputError (bad option), LoadError (not a model, not fetchable), MemoryShortError.
        """
        if dtype not in DTYPES:
            raise InputError(f"unknown dtype {dtype!r}; known: {', '.join(DTYPES)}")
        if device.startswith("cuda") and not torch.cuda.is_available():
            raise InputError(f"device {device!r} was asked for, but torch sees no CUDA device; use device=cpu")
        if threads < 0 or n_ctx < 0:
            raise InputError(f"threads and n_ctx must be 0 or more, got {threads} and {n_ctx}")
        if threads:
            torch.set_num_threads(threads)
        folder = hf_files.local_or_hub(source)
        model, tokenizer = hf_files.load(folder, dtype=DTYPES[dtype], device=device, n_ctx=n_ctx, revision=revision)
        return cls(model, tokenizer, name=name or str(source), n_ctx=n_ctx, exact=exact)

    def forward(self, ids: Sequence[int], n_logits: int | None = None) -> np.ndarray:
        self._require_open()
        rows, before = check_forward(self, ids, n_logits), self.n_past
        try:
            return self._run(list(ids), rows)
        except Exception as error:
            self._go_back(before)
            if isinstance(error, SpecnbError):
                raise
            raise EngineError(f"torch failed on {len(ids)} ids of {self.name} at position {before}: {error}") from error
        except BaseException:  # an interrupt leaves some layers longer than others
            self._go_back(before)
            raise

    @torch.inference_mode()
    def _run(self, ids: list[int], rows: int) -> np.ndarray:
        if self._one_by_one:
            # the first block sees no state and may be wide
            pieces = [[token] for token in ids] if self.n_past else [ids]
            logits = torch.cat([self._step(piece, len(piece) if rows else 1) for piece in pieces], dim=1)
            return logits[0, logits.shape[1] - rows :].float().cpu().numpy()
        head, tail = ids[: len(ids) - rows], ids[len(ids) - rows :]
        for start in range(0, len(head), PREFILL_WIDTH):
            # ids that need no logits go first and in pieces; the last piece joins the tail when both are short
            piece = head[start : start + PREFILL_WIDTH]
            if rows and start + PREFILL_WIDTH >= len(head) and len(piece) + rows <= PREFILL_WIDTH:
                tail = [*piece, *tail]
                break
            self._step(piece, 1)
        if not rows:
            return np.empty((0, self.vocab.size), dtype=np.float32)
        return self._step(tail, rows)[0].float().cpu().numpy()

    def _step(self, ids: Sequence[int], keep: int) -> torch.Tensor:
        """One forward; logits `(1, keep, vocab)` in the model's dtype."""
        if self._rowwise and len(ids) == 1:
            # torch's product for one row rounds otherwise than that for two or more: a single step takes two
            logits = self._forward([ids[0], ids[0]], 2)[:, :1]
            self._cache.crop(-1)
            self.n_past -= 1
            return logits
        return self._forward(ids, keep)

    def _forward(self, ids: Sequence[int], keep: int) -> torch.Tensor:
        n = len(ids)
        out = self._model(
            input_ids=torch.tensor([list(ids)], dtype=torch.long, device=self._device),
            # the second token of a doubled step may lie behind the last position that the model knows
            position_ids=torch.arange(self.n_past, self.n_past + n, device=self._device).clamp(max=self._last)[None],
            use_cache=True,
            **{self._state_argument: self._cache},
            **({"logits_to_keep": keep} if self._keeps_logits else {}),
        )
        self.n_past += n
        return out.logits[:, -keep:]

    def _go_back(self, n: int) -> None:
        """The state of the first `n` tokens again; one that cannot be cropped is emptied."""
        if self._reason:
            return self.reset()
        for layer in self._cache.layers:
            layer.keep(n)
        self.n_past = n

    def _require_open(self) -> None:
        if self._model is None:
            raise InputError(f"{self.name} was closed: load it again")

    def rewind(self, n: int) -> None:
        self._require_open()
        check_rewind(self, n)
        if n:
            self._cache.crop(-n)
            self.n_past -= n

    def reset(self) -> None:
        self._require_open()
        self._cache = self._new_cache()
        self.n_past = 0

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        if self._tokenizer is None:
            raise InputError(f"{self.name} was opened without a tokenizer: pass token ids")
        try:
            return self._tokenizer(text, add_special_tokens=special, split_special_tokens=not special).input_ids
        except TypeError as error:  # what the tokenizers library raises for half a surrogate pair
            raise InputError(f"this text cannot be tokenized: {text!r:.80}") from error

    def close(self) -> None:
        self._model = self._cache = None

    @torch.inference_mode()
    def locate_nonfinite(self, ids: Sequence[int]) -> str:
        """Name of the first module whose output is not finite when `ids` are fed from scratch, "" if all are finite.

        Leaves the state alone.
        """
        found: list[str] = []

        def watch(name: str):
            def hook(_module: torch.nn.Module, _inputs: object, output: object) -> None:
                first = output[0] if isinstance(output, tuple) and output else output
                if not found and isinstance(first, torch.Tensor) and not bool(torch.isfinite(first).all()):
                    found.append(name)

            return hook

        hooks = [module.register_forward_hook(watch(name)) for name, module in self._model.named_modules() if name]
        try:
            positions = torch.arange(len(ids), device=self._device)[None]
            tokens = torch.tensor([list(ids)], dtype=torch.long, device=self._device)
            state = {self._state_argument: self._new_cache()}
            self._model(input_ids=tokens, position_ids=positions, use_cache=True, **state)
        finally:
            for hook in hooks:
                hook.remove()
        return found[0] if found else ""

    def _new_cache(self) -> Cache:
        if self._reason:
            return DynamicCache(config=self._model.config)
        layers = len(DynamicCache(config=self._model.config).layers)
        return Cache(layers=[KeptPastLayer() for _ in range(layers)])


def _why_not_croppable(model: PreTrainedModel) -> str:
    """Why this model's state cannot go back by dropping entries; "" when it can."""
    if getattr(model, "_is_stateful", False):
        return f"{type(model).__name__} has recurrent layers, whose state keeps no past to go back to"
    exact = (DynamicLayer, DynamicSlidingWindowLayer)
    other = {type(layer).__name__ for layer in DynamicCache(config=model.config).layers if type(layer) not in exact}
    return f"its cache holds {', '.join(sorted(other))}, which cannot be cropped exactly" if other else ""
