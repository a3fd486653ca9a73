"""One lab shared by the tests of the divergence lab, because each of its runs takes a second.

Do not change its models and outcomes; copy them first.
"""

from specnb.divergence import pair as small
from specnb.divergence.faults.planting import replace_forward
from specnb.divergence.investigate import random_script
from specnb.divergence.setups import Deploy, Lab, Outcome
from tests.benchmarks.divergence_score.faults import FAULTS

TOKENS, PROMPT = 20, 14
"""Longer than the window of 16 tokens, with a rejection. The cost of a run is its nine feeds."""


def patched(path, change):
    """Return a service in which `change` modifies the output of a module's forward."""

    def run(original, *args, **kwargs):
        return change(original(*args, **kwargs))

    return lambda draft, neighbour: replace_forward(draft.get_submodule(path), run)


class KeptLab(Lab):
    """A lab that caches its runs without a service, or with a fault of FAULTS."""

    def __init__(self, draft, target, *, script):
        super().__init__(draft, target, script=script)
        self._kept = {}

    def run(self, name: str, deploy: Deploy | None = None) -> Outcome:
        """Run one set-up as `Lab.run` does, or return the cached outcome."""
        if deploy is not None and deploy not in FAULTS.values():
            return super().run(name, deploy)
        if (name, deploy) not in self._kept:
            self._kept[name, deploy] = super().run(name, deploy)
        return self._kept[name, deploy]


def shared_lab() -> KeptLab:
    """Return a lab of the built-in pair in float32, with a random text."""
    made = small.pair()
    return KeptLab(
        made.draft, made.target, script=random_script(made.draft, tokens=TOKENS, prompt=PROMPT)
    )
