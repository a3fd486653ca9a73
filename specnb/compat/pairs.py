"""Thirty model files: which can draft for which, and which of those can win at all?

Fitting is `check`'s verdict on the vocabularies. Winning is a bound: a round of K drafts commits tau tokens
(`predict`, at a chance of 0.7 that a token which can be drafted is kept) and costs at least 1 + K c plain steps. Here c
is the ratio of the weights' bytes, which every step reads; wide forwards are taken to cost no more than narrow ones.
Where even that is below 1, nothing helps; where it is not, `specnb bench draft` measures.
"""

from collections.abc import Iterable, Sequence
from itertools import permutations
from pathlib import Path

import pandas as pd

from specnb.compat.check import check
from specnb.compat.predict import predict
from specnb.compat.read import describe
from specnb.errors import InputError
from specnb.lm import zoo
from specnb.lm.load import parse, weights_bytes

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
        folder = zoo.expanded(place)
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


def pairs(names: Sequence[str], *, quality: float = QUALITY) -> pd.DataFrame:
    """Every pair in which the smaller model can draft for the larger one; columns COLUMNS, the best case first.

    `best_case` is the bound on the speed-up at its best `k`, None where the vocabularies tell nothing. Raises
    InputError for fewer than two models, and for what cannot be described.
    """
    if len(names) < 2:
        raise InputError(f"got {', '.join(names) or 'no model'}, expected two or more, or a folder of .gguf files")
    sizes, described = {name: weights_bytes(parse(name)) for name in names}, {name: describe(name) for name in names}
    rows = []
    for target, draft in permutations(names, 2):
        if not 0 < sizes[draft] < sizes[target]:
            continue
        report, c = check(described[target], described[draft]), sizes[draft] / sizes[target]
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
