"""Notebooks as tests: four every day, the others with the slow tests."""

import os
import tempfile

import pytest

QUICK = ("00_start_here", "03_compatibility", "06_divergence", "08_lossless")


def pytest_configure(config: pytest.Config) -> None:
    # nbval's items take no fixtures, and its kernels inherit this process's environment
    folder = tempfile.TemporaryDirectory(prefix="specnb-notebooks-")
    config.add_cleanup(folder.cleanup)
    os.environ.setdefault("SPECNB_BUDGET", "quick")
    os.environ.setdefault("SPECNB_RESULTS", folder.name)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.suffix == ".ipynb" and item.path.stem not in QUICK:
            item.add_marker(pytest.mark.slow)
