"""Which way back a transformers model takes: what its family allows, and a probe finds exact."""

from collections.abc import Callable
from functools import partial

from specnb.lm import rollback_choice
from specnb.lm.base import LanguageModel
from specnb.lm.hf_engine import TorchEngine
from specnb.lm.hf_record import ActivationRecorder, StateRecorder
from specnb.lm.memory import Need, require
from specnb.lm.rollback import Checkpoint, Crop, FusedReplay, Recompute, Rollback, check_options
from specnb.lm.rollback_recorded import ActivationReplay, Snapshots

MAKERS: dict[str, Callable[[TorchEngine, int], Rollback]] = {
    "crop": lambda engine, _depth: Crop(engine),
    "replay": lambda engine, depth: ActivationReplay(engine, ActivationRecorder(engine, depth)),
    "snapshots": lambda engine, depth: Snapshots(engine, StateRecorder(engine, depth)),
    "checkpoint": lambda engine, _depth: Checkpoint(engine),
    "fused": lambda engine, _depth: FusedReplay(engine),
    "recompute": lambda engine, _depth: Recompute(engine),
}
PREFERRED = ("replay", "snapshots", "checkpoint", "recompute")
"""Of recurrent models: fewest bytes and no forward first."""


def choose(model: LanguageModel, engine: TorchEngine, kind: str, depth: int) -> Rollback:
    """The way back `kind` for `model`, or with "auto" the first that is exact. Raises as `rollback_choice.choose`."""
    check_options(kind, depth, MAKERS)
    makers = {name: partial(make, engine, depth) for name, make in MAKERS.items()}
    afford = partial(_require_room, model, engine, depth)
    return rollback_choice.choose(model, makers, kind, PREFERRED, afford=afford)


def _require_room(model: LanguageModel, engine: TorchEngine, depth: int, kind: str) -> None:
    """MemoryShortError where the free memory does not hold what `kind` keeps: one state, or one a token."""
    model.forward([0])
    states = {"snapshots": 1 + depth, "recompute": 0}.get(kind, 1)
    need = Need(0, states * engine.save().nbytes)
    model.reset()
    require(need, device=model.caps.device, what=f"what rollback={kind} keeps of {model.name}")
