"""Parameters at the point of use, in two traces: read by the same module, and not the same."""

import pandas as pd

from specnb.divergence.align import Laid
from specnb.divergence.tracing.paths import canonical_name, renamed

COLUMNS = ("module", "parameter", "read", "says", "same_values", "reference_digest", "digest")


def reads(reference: Laid, candidate: Laid) -> pd.DataFrame:
    """One row for each parameter that a module of the candidate read otherwise than the reference's module did.

    `says`: "foreign" (not the draft's own, and the reference's module did not read it), "changed" (other values),
    "cast" (another dtype), "extra" (the draft's own, and the reference's module did not read it). `same_values`: the
    reference's module read these very values, whatever their name.
    Empty where one of the traces was captured without `at_use`.
    """
    known = dict(iter(_read(reference).groupby("module")))
    rows = []
    for one in _read(candidate).itertuples():
        ours = known.get(one.module)
        if ours is None:
            continue
        # each model calls itself as it likes, so only of others the owner's name counts
        whose = ours["own"] if one.own else ~ours["own"] & (ours["owner"] == one.owner)
        named = ours[(ours["path"] == one.path) & whose]
        if one.digest in set(named["digest"]):
            continue
        says = _says(one.own, named, one.dtype)
        parameter = one.path if one.own else ""
        same = bool(one.digest) and one.digest in set(ours["digest"])
        before = named["digest"].iloc[0] if len(named) else ""
        rows.append((one.module, parameter, f"{one.owner}:{one.owner_path}", says, same, before, one.digest))
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _read(one: Laid) -> pd.DataFrame:
    params = one.trace.params.drop_duplicates(["module", "owner", "owner_path", "digest", "dtype"])
    paths = renamed(params["module"].unique(), one.rename)
    owned = {path: canonical_name(path, one.rename) for path in params["owner_path"].unique()}
    return params.assign(
        module=params["module"].map(paths), path=params["owner_path"].map(owned),
        own=params["owner"] == one.trace.facts.get("tag"),
    )  # fmt: skip


def _says(own: bool, named: pd.DataFrame, dtype: str) -> str:
    if named.empty:
        return "extra" if own else "foreign"
    return "changed" if dtype in set(named["dtype"]) else "cast"
