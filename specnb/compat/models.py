"""The models that there are: a sheet of facts about one, a list of all with their roles, and which pairs can win.

Fitting is `check`'s verdict on the vocabularies, each two of which are compared once. Winning is a bound: a round of K
drafts commits tau tokens (`predict`, at a chance of 0.7 that a token which can be drafted is kept) and costs at least
1 + K c plain steps. Here c is the ratio of the weights' bytes, which every step reads; wide forwards are taken to cost
no more than narrow ones. Where even that is below 1, nothing helps; where it is not, `specnb bench draft` measures.
Of a model known by facts alone a weight counts as a byte, and all experts of a mixture count.
"""

from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cache
from itertools import permutations
from pathlib import Path
from typing import Any

import pandas as pd
import psutil

from specnb.compat.check import check, predict
from specnb.compat.description import Description, State
from specnb.compat.read import describe, shelf_facts, shelf_names
from specnb.draft.token_map import ids_agree
from specnb.errors import FetchError, InputError, LoadError
from specnb.io import read_json
from specnb.lm import files
from specnb.lm.files import expand_home, parse, weights_bytes
from specnb.lm.load import load

QUALITY = 0.7
"""Chance that a token is kept: about that of a good small draft on code."""
LONGEST = 16
COLUMNS = ("target", "draft", "verdict", "c", "text_shared", "k", "best_case", "can_win")
STATED = ("source", "architecture", "state", "n_layers", "vocab_size")
OPENED = (
    "engine", "device", "dtype", "n_ctx", "max_width", "rewind", "rewind_reason", "trees", "same_bits_up_to",
    "certificate",
)  # fmt: skip
"""Facts of a sheet: fields of a description, and capabilities of an open model."""


def opens(name: str | Path) -> bool:
    """Return whether what this names has weights for `specnb.load`; else it describes a tokenizer alone."""
    text = str(name).partition("?")[0].lower()
    return not text.endswith(".json") and text not in shelf_names()


def weights(name: str) -> int:
    """Return the bytes of a model's weights; their number, where facts are all there is."""
    fact = shelf_facts().get(name.lower())
    return int(fact["parameters"]) if fact else weights_bytes(parse(name))


def sheet(name: str) -> dict[str, Any]:
    """Return the facts of a model: what it is, what opens here and how that goes back, and what can draft for it.

    Opens the model where there are weights. Raises as `describe`; a model that does not open says why in `opens`.
    """
    described, base, rows = describe(name), name.partition("?")[0].lower(), files.status()
    licence = described.licence or next((row.licence for row in rows if row.name == base), None)
    facts = {"model": name, **{key: getattr(described, key) for key in STATED}, "licence": licence}
    facts |= {"tokenizer": described.vocab and described.vocab.kind, "trained_n_ctx": described.n_ctx}
    if not opens(name):
        return facts | {"opens": "no: it is a tokenizer, or facts, without weights"}
    spec, crops = parse(name), described.state is State.ATTENTION
    # of copies of a model one; and a list of drafts is no reason to fetch gigabytes
    drafts = [row.name for row in rows if row.present and ":" not in row.name and row.name != base]
    cards = {path.parent.name: read_json(path) for path in files.embedded_root().parent.glob("heads/*/config.json")}
    facts |= {
        "size_bytes": weights_bytes(spec),
        "weights": files.trace_weights(name),
        "strategies": ["crop"] if crops else [*spec.engine.preferred],
        "drafts": [f"{draft}: {check(described, describe(draft)).verdict}" for draft in drafts],
        "heads": [head for head, card in cards.items() if card["backbone_name"].partition("?")[0] == base],
    }
    memory = psutil.Process().memory_info
    before = memory().rss
    try:
        with closing(load(name)) as model:
            facts |= {key: getattr(model.caps, key) for key in OPENED}
            return facts | {"opens": "yes", "memory_bytes": memory().rss - before}
    except (InputError, LoadError, FetchError) as error:
        return facts | {"opens": f"no: {error}"}


def names_in(places: Iterable[str]) -> list[str]:
    """Return the names to open: a folder stands for the GGUF files below it (split ones by their first part).

    Raises InputError for a folder without any.
    """
    names = []
    for place in places:
        folder = expand_home(place)
        if not folder.is_dir() or (folder / "config.json").exists():
            names.append(place)
        elif ggufs := sorted(folder.rglob("*.gguf")):
            names += [str(file) for file in ggufs if "-of-" not in file.stem or "-00001-of-" in file.stem]
        else:
            raise InputError(f"{folder} holds no .gguf file and no config.json: give a folder of models, or names")
    return list(dict.fromkeys(names))


def listing(places: Iterable[str] = ()) -> list[files.ZooStatus]:
    """Return every model of the zoo, of the checkout, of the shelf's facts and of `places`, with its possible roles.

    A target has a listed draft with the same ids, and a draft such a target, so that the pair can win: with nothing
    translated the best case is K = 1, which is 1 + QUALITY tokens for 1 + c steps. Facts, whose size is a number of
    weights, pair with facts. Reads no weights, and fetches nothing that `places` do not name: where the pieces are not
    at hand `roles` is None.
    """
    rows = files.status() + [
        files.ZooStatus(name, f"hf:{fact['model']}", fact.get("licence"), None, False, None, weights(name))
        for name, fact in shelf_facts().items()
    ]
    described = [describe(row.name, fetch=False) for row in rows]
    for name in names_in(places):
        file, model = expand_home(parse(name).source), describe(name)
        rows.append(files.ZooStatus(file.name, str(file.parent), model.licence, weights(name), True, file))
        described.append(model)
    models = [(row, model.tokens, set()) for row, model in zip(rows, _distinct(described), strict=True)]
    agree = cache(ids_agree)
    for (target, pieces, of_target), (draft, drafted, of_draft) in permutations(models, 2):
        comparable = pieces and drafted and bool(target.n_bytes) == bool(draft.n_bytes)
        large, small = (row.n_bytes or row.parameters or 0 for row in (target, draft))
        if comparable and 0 < small < QUALITY * large and agree(pieces, drafted):
            of_target.add("target")
            of_draft.add("draft")
    return [replace(row, roles=pieces and ", ".join(sorted(of, reverse=True))) for row, pieces, of in models]


def pairs(names: Sequence[str]) -> pd.DataFrame:
    """Return every pair in which the smaller model can draft for the larger one; columns COLUMNS, the best case first.

    `best_case` is the bound on the speed-up at its best `k`, None where the vocabularies tell nothing. Raises
    InputError for fewer than two models, and for what cannot be described.
    """
    if len(names) < 2:
        raise InputError(f"got {', '.join(names) or 'no model'}, expected two or more, or a folder of .gguf files")
    sizes, read, compared = {name: weights(name) for name in names}, cache(describe), cache(check)
    shipped = (files.find_entry(name)[0].name if files.is_zoo_name(name) else name for name in names)
    described, rows = dict(zip(names, _distinct(map(read, shipped)), strict=True)), []
    for target, draft in permutations(names, 2):
        if not 0 < sizes[draft] < sizes[target]:
            continue
        report, c = compared(described[target], described[draft]), sizes[draft] / sizes[target]
        if report.reach == 0:
            continue
        best = k = None
        if (reach := report.reach) is not None:
            best, k = max((predict(reach, k, QUALITY).tau / (1 + k * c), k) for k in range(1, LONGEST + 1))
        short = [Path(name).name if name.endswith(".gguf") else name for name in (target, draft)]
        rows.append((*short, str(report.verdict), c, report.reach, k, best, best and best > 1))
    table = pd.DataFrame(rows, columns=COLUMNS)
    return table.sort_values(["target", "best_case"], ascending=[True, False], ignore_index=True)


def _distinct(described: Iterable[Description]) -> list[Description]:
    """Return the same models, one description for all that have the same pieces: two vocabularies are compared once."""
    first: dict[tuple[bytes, ...] | None, Description] = {}
    return [first.setdefault(model.vocab and model.vocab.pieces, model) for model in described]
