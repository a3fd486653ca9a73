"""Run the setups, find the first wrong module, rank the causes, report the coverage.

    from specnb.divergence.investigate import investigate
    investigate(draft, target, deploy=my_service).line

`deploy(draft, target)` reproduces the service in which nothing is accepted: a context manager under
which calling the draft does what it does there. Every setup is fed the same tokens and compared,
module by module, with a pristine copy on the same inputs.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
"""Minimum lead of the likeliest cause, and minimum of score plus lead, to name it alone.

That the draft is also wrong alone is not enough; one strong sign without a rival is.
"""
EARLIEST = 8
"""Number of wrong tensors in a report, earliest first."""


@dataclass(frozen=True)
class Investigation:
    """The result of `investigate`: a verdict, the first divergence, causes, and the evidence.

    `reason` explains a verdict other than DIVERGENT. For DIVERGENT it is "", or states that the
    logits do not show the divergence. `repeats`: two runs without hooks have equal logits, in the
    first setup, the first wrong one and the last. `inert`: so do their runs with hooks.
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
        """The first wrong setup; None if all are clean."""
        return next((outcome for outcome in self.outcomes.values() if not outcome.clean), None)

    @property
    def first(self) -> Node | None:
        """The first divergence; None if there is none."""
        return self.bad.first if self.verdict == "DIVERGENT" else None

    @property
    def line(self) -> str:
        """The verdict in one line."""
        ran = {"clean": [], "wrong": []}
        for name, outcome in self.outcomes.items():
            ran["clean" if outcome.clean else "wrong"].append(name)
        summary = "; ".join(
            f"{' '.join(names)} {verdict}" for verdict, names in ran.items() if names
        )
        first = self.first
        if first is None:
            alone = (
                ""
                if self.facts["in_service"]
                else "; without a service: the models ran by themselves"
            )
            return f"{self.verdict}: {self.reason}; {summary}{alone}"
        tokens = f"{first.n_tokens} of {self.coverage.tokens} tokens from {first.first_token} on"
        cause = self.causes[0]
        strongest = max(cause.signs, default=None)
        why = f" ({strongest.says})" if strongest and strongest.weight > 0 else ""
        called = (
            f"cause {cause.name}"
            if self.cause_known
            else f"cause not known; likeliest {cause.name}"
        )
        random = "" if self.repeats else "; its output differs from run to run"
        random += (
            " (it is in training mode: call its `eval`)"
            if random and self.facts["training"]
            else ""
        )
        inside = (
            f" or in one of {len(self.hidden)} modules that could not be compared"
            if self.hidden
            else ""
        )
        harmless = (
            f"; but {self.reason}: this does not explain rejected draft tokens"
            if self.reason
            else ""
        )
        return (
            f"DIVERGENT: first at {name_module(first)}{inside}, {tokens}; "
            f"{called}{why}; {summary}{random}{harmless}"
        )

    @property
    def hidden(self) -> list[str]:
        """Uncompared modules inside the first wrong one: one of them may be wrong."""
        first = self.bad.first
        if not first.at and first.role == "in":  # no module computed what the model was fed
            return []
        inner = first.module and f"{first.module}."
        return [
            module for module in self.coverage.uncompared if module and module.startswith(inner)
        ]

    @property
    def cause_known(self) -> bool:
        """Return whether the evidence is enough to name the likeliest cause alone."""
        if not self.causes or self.hidden:
            return False
        best, second = (cause.score for cause in self.causes[:2])
        return best - second >= LEAD and best + (best - second) >= KNOWN

    def nodes(self) -> pd.DataFrame:
        """Return the tensors wrong by themselves in the first wrong setup, earliest first.

        The columns are those of `Node` and `call`, the index of the module's call in its step.
        """
        return errors.nodes(self.outcome().wrong)[[*Node._fields, "call"]]

    def setups(self) -> pd.DataFrame:
        """Return one row per setup; `n_wrong` counts wrong tensors, `foreign` parameters."""
        rows = []
        for name, setup in SETUPS.items():
            row = {
                "setup": name,
                "says": setup.says,
                "verdict": "not run",
                "first": "",
                "n_wrong": None,
                "foreign": None,
            }
            if outcome := self.outcomes.get(name):
                row["verdict"] = "clean" if outcome.clean else "wrong"
                row["first"] = "" if outcome.clean else name_module(outcome.first)
                row["n_wrong"] = outcome.wrong.groupby(TENSOR).ngroups
                row["foreign"] = outcome.foreign["owner_path"].nunique()
            rows.append(row | {"kills": setup.rules_out})
        return pd.DataFrame(rows).astype({"n_wrong": "Int64", "foreign": "Int64"})

    def ranked(self) -> pd.DataFrame:
        """Return one row per cause, likeliest first, with the signs for and against it."""
        rows = []
        for cause in self.causes:
            signs = {f"{sign.says} ({sign.weight:+g})": sign.weight for sign in cause.signs}
            for_it = [says for says, weight in signs.items() if weight > 0]
            against_it = [says for says, weight in signs.items() if weight < 0]
            rows.append(
                (cause.name, cause.score, for_it, against_it, cause.issues, cause.next_experiment)
            )
        columns = ["cause", "score", "for_it", "against_it", "issues", "next_experiment"]
        return pd.DataFrame(rows, columns=columns)

    def outcome(self) -> Outcome:
        """Return the outcome of the first wrong setup, or of the last if all are clean."""
        return self.bad or [*self.outcomes.values()][-1]

    def document(self) -> dict[str, Any]:
        """Return a JSON document; `schema` is its version."""
        first = self.first
        return plain(
            {
                "schema": SCHEMA,
                "verdict": self.verdict,
                "line": self.line,
                "reason": self.reason,
                "exit_code": self.exit_code,
                "first": first and first._asdict(),
                "nodes": self.nodes().to_dict("records"),
                "setups": self.setups().to_dict("records"),
                "cause_known": self.cause_known,
                "causes": self.ranked().to_dict("records"),
                "coverage": self.coverage._asdict() | {"says": str(self.coverage)},
                "floors": {"largest": self.lab.floor.max(), "median": self.lab.floor.median()},
                "repeats": self.repeats,
                "inert": self.inert,
                "facts": self.facts,
            }
        )


def investigate(
    draft: Module,
    target: Module | None = None,
    *,
    script: Script | None = None,
    deploy: Deploy | None = None,
    setups: Sequence[str] | None = None,
    progress: Progress = silent,
) -> Investigation:
    """Find where a Transformers draft diverges, alone and next to other models.

    `setups` None: S0, S0w, S1, S2 and, with a target, S3; then S4 to S6 if the draft is wrong only
    next to a neighbor. All inputs and outputs of modules stay in memory: several MB per token for a
    model of 1 B parameters. Raises InputError for a compiled model, and for a dtype without known
    rounding.
    """
    lab = Lab(draft, target, script=script or random_script(draft, target))
    return judge_service(lab, deploy=deploy, setups=setups, progress=progress)


def judge_service(
    lab: Lab,
    *,
    deploy: Deploy | None = None,
    setups: Sequence[str] | None = None,
    progress: Progress = silent,
) -> Investigation:
    """Investigate with an existing lab, whose reference and floors can serve several services."""
    started = time.perf_counter()
    outcomes = {}

    def run(names: Sequence[str]) -> None:
        if not (setups or lab.target):
            names = [name for name in names if SETUPS[name].beside != "target"]
        total = len(outcomes) + len(names)
        for name in names:
            progress(len(outcomes), total, f"{name}: {SETUPS[name].says}")
            outcomes[name] = lab.run(name, deploy)

    # 1. Run the setups, and more of them if the draft is wrong only next to a neighbor.
    run(setups or FIRST)
    wrong = [outcome for outcome in outcomes.values() if not outcome.clean]
    if not setups and wrong and wrong[0].setup.beside != "nobody":
        run(ON_DEMAND)
    # 2. Is the draft deterministic, and do hooks change its logits?
    ran = [*outcomes.values()]
    repeats = inert = True
    for name in dict.fromkeys(item.setup.id for item in (ran[0], *wrong[:1], ran[-1])):
        bare = lab.bare(name, deploy)
        repeats &= same_logits(bare, lab.bare(name, deploy))
        inert &= same_logits(bare, outcomes[name].logits)
    # 3. Compute coverage, verdict and causes.
    covered = (Coverage.of(outcome, lab.draft) for outcome in wrong[:1] or ran)
    coverage = max(covered, key=lambda item: (not item.output, len(item.uncompared)))
    verdict, reason = _verdict(lab, outcomes, _doubts(lab, outcomes, coverage, repeats, inert))
    causes = rank(gather(lab, outcomes, repeats=repeats)) if wrong else []
    facts = _facts(lab) | {
        "in_service": deploy is not None,
        "seconds": time.perf_counter() - started,
    }
    return Investigation(verdict, reason, lab, outcomes, causes, coverage, repeats, inert, facts)


def _facts(lab: Lab) -> dict[str, Any]:
    """Return what was investigated, on which machine and with which tokens."""
    script, draft = lab.script, lab.draft
    return {
        "draft": type(draft).__name__,
        "target": lab.target and type(lab.target).__name__,
        "dtype": lab.dtype,
        "device": str(next(draft.parameters()).device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
        "tokens": len(script.text),
        "prompt": len(script.feeds[0].ids),
        "feeds": len(script.feeds),
        "taken_back": sum(feed.forget for feed in script.feeds),
        "training": draft.training,
        "unsteady": sorted({module or "the model itself" for module, *_ in lab.unsteady.index}),
    }


def random_script(
    draft: Module,
    target: Module | None = None,
    *,
    tokens: int = 32,
    prompt: int = 16,
    k: int = 3,
    seed: int = 0,
) -> Script:
    """Return a script of random tokens that both models have: a prompt, then rounds of `k`."""
    size = min(
        model.get_input_embeddings().num_embeddings
        for model in (draft, target)
        if model is not None
    )
    text = np.random.default_rng(seed).integers(0, size, tokens).tolist()
    return Script.drafting(text, prompt=prompt, k=k, vocab_size=size, seed=seed)


def _verdict(lab: Lab, outcomes: Mapping[str, Outcome], doubts: Iterable[str]) -> tuple[str, str]:
    """Return the verdict and its reason."""
    ran = [*outcomes.values()]
    wrong = [outcome for outcome in ran if not outcome.clean]
    alike = all(same_logits(item.logits, lab.sound_logits[item.setup.in_blocks]) for item in ran)
    verdict, reason = errors.give_verdict(
        bool(wrong),
        doubts=doubts,
        excuses=[
            "all positions are offset by one number, which RoPE does not see"
            for item in ran
            if item.offset
        ],
        sound="every setup is bit-identical to a copy of the draft as loaded" if alike else "",
        rest=(
            "bits differ from the pristine copy's, "
            "in no module by more than another order of summation"
        ),
    )
    if verdict == "DIVERGENT":
        far, apart = lab.logits_off(wrong)
        reason = (
            ""
            if far > TIMES_FLOOR * apart
            else f"its logits differ by {far:.1g}, no more than rounding"
        )
    elif verdict != "INCONCLUSIVE":
        reason += _foreign(outcomes)
    return verdict, reason


def _doubts(
    lab: Lab, outcomes: Mapping[str, Outcome], coverage: Coverage, repeats: bool, inert: bool
) -> Iterator[str]:
    """Yield reasons why a draft in which nothing is wrong cannot be judged."""
    for outcome in outcomes.values():
        if outcome.coarser:
            served = f"in {outcome.setup.id} the service computes in {outcome.coarser}"
            yield f"{served}, and the draft is {lab.dtype}: load the draft in that type (--dtype)"
    for key, whole in lab.sound[0].whole.items():
        if key.role == "out" and len(bad := np.flatnonzero(np.isnan(whole.features).any(1))):
            place = f"{key.module or 'the model itself'} at position {bad[0]}"
            yield f"the draft as loaded gives NaN, first in {place}: check its weights"
    if not coverage.complete:
        missed = ", ".join(coverage.uncompared[:3]) or "the model's output"
        yield (
            f"nothing is wrong, but {missed} could not be compared: "
            "feed one complete row without padding"
        )
    if len(lab.unsteady):
        at = lab.unsteady.index[0][0]
        floor = lab.unsteady.iloc[0]
        place = (
            f"{at or 'the model itself'} differs by {floor:.2g} "
            "between sound runs with different block sizes"
        )
        yield f"nothing that could be judged is wrong, but {place}: use a shorter text, or float32"
    if not repeats:
        yield (
            "the draft's output differs from run to run, even without hooks: "
            "make it deterministic first"
        )
    if not inert:
        yield (
            "the draft's logits differ with and without hooks: the captured run is not the real one"
        )
    foreign = _foreign(outcomes)
    if foreign and {outcome.setup.beside for outcome in outcomes.values()} <= {"nobody", "copy"}:
        yield (
            f"nothing is wrong{foreign}, whose values are the same in every setup that ran: run S2"
        )
    far, apart = lab.logits_off(outcomes.values())
    if far > min(GROWN * apart, 1.0):  # zeros would differ by 1
        yield f"the logits differ by {far:.2g}, and no compared module is wrong by itself"


def _foreign(outcomes: Mapping[str, Outcome]) -> str:
    """Return a clause that names a parameter of another model that was read; "" if none was."""
    read = next(
        (row for outcome in outcomes.values() for row in outcome.foreign.itertuples()), None
    )
    return f"; but {read.module} read {read.owner}:{read.owner_path}" if read else ""


# --- the report as plain text ---------------------------------------------------------------------


def text(investigation: Investigation) -> str:
    """Return the report as plain text, the verdict line first."""
    coverage, facts, floor = investigation.coverage, investigation.facts, investigation.lab.floor
    missed = {
        "never ran": coverage.never_called,
        "ran but not compared": coverage.uncompared,
        "compared only as part of the containing module": coverage.with_holder,
        "not judged, because sound runs differ too much": facts["unsteady"],
        "left out (other shapes)": coverage.left_out,
        "set-ups not run": [name for name in SETUPS if name not in investigation.outcomes],
    }
    parts = [
        investigation.line,
        "",
        (
            f"fed: {facts['tokens']} tokens in {facts['feeds']} feeds, "
            f"{facts['taken_back']} rolled back"
        ),
        f"compared: {coverage}",
        *(f"{name}: {', '.join(names)}" for name, names in missed.items() if names),
        (
            f"wrong: an error above {TIMES_FLOOR:g} times the floor, "
            "the largest error of that tensor between sound runs with other shapes "
            f"(relative L2; median {floor.median():.2g}, maximum {floor.max():.2g})"
        ),
        "",
        "Setups",
        investigation.setups().astype("string").fillna("").to_string(index=False),
    ]
    if investigation.bad is not None:
        earliest = investigation.nodes().head(EARLIEST).drop(columns=["at", "call"])
        parts += [
            "",
            "Earliest divergences",
            earliest.to_string(index=False, float_format="{:.4g}".format),
        ]
        parts += ["", "Causes, likeliest first"]
    for cause in investigation.ranked().itertuples():
        if not cause.for_it:
            continue
        parts.append(f"{cause.cause} ({cause.score:+.1f}): {'; '.join(cause.for_it)}")
        if cause.against_it:
            parts.append(f"  against it: {'; '.join(cause.against_it)}")
        parts.append(f"  seen before: {', '.join(cause.issues)}; next: {cause.next_experiment}")
    return "\n".join(parts) + "\n"
