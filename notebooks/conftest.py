"""Notebooks that run as tests write their records and figures into a temporary folder, not into the checkout."""

import os
import tempfile

import pytest


def pytest_configure(config: pytest.Config) -> None:
    # nbval's items take no fixtures, and its kernels inherit this process's environment
    folder = tempfile.TemporaryDirectory(prefix="specnb-notebooks-")
    config.add_cleanup(folder.cleanup)
    for name in ("SPECNB_RESULTS", "SPECNB_FIGURES"):
        os.environ.setdefault(name, os.path.join(folder.name, name.lower()))  # noqa: PTH118
