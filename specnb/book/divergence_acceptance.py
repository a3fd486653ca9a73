"""The acceptance beside a verdict: what a generation with the draft under suspicion kept of its drafts."""

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from specnb.errors import InputError
from specnb.lm.bounded_json import SHOWN, read_json
from specnb.measure.pair import Pair
from specnb.measure.triage import Triage, kind_of, triage
from specnb.records import Generation, Round

FILE_BYTES = 1 << 26
FILE_VALUES = 1 << 22
AGAIN = "make it with `specnb generate --draft … --json`"


def read(path: Path, *, vocab_size: int) -> Triage:
    """The triage of the generation in a file that `specnb generate --json` wrote.

    `vocab_size`: tokens that the models know. Raises InputError for another file, one in which nothing was drafted, and
    one of tokens that the models do not know.
    """
    values = read_json(path, FILE_BYTES, FILE_VALUES).values
    try:
        made = Pair.model_validate({**values, "vocab_size": vocab_size})
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise InputError(f"{path} holds no generation ({where[:SHOWN]}: {first['msg'][:SHOWN]}): {AGAIN}") from error
    one, fork = made.generation, made.summary.fork
    if not one.drafter:
        raise InputError(f"in the generation of {path} nothing was drafted: {AGAIN}")
    _check_ids(one, vocab_size, path)
    for number, made_in in enumerate(one.rounds):
        if not _possible(made_in):
            raise InputError(f"{path}: round {number} keeps or counts other drafts than it has: {AGAIN}")
    return triage([one], vocab_size=vocab_size, drafter_kind=kind_of(one.drafter), forks=[fork] if fork else [])


def told(found: Triage) -> str:
    """In a sentence, also where nothing is to be said against it."""
    return found.line or found.reason or "Nothing about the acceptance is suspicious."


def document(found: Triage) -> dict[str, Any]:
    """Plain values for JSON."""
    return {
        "verdict": found.verdict, "line": found.line, "reason": found.reason,
        "alpha": [share._asdict() for share in found.profile.alpha],
    }  # fmt: skip


def _check_ids(one: Generation, vocab_size: int, path: Path) -> None:
    drafted = (token for r in one.rounds for token in r.draft_ids)
    for token in (*one.prompt_ids, *one.token_ids, *drafted):
        if not 0 <= token < vocab_size:
            raise InputError(
                f"{path}: the models that are investigated have no token {token} (0 to {vocab_size - 1}): give --draft "
                "and --target of this generation"
            )


def _possible(r: Round) -> bool:
    """Whether a round's counts are those of its tokens: they bound what is computed from them."""
    if not 0 <= r.n_accepted <= r.k == len(r.draft_ids) or len(r.committed_ids) > r.n_accepted + 1:
        return False
    if r.parents and (len(r.parents) != r.k or any(not -1 <= parent < node for node, parent in enumerate(r.parents))):
        return False
    try:
        kept = [r.draft_ids[node] for node in r.accepted_nodes]
    except KeyError:  # the path that was kept is none of the tree
        return False
    return kept == list(r.committed_ids[: r.n_accepted])
