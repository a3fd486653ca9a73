"""What the set-ups of an investigation showed, reduced to what causes are told apart by."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pandas as pd

from specnb.divergence import ladder
from specnb.divergence.capture import capture
from specnb.divergence.local import WHICH
from specnb.divergence.parts import Parts, find, output_head
from specnb.divergence.script import Script, run
from specnb.divergence.setups import OWN, Lab, Outcome
from specnb.divergence.trace import Trace
from specnb.divergence.tracing.at_use import UNKNOWN
from specnb.divergence.tracing.paths import canonical
from specnb.errors import InputError

ONE_FACTOR = 0.2
"""How far off tokens of one factor may be (`ladder.one_factor`): in a replay gains are exact, and no error travels."""
CACHED = ("keys", "values")


@dataclass(frozen=True)
class Case:
    """Outcomes by set-up, in the order they were run; `meant` are digests of the draft's parameters by their path, and
    `holders` the modules that hold them, as traces call them.

    `sound` is the pristine copy's run up to the first wrong feed, with its cache, where attention is wrong first.
    `repeats`: what was run again without hooks gave the same bits.
    """

    outcomes: Mapping[str, Outcome]
    meant: Mapping[str, str]
    holders: Mapping[str, str]
    parts: Parts
    head: str
    n_tokens: int
    sound: Trace | None = None
    repeats: bool = True

    @classmethod
    def of(cls, lab: Lab, outcomes: Mapping[str, Outcome]) -> "Case":
        """The outcomes of a lab's set-ups."""
        names = canonical(path for path, _ in lab.reference.named_modules())
        holders = {path: names[path.rpartition(".")[0]] for path in lab.meant}
        case = cls(dict(outcomes), lab.meant, holders, find(lab.draft), _head(lab), len(lab.script.text))
        return replace(case, sound=_sound(lab, case)) if case.bad is not None and case.attending else case

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
    def at_once(self) -> bool:
        """Whether all that is wrong alone begins in the first feed: before anything was cached, or taken back."""
        alone = [one for one in self.outcomes.values() if one.setup.beside == "nobody"]
        return bool(alone) and all(not one.clean and one.wrong["feed"].iloc[0] == 0 for one in alone)

    @cached_property
    def factor(self) -> float | None:
        """The one factor by which the first tensor is too large at all of its tokens; None where there is none."""
        return ladder.one_factor(self.rows["gain"].to_numpy(), self.rows["error"].to_numpy(), limit=ONE_FACTOR)

    @cached_property
    def own(self) -> set[str]:
        """Paths of the parameters that the first module holds, itself or in modules of which nothing was compared.

        The model itself holds all modules: of those inside it the ones that ran.
        """
        module, seen = self.first["module"], set(self.bad.errors["at"])
        inner = f"{module}." if module else ""
        known = {*self.holders.values()} if module else {*self.bad.trace.tensors["module"]}
        unseen = {one for one in known - seen if one.startswith(inner)}
        return {path for path, holder in self.holders.items() if holder == module or holder in unseen}

    @cached_property
    def reads(self) -> pd.DataFrame:
        """The parameters that operations of the first module read."""
        params = self.bad.trace.params
        return params[params["module"] == self.first["module"]].drop_duplicates(["owner", "owner_path", "digest"])

    @cached_property
    def foreign(self) -> list[str]:
        """Of these, the parameters of other models, as owner:path."""
        theirs = self.reads[~self.reads["owner"].isin((OWN, UNKNOWN))]
        return sorted({f"{row.owner}:{row.owner_path}" for row in theirs.itertuples()})

    @cached_property
    def changed(self) -> list[str]:
        """Of these, the draft's own whose content is not that of the pristine copy."""
        ours = self.reads[self.reads["owner"] == OWN]
        pairs = zip(ours["owner_path"], ours["digest"], strict=True)
        return sorted({path for path, digest in pairs if self.meant.get(path, digest) != digest})

    @cached_property
    def copies(self) -> list[str]:
        """Of the draft's parameters, those whose content was read from parameters that no known model has."""
        return sorted(self._read_of(UNKNOWN))

    @cached_property
    def tied(self) -> set[str]:
        """Of the draft's parameters, those whose content was read of its own, by whatever path: a tied head is read as
        the embedding."""
        return self._read_of(OWN)

    @cached_property
    def strange(self) -> bool:
        """Whether parameters that no known model has were read, and are not seen to be copies of the draft's own."""
        return bool(self._digests(UNKNOWN) - {*self.meant.values()})

    def _digests(self, owner: str) -> set[str]:
        """Digests of the parameters of an owner that were read; "" of those that have none."""
        return {*self.reads.loc[self.reads["owner"] == owner, "digest"]}

    def _read_of(self, owner: str) -> set[str]:
        """Paths of the draft's parameters whose content was read from parameters of an owner."""
        read = self._digests(owner)
        return {path for path, digest in self.meant.items() if digest and digest in read}

    @cached_property
    def unseen(self) -> bool:
        """Whether the first module has parameters and was seen to read none: a kernel that torch is not shown did."""
        known = self.own.isdisjoint({*self.reads["owner_path"], *self.tied}) and not self.copies
        return bool(self.own) and known and not self.foreign and not self.strange

    @cached_property
    def bare(self) -> bool:
        """Whether the first module has no parameters, and read none."""
        return not self.own and self.reads.empty

    @cached_property
    def unchanged(self) -> bool:
        """Whether the first module read all its parameters, and nothing that is not as in the pristine copy.

        Of the buffers of a rotary embedding one is read, the other is what it was made with.
        """
        read = {*self.reads.loc[self.reads["owner"] == OWN, "owner_path"], *self.copies, *self.tied}
        return bool(read) and (self.own <= read or self.turning) and not (self.changed or self.foreign or self.strange)

    @cached_property
    def turning(self) -> bool:
        """Whether a rotary embedding is wrong."""
        return self.first["module"] in dict(self.parts.rotaries)

    @cached_property
    def attending(self) -> bool:
        """Whether attention is wrong between its projections."""
        return self.first["module"] in dict(self.parts.attentions) and self.first["role"] == "in"

    @cached_property
    def cached(self) -> dict[str, bool]:
        """Of "keys" and "values" whether the cache held the rows of a sound run in the first wrong feed.

        Only what both runs' caches show: empty where attention is not what is wrong first. Keys that are all turned by
        one number of positions more are no others. Rows that are near the right ones (`nearly_cached`) are neither.
        """
        exact = ladder.rounding([str(self.bad.trace.facts.get("dtype"))])
        return {name: off <= exact for name, off in self._cache_errors.items() if off <= exact or off > ladder.LARGE}

    @cached_property
    def nearly_cached(self) -> dict[str, float]:
        """The largest relative error of those whose rows are the right ones, but for more than rounding to the draft's
        type: of a quantised cache, or after a sound kernel of another order."""
        return {name: off for name, off in self._cache_errors.items() if name not in self.cached}

    @cached_property
    def _cache_errors(self) -> dict[str, float]:
        if self.sound is None:
            return {}
        names = CACHED[1:] if self.bad.offset else CACHED
        errors = {name: self._cache_error(name) for name in names}
        return {name: error for name, error in errors.items() if error is not None}

    def _cache_error(self, name: str) -> float | None:
        """The largest relative error of a cached row; inf for another number of rows, None where nothing was seen."""
        where = {"module": self.first["module"], "role": "state", "name": name, "step": int(self.first["feed"])}
        rows, sound = (_cached_rows(trace.rows(**where), trace) for trace in (self.bad.trace, self.sound))
        if rows is None or sound is None or rows.shape[1:] != sound.shape[1:]:
            return None
        if len(rows) != len(sound) or not np.isfinite(rows).all():
            return np.inf
        off, size = (np.linalg.norm(values, axis=1) for values in (rows - sound, sound))
        return float(np.max(np.divide(off, size, out=np.where(off > 0, np.inf, 0.0), where=size > 0), initial=0.0))

    def error_like(self, one: str, other: str) -> bool | None:
        """Whether two set-ups are wrong by the same amounts; None where one was not run, or none repeats."""
        if not self.repeats or one not in self.outcomes or other not in self.outcomes:
            return None
        a, b = (self.outcomes[name].wrong["error"].to_numpy() for name in (one, other))
        return len(a) == len(b) and bool(np.allclose(a, b, rtol=1e-3))


def _head(lab: Lab) -> str:
    try:
        return output_head(lab.draft)[0]
    except InputError:  # a drafter that has no head of its own
        return ""


def _sound(lab: Lab, case: Case) -> Trace:
    """The pristine copy, fed as the first wrong set-up was up to the feed that is wrong."""
    feeds = case.bad.script.feeds[: int(case.first["feed"]) + 1]
    only = f"^{re.escape(case.first['module'])}$"
    with capture(lab.reference, tag=OWN, modules=only, full="", at_use=False) as builder:
        run(lab.reference, Script(feeds))
    return builder.trace()


def _cached_rows(found: pd.DataFrame, trace: Trace) -> np.ndarray | None:
    """What a cache held, `(tokens, features)`, by its rows in the trace; None where that was not seen."""
    full = None if found.empty else trace.array(found["row"].iloc[-1], "full")
    if full is None or found["token_axis"].iloc[-1] < 0:
        return None
    rows = np.moveaxis(full, found["token_axis"].iloc[-1], 0)
    return rows.reshape(len(rows), -1)
