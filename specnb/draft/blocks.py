"""Draft with some of the target's own blocks, untrained: the first (early exit), or all but some (layer skipping).

LayerSkip (Elhoushi et al. 2404.16710) trains the target for its exits, SWIFT (Xia et al. 2410.06916) searches the
blocks to skip for each text; neither is done here. The blocks have a cache of their own, and share the weights.
"""

from collections.abc import Sequence
from typing import Any

from specnb.draft.model import ModelDrafter
from specnb.errors import InputError
from specnb.lm.base import LanguageModel


def exit_drafter(target: LanguageModel, *, n_blocks: int = 8) -> ModelDrafter:
    """Draft with the first `n_blocks` blocks of a torch target."""
    return ModelDrafter(_require_torch(target).keep_blocks(range(n_blocks)))


def skip_drafter(target: LanguageModel, *, skipped: Sequence[int] = ()) -> ModelDrafter:
    """Draft without the blocks `skipped`, where none are named without every second one of the middle half."""
    model = _require_torch(target)
    n_blocks = model.network.config.num_hidden_layers
    skipped = skipped or range(n_blocks // 4, n_blocks - n_blocks // 4, 2)
    return ModelDrafter(model.keep_blocks(sorted(set(range(n_blocks)) - set(skipped))))


def _require_torch(target: LanguageModel) -> Any:
    if not hasattr(target, "keep_blocks"):
        raise InputError(
            f"blocks of {target.name} cannot be left out in {target.caps.engine}: open it with ?backend=hf"
        )
    return target
