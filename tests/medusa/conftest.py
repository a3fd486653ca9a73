"""Models and heads, built once per session: a random llama, a backbone whose text is periodic."""

import pytest

from specnb.lm.hf.model import HfModel
from specnb.medusa.nets import Heads
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
def fitted(circles) -> dict[str, Heads]:
    """Heads of both kinds that predict every token of every circle."""
    return {kind: periodic.trained(circles, kind=kind)[0] for kind in ("medusa", "hydra")}


@pytest.fixture(scope="session")
def text(circles, tmp_path_factory):
    """A training text of circles."""
    folder = tmp_path_factory.mktemp("text")
    periodic.write_text(circles, folder, length=32)
    return folder
