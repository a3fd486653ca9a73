"""Models that come with the checkout: small ones, trained for this project, in `data/models/`, each with its card."""

from pathlib import Path

from specnb.errors import InputError
from specnb.lm.zoo import ZooStatus
from specnb.paths import project_dir

LICENCE = "Apache-2.0"


def names() -> tuple[str, ...]:
    """Every embedded model, as `specnb.load` takes it."""
    try:
        root = project_dir() / "data" / "models"
    except InputError:  # the package without its checkout has none
        return ()
    return tuple(sorted(found.parent.name for found in root.glob("*/config.json")))


def folder(name: str) -> Path | None:
    """The transformers folder of an embedded model; None for other names."""
    return project_dir() / "data" / "models" / name if name in names() else None


def status() -> list[ZooStatus]:
    """A row of `specnb models` for each."""
    rows = []
    for name in names():
        path = folder(name)
        size = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
        rows.append(ZooStatus(name, "trained here, data/models", LICENCE, size, True, path))
    return rows
