"""Thirty model files: what can each be, which can draft for which, and which of those can win at all?

Fitting is `check`'s verdict on the vocabularies, each two of which are compared once. Winning is a bound: a round of K
drafts commits tau tokens (`predict`, at a chance of 0.7 that a token which can be drafted is kept) and costs at least
1 + K c plain steps. Here c is the ratio of the weights' bytes, which every step reads; wide forwards are taken to cost
no more than narrow ones. Where even that is below 1, nothing helps; where it is not, `specnb bench draft` measures.
Of a model known by facts alone a weight counts as a byte, and all experts of a mixture count.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from itertools import permutations
from pathlib import Path

import pandas as pd

from specnb.compat.check import check
from specnb.compat.description import Description
from specnb.compat.predict import predict
from specnb.compat.read import describe, status, weights
from specnb.draft.token_map import ids_agree
from specnb.errors import InputError
from specnb.lm.files import ZooStatus, expand_home, find_entry, is_zoo_name, parse

QUALITY = 0.7
"""Chance that a token is kept: about that of a good small draft on code."""
LONGEST = 16
COLUMNS = ("target", "draft", "verdict", "c", "text_shared", "k", "best_case", "can_win")


def names_in(places: Iterable[str]) -> list[str]:
    """Names to open: a folder stands for the GGUF files below it, first parts of split ones; all else for itself.

    Raises InputError for a folder without any.
    """
    names = []
    for place in places:
        folder = expand_home(place)
        if not folder.is_dir() or (folder / "config.json").exists():
            names.append(place)
            continue
        files = sorted(
            str(file) for file in folder.rglob("*.gguf") if "-of-" not in file.stem or "-00001-of-" in file.stem
        )
        if not files:
            raise InputError(
                f"{folder} holds no .gguf file and no config.json: give a folder of models, or their names"
            )
        names += files
    return list(dict.fromkeys(names))


def listing(places: Iterable[str] = ()) -> list[ZooStatus]:
    """Every model of the zoo, of the checkout, of the shelf's facts and of `places`, with the roles it can have.

    A target has a listed draft with the same ids, and a draft such a target, so that the pair can win: with nothing
    translated the best case is K = 1, which is 1 + QUALITY tokens for 1 + c steps. Facts, whose size is a number of
    weights, pair with facts. Reads no weights, and fetches nothing that `places` do not name: where the pieces are not
    at hand `roles` is None.
    """
    rows = status()
    described = [describe(row.name, fetch=False) for row in rows]
    for name in names_in(places):
        file, model = expand_home(parse(name).source), describe(name)
        rows.append(ZooStatus(file.name, str(file.parent), model.licence, weights(name), True, file))
        described.append(model)
    models = zip(rows, _distinct(described), strict=True)
    known = {row: (row.n_bytes or row.parameters, model.tokens) for row, model in models if model.vocab}
    agree, roles = cache(ids_agree), {row: set() for row in known}
    for (target, (size, pieces)), (draft, (smaller, drafted)) in permutations(known.items(), 2):
        same_unit = bool(target.n_bytes) == bool(draft.n_bytes)
        if same_unit and 0 < smaller < QUALITY * size and agree(pieces, drafted):
            roles[target].add("target")
            roles[draft].add("draft")
    return [replace(row, roles=", ".join(sorted(roles[row], reverse=True))) if row in known else row for row in rows]


def pairs(names: Sequence[str], *, quality: float = QUALITY) -> pd.DataFrame:
    """Every pair in which the smaller model can draft for the larger one; columns COLUMNS, the best case first.

    `best_case` is the bound on the speed-up at its best `k`, None where the vocabularies tell nothing. Raises
    InputError for fewer than two models, and for what cannot be described.
    """
    if len(names) < 2:
        raise InputError(f"got {', '.join(names) or 'no model'}, expected two or more, or a folder of .gguf files")
    sizes, read, compared = {name: weights(name) for name in names}, cache(describe), cache(check)
    files = (find_entry(name)[0].name if is_zoo_name(name) else name for name in names)
    described, rows = dict(zip(names, _distinct(map(read, files)), strict=True)), []
    for target, draft in permutations(names, 2):
        if not 0 < sizes[draft] < sizes[target]:
            continue
        report, c = compared(described[target], described[draft]), sizes[draft] / sizes[target]
        if report.reach == 0:
            continue
        cases = {} if report.reach is None else {
            k: predict(report.reach, k, quality).tau / (1 + k * c) for k in range(1, LONGEST + 1)
        }  # fmt: skip
        k = max(cases, key=cases.__getitem__, default=None)
        best = cases.get(k)
        short = [Path(name).name if Path(name).suffix == ".gguf" else name for name in (target, draft)]
        rows.append((*short, str(report.verdict), c, report.reach, k, best, best and best > 1))
    table = pd.DataFrame(rows, columns=COLUMNS)
    return table.sort_values(["target", "best_case"], ascending=[True, False], ignore_index=True)


def _distinct(described: Iterable[Description]) -> list[Description]:
    """The same models, one description for all that have the same pieces: two vocabularies are compared once."""
    first: dict[tuple[bytes, ...] | None, Description] = {}
    return [first.setdefault(model.vocab and model.vocab.pieces, model) for model in described]
