"""Models, built once per session: a random llama, and a backbone whose text is periodic."""

import pytest

from specnb.lm.hf.model import HfModel
from tests.medusa import periodic
from tests.tiny_models import torch_model


@pytest.fixture(scope="session")
def tiny() -> HfModel:
    """A random llama, whose greedy text is not known."""
    return HfModel(torch_model("llama"), None, name="tiny")


@pytest.fixture(scope="session")
def circles() -> HfModel:
    return periodic.backbone_model()


@pytest.fixture(scope="session")
def text(circles, tmp_path_factory):
    """A training text of circles."""
    folder = tmp_path_factory.mktemp("text")
    periodic.write_text(circles, folder, length=32)
    return folder
