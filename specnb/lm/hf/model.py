"""A causal LM of transformers, run by torch through our own loop: `generate` is never called.

A KV cache that keeps every position can be cropped at any depth (also for models with sliding windows: the mask, not
the cache, forgets); recurrent states go back by one of the strategies of `rollback`. `position_ids` are always
passed; several model families count from 0 when they are not.
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
from specnb.lm.rollback import AUTO, DEPTH, Recompute, RewindableModel, RollbackDepth, RollbackKind
from specnb.lm.vocab import tokenizing
from specnb.machine import require_memory, thread_counts

STEPS = {
    "later": "transformers ignores the recurrent state in blocks of this family: its layers take them token by token",
    "single": "transformers computes blocks of this family otherwise than single tokens: it is fed token by token",
}


class HfModel(RewindableModel, TreeModel):
    """transformers behind the LanguageModel interface. Make one with `HfModel.open`."""

    preferred = ("replay", "snapshots", "checkpoint", "recompute")
    """Fewest bytes and no forward first."""

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
        """Take a loaded network; with `follow_cores` the number of threads follows the free cores."""
        self.name = name
        config = model.config.get_text_config(decoder=True)
        self.vocab = hf_files.tokenizer_vocabulary(tokenizer, config, model.generation_config)
        self._tokenizer = tokenizer
        reason = uncroppable(model.eval())
        n_ctx = hf_files.context(model.config, n_ctx, name)
        int4 = any(isinstance(module, BlockLinear) for module in model.modules())
        no_decoder = refuse(model) or ("transformers' was asked for" if decoder != AUTO else "")
        if no_decoder:
            packed = decoder == AUTO and pack(model)
            self._engine = TorchEngine(model)
        else:
            rows = 1 if exact == "false" else ROWS
            self._engine = DecoderEngine(model, Decoder(model, n_ctx, rows=rows))
            packed = self._engine.decoder.packed
        self._hidden: HiddenStates | None = None
        self._layer_states = WeakSet[LayerStates]()
        self.rollback = Recompute(self._engine)
        self.caps = Capabilities(
            engine="torch",
            device=str(model.device),
            dtype="int4" if int4 else str(model.dtype).removeprefix("torch."),
            n_ctx=n_ctx,
            max_width=n_ctx,
            rewind_reason=reason,
            lossless_dtype=model.dtype == torch.float32,
            trees=True,  # until it is found that they fail
            details={
                "threads": torch.get_num_threads(),
                "packed": packed,
                "decoder": f"transformers: {no_decoder}" if no_decoder else "specnb",
                "attention": config._attn_implementation if no_decoder else "blocks of 16 rows",
            },
        )
        with hf_files.quiet():  # the first forwards tell once a process which fast kernels are not installed
            # recurrent models, and configs that may mean an encoder
            doubtful = model._is_stateful or getattr(model.config, "is_decoder", True) is False
            steps = self._engine.steps = probe_steps(self) if doubtful else "blocks"
            recorders = {
                "replay": partial(ActivationRecorder, self._engine, rollback_depth),
                "snapshots": partial(StateRecorder, self._engine, rollback_depth),
            }
            self._choose_rollback(recorders, rollback, partial(self._require_room, rollback_depth))
        no_trees = (why_no_trees(model, self.rollback.kind) or probe_trees(self)) if no_decoder else ""
        self.caps = replace(
            self.caps,
            rewind=self.rollback.kind,
            details=self.caps.details | ({"steps": STEPS[steps]} if steps in STEPS else {}),
            trees=not no_trees,
            trees_reason=no_trees,
        )
        most = torch.get_num_threads()
        counts = thread_counts(most) if follow_cores and model.device.type == "cpu" else [most]
        any_time = not no_decoder and exact != "false" and self._certify(counts)
        self._follow_cores(counts, self._engine.set_threads, any_time=any_time)

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
        """Open a folder or a hub id.

        `dtype` float32, bfloat16, float16 or int4; `coarse` with int4 for all matrices in 4 bits, lm_head included,
        as a draft model may have them; `device` cpu or cuda[:n]; `n_ctx` most tokens of state (0: the model's
        own, at most 4096); `threads` for torch (0: as many as it has now, fewer while other processes take
        some cores); `decoder` auto (our own forward where there
        is one, see `lm.hf.decoder`) or transformers; `exact` auto or true for a token's same logits at every width
        (`caps.same_bits_up_to` says how far that holds), false for the fewest rows; `rollback` how a recurrent state
        goes back (crop, replay, snapshots, checkpoint, fused, recompute; "auto": the first that a probe finds exact),
        `rollback_depth` over how many tokens replay and snapshots record. Raises InputError (bad option), LoadError
        (no model to be had), MemoryShortError.
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
            model, tokenizer, name=name or str(source), n_ctx=n_ctx, exact=exact, decoder=decoder, rollback=rollback,
            rollback_depth=rollback_depth, follow_cores=not threads,
        )  # fmt: skip

    def forward_tree(self, ids, tree):
        """As `TreeModel.forward_tree`. A chain gets the bits of `forward`; other trees agree up to rounding."""
        check_tree(self, ids, tree)
        if self.pace:
            self.pace.step()
        with self._restore_on_error(self.n_past):
            logits = self._engine.feed_tree(ids, tree)
            self.unsettled = tree
        return logits

    def keep_path(self, nodes):
        path, start = check_path(self, nodes), self.n_past - len(self.unsettled)
        with self._restore_on_error(start):
            self.unsettled = None
            self._engine.keep_path(start, path)
            if self._hidden:
                self._hidden.keep_path(path)
            for states in self._layer_states:
                states.keep_path(start, path)

    @property
    def network(self) -> PreTrainedModel:
        """The torch model itself, for those who read its weights. Feed it only while this model's state is empty."""
        self._require_open()
        return self._engine.model

    def own_threads(self) -> AbstractContextManager[None]:
        """Run torch in a block with this model's number of threads, for drafters that compute on its states."""
        self._require_open()
        return self._engine.threads()

    def keep_blocks(self, blocks: Sequence[int]) -> "HfModel":
        """Open a model of these blocks between the same embeddings and head: shared weights, a state of its own.

        Raises InputError for a model that our decoder does not compute, and for blocks that it has not.
        """
        net, chosen = self.network, sorted(set(blocks))
        if reason := refuse(net):
            raise InputError(f"no blocks of {self.name} can be left out: {reason}")
        if not chosen or chosen[0] < 0 or chosen[-1] >= len(net.model.layers):
            raise InputError(f"{self.name} has blocks 0 to {len(net.model.layers) - 1}, got {list(blocks)}")
        part = with_layers(net, [net.model.layers[i] for i in chosen])
        name = f"{len(chosen)} of {len(net.model.layers)} blocks"
        return HfModel(part, self._tokenizer, name=name, n_ctx=self.caps.n_ctx)

    def watch_hidden(self) -> HiddenStates:
        """Show what stood before lm_head, from the next forward on; one listener however often called.

        Raises InputError where it is not clear which norm stands there.
        """
        self._require_open()
        self._hidden = self._hidden or HiddenStates(self._engine, self)
        return self._hidden

    def watch_layers(self, layers: Sequence[int]) -> LayerStates:
        """Keep the outputs of these layers, from 0, from the next forward on; `close` what is returned in the end."""
        self._require_open()
        states = LayerStates(self._engine, layers, self.caps.n_ctx)
        self._layer_states.add(states)
        return states

    def listen(self, hear: Callable[..., object]) -> Callable[[], None]:
        """Call `hear` with the states before and after the final norm, `(n, hidden)`, of each forward to come.

        Returns what ends it. Raises InputError where it is not clear which norm stands there.
        """
        self._require_open()
        return self._engine.listen(hear)

    def encode(self, text, *, special=True):
        if self._tokenizer is None:
            raise InputError(f"{self.name} was opened without a tokenizer: put it into the folder, or pass token ids")
        with tokenizing(text):
            return self._tokenizer(text, add_special_tokens=special, split_special_tokens=not special).input_ids

    def close(self):
        if self.rollback:
            self.rollback.close()
        if self._hidden:
            self._hidden.close()
        self._engine = self.rollback = self._hidden = None

    def locate_nonfinite(self, ids):
        self._require_open()
        return self._engine.first_nonfinite(ids)

    def _certify(self, counts: Sequence[int]) -> bool:
        """Find how wide a block may be for a token to keep its bits; the answer is stored for models of these shapes.

        Returns whether the number of threads, one of `counts`, changes no bit.
        """
        engine, decoder = self._engine, self._engine.decoder
        facts = {"engine": f"torch {torch.__version__}", "dtype": self.caps.dtype, **self.caps.details}
        if decoder.rows == 1:  # of int4, whose passes over many tokens are slow, a few layers are probed
            engine.decoder = decoder.sample()
        try:
            certificate = certified(self, counts, engine.set_threads, shapes=engine.decoder.shapes, **facts)
        finally:
            engine.decoder = decoder
        rule = {"exact_by": f"packed weights, at least {ROWS} rows"} if self.caps.details["packed"] else {}
        if decoder.rows == 1:
            rule = {"exact_by": "the int4 kernel"}
        self.caps = replace(self.caps, same_bits_up_to=certificate.width, details=self.caps.details | rule)
        return certificate.any_threads

    def _require_room(self, depth: int, kind: str) -> None:
        """MemoryShortError where the free memory does not hold what `kind` keeps: one state, or one a token."""
        self.forward([0])
        states = {"snapshots": 1 + depth, "recompute": 0}.get(kind, 1)
        n_bytes = states * self._engine.save().nbytes
        self.reset()
        require_memory(0, n_bytes, device=self.caps.device, name=f"what rollback={kind} keeps of {self.name}")
