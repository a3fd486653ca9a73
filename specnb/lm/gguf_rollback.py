"""Which way back a model of llama.cpp takes: what its architecture allows, and a probe finds exact."""

from collections.abc import Callable
from functools import partial

from specnb.errors import InputError
from specnb.lm import binding, gguf_open, rollback_choice
from specnb.lm.base import LanguageModel
from specnb.lm.gguf_engine import LlamaEngine, PlaneRecorder
from specnb.lm.rollback import AUTO, Checkpoint, Crop, FusedReplay, Recompute, Rollback, check_options
from specnb.lm.rollback_recorded import Snapshots

DEPTH = 16
"""Planes that are asked for. From about 20 on llama.cpp ends the process for LFM2 (its graph has no room for more)."""

MAKERS: dict[str, Callable[[LlamaEngine, int], Rollback]] = {
    "crop": lambda engine, _planes: Crop(engine),
    "snapshots": lambda engine, planes: Snapshots(engine, PlaneRecorder(engine, planes)),
    "fused": lambda engine, _planes: FusedReplay(engine),
    "checkpoint": lambda engine, _planes: Checkpoint(engine),
    "recompute": lambda engine, _planes: Recompute(engine),
}
PREFERRED = ("snapshots", "fused", "checkpoint", "recompute")


def planes_wanted(model: object, kind: str, depth: int, n_ubatch: int) -> int:
    """How many planes to ask the context for (`n_rs_seq`). Raises InputError for an unknown way back or depth."""
    if kind == "replay":
        raise InputError("llama.cpp does not show what enters a recurrence: rollback=replay needs ?backend=hf")
    check_options(kind, depth, MAKERS)
    if kind not in (AUTO, "snapshots") or not gguf_open.recurrent(model):
        return 0
    if depth > DEPTH and (binding.metadata(model, "general.architecture") or "").startswith("lfm2"):
        raise InputError(f"rollback_depth is {depth}, but llama.cpp fails on more than {DEPTH} for LFM2")
    return min(depth, max(0, n_ubatch - 2))  # else a GGML_ASSERT ends the process


def choose(model: LanguageModel, engine: LlamaEngine, kind: str, planes: int) -> Rollback:
    """The way back `kind` for `model`, or with "auto" the first that is exact. Raises as `rollback_choice.choose`.

    `planes` are those that the context really has (architectures without them get none).
    """
    makers = {name: partial(make, engine, planes) for name, make in MAKERS.items()}
    return rollback_choice.choose(model, makers, kind, PREFERRED)
