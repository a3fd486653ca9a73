"""Names that a feature answers to, as text: a feature lives above the core and is still reachable from it.

An entry is `"module:object"`; nothing is imported before it is asked for.
"""

from importlib import import_module
from typing import Any

DRAFTERS = {
    "lookup": "specnb.draft.lookup:lookup_drafter",
    "suffix": "specnb.draft.suffix:suffix_drafter",
    "auto": "specnb.measure.pair:auto_drafter",
    "self": "specnb.draft.load:self_drafter",
    "exit": "specnb.draft.model:exit_drafter",
    "skip": "specnb.draft.model:skip_drafter",
    "jump": "specnb.medusa.jump:jump_drafter",
    "medusa": "specnb.medusa.drafter:heads_drafter",
    "hydra": "specnb.medusa.drafter:hydra_drafter",
    "eagle": "specnb.medusa.jump:eagle_drafter",
}
"""Drafters that need no model name: the command line's `--drafter`. Called as `(target, **options)`."""

ENGINES = {"llama": "specnb.lm.gguf.model:GgufModel", "hf": "specnb.lm.hf.model:HfModel"}
"""What opens models, by the `backend` of a name."""

CHECKS = {
    "self": "specnb.draft.load:refuse_copy",
    "medusa": "specnb.medusa.drafter:check_heads",
    "jump": "specnb.medusa.jump:check_jump",
    "hydra": "specnb.medusa.drafter:check_heads",
    "eagle": "specnb.medusa.jump:check_jump",
}
"""What a drafter refuses before a model is opened. Called as `(target_name, **options)`."""


def resolve(entry: str) -> Any:
    """The object that `"module:object"` names.

    >>> resolve("specnb.registry:DRAFTERS")["medusa"]
    'specnb.medusa.drafter:heads_drafter'
    """
    module, name = entry.split(":")
    return getattr(import_module(module), name)
