"""Trained heads, built once a session: a backbone that walks in circles, and heads that know what comes."""

import pytest

from specnb.lm.hf.model import HfModel
from specnb.medusa.nets import Heads
from tests.medusa import periodic

STEPS = 400


@pytest.fixture(scope="session")
def circles() -> HfModel:
    return periodic.backbone_model()


@pytest.fixture(scope="session")
def fitted(circles) -> dict[str, Heads]:
    """Sound heads of both kinds, right about every token of every circle."""
    heads = {kind: periodic.new_heads(circles, kind=kind) for kind in ("medusa", "hydra")}
    for of_kind in heads.values():
        periodic.fit(of_kind, circles, steps=STEPS)
    return heads
