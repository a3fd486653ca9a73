"""How a transformers model carries its state from one forward to the next, and whether that is in doubt.

Several families run without an error and forget: their state has another argument, lives in the modules, or is
ignored by forwards of more than one token (Mamba, Falcon-Mamba, Jamba). Wrong logits would be the only sign;
`preflight` looks for them.
"""

import inspect

from transformers import PreTrainedModel

from specnb.errors import LoadError

ARGUMENTS = ("past_key_values", "cache_params")


def argument(model: PreTrainedModel) -> str:
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
