"""What an investigation found: a verdict, the first divergence, causes, and all that it rests on."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd

from specnb.divergence.causes import Case, Cause
from specnb.divergence.features import Features
from specnb.divergence.ladder import EXIT, HEAT, Node, Verdict, named
from specnb.divergence.local import WHICH, over_floor
from specnb.divergence.setups import SETUPS, Coverage, Outcome
from specnb.io import plain

SCHEMA = 1
TRAINING = "it is in training mode: call its `eval`"
LEAD, KNOWN = 1.0, 3.0
"""How far the likeliest cause must lead, and its score and lead together: that a fault shows alone, too, is not enough,
and one strong sign without a rival is."""


@dataclass(frozen=True)
class Investigation:
    """The result of `investigate`.

    `reason` says why the verdict is not DIVERGENT; where it is, that the logits do not show it. `floor`: the largest
    error of each tensor in sound runs. `repeats`: S0, and the first set-up that is wrong, give the same bits when run
    again without hooks; `inert`: these, and the last set-up, give with hooks what they give without. `facts`: classes,
    dtype, versions, script.
    `features`: what came of switching features of the service off, where it was given some and something was wrong.
    """

    verdict: Verdict
    reason: str
    case: Case
    causes: tuple[Cause, ...]
    coverage: Coverage
    floor: pd.Series
    repeats: bool
    inert: bool
    facts: Mapping[str, Any]
    features: Features | None = None

    @property
    def exit_code(self) -> int:
        return EXIT[self.verdict]

    @property
    def first(self) -> Node | None:
        """The first divergence; None where there is none."""
        if self.verdict != "DIVERGENT":
            return None
        rows, first = self.case.rows, self.case.first
        worst = rows.loc[rows["error"].idxmax()]
        return Node(
            first["module"], first["role"], first["name"], first["at"], int(first["position"]),
            int(rows["position"].max()), rows["position"].nunique(), float(worst["error"]), float(worst["floor"]),
            float(worst["ratio"]), float(worst["gain"]),
        )  # fmt: skip

    @property
    def line(self) -> str:
        """The verdict in one line."""
        clean = [name for name, item in self.case.outcomes.items() if item.clean]
        wrong = [name for name, item in self.case.outcomes.items() if not item.clean]
        summary = "; ".join(
            f"{' '.join(names)} {verdict}" for names, verdict in ((clean, "clean"), (wrong, "wrong")) if names
        )
        first = self.first
        if first is None:
            alone = "" if self.facts["in_service"] else "; no service was given, so the models ran by themselves"
            return f"{self.verdict}: {self.reason}; {summary}{alone}"
        tokens = f"{first.n_tokens} of {self.coverage.tokens} tokens from {first.first_token} on"
        cause = self.causes[0]
        strongest = max(cause.signs, default=None)
        why = f" ({strongest.says})" if strongest and strongest.weight > 0 else ""
        called = f"cause {cause.name}" if self.cause_known else f"cause not known; likeliest {cause.name}"
        random = "" if self.repeats else "; it differs from run to run"
        random += f" ({TRAINING})" if random and self.facts["training"] else ""
        inside = f" or in one of {len(self.hidden)} modules that could not be compared" if self.hidden else ""
        harmless = f"; yet {self.reason}: that does not explain refused drafts" if self.reason else ""
        return f"DIVERGENT: first at {named(first)}{inside}, {tokens}; {called}{why}; {summary}{random}{harmless}"

    @property
    def hidden(self) -> list[str]:
        """Modules inside the first that could not be compared: it may be one of them that is wrong."""
        first = self.first
        if first is None or (first.at == "" and first.role == "in"):  # what the model was fed, no module made
            return []
        inner = f"{first.module}." if first.module else ""
        return [module for module in self.coverage.uncompared if module and module.startswith(inner)]

    @property
    def cause_known(self) -> bool:
        """Whether so much speaks for the likeliest cause, and so much less for the next, that it may be named alone."""
        if len(self.causes) < 2 or self.hidden:
            return False
        best, lead = self.causes[0].score, self.causes[0].score - self.causes[1].score
        return lead >= LEAD and best + lead >= KNOWN

    def nodes(self) -> pd.DataFrame:
        """The modules that are wrong by themselves in the first wrong set-up, first in time first; a row a tensor.

        Columns are `Node`'s and `call`, the how manieth of the module in its step.
        """
        columns = [*Node._fields, "call"]
        if self.case.bad is None:
            return pd.DataFrame(columns=columns)
        wrong = self.case.bad.wrong
        groups = wrong.groupby(["module", "at", "call", "role", "name"], sort=False)
        table = groups.agg(
            first_token=("position", "min"), last_token=("position", "max"), n_tokens=("position", "nunique"),
            error=("error", "max"), floor=("floor", "first"), ratio=("ratio", "max"), worst=("error", "idxmax"),
        )  # fmt: skip
        table["gain"] = wrong.loc[table["worst"], "gain"].to_numpy()
        return table.reset_index()[columns]

    def setups(self) -> pd.DataFrame:
        """One row for each set-up: setup, says, verdict, first, n_wrong (tensors), foreign (parameters), kills."""
        return pd.DataFrame([self._setup(name) for name in SETUPS]).astype({"n_wrong": "Int64", "foreign": "Int64"})

    def ranked(self) -> pd.DataFrame:
        """The causes, likeliest first: cause, score, for_it, against_it, issues, next_experiment."""
        columns = ["cause", "score", "for_it", "against_it", "issues", "next_experiment"]
        rows = [[c.name, c.score, c.for_it, c.against_it, list(c.issues), c.next_experiment] for c in self.causes]
        return pd.DataFrame(rows, columns=columns)

    def errors(self, setup: str | None = None) -> pd.DataFrame:
        """All that was compared in a set-up (as `outcome` has it), with `floor`, and `ratio` of error to floor."""
        return over_floor(self.outcome(setup).errors, self.floor)

    def heat(self, setup: str | None = None) -> pd.DataFrame:
        """log10 of error over floor, modules in order of time by positions, 0 at the floor, within HEAT.

        `setup` None is the first that is wrong, else the last that was run. Of a module's tensors the largest counts.
        """
        errors = self.errors(setup)
        with np.errstate(divide="ignore"):
            errors["heat"] = np.log10(errors["ratio"]).fillna(0).clip(*HEAT)
        order = errors.groupby("module")["order"].min().sort_values().index
        return errors.pivot_table(index="module", columns="position", values="heat", aggfunc="max").loc[order]

    def document(self) -> dict[str, Any]:
        """A JSON document; its shape is told by `schema`."""
        first = self.first
        return plain({
            "schema": SCHEMA, "verdict": self.verdict, "line": self.line, "reason": self.reason,
            "exit_code": self.exit_code, "first": first and first._asdict(), "nodes": self.nodes().to_dict("records"),
            "setups": self.setups().to_dict("records"),
            "cause_known": self.cause_known, "causes": self.ranked().to_dict("records"),
            "coverage": asdict(self.coverage) | {"says": str(self.coverage)},
            "floors": {"largest": self.floor.max(), "median": self.floor.median()},
            "repeats": self.repeats, "inert": self.inert, "facts": self.facts,
            "features": self.features and self.features.facts(),
        })  # fmt: skip

    def _setup(self, name: str) -> dict[str, Any]:
        setup, outcome = SETUPS[name], self.case.outcomes.get(name)
        row = {"setup": name, "says": setup.says, "verdict": "not run", "first": "", "n_wrong": None, "foreign": None}
        if outcome is not None:
            row["verdict"], row["n_wrong"] = "clean" if outcome.clean else "wrong", 0
            row["foreign"] = outcome.foreign["owner_path"].nunique()
        if outcome is not None and not outcome.clean:
            row["first"] = named(outcome.wrong.iloc[0])
            row["n_wrong"] = len(outcome.wrong[list(WHICH)].drop_duplicates())
        return row | {"kills": setup.kills}

    def outcome(self, setup: str | None = None) -> Outcome:
        """What a set-up showed; None: the first that is wrong, else the last."""
        if setup is None:
            return self.case.bad or list(self.case.outcomes.values())[-1]
        return self.case.outcomes[setup]
