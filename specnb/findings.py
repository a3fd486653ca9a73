"""The result of a check, shared by preflight, doctor, gates, and triage."""

from typing import NamedTuple


class Finding(NamedTuple):
    """One check, its verdict, the evidence or the reason for skipping it, and known upstream `issues`.

    `remedy` is what to do or to try next; it is empty if nothing is wrong.
    """

    check: str
    verdict: str
    evidence: str
    remedy: str = ""
    issues: tuple[str, ...] = ()
