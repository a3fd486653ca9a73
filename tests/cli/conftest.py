"""What the tests of commands share."""

import pytest

from tests.tiny_models import torch_folder


def errors(err):
    """The lines on stderr that are no progress bar's."""
    return [line for line in err.replace("\r", "\n").splitlines() if line.startswith("specnb: ")]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    return str(torch_folder(tmp_path_factory.mktemp("models") / "hf"))
