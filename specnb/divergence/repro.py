"""The smallest run that still goes wrong at the same place, and a script of it that needs nothing of this package.

Text and feeds are made shorter as long as the same tensor is the first wrong one (delta debugging; Zeller and
Hildebrandt 2002), within a bounded number of runs. A run costs what a set-up and its two sound runs cost.
"""

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from torch import Tensor, nn

from specnb.divergence.reproduction import standalone
from specnb.divergence.reproduction.pack import pack
from specnb.divergence.script import Feed, Script
from specnb.divergence.setups import Deploy, Lab, Outcome
from specnb.errors import InputError
from specnb.io import write_atomic

MOST_RUNS = 12


@dataclass(frozen=True)
class Repro:
    """The smallest run found. `kind` is "module" where the first module alone shows it, "model" for the whole draft."""

    setup: str
    script: Script
    first: pd.Series
    runs: int
    facts: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def kind(self) -> str:
        return self.facts["kind"]

    def __str__(self) -> str:
        feeds, tokens = len(self.script.feeds), len(self.script.text)
        return (
            f"{self.first['module'] or 'the model'} in {self.setup} with {tokens} token{'s' * (tokens > 1)} in {feeds} "
            f"feed{'s' * (feeds > 1)} ({self.runs} runs): a script of the {self.kind}"
        )

    def write(self, folder: Path) -> Path:
        """`repro.py`, `repro.json` and `repro.safetensors` in `folder`; the path of the script, which is written last.

        It needs torch, transformers and safetensors. Raises InputError where nothing can be written.
        """
        from safetensors.torch import save

        folder = Path(folder)
        contents = {
            "repro.safetensors": save(self.tensors),
            "repro.json": (json.dumps(self.facts, indent=1) + "\n").encode(),
            "repro.py": inspect.getsource(standalone).encode(),
        }
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, content in contents.items():
                write_atomic(folder / name, content)
        except OSError as error:
            raise InputError(f"{folder} cannot be written ({error.strerror}): give another folder") from error
        return folder / "repro.py"


def minimal(
    draft: nn.Module,
    target: nn.Module | None = None,
    *,
    outcome: Outcome,
    deploy: Deploy | None = None,
    runs: int = MOST_RUNS,
) -> Repro:
    """The smallest run found in at most `runs` runs; `outcome` is a wrong one, such as `investigation.case.bad`.

    `draft`, `target` and `deploy` are those that were investigated. Raises InputError for an outcome that is clean, one
    that does not happen again, and a draft that a script cannot build (`reproduction.pack`).
    """
    if outcome.clean:
        raise InputError(f"{outcome.setup.id} is clean: there is nothing to reproduce")
    if runs < 1:
        raise InputError(f"{runs} runs find nothing: allow at least 1")
    search = _Search(draft, target, deploy, outcome, runs)
    search.shrink()
    if search.best is None:
        first = search.wanted["module"] or "the model"
        raise InputError(
            f"{first} was not wrong again in {search.used} runs of {search.setup}: give the deploy that was "
            "investigated, or allow more runs; else it is not deterministic"
        )
    lab, found = search.best
    facts, tensors = pack(lab, found)
    return Repro(search.setup, found.script, found.wrong.iloc[0], search.used, facts, tensors)


class _Search:
    """Tries scripts; `best` is the last one, the smallest, at which the same tensor was wrong first."""

    def __init__(
        self, draft: nn.Module, target: nn.Module | None, deploy: Deploy | None, outcome: Outcome, runs: int
    ) -> None:
        self._models, self._deploy, self._left = (draft, target), deploy, runs
        # fed in blocks is a matter of the script, which the outcome has
        self.setup = "S0" if outcome.setup.in_blocks else outcome.setup.id
        self.wanted, self._script = outcome.wrong.iloc[0], outcome.script
        self.used = 0
        self.best: tuple[Lab, Outcome] | None = None

    def shrink(self) -> None:
        """One prefill where that is enough, else feeds up to the first wrong one with less before it."""
        number = int(self.wanted["feed"])
        end = self._script.starts[number] + len(self._script.feeds[number].ids)
        # what is wrong may need tokens behind it that came with it
        if any(self._one_prefill(length) for length in sorted({int(self.wanted["position"]) + 1, end})):
            return
        if self._shows(self._script.feeds[: number + 1]):
            self._shorter_prompt()
            self._fewer_feeds()

    def _one_prefill(self, length: int) -> bool:
        text = self._script.text
        if not self._shows((Feed(text[:length]),)):
            return False
        self._bisect(len(text[:length]), lambda n: (Feed(text[:n]),))
        return True

    def _shorter_prompt(self) -> None:
        prompt, *rest = self._best_feeds()
        self._bisect(len(prompt.ids), lambda n: (Feed(prompt.ids[:n], prompt.forget), *rest))

    def _bisect(self, known: int, feeds: Callable[[int], tuple[Feed, ...]]) -> None:
        """The least n at which `feeds(n)` shows it, if all above do."""
        below = 0
        while known - below > 1 and self._left:
            middle = (known + below) // 2
            if self._shows(feeds(middle)):
                known = middle
            else:
                below = middle

    def _fewer_feeds(self) -> None:
        at = len(self._best_feeds()) - 2  # neither the prompt nor the last, in which it shows
        while at > 0 and self._left:
            feeds = self._best_feeds()
            self._shows((*feeds[:at], *feeds[at + 1 :]))
            at -= 1

    def _best_feeds(self) -> tuple[Feed, ...]:
        return self.best[1].script.feeds

    def _shows(self, feeds: tuple[Feed, ...]) -> bool:
        if not self._left:
            return False
        try:
            script = Script(feeds)
        except InputError:  # more is taken back than is left
            return False
        self._left, self.used = self._left - 1, self.used + 1
        lab = Lab(*self._models, script=script, deploy=self._deploy)
        try:
            outcome = lab.run(self.setup)
        except (Exception, SystemExit):  # a text this short, or fed so, the service does not take
            return False
        same = ["at", "role", "name"]
        if outcome.clean or not (outcome.wrong.iloc[0][same] == self.wanted[same]).all():
            return False
        self.best = (lab, outcome)
        return True
