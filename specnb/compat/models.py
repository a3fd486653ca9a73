"""Models: the facts of one, a list of all, and which pairs can pay.

Whether a pair fits is the verdict of `check`; each two vocabularies are compared once. Whether it
can pay follows from a bound on the speedup: a round of K draft tokens commits tau tokens
(`predict`, with an acceptance rate of 0.7 for tokens that can be drafted) and costs at least
1 + K c plain steps. Here c is the ratio of the weight bytes that a step reads (in a mixture of
experts, only active ones). A forward pass over several tokens is assumed to cost no more than one
over a single token. If the bound is at most 1, the pair cannot pay; otherwise, measure it with
`specnb bench`. For a model known only from facts, a weight counts as one byte.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from functools import cache
from itertools import permutations
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import psutil

from specnb.compat.check import check, predict
from specnb.compat.description import Description, State
from specnb.compat.read import describe, shelf_facts, shelf_names
from specnb.errors import FetchError, InputError, LoadError
from specnb.fetch import gguf_parts
from specnb.io import reading
from specnb.lm import files
from specnb.lm.files import expand_home, local_file, parse, weights_bytes
from specnb.lm.gguf.header import ARCHITECTURE, read_header
from specnb.lm.load import load

QUALITY = 0.7
"""Assumed acceptance rate of a token: about that of a good small draft model on code."""
LONGEST = 16
COLUMNS = ("target", "draft", "verdict", "c", "text_shared", "k", "best_case", "can_win")
STATED = ("source", "architecture", "state", "n_layers", "vocab_size")
OPENED = (
    "engine",
    "device",
    "dtype",
    "n_ctx",
    "max_width",
    "rewind",
    "rewind_reason",
    "trees",
    "same_bits_up_to",
    "certificate",
)
"""Facts in a sheet: fields of a description (STATED), capabilities of an open model (OPENED)."""


def opens(name: str | Path) -> bool:
    """Return whether `specnb.load` can open a name; otherwise it is a tokenizer or only facts."""
    return str(name).partition("?")[0].lower() not in shelf_names()


def weights(name: str) -> int:
    """Return the bytes of a model's weights, their number if only facts are known, 0 if unknown."""
    fact = shelf_facts().get(name.lower())
    return int(fact["parameters"]) if fact else weights_bytes(parse(name))


def active_share(name: str) -> float:
    """Return the share of a model's weights that a step reads: below 1 for a mixture of experts.

    It comes from facts, or from the number and size of the experts in a GGUF header. For other
    models it is 1.
    """
    if not opens(name):
        fact = shelf_facts().get(name.lower(), {"parameters": 1})
        return fact.get("active_parameters", fact["parameters"]) / fact["parameters"]
    spec = parse(name)
    file = local_file(spec) if spec.where in ("gguf", "hub") else None
    if file is None:
        return 1.0
    headers = [read_header(part) for part in gguf_parts(file)]
    architecture = headers[0].get(ARCHITECTURE, str)
    n, used = (
        headers[0].get(f"{architecture}.{key}", int, 0)
        for key in ("expert_count", "expert_used_count")
    )
    if not (n and used):
        return 1.0
    sizes = {
        tensor: math.prod(shape) for header in headers for tensor, shape in header.shapes.items()
    }
    experts = sum(size for tensor, size in sizes.items() if "_exps." in tensor)
    return 1 - (1 - used / n) * experts / sum(sizes.values())


def sheet(name: str) -> dict[str, Any]:
    """Return the facts of a model: what it is, and how it opens and rolls back here.

    Opens the model if it has weights; if that fails, `opens` has the reason. Raises as `describe`.
    """
    described = describe(name)
    base = name.partition("?")[0].lower()
    licences = {row.name: row.licence for row in files.status()}
    facts = {
        "model": name,
        **{key: getattr(described, key) for key in STATED},
        "licence": described.licence or licences.get(base),
        "tokenizer": described.vocab and described.vocab.kind,
        "trained_n_ctx": described.n_ctx,
    }
    if not opens(name):
        return facts | {"opens": "no: it is a tokenizer, or facts without weights"}
    spec = parse(name)
    crops = described.state is State.ATTENTION
    facts |= {
        "size_bytes": weights_bytes(spec),
        "weights": files.weights_origin(name),
        "strategies": ["crop"] if crops else [*spec.engine.preferred],
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
    """Return the names to open; a folder of GGUF files is replaced by its files.

    Of a split file, only the first part is listed. Raises InputError for a folder with neither GGUF
    files nor a config.json.
    """
    names = []
    for place in places:
        folder = expand_home(place)
        if not folder.is_dir() or (folder / "config.json").exists():
            names.append(place)
        elif ggufs := sorted(folder.rglob("*.gguf")):
            names += [
                str(file) for file in ggufs if "-of-" not in file.stem or "-00001-of-" in file.stem
            ]
        else:
            raise InputError(
                f"{folder} contains no .gguf file and no config.json: "
                "give a folder of models, or names"
            )
    return list(dict.fromkeys(names))


class Candidate(NamedTuple):
    """A model that may be a target or a draft; `fault`: what is wrong with a damaged file.

    `size` is that of its weights in bytes, and `share` the fraction of them that a step reads.
    """

    name: str
    described: Description
    size: int
    share: float = 1.0
    fault: str | None = None

    @property
    def active(self) -> float:
        """Weight bytes that a step reads."""
        return self.size * self.share

    def can_draft_for(self, target: "Candidate") -> bool:
        """Return whether the model is smaller than `target`, and neither file is damaged."""
        return 0 < self.size < target.size and not (self.fault or target.fault)


def listing() -> list[files.ZooStatus]:
    """Return every model of the zoo, the checkout and the shelf's facts; fetch nothing."""
    return files.status() + [
        files.ZooStatus(
            name, f"hf:{fact['model']}", fact.get("licence"), None, False, None, weights(name)
        )
        for name, fact in shelf_facts().items()
    ]


def pairs(names: Sequence[str]) -> pd.DataFrame:
    """Return every pair whose smaller model can draft for the larger one, best first per target.

    The columns are COLUMNS. `best_case` is the bound on the speedup at its best `k`, or None if a
    vocabulary is not available. A damaged file is a row without a draft. Raises InputError for
    fewer than two models, and for a name that cannot be found.
    """
    if len(names) < 2:
        raise InputError(
            f"got {', '.join(names) or 'no model'}, expected two or more, "
            "or a folder of .gguf files"
        )
    read = cache(describe)
    compared = cache(check)
    models = _distinct([_candidate(name, read) for name in names])
    short = {name: Path(name).name if name.endswith(".gguf") else name for name in names}
    rows: list[tuple] = [
        (short[model.name], None, model.fault, *[None] * 5) for model in models if model.fault
    ]
    for target, draft in permutations(models, 2):
        if not draft.can_draft_for(target):
            continue
        report = compared(target.described, draft.described)
        if report.reach == 0:
            continue
        c = draft.active / target.active
        best = k = None
        if report.reach is not None:
            best, k = max(
                (predict(report.reach, k, QUALITY).tau / (1 + k * c), k)
                for k in range(1, LONGEST + 1)
            )
        pair = short[target.name], short[draft.name], str(report.verdict)
        rows.append((*pair, c, report.reach, k, best, best and best > 1))
    table = pd.DataFrame(rows, columns=COLUMNS)
    return table.sort_values(["target", "best_case"], ascending=[True, False], ignore_index=True)


def _candidate(name: str, read: Callable[[str], Description]) -> Candidate:
    """Return a model as described by `read`, with its size, or with the fault of its file."""
    shipped = files.find_entry(name)[0].name if files.is_zoo_name(name) else name
    size = weights(name)
    try:
        with reading(name):
            return Candidate(name, read(shipped), size, active_share(name))
    except InputError as error:
        return Candidate(name, Description(name, name), size, fault=f"no: {error}")


def _distinct(models: Iterable[Candidate]) -> list[Candidate]:
    """Share one description among models with the same pieces, so these are compared once."""
    first = {}
    distinct = []
    for model in models:
        vocab = model.described.vocab
        described = first.setdefault(vocab.pieces if vocab else model.name, model.described)
        distinct.append(model._replace(described=described))
    return distinct
