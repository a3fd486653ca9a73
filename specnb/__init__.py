"""specnb: speculative decoding, explored in notebooks, exact and measured.

Glossary (the only names for these things, in code, tables and figures):

    target, drafter   the model whose output counts; whatever proposes tokens (a model, a lookup, heads)
    K                 draft length: tokens proposed in one round
    round             one cycle draft -> verify -> commit; the grain of every record
    n_accepted        drafted tokens kept in a round, 0..K; a round commits n_accepted + 1 tokens
    tau               mean committed tokens per target call, the extra token (correction or bonus) included
    alpha_k           P(draft position k accepted, given that k-1 were)
    acceptance_rate   accepted / drafted, always shown with both counts
    p_target, q_draft probability rows of the target and of the drafter
    T(n)              seconds of one target forward on n new tokens; T(n)/T(1) is the verify cost curve
    c                 T_draft(1) / T_target(1)
    rewind            forget the last n tokens of a model's state, exactly
    baseline          the fastest plain decoding of the target's weights here, whichever engine: a speed-up is over it
    lossless          greedy: the tokens of plain decoding; sampling: its distribution

    record = specnb.generate("smollm2-135m", "def fib(n):", drafter="lookup", k=8)

Names below are imported when they are first used, so that `import specnb` stays quick.
"""

from importlib import import_module
from typing import Any

# Eager: a later import of the submodule would put the module in the place of the function.
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
_MODULES = {"tables": "specnb.book.tables", "figures": "specnb.book.figures", "ksweep": "specnb.measure.ksweep"}

__all__ = sorted(["Prompt", "prompts", *_WHERE, *_MODULES])
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    with importing():
        if name in _MODULES:
            return import_module(_MODULES[name])
        if name in _WHERE:
            return getattr(import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'specnb' has no attribute {name!r}; it offers {', '.join(__all__)}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
