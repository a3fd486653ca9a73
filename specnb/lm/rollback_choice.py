"""Which way back a model takes: the one that was asked for, or the first that a probe finds exact."""

from collections.abc import Callable, Mapping, Sequence

from specnb.errors import InputError, LoadError, MemoryShortError
from specnb.lm.base import LanguageModel
from specnb.lm.preflight import goes_back
from specnb.lm.rollback import AUTO, Rollback


def choose(
    model: LanguageModel,
    makers: Mapping[str, Callable[[], Rollback]],
    kind: str,
    preferred: Sequence[str],
    *,
    afford: Callable[[str], None] = lambda _name: None,
) -> Rollback:
    """The way back `kind` for `model`, or with "auto" the first of `preferred` that is exact.

    A model that can crop need not be probed. `makers` make a way, or raise InputError where the family or the engine
    has none; `afford(name)` raises MemoryShortError where there is no room for what it keeps. Raises InputError (not
    for this model), MemoryShortError, LoadError (a probe found it inexact).
    """
    reason = model.caps.rewind_reason
    if kind == AUTO and not reason:
        return makers["crop"]()
    if kind == "crop" and reason:
        raise InputError(f"rollback=crop is not for {model.name}: {reason}")
    refused: list[str] = []
    for name in preferred if kind == AUTO else (kind,):
        try:
            way = makers[name]()
        except InputError as error:
            if kind != AUTO:
                raise
            refused.append(str(error))
            continue
        model.rollback = way
        try:
            if goes_back(model):
                afford(name)
                return way
            refused.append(f"{name} does not bring back the state that was")
        except MemoryShortError as error:
            if kind != AUTO:
                way.close()
                raise
            refused.append(str(error))
        except Exception as error:  # of a family, or a release of an engine, that does things otherwise
            refused.append(f"{name} fails: {error}")
        except BaseException:
            way.close()
            raise
        way.close()
        model.reset()
    raise LoadError(f"{model.name} has no exact way back: {'; '.join(refused)}. Try rollback=recompute")
