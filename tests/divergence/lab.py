"""One lab for the tests of the divergence lab: they look at the same runs from several sides, and a
run costs a second.

What it hands out is shared: read it, or copy it first.
"""

from torch import nn

from specnb.divergence import pair as small
from specnb.divergence.investigate import random_script
from specnb.divergence.script import Script
from specnb.divergence.setups import Deploy, Lab, Outcome
from tests.benchmarks.divergence_score.faults import FAULTS

TOKENS, PROMPT = 20, 14
"""Longer than the window of 16 tokens, with a rejection in it. What a run costs is its number of
feeds: nine."""


class KeptLab(Lab):
    """A lab that runs a planted fault of FAULTS, or nothing, in a set-up once. Services of other
    kinds are run anew."""

    def __init__(self, draft: nn.Module, target: nn.Module | None = None, *, script: Script) -> None:
        super().__init__(draft, target, script=script)
        self._kept: dict[tuple[str, Deploy | None], Outcome] = {}

    def run(self, name: str, deploy: Deploy | None = None) -> Outcome:
        """As `Lab.run`, by which a test runs anew where that is what it is about."""
        if deploy is not None and deploy not in FAULTS.values():
            return super().run(name, deploy)
        if (name, deploy) not in self._kept:
            self._kept[name, deploy] = super().run(name, deploy)
        return self._kept[name, deploy]


def shared_lab() -> KeptLab:
    """The embedded pair in float32, with its text."""
    made = small.pair()
    return KeptLab(made.draft, made.target, script=random_script(made.draft, tokens=TOKENS, prompt=PROMPT))
