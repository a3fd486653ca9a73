"""specnb: speculative decoding, explored in notebooks, exact and measured.

Glossary (the only terms for these things, in code, tables and figures):

    target            the model that verifies draft tokens and defines the output
    drafter           the proposer of draft tokens: a draft model, prompt lookup, trained heads
    K                 draft length: tokens proposed in one round
    round             one cycle draft -> verify -> commit; every record consists of rounds
    n_accepted        accepted draft tokens of a round, 0..K; a round commits n_accepted + 1 tokens
    tau               mean committed tokens per target forward pass, correction or bonus included
    alpha_k           P(draft token k is accepted, given that the k-1 before it were)
    acceptance_rate   accepted / drafted, always shown with both counts
    p_target, q_draft probability rows of the target and of the drafter
    T(n)              seconds of one target forward pass over n new tokens
    c                 cost of one draft step in plain steps: T_draft(1) / T_target(1)
    rollback          restore a model's state exactly to an earlier position; `rewind(n)` does it
    baseline          the fastest plain decoding of the target's weights on this machine, in any
                      engine; speedups are relative to it
    lossless          same output as plain decoding (greedy), or same distribution (sampling)

    record = specnb.generate("smollm2-135m", "def fib(n):", drafter="lookup", k=8)

The names below are imported on first use, which keeps `import specnb` fast.
"""

from importlib import import_module
from typing import Any

# Imported now: a later import of the submodule would replace the function with the module.
from specnb.errors import importing
from specnb.prompts import Prompt as Prompt
from specnb.prompts import prompts as prompts

_WHERE = {
    "load": "specnb.lm.load",
    "generate": "specnb.decode.generate",
    "load_drafter": "specnb.draft.load",
    "LookupDrafter": "specnb.draft.lookup",
    "ModelDrafter": "specnb.draft.model",
    "Generation": "specnb.records",
    "RunRecord": "specnb.records",
    "KSweepParams": "specnb.params",
    "verify_curve": "specnb.measure.cost",
    "compare": "specnb.measure.bench",
    "save": "specnb.store",
    "publish": "specnb.book.publish",
}
_MODULES = {
    "tables": "specnb.book.tables",
    "figures": "specnb.book.figures",
    "ksweep": "specnb.chapters.ksweep",
}

__all__ = sorted(["Prompt", "prompts", *_WHERE, *_MODULES])
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    with importing():
        if name in _MODULES:
            return import_module(_MODULES[name])
        if name in _WHERE:
            return getattr(import_module(_WHERE[name]), name)
    names = ", ".join(__all__)
    raise AttributeError(f"module 'specnb' has no attribute {name!r}: choose from {names}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
