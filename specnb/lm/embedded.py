"""Models that come with the checkout: small ones, trained for this project, in `data/models/`, each with its card."""

from pathlib import Path

from specnb.errors import InputError
from specnb.paths import project_dir


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
