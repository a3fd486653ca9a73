"""Models: the facts of one, a list of all with their roles, and which pairs can win.

Fitting is `check`'s verdict on the vocabularies, each two of which are compared once. Winning is a
bound: a round of K draft tokens commits tau tokens (`predict`, with an acceptance rate of 0.7 for
tokens that can be drafted) and costs at least 1 + K c plain steps. Here c is the ratio of the bytes
of weights that a step reads: in a mixture of experts, of the active ones. A forward pass over
several tokens is taken to cost no more than one over a single token. Where even that bound is below
1, nothing helps; where it is not, `specnb bench` measures. For a model that is known by facts
alone a weight counts as a byte.
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
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
from specnb.fetch import gguf_parts
from specnb.io import read_json, reading
from specnb.lm import files
from specnb.lm.files import expand_home, local_file, local_folder, parse, weights_bytes
from specnb.lm.gguf.header import read_header
from specnb.lm.load import load

QUALITY = 0.7
"""Acceptance rate of a token: about that of a good small draft model on code."""
LONGEST = 16
COLUMNS = ("target", "draft", "verdict", "c", "text_shared", "k", "best_case", "can_win")
STATED = ("source", "architecture", "state", "n_layers", "vocab_size")
OPENED = (
    "engine", "device", "dtype", "n_ctx", "max_width", "rewind", "rewind_reason", "trees", "same_bits_up_to",
    "certificate",
)  # fmt: skip
"""Facts of a sheet: fields of a description, and capabilities of an open model."""
EXPERTS = re.compile(r"_exps\.|\.experts\.")
"""Tensors of the experts among which a token chooses, in a GGUF and in a folder."""
EXPERT_KEYS = ("expert_count", "num_experts", "num_local_experts", "n_routed_experts")
USED_KEYS = ("expert_used_count", "num_experts_per_tok")


def opens(name: str | Path) -> bool:
    """Return whether a name has weights for `specnb.load`; else it is a tokenizer, or facts."""
    text = str(name).partition("?")[0].lower()
    return not text.endswith(".json") and text not in shelf_names()


def weights(name: str) -> int:
    """Return the bytes of a model's weights; their number, where facts are all there is."""
    fact = shelf_facts().get(name.lower())
    return int(fact["parameters"]) if fact else weights_bytes(parse(name))


def active_share(name: str) -> float:
    """Return the share of a model's weights that a step reads: below 1 for a mixture of experts.

    Facts state it. Files state how many experts a token uses, and how large the experts are.
    """
    if not opens(name):
        fact = shelf_facts().get(name.lower(), {"parameters": 1})
        return fact.get("active_parameters", fact["parameters"]) / fact["parameters"]
    spec = parse(name)
    path = local_file(spec) if spec.where in ("gguf", "hub") else None
    if path:
        parts = [read_header(part) for part in gguf_parts(path)]
        stated = {key.partition(".")[2]: value for key, value in parts[0].values.items()}
        shapes = {tensor: shape for part in parts for tensor, shape in part.shapes.items()}
    elif spec.where == "hf" and weights_bytes(spec):
        folder = local_folder(spec.source)
        stated = read_json(folder / "config.json")
        stated |= stated.get("text_config") or {}
    else:
        return 1.0
    n, used = (next(filter(None, map(stated.get, keys)), 0) for keys in (EXPERT_KEYS, USED_KEYS))
    if not (n and used):
        return 1.0
    if spec.where == "hf":
        shapes = tensor_shapes(folder)
    experts = sum(math.prod(shape) for tensor, shape in shapes.items() if EXPERTS.search(tensor))
    return 1 - (1 - used / n) * experts / sum(map(math.prod, shapes.values()))


def tensor_shapes(folder: Path) -> dict[str, list[int]]:
    """Return the shape of each tensor in the safetensors files of a model folder; no weight is read.

    Raises InputError for a folder without such files, a missing shard, or a damaged file.
    """
    from safetensors import safe_open

    paths = sorted(folder.glob("*.safetensors"))
    if (index := folder / "model.safetensors.index.json").exists():
        paths = [folder / Path(name).name for name in sorted({*read_json(index).get("weight_map", {}).values()})]
    if not paths:
        raise InputError(f"{folder} has no safetensors files: give the folder of a model")
    shapes = {}
    for path in paths:
        with reading(path), safe_open(path, framework="np") as file:
            shapes |= {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 (no mapping)
    return shapes


def sheet(name: str) -> dict[str, Any]:
    """Return the facts of a model: what it is, how it opens and rolls back here, and its drafts.

    Opens the model where there are weights. Raises as `describe`; a model that does not open says
    why in `opens`.
    """
    described = describe(name)
    base = name.partition("?")[0].lower()
    rows = files.status()
    licence = described.licence or next((row.licence for row in rows if row.name == base), None)
    facts = {"model": name, **{key: getattr(described, key) for key in STATED}, "licence": licence}
    facts |= {"tokenizer": described.vocab and described.vocab.kind, "trained_n_ctx": described.n_ctx}
    if not opens(name):
        return facts | {"opens": "no: it is a tokenizer, or facts, without weights"}
    spec = parse(name)
    crops = described.state is State.ATTENTION
    # of copies of a model one; and a list of drafts is no reason to fetch gigabytes
    drafts = [row.name for row in rows if row.present and ":" not in row.name and row.name != base]
    cards = {path.parent.name: read_json(path) for path in files.embedded_root().parent.glob("heads/*/config.json")}
    facts |= {
        "size_bytes": weights_bytes(spec),
        "weights": files.weights_origin(name),
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
    """Return the names to open: for a folder, the GGUF files below it (of a split one the first part).

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
    """Return every model of the zoo, the checkout, the shelf's facts and `places`, with its roles.

    A target has a listed draft with the same ids, and a draft such a target, so that the pair can
    win: with nothing translated the best case is K = 1, which is 1 + QUALITY tokens for 1 + c
    steps. Facts, whose size is a number of weights, pair with facts. Reads no weights, and fetches
    nothing that `places` do not name: where the pieces are not at hand `roles` is None. For a
    damaged file it is "no" and the reason.
    """
    rows = files.status() + [
        files.ZooStatus(name, f"hf:{fact['model']}", fact.get("licence"), None, False, None, weights(name))
        for name, fact in shelf_facts().items()
    ]
    described = [describe(row.name, fetch=False) for row in rows]
    shares = [active_share(row.name) for row in rows]
    for name in names_in(places):
        file = expand_home(parse(name).source)
        size = weights(name)
        model, share, fault = _read(name, describe)
        row = files.ZooStatus(file.name, str(file.parent), model.licence, size, True, file, roles=fault)
        rows.append(row)
        described.append(model)
        shares.append(share)
    models = [(*each, set()) for each in zip(rows, shares, _distinct(described), strict=True)]
    agree = cache(ids_agree)
    for (target, read, larger, of_target), (draft, drafting, smaller, of_draft) in permutations(models, 2):
        comparable = larger.vocab and smaller.vocab and bool(target.n_bytes) == bool(draft.n_bytes)
        large, small = (row.n_bytes or row.parameters or 0 for row in (target, draft))
        can_win = 0 < small < large and small * drafting < QUALITY * large * read
        if comparable and can_win and agree(larger.tokens, smaller.tokens):
            of_target.add("target")
            of_draft.add("draft")
    return [
        replace(row, roles=row.roles or (model.vocab and ", ".join(sorted(of, reverse=True))))
        for row, _, model, of in models
    ]


def pairs(names: Sequence[str]) -> pd.DataFrame:
    """Return every pair whose smaller model can draft for the larger one, the best case first.

    The columns are COLUMNS. `best_case` is the bound on the speed-up at its best `k`, None where
    the vocabularies tell nothing. A damaged file is a row without a draft. Raises InputError for
    fewer than two models, and for what cannot be described.
    """
    if len(names) < 2:
        raise InputError(f"got {', '.join(names) or 'no model'}, expected two or more, or a folder of .gguf files")
    sizes = {name: weights(name) for name in names}
    read = cache(describe)
    compared = cache(check)
    short = {name: Path(name).name if name.endswith(".gguf") else name for name in names}
    active = {}
    models = []
    rows = []
    for name in names:
        model, share, fault = _read(name, read)
        models.append(model)
        active[name] = sizes[name] * share
        if fault:
            sizes[name] = 0
            rows.append((short[name], None, fault, *[None] * 5))
    described = dict(zip(names, _distinct(models), strict=True))
    for target, draft in permutations(names, 2):
        if not 0 < sizes[draft] < sizes[target]:
            continue
        report = compared(described[target], described[draft])
        c = active[draft] / active[target]
        if report.reach == 0:
            continue
        best = k = None
        if (reach := report.reach) is not None:
            best, k = max((predict(reach, k, QUALITY).tau / (1 + k * c), k) for k in range(1, LONGEST + 1))
        pair = short[target], short[draft], str(report.verdict)
        rows.append((*pair, c, reach, k, best, best and best > 1))
    table = pd.DataFrame(rows, columns=COLUMNS)
    return table.sort_values(["target", "best_case"], ascending=[True, False], ignore_index=True)


def _read(name: str, read: Callable[[str], Description]) -> tuple[Description, float, str | None]:
    """Return what `read` says of a model, its active share, and what is wrong with a damaged one."""
    shipped = files.find_entry(name)[0].name if files.is_zoo_name(name) else name
    try:
        with reading(name):
            return read(shipped), active_share(name), None
    except InputError as error:
        return Description(name, name), 1.0, f"no: {error}"


def _distinct(described: Iterable[Description]) -> list[Description]:
    """Return one description for all models with the same pieces: vocabularies are compared once."""
    first = {}
    return [first.setdefault(model.vocab.pieces if model.vocab else model, model) for model in described]
