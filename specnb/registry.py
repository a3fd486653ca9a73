"""Registries of drafters and engines: names mapped to `"module:object"`, imported on first use.

They let the core use features that are built on top of it.
"""

from importlib import import_module
from typing import Any

DRAFTERS = {
    "auto": "specnb.measure.auto:auto_drafter",
    "suffix": "specnb.draft.suffix:suffix_drafter",
    "lookup": "specnb.draft.lookup:lookup_drafter",
    "jump": "specnb.medusa.jump:jump_drafter",
    "eagle": "specnb.medusa.jump:eagle_drafter",
    "hydra": "specnb.medusa.drafter:hydra_drafter",
    "medusa": "specnb.medusa.drafter:heads_drafter",
    "self": "specnb.draft.model:self_drafter",
    "exit": "specnb.draft.model:exit_drafter",
    "skip": "specnb.draft.model:skip_drafter",
}
"""Drafters that need no model name (`--drafter` in the CLI). Called as `(target, **options)`."""

DRAFT_MODEL = "specnb.draft.model:model_drafter"
"""Opens a draft model by name. Called as `(name, target, **options)`."""

ENGINES = {"llama": "specnb.lm.gguf.model:GgufModel", "hf": "specnb.lm.hf.model:HfModel"}
"""Classes that open models, by the `backend` of the model name."""

CHECKS = {
    "self": "specnb.draft.model:refuse_copy",
    "medusa": "specnb.medusa.drafter:check_heads",
    "jump": "specnb.medusa.jump:check_jump",
    "hydra": "specnb.medusa.drafter:check_heads",
    "eagle": "specnb.medusa.jump:check_jump",
}
"""Checks that run before a model is opened. Called as `(target_name, **options)`."""


def resolve(entry: str) -> Any:
    """Import and return the object of a `"module:object"` entry.

    >>> resolve("specnb.registry:DRAFTERS")["medusa"]
    'specnb.medusa.drafter:heads_drafter'
    """
    module, name = entry.split(":")
    return getattr(import_module(module), name)
