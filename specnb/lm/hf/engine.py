"""One forward of a transformers model over its state, and the state's copies: what `rollback` builds on.

Several families run without an error and forget: their state has another argument, lives in the modules, or is
ignored by forwards of more than one token (Mamba, Falcon-Mamba, Jamba). `preflight` looks for them.
"""

import inspect
from collections.abc import Sequence

import numpy as np
import torch
from transformers import Cache, PreTrainedModel

from specnb.errors import LoadError
from specnb.lm.hf.cache import SavedState, keep_entries, new_cache
from specnb.lm.hf.tree import tree_mask
from specnb.lm.preflight import Steps
from specnb.lm.tree import Tree

PREFILL_WIDTH = 512
ARGUMENTS = ("past_key_values", "cache_params")


def cache_argument(model: PreTrainedModel) -> str:
    """Name of the forward's argument that takes the cache.

    Raises LoadError for models that keep their state otherwise.
    """
    known = inspect.signature(model.forward).parameters
    name = next((name for name in ARGUMENTS if name in known), None)
    if name is None:
        raise LoadError(f"{type(model).__name__} takes no cache ({' or '.join(ARGUMENTS)}): it cannot be run here")
    return name


def doubtful(model: PreTrainedModel) -> bool:
    """Whether `preflight.steps_needed` should look: recurrent models, and configs that may mean an encoder."""
    return bool(getattr(model, "_is_stateful", False)) or getattr(model.config, "is_decoder", True) is False


class TorchEngine:
    """`model` with a state of `held` tokens (the interface is `rollback.Engine`).

    `last_position` is the last one that the model knows; `doubled` feeds single tokens as two (see `_step`).
    """

    def __init__(self, model: PreTrainedModel, *, last_position: int, doubled: bool) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self.held = 0
        self.cache: Cache = new_cache(model)
        self.listening = True
        """False while forwards run that are not this state's: recorders keep nothing of them."""
        self.n_feeds = 0
        """Calls of `feed` and `feed_tree` so far; one may run the model more than once."""
        self.feeding = False
        """True while the model runs to extend this state, and for nobody else."""
        self.steps: Steps = "blocks"
        """Whether tokens are fed one by one, and from when on (`preflight.steps_needed`)."""
        self._last, self._doubled = last_position, doubled
        self._state_argument = cache_argument(model)
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    @torch.inference_mode()
    def feed(self, ids: Sequence[int], rows: int) -> np.ndarray:
        self.n_feeds += 1
        if self.steps != "blocks":
            return self._feed_singly(ids, rows)
        head, tail = ids[: len(ids) - rows], ids[len(ids) - rows :]
        for start in range(0, len(head), PREFILL_WIDTH):
            # ids that need no logits go first and in pieces; the last piece joins the tail when both are short
            piece = head[start : start + PREFILL_WIDTH]
            if rows and start + PREFILL_WIDTH >= len(head) and len(piece) + rows <= PREFILL_WIDTH:
                tail = [*piece, *tail]
                break
            self._step(piece, 1)
        if not rows:
            return np.empty((0, 0), dtype=np.float32)
        return self._step(tail, rows)[0].float().cpu().numpy()

    @torch.inference_mode()
    def feed_tree(self, ids: Sequence[int], tree: Tree) -> np.ndarray:
        """Append the nodes of `tree` in one forward; their logits `(T, vocab)`."""
        if tree == Tree.chain(len(tree)):  # needs no mask, and without one its bits are those of plain decoding
            return self.feed(ids, len(ids))
        self.n_feeds += 1
        return self._forward(ids, len(ids), tree)[0].float().cpu().numpy()

    @torch.inference_mode()
    def keep_path(self, start: int, nodes: Sequence[int]) -> None:
        """Of the entries behind the first `start` tokens keep these, counted from there, in their order."""
        for layer in self.cache.layers:
            layer.gather(start, nodes)
        self.held = start + len(nodes)

    def _feed_singly(self, ids: Sequence[int], rows: int) -> np.ndarray:
        """Token by token; but a first block that sees no state may be wide, unless blocks compute otherwise."""
        if not self.held and self.steps == "later":
            return self._step(ids, max(1, rows))[0, max(1, rows) - rows :].float().cpu().numpy()
        kept = [self._step([token], 1)[0] for token in ids][len(ids) - rows :]
        return torch.cat(kept).float().cpu().numpy() if kept else np.empty((0, 0), dtype=np.float32)

    def _step(self, ids: Sequence[int], keep: int) -> torch.Tensor:
        """One forward; logits `(1, keep, vocab)` in the model's dtype."""
        if self._doubled and len(ids) == 1:
            # torch's product for one row rounds otherwise than that for two or more: a single step takes two
            logits = self._forward([ids[0], ids[0]], 2)[:, :1]
            self.crop(1)
            return logits
        return self._forward(ids, keep)

    def _forward(self, ids: Sequence[int], keep: int, tree: Tree | None = None) -> torch.Tensor:
        """Token i at its place in line, or as node i of `tree` at its depth, seeing its ancestors only."""
        n = len(ids)
        places = torch.arange(n) if tree is None else torch.tensor(tree.depths)
        mask = None if tree is None else tree_mask(tree, self.held, dtype=self.model.dtype, device=self.device)
        self.feeding = True
        try:
            out = self.model(
                input_ids=torch.tensor([list(ids)], dtype=torch.long, device=self.device),
                # the second token of a doubled step may lie behind the last position that the model knows
                position_ids=(self.held + places).clamp(max=self._last)[None].to(self.device),
                use_cache=True,
                **{self._state_argument: self.cache},
                **({"logits_to_keep": keep} if self._keeps_logits else {}),
                **({} if mask is None else {"attention_mask": mask}),
            )
        finally:
            self.feeding = False
        self.held += n
        return out.logits[:, -keep:]

    def crop(self, n: int) -> None:
        self.keep(self.held - n)

    def keep(self, n: int) -> bool:
        """The attention entries of the first `n` tokens only, however far each layer got. True: that never fails."""
        keep_entries(self.cache, n)
        self.held = n
        return True

    def save(self) -> SavedState:
        return SavedState.of(self.cache, self.held)

    def restore(self, saved: SavedState) -> None:
        saved.put_back(self.cache)
        self.keep(saved.n_tokens)

    def clear(self) -> None:
        self.cache = new_cache(self.model)
        self.held = 0

    def first_nonfinite(self, ids: Sequence[int]) -> str:
        """As `HfModel.locate_nonfinite`."""
        names: list[str] = []

        def watch(name: str):
            def hook(_module: torch.nn.Module, _inputs: object, output: object) -> None:
                first = output[0] if isinstance(output, tuple) and output else output
                if not names and isinstance(first, torch.Tensor) and not bool(torch.isfinite(first).all()):
                    names.append(name)

            return hook

        hooks = [module.register_forward_hook(watch(name)) for name, module in self.model.named_modules() if name]
        try:
            self.run_apart(ids)
        finally:
            for hook in hooks:
                hook.remove()
        return names[0] if names else ""

    @torch.inference_mode()
    def run_apart(self, ids: Sequence[int]) -> None:
        """Run the model on `ids` from scratch, for the hooks in it; the state is left alone."""
        self.listening = False
        try:
            positions = torch.arange(len(ids), device=self.device)[None]
            tokens = torch.tensor([list(ids)], dtype=torch.long, device=self.device)
            state = {self._state_argument: new_cache(self.model)}
            self.model(input_ids=tokens, position_ids=positions, use_cache=True, **state)
        finally:
            self.listening = True
