"""A causal LM of transformers, run by torch through our own loop: `generate` is never called.

A KV cache that keeps every position can be cropped at any depth (also for models with sliding windows: the mask, not
the cache, forgets); recurrent states go back by one of the strategies of `rollback`. `position_ids` are always
passed; several model families count from 0 when they are not.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specnb.errors import EngineError, InputError, SpecnbError
from specnb.lm import hf_files, hf_rollback, hf_state
from specnb.lm.base import Capabilities, check_forward
from specnb.lm.dequantise import quiet
from specnb.lm.hf_attention import MAX_ROWS, use_rowwise
from specnb.lm.hf_cache import uncroppable
from specnb.lm.hf_engine import TorchEngine
from specnb.lm.preflight import same_bits, steps_needed
from specnb.lm.rollback import AUTO, DEPTH, Crop, Recompute, Rollback
from specnb.lm.rollback_model import GoesBack

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
STEPS = {
    "later": "transformers ignores the recurrent state in blocks of this family: its layers take them token by token",
    "single": "transformers computes blocks of this family otherwise than single tokens: it is fed token by token",
}


class HfModel(GoesBack):
    """transformers behind the LanguageModel interface. Make one with `HfModel.open`."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        name: str,
        n_ctx: int = 0,
        exact: bool = True,
        rollback: str = AUTO,
        rollback_depth: int = DEPTH,
    ) -> None:
        self.name = name
        config = model.config.get_text_config(decoder=True)
        self.vocab = hf_files.vocabulary(tokenizer, config, model.generation_config)
        self._tokenizer = tokenizer
        reason = uncroppable(model.eval())
        rowwise = exact and not reason and use_rowwise(model)
        n_ctx = hf_files.context(model.config, n_ctx, name)
        parameter = next(model.parameters())
        self._engine = TorchEngine(model, last_position=n_ctx - 1, doubled=rowwise)
        self.rollback: Rollback = Recompute(self._engine)
        """The way back, and what it has cost."""
        self.caps = Capabilities(
            engine="torch",
            device=str(parameter.device),
            dtype=str(parameter.dtype).removeprefix("torch."),
            n_ctx=n_ctx,
            max_width=n_ctx,
            rewind="recompute",
            rewind_depth=n_ctx,
            rewind_reason=reason,
            lossless_dtype=parameter.dtype == torch.float32,
            details={"threads": torch.get_num_threads(), "attention": config._attn_implementation},
        )
        with quiet():  # the first forwards tell once a process which fast kernels are not installed
            self._engine.steps = steps_needed(self) if hf_state.doubtful(model) else "blocks"
            steps = self._engine.steps
            self.rollback = hf_rollback.choose(self, self._engine, rollback, rollback_depth)
        self.caps = replace(
            self.caps,
            rewind=self.rollback.kind,
            details=self.caps.details | ({"steps": STEPS[steps]} if steps in STEPS else {}),
            same_bits_up_to=MAX_ROWS if rowwise and same_bits(self) else 0,
        )

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
        rollback: str = AUTO,
        rollback_depth: int = DEPTH,
    ) -> "HfModel":
        """Open a folder, a hub id or a GGUF file (dequantised once into a cached folder).

        `dtype` float32, bfloat16 or float16; `device` cpu or cuda[:n]; `n_ctx` most tokens of state (0: the
        model's own, at most 4096); `threads` for torch (0: left alone; it holds for the whole process);
        `exact` makes bfloat16 and float16 on a CPU give a token the same logits at every width (see
        `hf_attention`; false: transformers' own attention, a little faster); `rollback` how the state of a recurrent
        model goes back (crop, replay, snapshots, checkpoint, fused, recompute; "auto": the first that a probe finds
        exact), and `rollback_depth` over how many tokens replay and snapshots record (the others have no use for it).

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
        return cls(
            model,
            tokenizer,
            name=name or str(source),
            n_ctx=n_ctx,
            exact=exact,
            rollback=rollback,
            rollback_depth=rollback_depth,
        )

    def forward(self, ids: Sequence[int], n_logits: int | None = None) -> np.ndarray:
        self._require_open()
        rows, before = check_forward(self, ids, n_logits), self.n_past
        try:
            logits = self.rollback.forward(list(ids), rows)
        except Exception as error:
            self._go_back(before)
            if isinstance(error, SpecnbError):
                raise
            raise EngineError(f"torch failed on {len(ids)} ids of {self.name} at position {before}: {error}") from error
        except BaseException:  # an interrupt leaves some layers longer than others
            self._go_back(before)
            raise
        return logits if rows else np.empty((0, self.vocab.size), dtype=np.float32)

    def _go_back(self, n: int) -> None:
        """The state of the first `n` tokens again; one that cannot be cropped is emptied."""
        if isinstance(self.rollback, Crop):
            self._engine.keep(n)
        else:
            self.rollback.reset()

    def _require_open(self) -> None:
        if self._engine is None:
            raise InputError(f"{self.name} was closed: load it again")

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        if self._tokenizer is None:
            raise InputError(f"{self.name} was opened without a tokenizer: pass token ids")
        try:
            return self._tokenizer(text, add_special_tokens=special, split_special_tokens=not special).input_ids
        except TypeError as error:  # what the tokenizers library raises for half a surrogate pair
            raise InputError(f"this text cannot be tokenized: {text!r:.80}") from error

    def close(self) -> None:
        if self._engine is not None:
            self.rollback.close()
        self._engine = self.rollback = None

    def locate_nonfinite(self, ids: Sequence[int]) -> str:
        """Name of the first module whose output is not finite when `ids` are fed from scratch, "" if all are finite.

        Leaves the state alone.
        """
        self._require_open()
        return self._engine.first_nonfinite(ids)
