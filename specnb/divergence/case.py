"""What the set-ups of an investigation showed, reduced to what causes are told apart by."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd

from specnb.divergence.local import WHICH
from specnb.divergence.parts import Parts, find, output_head
from specnb.divergence.setups import OWN, Lab, Outcome
from specnb.divergence.tracing.paths import canonical_name
from specnb.errors import InputError

ONE_FACTOR = 0.2
"""Spread of the gain over tokens, as a share of it and of its distance from 1, up to which it is one factor for all."""


@dataclass(frozen=True)
class Case:
    """Outcomes by set-up, in the order they were run; `meant` are digests of the draft's parameters by their path."""

    outcomes: Mapping[str, Outcome]
    meant: Mapping[str, str]
    parts: Parts
    head: str
    n_tokens: int

    @classmethod
    def of(cls, lab: Lab, outcomes: Mapping[str, Outcome]) -> "Case":
        """The outcomes of a lab's set-ups."""
        return cls(dict(outcomes), lab.meant, find(lab.draft), _head(lab), len(lab.script.text))

    @cached_property
    def bad(self) -> Outcome | None:
        """The first set-up that is wrong; None where all are clean."""
        return next((one for one in self.outcomes.values() if not one.clean), None)

    def wrong(self, name: str) -> bool | None:
        """Whether this set-up is wrong; None where it was not run."""
        return not self.outcomes[name].clean if name in self.outcomes else None

    @cached_property
    def alone(self) -> bool | None:
        """Whether it is wrong without a neighbour; None where that was not run."""
        alone = [one for one in self.outcomes.values() if one.setup.beside == "nobody"]
        return any(not one.clean for one in alone) if alone else None

    @cached_property
    def first(self) -> pd.Series:
        """The row that is wrong first in time: its `module` is the first divergence."""
        return self.bad.wrong.iloc[0]

    @cached_property
    def rows(self) -> pd.DataFrame:
        """All wrong rows of that tensor."""
        wrong, which = self.bad.wrong, list(WHICH)
        return wrong[(wrong[which] == self.first[which]).all(axis=1)]

    @cached_property
    def others(self) -> list[str]:
        """Modules that are wrong by themselves besides the first, in order of time."""
        return [name for name in self.bad.wrong["module"].unique() if name != self.first["module"]]

    @cached_property
    def share(self) -> float:
        """Share of the text's tokens at which the first tensor is wrong."""
        return self.rows["position"].nunique() / self.n_tokens

    @cached_property
    def factor(self) -> float | None:
        """The one factor by which the first tensor is too large at all of its tokens; None where there is none."""
        gain = self.rows["gain"].to_numpy()
        middle = float(np.median(gain))
        # what is left of the error once the factor is out, by Pythagoras: error^2 = (gain - 1)^2 + rest^2
        rest = np.sqrt(np.clip(self.rows["error"].to_numpy() ** 2 - (gain - 1) ** 2, 0, None))
        spread = max(float(np.abs(gain - middle).max()), float(np.median(rest)))
        # of an output that is small and has nothing to do with the right one all gains are near 0, too
        return middle if spread < ONE_FACTOR * min(abs(middle - 1), middle) else None

    @cached_property
    def reads(self) -> pd.DataFrame:
        """The parameters that operations of the first module read."""
        params = self.bad.trace.params
        return params[params["module"] == self.first["module"]].drop_duplicates(["owner", "owner_path", "digest"])

    @cached_property
    def foreign(self) -> list[str]:
        """Of these, the parameters of other models, as owner:path."""
        theirs = self.reads[self.reads["owner"] != OWN]
        return sorted({f"{row.owner}:{row.owner_path}" for row in theirs.itertuples()})

    @cached_property
    def unseen(self) -> bool:
        """Whether the first module has parameters and was seen to read none: a kernel that torch is not shown did."""
        own = {path for path in self.meant if canonical_name(path).rpartition(".")[0] == self.first["module"]}
        return bool(own) and own.isdisjoint(self.reads["owner_path"]) and not self.foreign

    @cached_property
    def changed(self) -> list[str]:
        """Of these, the draft's own whose content is not that of the pristine copy."""
        ours = self.reads[self.reads["owner"] == OWN]
        pairs = zip(ours["owner_path"], ours["digest"], strict=True)
        return sorted({path for path, digest in pairs if self.meant.get(path, digest) != digest})

    def error_like(self, one: str, other: str) -> bool | None:
        """Whether two set-ups are wrong by the same amounts; None where one was not run."""
        if one not in self.outcomes or other not in self.outcomes:
            return None
        a, b = (self.outcomes[name].wrong["error"].to_numpy() for name in (one, other))
        return len(a) == len(b) and bool(np.allclose(a, b, rtol=1e-3))


def _head(lab: Lab) -> str:
    try:
        return output_head(lab.draft)[0]
    except InputError:  # a drafter that has no head of its own
        return ""
