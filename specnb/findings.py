"""The result of a check, shared by preflight, doctor, gates, and triage."""

from typing import NamedTuple


class Finding(NamedTuple):
    """A check, its verdict, its evidence (or why it was skipped), and known upstream `issues`.

    `remedy` says what to do or try next; it is empty if nothing is wrong.
    """

    check: str
    verdict: str
    evidence: str
    remedy: str = ""
    issues: tuple[str, ...] = ()
