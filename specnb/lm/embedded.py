"""Models that come with the checkout: small ones, trained for this project, in `data/models/`, each with its card."""

from pathlib import Path

from specnb.errors import InputError
from specnb.io import project_dir
from specnb.lm.cache import expanded
from specnb.lm.zoo import ZooStatus

LICENCE = "Apache-2.0"


def root() -> Path:
    """Where they lie, one folder each. Raises InputError for the package without its checkout."""
    return project_dir() / "data" / "models"


def names() -> tuple[str, ...]:
    """Every embedded model, as `specnb.load` takes it."""
    try:
        configs = root().glob("*/config.json")
    except InputError:  # the package without its checkout has none
        return ()
    return tuple(sorted(config.parent.name for config in configs))


def folder(name: str) -> Path | None:
    """The transformers folder of an embedded model; None for other names."""
    return root() / name if name in names() else None


def local_folder(name: str) -> Path:
    """The folder that a name means: of an embedded model, else the path itself, which need not be there."""
    return folder(name) or expanded(name)


def status() -> list[ZooStatus]:
    """A row of `specnb models` for each."""
    rows = []
    for name in names():
        path = folder(name)
        size = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
        rows.append(ZooStatus(name, "trained here, data/models", LICENCE, size, True, path))
    return rows
