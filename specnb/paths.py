"""Where things lie on disk: the cache of fetched and derived models, the prompts, the results."""

import os
from pathlib import Path

from specnb.errors import InputError


def cache_dir() -> Path:
    """Folder of fetched and derived models: `$SPECNB_CACHE`, else `$XDG_CACHE_HOME/specnb`, else `~/.cache/specnb`.

    The folder is not created here.
    """
    if folder := os.environ.get("SPECNB_CACHE"):
        return Path(folder).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "specnb"


def project_dir() -> Path:
    """The checkout that holds `data/`, `notebooks/` and `figures/`; the package is installed from it (`-e .`)."""
    root = Path(__file__).resolve().parent.parent
    if not (root / "data").is_dir():
        raise InputError(
            f"no data/ folder beside the package ({root}): specnb is used from its checkout; "
            "install it there with `pip install -e .`"
        )
    return root
