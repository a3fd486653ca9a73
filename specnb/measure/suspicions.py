"""Faults that the acceptance of a run's drafters looks like, told by themselves where a run is shown."""

from specnb.errors import InputError
from specnb.measure import triage
from specnb.measure.pair import Pair
from specnb.records import RunRecord


def suspicions(record: RunRecord) -> list[str]:
    """One line for each drafter of a run whose drafts are kept as those of a faulty one are; empty where none is.

    Takes all of a drafter's generations, whatever K and temperature. Forks that the run measured (the K sweep's, of
    one drafter) count, too. Raises InputError for a record that does not say how large the target's vocabulary is.
    """
    size = record.provenance.get("extra", {}).get("vocab_size")
    if size is None:
        raise InputError(f"run {record.run_id} was recorded without the size of the target's vocabulary: run it again")
    forks = record.measurements.get("forks", ())
    lines = []
    for drafter in dict.fromkeys(g.drafter for g in record.generations if g.drafter):
        made = [g for g in record.generations if g.drafter == drafter]
        line = triage.line(made, vocab_size=size, drafter_kind=triage.kind_of(drafter), forks=forks)
        lines += [f"{drafter}: {line}"] if line else []
    return lines


def suspicion(made: Pair) -> str:
    """The line of a single generation; "" where nothing is suspicious, or nothing was drafted."""
    one, fork = made.generation, made.summary.fork
    kind = triage.kind_of(one.drafter)
    return triage.line([one], vocab_size=made.vocab_size, drafter_kind=kind, forks=[fork] if fork else [])
