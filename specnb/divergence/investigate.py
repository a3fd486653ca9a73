"""One call: run the set-ups, find the module that is wrong first, rank the causes, say what was looked at.

    from specnb.divergence.investigate import investigate
    investigate(draft, target, deploy=my_service).line

`deploy(draft, target)` is what puts the draft into service as it is when nothing is accepted: a context manager under
which calling the draft does what it does there. The lab feeds the same tokens in every set-up and compares, module by
module, with what a pristine copy makes of the same inputs.
"""

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import metadata
from typing import Any

import numpy as np
import torch
from torch import nn

from specnb.divergence.causes import Case, rank
from specnb.divergence.features import checked, switched_off
from specnb.divergence.investigation import TRAINING, Investigation
from specnb.divergence.ladder import GROWN, TIMES_FLOOR, Verdict
from specnb.divergence.precision import same_logits
from specnb.divergence.script import Script
from specnb.divergence.setups import FIRST, ON_DEMAND, SETUPS, Coverage, Deploy, Lab, Outcome, vocabulary_size
from specnb.errors import InputError
from specnb.measure.experiment import Progress, silent

TOKENS, PROMPT, K = 32, 16, 3
"""Of the script that is made up where none is given."""
OTHERS = {name for name, setup in SETUPS.items() if setup.beside not in ("nobody", "copy")}
"""Set-ups in which a neighbour's values are not the draft's own."""
REPEATS = 2
"""Runs of a set-up without hooks, besides the one with them."""


def investigate(
    draft: nn.Module,
    target: nn.Module | None = None,
    *,
    script: Script | None = None,
    deploy: Deploy | None = None,
    setups: Sequence[str] | None = None,
    features: Sequence[str] = (),
    progress: Progress = silent,
) -> Investigation:
    """Investigate a transformers draft, beside `target` where one is given.

    `setups` None: S0, S0w, S1, S2 and with a target S3; then S4 to S6 where only a neighbour makes it wrong. `features`
    are names that `deploy` takes as `without` (`features.Service`): what is wrong is run again without each. Everything
    every module gave is kept: some MB a token for a model of 1 B parameters. Raises InputError for a service that
    leaves no features out, a compiled model, a dtype without known rounding.
    """
    started = time.perf_counter()
    lab = Lab(draft, target, script=script or made_up(draft, target), deploy=deploy)
    return judge(lab, setups=setups, features=features, progress=progress, started=started)


def judge(
    lab: Lab,
    *,
    deploy: Deploy | None = None,
    setups: Sequence[str] | None = None,
    features: Sequence[str] = (),
    progress: Progress = silent,
    started: float | None = None,
) -> Investigation:
    """`investigate` with a lab that is already there: one reference and its floors serve several services."""
    started = time.perf_counter() if started is None else started
    wanted = lab.fitting(FIRST) if setups is None else tuple(dict.fromkeys(setups))
    service = deploy or lab.deploy
    features = checked(service, features) if features else ()
    outcomes = _run(lab, wanted, {}, deploy, progress)
    case = Case.of(lab, outcomes)
    if setups is None and case.bad is not None and not case.alone:
        outcomes = _run(lab, lab.fitting(ON_DEMAND), outcomes, deploy, progress)
        case = Case.of(lab, outcomes)
    covered = [Coverage.of(outcome, lab.draft) for outcome in ([case.bad] if case.bad else outcomes.values())]
    coverage = max(covered, key=lambda outcome: (not outcome.output, len(outcome.uncompared)))
    repeats, inert = _same_bits(lab, case, deploy)
    case = replace(case, repeats=repeats)
    verdict, reason = _verdict(lab, case, coverage, repeats, inert)
    switched = None
    if features and case.bad is not None:
        run = partial(_without, lab, service, case.bad.setup.id)
        switched = switched_off(run, features, setup=case.bad.setup.id, progress=progress)
    return Investigation(
        verdict, reason, case, tuple(rank(case)), coverage, lab.floor, repeats, inert,
        _facts(lab, time.perf_counter() - started) | {"in_service": deploy is not None or lab.in_service}, switched,
    )  # fmt: skip


def made_up(
    draft: nn.Module,
    target: nn.Module | None = None,
    *,
    tokens: int = TOKENS,
    prompt: int = PROMPT,
    k: int = K,
    seed: int = 0,
) -> Script:
    """A script of random tokens that both know: `prompt` of them at once, the others in rounds of `k`.

    Raises InputError for a draft that does not say how many tokens it knows, and for a prompt that leaves none.
    """
    size = min(vocabulary_size(model) for model in (draft, target) if model is not None)
    if size == sys.maxsize:
        raise InputError(f"{type(draft).__name__} has no input embedding that tells its vocabulary: give a script")
    text = np.random.default_rng(seed).integers(0, size, tokens).tolist()
    return Script.drafting(text, prompt=prompt, k=k, vocab_size=size, seed=seed)


def _run(
    lab: Lab, names: Sequence[str], before: Mapping[str, Outcome], deploy: Deploy | None, progress: Progress
) -> dict[str, Outcome]:
    """The outcomes so far, and those of these set-ups behind them."""
    outcomes = dict(before)
    for name in names:
        progress(len(outcomes), len(before) + len(names), f"{name}: {SETUPS[name].says}")
        outcomes[name] = lab.run(name, deploy)
    return outcomes


def _without(lab: Lab, service: Deploy, setup: str, off: frozenset[str]) -> tuple[bool, str, int]:
    """A set-up with features of the service off (`features.Run`)."""
    outcome = lab.run(setup, partial(service, without=off))
    clean = outcome.clean and Coverage.of(outcome, lab.draft).complete
    return clean, next(iter(outcome.wrong["module"]), ""), outcome.wrong["position"].nunique()


def _same_bits(lab: Lab, case: Case, deploy: Deploy | None) -> tuple[bool, bool]:
    """Whether S0 and the set-up that is wrong repeat, and whether hooks change nothing in these and in the last one."""
    asked = {"S0": case.outcomes["S0"] if "S0" in case.outcomes else lab.run("S0", deploy)}
    asked |= {} if case.bad is None else {case.bad.setup.id: case.bad}
    bare = {name: [lab.bare(name, deploy) for _ in range(REPEATS)] for name in asked}
    last, its = list(case.outcomes.items())[-1]
    inert = all(same_logits(bare[name][0], outcome.logits) for name, outcome in asked.items())
    inert &= last in asked or same_logits(lab.bare(last, deploy), its.logits)
    return all(same_logits(runs[0], outcome) for runs in bare.values() for outcome in runs[1:]), inert


def _verdict(lab: Lab, case: Case, coverage: Coverage, repeats: bool, inert: bool) -> tuple[Verdict, str]:
    if case.bad is not None:
        far, apart = lab.logits_off(outcome for outcome in case.outcomes.values() if not outcome.clean)
        return "DIVERGENT", "" if far > TIMES_FLOOR * apart else f"its logits are {far:.1g} off, as rounding is"
    doubt = _doubt(lab, case, coverage, repeats, inert)
    if doubt:
        return "INCONCLUSIVE", doubt
    outcomes, also = case.outcomes.values(), _foreign(case)
    if any(outcome.offset for outcome in outcomes):
        return "PRECISION_ONLY", f"all positions are one number off, which RoPE does not see{also}"
    if rounded := [outcome.coarser for outcome in outcomes if outcome.coarser]:
        reason = f"what differs is no larger than what rounding to {rounded[0]} does, the draft is {lab.dtype}"
        return "PRECISION_ONLY", f"{reason}{also}"
    sound = {False: lab.sound_logits[0], True: lab.sound_logits[1]}
    if all(same_logits(outcome.logits, sound[outcome.setup.in_blocks]) for outcome in outcomes):
        return "SOUND", f"every set-up gives the very bits of a copy of the draft as it was loaded{also}"
    return "PRECISION_ONLY", f"bits differ from the pristine copy's, no module by more than another order of sums{also}"


def _doubt(lab: Lab, case: Case, coverage: Coverage, repeats: bool, inert: bool) -> str:
    """Why nothing can be said of a draft of which nothing is wrong; "" where something can."""
    if (nan := lab.first_nan()) is not None:
        module, position = nan
        return (
            f"the draft as it was loaded gives NaN, first in {module or 'the model itself'} at position {position}: "
            "look at its weights (specnb divergence preflight)"
        )
    if not coverage.complete:
        missed = ", ".join(coverage.uncompared[:3]) or "the model's output"
        shapes = (
            ": are they run in other shapes than the text is fed in? Let the service feed one row, whole and unpadded"
            if len(coverage.uncompared) > coverage.modules / 2
            else ""
        )
        return f"nothing that was compared is wrong, but {missed} could not be compared{shapes}"
    if len(lab.unsteady):
        at, floor = lab.unsteady.index[0][0], lab.unsteady.iloc[0]
        return (
            f"nothing that could be judged is wrong, but in sound runs {at or 'the model itself'} is {floor:.2g} off "
            "where more or fewer tokens are fed at once: give a shorter text, or float32"
        )
    if not repeats:
        mode = f" ({TRAINING})" if lab.draft.training else ""
        return f"alone, the draft gives other bits from run to run{mode}: make it deterministic first"
    if not inert:
        return "the draft gives other logits with hooks on it than without: what was seen is not it"
    foreign = _foreign(case)
    if foreign and not OTHERS & {*case.outcomes}:
        return f"nothing is wrong{foreign}, and in no set-up that was run are its values others: run S2"
    far, apart = lab.logits_off(outcome for outcome in case.outcomes.values() if not outcome.coarser)
    if far > min(GROWN * apart, 1.0):  # zeros in their place would be as far
        return f"the logits are {far:.2g} off, and no module that was compared is wrong by itself"
    return ""


def _foreign(case: Case) -> str:
    """What was read of other models while everything was right, as the end of a sentence."""
    read = [row for outcome in case.outcomes.values() for row in outcome.foreign.itertuples()]
    return f"; yet {read[0].module} read {read[0].owner}:{read[0].owner_path}" if read else ""


def _facts(lab: Lab, seconds: float) -> dict[str, Any]:
    script = lab.script
    return {
        "draft": type(lab.draft).__name__, "target": lab.target and type(lab.target).__name__,
        "dtype": lab.dtype, "device": str(next(lab.draft.parameters()).device), "threads": torch.get_num_threads(),
        "torch": torch.__version__, "transformers": metadata.version("transformers"),
        "tokens": len(script.text),
        "prompt": len(script.feeds[0].ids), "feeds": len(script.feeds),
        "taken_back": sum(feed.forget for feed in script.feeds), "seconds": seconds, "training": lab.draft.training,
        "unsteady": sorted({module or "the model itself" for module, *_ in lab.unsteady.index}),
    }  # fmt: skip
