"""Which way back a transformers model takes: what its family allows, and a probe finds exact."""

from collections.abc import Callable

from specnb.errors import InputError, LoadError, MemoryShortError
from specnb.lm.base import LanguageModel
from specnb.lm.hf_engine import TorchEngine
from specnb.lm.hf_record import ActivationRecorder, StateRecorder
from specnb.lm.memory import Need, require
from specnb.lm.preflight import goes_back
from specnb.lm.rollback import (
    AUTO,
    Checkpoint,
    Crop,
    FusedReplay,
    Recompute,
    Rollback,
    check_options,
)
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


def choose(model: LanguageModel, engine: TorchEngine, kind: str, depth: int, reason: str) -> Rollback:
    """The way back `kind` for `model`, or with "auto" the first that is exact; `reason` is why it cannot crop, or "".

    Raises InputError (unknown, or not for this family), LoadError (a probe found it inexact).
    """
    check_options(kind, depth, MAKERS)
    if kind == AUTO and not reason:
        return Crop(engine)
    if kind == "crop" and reason:
        raise InputError(f"rollback=crop is not for {model.name}: {reason}")
    refused: list[str] = []
    for name in PREFERRED if kind == AUTO else (kind,):
        try:
            way = MAKERS[name](engine, depth)
        except InputError as error:
            if kind != AUTO:
                raise
            refused.append(str(error))
            continue
        model.rollback = way
        try:
            if goes_back(model):
                _require_room(model, engine, name, depth)
                return way
            refused.append(f"{name} does not bring back the state that was")
        except MemoryShortError as error:
            if kind != AUTO:
                way.close()
                raise
            refused.append(str(error))
        except Exception as error:  # of a family, or a release of transformers, that does things otherwise
            refused.append(f"{name} fails: {error}")
        except BaseException:
            way.close()
            raise
        way.close()
        engine.clear()
    raise LoadError(f"{model.name} has no exact way back: {'; '.join(refused)}. Try rollback=recompute")


def _require_room(model: LanguageModel, engine: TorchEngine, kind: str, depth: int) -> None:
    """MemoryShortError where the free memory does not hold what `kind` keeps: one state, or one a token."""
    model.forward([0])
    states = {"snapshots": 1 + depth, "recompute": 0}.get(kind, 1)
    need = Need(0, states * engine.save().nbytes)
    model.reset()
    require(need, device=model.caps.device, what=f"what rollback={kind} keeps of {model.name}")
