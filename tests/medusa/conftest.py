"""Models and heads, built once a session: a random llama, a backbone that walks in circles, heads that know it."""

import pytest

from specnb.lm.hf.model import HfModel
from specnb.medusa.nets import Heads
from tests.medusa import periodic
from tests.tiny_models import torch_model


@pytest.fixture(scope="session")
def tiny() -> HfModel:
    """A random llama: its texts are its own business, and so are its near-ties."""
    return HfModel(torch_model("llama"), None, name="tiny")


@pytest.fixture(scope="session")
def circles() -> HfModel:
    return periodic.backbone_model()


@pytest.fixture(scope="session")
def fitted(circles) -> dict[str, Heads]:
    """Sound heads of both kinds, right about every token of every circle."""
    return {kind: periodic.trained(circles, kind=kind)[0] for kind in ("medusa", "hydra")}
