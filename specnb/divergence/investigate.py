"""One call: run the set-ups, find the module that is wrong first, rank the causes, say what was looked at.

    from specnb.divergence.investigate import investigate
    investigate(draft, target, deploy=my_service).line

`deploy(draft, target)` is what puts the draft into service as it is when nothing is accepted: a context manager under
which calling the draft does what it does there. The lab feeds the same tokens in every set-up and compares, module by
module, with what a pristine copy makes of the same inputs.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch.nn import Module

from specnb.divergence import errors
from specnb.divergence.causes import Cause, gather, rank
from specnb.divergence.errors import EXIT, GROWN, TENSOR, TIMES_FLOOR, Node, name_module
from specnb.divergence.faults.planting import Deploy
from specnb.divergence.script import Script
from specnb.divergence.setups import FIRST, ON_DEMAND, SETUPS, Coverage, Lab, Outcome, same_logits
from specnb.io import plain
from specnb.measure.experiment import Progress, silent

SCHEMA = 1
LEAD, KNOWN = 1.0, 3.0
"""How far the likeliest cause must lead, and its score and lead together: that a fault shows alone, too, is not enough,
and one strong sign without a rival is."""
EARLIEST = 8
"""Wrong tensors that a report lists, the first in time first."""


@dataclass(frozen=True)
class Investigation:
    """The result of `investigate`: a verdict, the first divergence, causes, and all that it rests on.

    `reason` says why the verdict is not DIVERGENT; where it is, that the logits do not show it. `repeats`: the first
    set-up, the first that is wrong and the last give the same bits when they are run again without hooks; `inert`: with
    hooks they give these bits, too.
    """

    verdict: str
    reason: str
    lab: Lab
    outcomes: Mapping[str, Outcome]
    causes: Sequence[Cause]
    coverage: Coverage
    repeats: bool
    inert: bool
    facts: Mapping[str, Any]

    @property
    def exit_code(self) -> int:
        return EXIT[self.verdict]

    @property
    def bad(self) -> Outcome | None:
        """The first set-up that is wrong; None where all are clean."""
        return next((outcome for outcome in self.outcomes.values() if not outcome.clean), None)

    @property
    def first(self) -> Node | None:
        """The first divergence; None where there is none."""
        return self.bad.first if self.verdict == "DIVERGENT" else None

    @property
    def line(self) -> str:
        """The verdict in one line."""
        ran = self.setups().query("verdict != 'not run'").groupby("verdict")["setup"].agg(" ".join)
        summary, first = "; ".join(f"{names} {verdict}" for verdict, names in ran.items()), self.first
        if first is None:
            alone = "" if self.facts["in_service"] else "; no service was given, so the models ran by themselves"
            return f"{self.verdict}: {self.reason}; {summary}{alone}"
        tokens = f"{first.n_tokens} of {self.coverage.tokens} tokens from {first.first_token} on"
        cause = self.causes[0]
        strongest = max(cause.signs, default=None)
        why = f" ({strongest.says})" if strongest and strongest.weight > 0 else ""
        called = f"cause {cause.name}" if self.cause_known else f"cause not known; likeliest {cause.name}"
        random = "" if self.repeats else "; it differs from run to run"
        random += " (it is in training mode: call its `eval`)" if random and self.facts["training"] else ""
        inside = f" or in one of {len(self.hidden)} modules that could not be compared" if self.hidden else ""
        harmless = f"; yet {self.reason}: that does not explain refused drafts" if self.reason else ""
        return f"DIVERGENT: first at {name_module(first)}{inside}, {tokens}; {called}{why}; {summary}{random}{harmless}"

    @property
    def hidden(self) -> list[str]:
        """Modules inside the first that could not be compared: it may be one of them that is wrong."""
        first = self.bad.first
        if not first.at and first.role == "in":  # what the model was fed, no module made
            return []
        inner = first.module and f"{first.module}."
        return [module for module in self.coverage.uncompared if module and module.startswith(inner)]

    @property
    def cause_known(self) -> bool:
        """Tell whether enough speaks for the likeliest cause, and less for the next, to name it alone."""
        if not self.causes or self.hidden:
            return False
        best, second = (cause.score for cause in self.causes[:2])
        return best - second >= LEAD and best + (best - second) >= KNOWN

    def nodes(self) -> pd.DataFrame:
        """The modules that are wrong by themselves in the first wrong set-up, first in time first; a row a tensor.

        Columns are `Node`'s and `call`, the index of this call of the module within the step.
        """
        return errors.nodes(self.outcome().wrong)[[*Node._fields, "call"]]

    def setups(self) -> pd.DataFrame:
        """One row for each set-up: setup, says, verdict, first, n_wrong (tensors), foreign (parameters), kills."""
        rows = []
        for name, setup in SETUPS.items():
            outline = "not run", "", None, None
            if outcome := self.outcomes.get(name):
                judged = ("clean", "") if outcome.clean else ("wrong", name_module(outcome.first))
                outline = *judged, outcome.wrong.groupby(TENSOR).ngroups, outcome.foreign["owner_path"].nunique()
            rows.append((name, setup.says, *outline, setup.rules_out))
        columns = ["setup", "says", "verdict", "first", "n_wrong", "foreign", "kills"]
        return pd.DataFrame(rows, columns=columns).astype({"n_wrong": "Int64", "foreign": "Int64"})

    def ranked(self) -> pd.DataFrame:
        """The causes, likeliest first: cause, score, for_it, against_it, issues, next_experiment."""
        rows = []
        for cause in self.causes:
            for_it, against_it = (
                [f"{sign.says} ({sign.weight:+g})" for sign in cause.signs if sign.weight * way > 0] for way in (1, -1)
            )
            rows.append((cause.name, cause.score, for_it, against_it, cause.issues, cause.next_experiment))
        return pd.DataFrame(rows, columns=["cause", "score", "for_it", "against_it", "issues", "next_experiment"])

    def outcome(self) -> Outcome:
        """Return the outcome of the first set-up that is wrong, else of the last."""
        return self.bad or [*self.outcomes.values()][-1]

    def heat(self, setup: str | None = None) -> pd.DataFrame:
        """`errors.heat_values` of a set-up; None: of the one that `outcome` gives."""
        return errors.heat_values((self.outcomes[setup] if setup else self.outcome()).errors)

    def document(self) -> dict[str, Any]:
        """A JSON document; its shape is told by `schema`."""
        first = self.first
        return plain({
            "schema": SCHEMA, "verdict": self.verdict, "line": self.line, "reason": self.reason,
            "exit_code": self.exit_code, "first": first and first._asdict(), "nodes": self.nodes().to_dict("records"),
            "setups": self.setups().to_dict("records"),
            "cause_known": self.cause_known, "causes": self.ranked().to_dict("records"),
            "coverage": self.coverage._asdict() | {"says": str(self.coverage)},
            "floors": {"largest": self.lab.floor.max(), "median": self.lab.floor.median()},
            "repeats": self.repeats, "inert": self.inert, "facts": self.facts,
        })  # fmt: skip


def investigate(
    draft: Module, target: Module | None = None, *, script: Script | None = None, deploy: Deploy | None = None,
    setups: Sequence[str] | None = None, progress: Progress = silent,
) -> Investigation:  # fmt: skip
    """Investigate a transformers draft, beside `target` where one is given.

    `setups` None: S0, S0w, S1, S2 and with a target S3; then S4 to S6 where only a neighbour makes it wrong.
    Everything every module gave is kept: some MB a token for a model of 1 B parameters. Raises InputError for a
    compiled model, and for a dtype without known rounding.
    """
    lab = Lab(draft, target, script=script or random_script(draft, target))
    return judge_service(lab, deploy=deploy, setups=setups, progress=progress)


def judge_service(
    lab: Lab, *, deploy: Deploy | None = None, setups: Sequence[str] | None = None, progress: Progress = silent,
) -> Investigation:  # fmt: skip
    """`investigate` with a lab that is already there: one reference and its floors serve several services."""
    started = time.perf_counter()
    outcomes = {}

    def run(names: Sequence[str]) -> None:
        if not (setups or lab.target):
            names = [name for name in names if SETUPS[name].beside != "target"]
        total = len(outcomes) + len(names)
        for name in names:
            progress(len(outcomes), total, f"{name}: {SETUPS[name].says}")
            outcomes[name] = lab.run(name, deploy)

    run(setups or FIRST)
    wrong = [outcome for outcome in outcomes.values() if not outcome.clean]
    if not setups and wrong and wrong[0].setup.beside != "nobody":
        run(ON_DEMAND)
    ran = [*outcomes.values()]
    covered = (Coverage.of(outcome, lab.draft) for outcome in wrong[:1] or ran)
    coverage = max(covered, key=lambda item: (not item.output, len(item.uncompared)))
    repeats = inert = True
    for name in dict.fromkeys(item.setup.id for item in (ran[0], *wrong[:1], ran[-1])):
        bare = lab.bare(name, deploy)
        repeats &= same_logits(bare, lab.bare(name, deploy))
        inert &= same_logits(bare, outcomes[name].logits)
    offset = ["all positions are one number off, which RoPE does not see" for item in ran if item.offset]
    coarser = [f"what differs is no larger than what rounding to {item.coarser} does, the draft is {lab.dtype}"
               for item in ran if item.coarser]  # fmt: skip
    alike = all(same_logits(item.logits, lab.sound_logits[item.setup.in_blocks]) for item in ran)
    verdict, reason = errors.give_verdict(
        bool(wrong),
        doubts=_doubts(lab, outcomes, coverage, repeats, inert),
        excuses=offset + coarser,
        sound="every set-up gives the very bits of a copy of the draft as it was loaded" if alike else "",
        rest="bits differ from the pristine copy's, no module by more than another order of sums",
    )
    if verdict == "DIVERGENT":
        far, apart = lab.logits_off(outcome for outcome in ran if not outcome.clean)
        reason = "" if far > TIMES_FLOOR * apart else f"its logits are {far:.1g} off, as rounding is"
    elif verdict != "INCONCLUSIVE":
        reason += _foreign(outcomes)
    script, draft = lab.script, lab.draft
    facts = {
        "draft": type(draft).__name__, "target": lab.target and type(lab.target).__name__, "dtype": lab.dtype,
        "device": str(next(draft.parameters()).device), "threads": torch.get_num_threads(),
        "torch": torch.__version__, "transformers": metadata.version("transformers"),
        "tokens": len(script.text), "prompt": len(script.feeds[0].ids), "feeds": len(script.feeds),
        "taken_back": sum(feed.forget for feed in script.feeds), "seconds": time.perf_counter() - started,
        "training": draft.training, "in_service": deploy is not None,
        "unsteady": sorted({module or "the model itself" for module, *_ in lab.unsteady.index}),
    }  # fmt: skip
    causes = rank(*gather(lab, outcomes, repeats=repeats)) if wrong else []
    return Investigation(verdict, reason, lab, outcomes, causes, coverage, repeats, inert, facts)


def random_script(
    draft: Module, target: Module | None = None, *, tokens: int = 32, prompt: int = 16, k: int = 3, seed: int = 0
) -> Script:
    """A script of random tokens that both know: `prompt` of them at once, the others in rounds of `k`."""
    size = min(model.get_input_embeddings().num_embeddings for model in (draft, target) if model is not None)
    text = np.random.default_rng(seed).integers(0, size, tokens).tolist()
    return Script.drafting(text, prompt=prompt, k=k, vocab_size=size, seed=seed)


def _doubts(lab: Lab, outcomes: Mapping[str, Outcome], coverage: Coverage, repeats: bool, inert: bool) -> Iterator[str]:
    """Yield why nothing can be said of a draft of which nothing is wrong."""
    for key, whole in lab.sound[0].whole.items():
        if key.role == "out" and len(bad := np.flatnonzero(np.isnan(whole.features).any(1))):
            place = f"{key.module or 'the model itself'} at position {bad[0]}"
            yield f"as loaded it gives NaN, first in {place}: see its weights"
    if not coverage.complete:
        missed = ", ".join(coverage.uncompared[:3]) or "the model's output"
        yield f"nothing is wrong, but {missed} could not be compared: let the service feed one row, whole and unpadded"
    if len(lab.unsteady):
        at, floor = lab.unsteady.index[0][0], lab.unsteady.iloc[0]
        place = f"{at or 'the model itself'} is {floor:.2g} off with more or fewer tokens at once"
        yield f"nothing that could be judged is wrong, but in sound runs {place}: give a shorter text, or float32"
    if not repeats:
        yield "alone, the draft gives other bits from run to run: make it deterministic first"
    if not inert:
        yield "the draft gives other logits with hooks on it than without: what was seen is not it"
    foreign = _foreign(outcomes)
    if foreign and {outcome.setup.beside for outcome in outcomes.values()} <= {"nobody", "copy"}:
        yield f"nothing is wrong{foreign}, and in no set-up that was run are its values others: run S2"
    far, apart = lab.logits_off(outcome for outcome in outcomes.values() if not outcome.coarser)
    if far > min(GROWN * apart, 1.0):  # zeros in their place would be as far
        yield f"the logits are {far:.2g} off, and no module that was compared is wrong by itself"


def _foreign(outcomes: Mapping[str, Outcome]) -> str:
    """Name what was read of other models while everything was right, as the end of a sentence."""
    read = next((row for outcome in outcomes.values() for row in outcome.foreign.itertuples()), None)
    return f"; yet {read.module} read {read.owner}:{read.owner_path}" if read else ""


# --- the report: what a reader asks first, as plain text --------------------------------------------------------------


def answers(investigation: Investigation) -> dict[str, str]:
    """The questions that come first, and this investigation's answers."""
    facts, floor = investigation.facts, investigation.lab.floor
    other = ", ".join(
        name for name, item in investigation.outcomes.items()
        if [step["token_ids"] for step in item.run.steps] != [[*feed.ids] for feed in item.script.feeds]
    )  # fmt: skip
    return {
        "Same tokens in all runs?": (
            f"{f'NO, the model got others in {other}' if other else 'Yes'}: each set-up is fed {facts['tokens']} "
            f"tokens, a prompt of {facts['prompt']} and {facts['feeds'] - 1} feeds, {facts['taken_back']} taken back."
        ),
        "Does it repeat?": (
            "Yes: run again without hooks, it gives the same bits." if investigation.repeats else "NO: other bits."
        ),
        "Do the hooks change anything?": (
            "No." if investigation.inert else "YES, or it does not repeat: what was seen is not what runs."
        ),
        "What was looked at?": f"{investigation.coverage}.",
        "What was not?": _not_seen(investigation),
        "What counts as wrong?": (
            f"More than {TIMES_FLOOR:g} times the floor, the largest error of that tensor between sound runs of other "
            f"shapes: median {floor.median():.2g}, largest {floor.max():.2g} (relative L2)."
        ),
    }


def _not_seen(investigation: Investigation) -> str:
    coverage, facts = investigation.coverage, investigation.facts
    lists = {
        "never ran": coverage.never_called,
        "ran and not compared": coverage.uncompared,
        "compared with the module that holds them only": coverage.with_holder,
        "sound runs are too far apart to judge it": facts["unsteady"],
        "left out (other shapes)": coverage.left_out,
        "set-ups not run": [name for name in SETUPS if name not in investigation.outcomes],
    }
    parts = [] if facts["in_service"] else ["any service: none was given, so the models ran by themselves"]
    parts += [f"{name}: {', '.join(names)}" for name, names in lists.items() if names]
    if unseen := coverage.parameters - coverage.seen_at_use:
        parts.append(f"{unseen} parameters of the draft that no operation was seen to read")
    parts.append("whether the weights that were loaded are the checkpoint's")
    return "; ".join(parts) + "."


def text(investigation: Investigation) -> str:
    """The report as plain text: the verdict line first, ready to be printed."""
    parts = [investigation.line, "", *map(" ".join, answers(investigation).items())]
    parts += ["", "Set-ups", investigation.setups().astype("string").fillna("").to_string(index=False)]
    if investigation.bad is not None:
        nodes = investigation.nodes().head(EARLIEST).drop(columns=["at", "call"])
        parts += ["", "Earliest divergences", nodes.to_string(index=False, float_format="{:.4g}".format)]
        parts += ["", "Causes, likeliest first"]
    for cause in investigation.ranked().itertuples():
        if cause.for_it:
            parts.append(f"{cause.cause} ({cause.score:+.1f}): {'; '.join(cause.for_it)}")
            if cause.against_it:
                parts.append(f"  against it: {'; '.join(cause.against_it)}")
            parts.append(f"  seen before: {', '.join(cause.issues)}; next: {cause.next_experiment}")
    return "\n".join(parts) + "\n"
