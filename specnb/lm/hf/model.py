"""A causal language model of transformers, run by our own loop instead of `generate`.

The KV cache holds all positions, so it can be cropped to any length (the mask applies sliding
windows). Recurrent states use a strategy of `rollback`. `position_ids` are always passed, because
without them several model families count from 0.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal
from weakref import WeakSet

import torch
from pydantic import NonNegativeInt
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specnb.errors import InputError
from specnb.lm.base import Capabilities, Exact, TreeModel, check_path, check_tree
from specnb.lm.hf import files as hf_files
from specnb.lm.hf.decoder import ROWS, Decoder, refuse, with_layers
from specnb.lm.hf.engine import DecoderEngine, TorchEngine, uncroppable, why_no_trees
from specnb.lm.hf.hidden import HiddenStates, LayerStates
from specnb.lm.hf.int4 import BlockLinear
from specnb.lm.hf.product import pack
from specnb.lm.hf.record import ActivationRecorder, StateRecorder
from specnb.lm.probe import certified, probe_steps, probe_trees
from specnb.lm.rollback import (
    AUTO,
    DEPTH,
    Recompute,
    RewindableModel,
    RollbackDepth,
    RollbackKind,
)
from specnb.lm.vocab import tokenizing
from specnb.machine import require_memory, thread_counts

STEPS = {
    "later": "transformers ignores the state in blocks of this family: layers run token by token",
    "single": "transformers' blocks and single steps of this family differ: it runs token by token",
}


class HfModel(RewindableModel, TreeModel):
    """A `LanguageModel` of transformers. Create it with `HfModel.open`."""

    preferred = ("replay", "snapshots", "checkpoint", "recompute")
    """Replay and snapshots run no forward passes; replay needs less memory."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        name: str,
        n_ctx: int = 0,
        exact: str = AUTO,
        decoder: str = AUTO,
        rollback: str = AUTO,
        rollback_depth: int = DEPTH,
        follow_cores: bool = True,
    ) -> None:
        """Wrap a loaded network; `follow_cores` adapts the number of threads to the free cores."""
        self.name = name
        config = model.config.get_text_config(decoder=True)
        self.vocab = hf_files.tokenizer_vocabulary(tokenizer, config, model.generation_config)
        self._tokenizer = tokenizer
        self._hidden: HiddenStates | None = None
        self._layer_states: WeakSet[LayerStates] = WeakSet()
        reason = uncroppable(model.eval())
        n_ctx = hf_files.context(model.config, n_ctx, name)
        # 1. Run our own forward pass if it supports the model, else transformers'.
        no_decoder = refuse(model) or ("" if decoder == AUTO else "requested by the option")
        if no_decoder:
            packed = decoder == AUTO and pack(model)
            self._engine = TorchEngine(model)
        else:
            rows = 1 if exact == "false" else ROWS
            self._engine = DecoderEngine(model, Decoder(model, n_ctx, rows=rows))
            packed = self._engine.decoder.packed
        int4 = any(isinstance(module, BlockLinear) for module in model.modules())
        self.rollback = Recompute(self._engine)
        self.caps = Capabilities(
            engine="torch",
            device=str(model.device),
            dtype="int4" if int4 else str(model.dtype).removeprefix("torch."),
            n_ctx=n_ctx,
            max_width=n_ctx,
            rewind_reason=reason,
            lossless_dtype=model.dtype == torch.float32,
            trees=True,  # checked below
            details={
                "threads": torch.get_num_threads(),
                "packed": packed,
                "decoder": f"transformers: {no_decoder}" if no_decoder else "specnb",
                "attention": config._attn_implementation
                if no_decoder
                else "blocks of 4 to 16 rows",
            },
        )
        # 2. Find how tokens must be fed, and an exact rollback.
        with hf_files.quiet():  # the first forward passes warn about missing fast kernels
            # recurrent models, and configs that may be encoders
            doubtful = model._is_stateful or getattr(model.config, "is_decoder", True) is False
            steps = self._engine.steps = probe_steps(self) if doubtful else "blocks"
            recorders = {
                "replay": partial(ActivationRecorder, self._engine, rollback_depth),
                "snapshots": partial(StateRecorder, self._engine, rollback_depth),
            }
            self._choose_rollback(recorders, rollback, partial(self._require_room, rollback_depth))
        # 3. Check trees; our own forward pass supports them.
        no_trees = no_decoder and (why_no_trees(model, self.rollback.kind) or probe_trees(self))
        if steps in STEPS:
            self.caps.details["steps"] = STEPS[steps]
        self.caps = replace(
            self.caps, rewind=self.rollback.kind, trees=not no_trees, trees_reason=no_trees
        )
        # 4. Certify equal bits, and let the number of threads follow the free cores.
        most = torch.get_num_threads()
        counts = thread_counts(most) if follow_cores and model.device.type == "cpu" else [most]
        any_time = not no_decoder and exact != "false" and self._certify(counts)
        self._follow_cores(counts, any_time=any_time)

    @classmethod
    def open(
        cls,
        source: Path | str,
        *,
        name: str | None = None,
        dtype: Literal["float32", "bfloat16", "float16", "int4"] = "float32",
        device: str = "cpu",
        n_ctx: NonNegativeInt = 0,
        threads: NonNegativeInt = 0,
        exact: Exact = AUTO,
        decoder: Literal["auto", "transformers"] = AUTO,
        coarse: bool = False,
        revision: str = "main",
        rollback: RollbackKind = AUTO,
        rollback_depth: RollbackDepth = DEPTH,
    ) -> "HfModel":
        """Open a folder, a hub id or, with dtype=int4, a GGUF file.

        Args:
            dtype: float32, bfloat16, float16 or int4.
            device: cpu or cuda[:n].
            n_ctx: context length in tokens (0: the model's limit, at most 4096).
            threads: torch threads of this process (0: the current number, fewer while other
                processes use cores).
            exact: auto or true for bit-identical logits at all widths of a forward pass, as far as
                `caps.same_bits_up_to` certifies; false for no padding rows.
            decoder: auto (our own forward pass if `lm.hf.decoder` supports it) or transformers.
            coarse: with int4, round all matrices to 4 bits, including lm_head (for draft models).
            revision: branch, tag or commit of a hub id.
            rollback: strategy for a recurrent state (crop, replay, snapshots, checkpoint, fused,
                recompute; "auto": the first that a probe finds exact).
            rollback_depth: number of tokens that replay and snapshots record.

        Raises InputError (option), LoadError (the model cannot be loaded), MemoryShortError.
        """
        if threads:
            torch.set_num_threads(threads)
        if coarse and dtype != "int4":
            raise InputError(f"coarse=true needs dtype=int4, got dtype={dtype}")
        if dtype == "int4":
            load = partial(hf_files.load_int4, coarse=coarse)
        else:
            load = partial(hf_files.load_network, dtype=getattr(torch, dtype))
        model, tokenizer = load(str(source), device=device, n_ctx=n_ctx, revision=revision)
        return cls(
            model,
            tokenizer,
            name=name or str(source),
            n_ctx=n_ctx,
            exact=exact,
            decoder=decoder,
            rollback=rollback,
            rollback_depth=rollback_depth,
            follow_cores=not threads,
        )

    def forward_tree(self, ids, tree):
        """Run a tree. A chain is bit-identical to `forward`; other trees may differ by rounding."""
        check_tree(self, ids, tree)
        if self.pace:
            self.pace.step()
        with self._restore_on_error(self.n_past):
            logits = self._engine.feed_tree(ids, tree)
            self.unsettled = tree
        return logits

    def keep_path(self, nodes):
        path = check_path(self, nodes)
        start = self.n_past - len(self.unsettled)
        with self._restore_on_error(start):
            self.unsettled = None
            self._engine.keep_path(start, path)
            if self._hidden:
                self._hidden.keep_path(path)
            for states in self._layer_states:
                states.keep_path(start, path)

    @property
    def network(self) -> PreTrainedModel:
        """The torch model. Run it only while this model's state is empty."""
        return self._require_open().model

    def own_threads(self) -> AbstractContextManager[None]:
        """Use this model's number of torch threads in a block, for drafters that use its states."""
        return self._require_open().threads()

    def keep_blocks(self, blocks: Sequence[int]) -> "HfModel":
        """Return a model of these decoder blocks, with shared weights and a separate state.

        Raises InputError if `hf.decoder` does not support the model, and for unknown blocks.
        """
        net = self.network
        chosen = sorted(set(blocks))
        if reason := refuse(net):
            raise InputError(f"cannot skip blocks of {self.name}: {reason}")
        if not chosen or chosen[0] < 0 or chosen[-1] >= len(net.model.layers):
            raise InputError(
                f"got blocks {list(blocks)} of {self.name}, expected 0 to "
                f"{len(net.model.layers) - 1}"
            )
        part = with_layers(net, [net.model.layers[i] for i in chosen])
        name = f"{len(chosen)} of {len(net.model.layers)} blocks"
        return HfModel(part, self._tokenizer, name=name, n_ctx=self.caps.n_ctx)

    def watch_hidden(self) -> HiddenStates:
        """Return the states before and after the final norm, updated by each forward pass.

        Raises InputError if the final norm cannot be identified.
        """
        self._hidden = self._hidden or HiddenStates(self._require_open(), self)
        return self._hidden

    def watch_layers(self, layers: Sequence[int]) -> LayerStates:
        """Collect the outputs of `layers`, numbered from 0, from the next pass until `close`."""
        states = LayerStates(self._require_open(), layers, self.caps.n_ctx)
        self._layer_states.add(states)
        return states

    def listen(self, receive: Callable[..., object]) -> Callable[[], None]:
        """Call `receive` with each pass's states before and after the final norm, `(n, hidden)`.

        Returns a function that removes the hook. Raises InputError if the norm cannot be
        identified.
        """
        return self._require_open().listen(receive)

    def encode(self, text, *, special=True):
        if self._tokenizer is None:
            raise InputError(
                f"{self.name} has no tokenizer: add it to the folder, or pass token ids"
            )
        with tokenizing(text):
            return self._tokenizer(
                text, add_special_tokens=special, split_special_tokens=not special
            ).input_ids

    def close(self):
        if self.rollback:
            self.rollback.close()
        if self._hidden:
            self._hidden.close()
        self._engine = self.rollback = self._hidden = None

    def locate_nonfinite(self, ids):
        return self._require_open().first_nonfinite(ids)

    def _certify(self, counts: Sequence[int]) -> bool:
        """Certify the largest width with equal bits, once per set of layer shapes, and set `caps`.

        Returns whether results are bit-identical for all numbers of threads in `counts`.
        """
        engine = self._engine
        decoder = engine.decoder
        facts = {
            "engine": f"torch {torch.__version__}",
            "dtype": self.caps.dtype,
            **self.caps.details,
        }
        if decoder.rows == 1:  # long passes of int4 are slow: probe a few layers only
            engine.decoder = decoder.sample()
        try:
            certificate = certified(
                self, counts, engine.set_threads, shapes=engine.decoder.shapes, **facts
            )
        finally:
            engine.decoder = decoder
        details = self.caps.details
        if decoder.rows == 1:
            details["exact_by"] = "the int4 kernel"
        elif details["packed"]:
            details["exact_by"] = f"packed weights, at least {ROWS} rows"
        self.caps = replace(self.caps, same_bits_up_to=certificate.width)
        return certificate.any_threads

    def _require_room(self, depth: int, kind: str) -> None:
        """Raise MemoryShortError if the saved states of `kind` do not fit in memory."""
        self.forward([0])
        n_states = {"snapshots": 1 + depth, "recompute": 0}.get(kind, 1)
        n_bytes = n_states * self._engine.save().nbytes
        self.reset()
        name = f"the saved state of rollback={kind} for {self.name}"
        require_memory(0, n_bytes, device=self.caps.device, name=name)
