"""The gallery: one planted fault after the other, each investigated as a service of its own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from specnb.divergence.deploy import planted
from specnb.divergence.faults import FAULTS
from specnb.divergence.grading.cases import GridCase, Service
from specnb.divergence.grading.rows import NOTHING
from specnb.divergence.investigate import judge
from specnb.divergence.investigation import Investigation
from specnb.divergence.offline.result import named
from specnb.divergence.planted.fault import Fault
from specnb.divergence.setups import Lab
from specnb.errors import InputError
from specnb.measure.experiment import Progress, silent

GALLERY = ("S0", "S1", "S2", "S3")
"""Set-ups that tell the planted faults apart."""


@dataclass(frozen=True)
class Gallery:
    """`table`: one row for each fault; `strips`: faults by modules, the worst of all tokens, log10 of error over floor.

    `named`: of each fault the module that was named first.
    """

    table: pd.DataFrame
    strips: pd.DataFrame
    named: Mapping[str, str]


def gallery(
    lab: Lab, faults: Sequence[str] = tuple(FAULTS), *, setups: Sequence[str] | None = None, progress: Progress = silent
) -> Gallery:
    """Plant one fault after the other and investigate each as a service of its own.

    `setups` None: those of GALLERY that the lab can run. Columns of the table: fault, planted (what it is), verdict,
    module, module_right, token, cause, cause_right, seconds. A fault that is none (`split_k`, `uniform_offset`) is
    right where nothing is named. Raises InputError for an unknown fault, one that does not fit the lab's models, and
    one that waits for something that this script does not do.
    """
    if not faults:
        raise InputError(f"no fault to plant: give some of {', '.join(FAULTS)}")
    services = {name: Service(GridCase(name, None)) for name in faults if planted(name)}
    setups = lab.fitting(GALLERY) if setups is None else setups
    rows, strips, framed = [], {}, {}
    for done, (name, deploy) in enumerate(services.items()):
        progress(done, len(services), name)
        found = judge(lab, deploy=deploy, setups=setups)
        rows.append(_row(name, deploy.told(), found))
        strips[name] = found.heat().max(axis=1)
        if found.first is not None:
            framed[name] = found.first.module
    order = list(dict.fromkeys(module for strip in strips.values() for module in strip.index))
    return Gallery(pd.DataFrame(rows), pd.DataFrame(strips, index=order).T, framed)


def _row(name: str, fault: Fault, found: Investigation) -> dict[str, object]:
    first = found.first
    sound = fault.first is None
    module = None if first is None else first.module
    cause = found.causes[0].name if found.causes else ("PRECISION_ONLY" if found.verdict == "PRECISION_ONLY" else None)
    return {
        "fault": name, "planted": fault.note, "verdict": found.verdict,
        "module": NOTHING if first is None else named(first), "module_right": module == fault.first,
        "token": -1 if first is None else first.first_token, "cause": cause or NOTHING,
        "cause_right": (first is None) if sound else cause == fault.cause, "seconds": found.facts["seconds"],
    }  # fmt: skip
