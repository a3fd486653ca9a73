"""Tiny random hybrids as GGUF files, and models of llama.cpp, which the laws of going back share."""

from pathlib import Path

import pytest

from specnb.lm.gguf.convert import write_gguf
from specnb.lm.gguf.model import GgufModel
from specnb.lm.hf.files import quiet
from tests.tiny_hybrids import hybrid_folder

GGUFS = {"qwen35-grouped.gguf": "snapshots", "lfm2.gguf": "snapshots", "mamba2.gguf": "fused"}
"""What llama.cpp keeps of an architecture decides how it goes back: of Mamba-2 it keeps no snapshots."""


@pytest.fixture(scope="session")
def files(tmp_path_factory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("hybrids")
    with quiet():
        folders = {name: hybrid_folder(base / name, name.removesuffix(".gguf")) for name in GGUFS}
        return {name: write_gguf(folder, base / f"{name}.f32", dtype="f32") for name, folder in folders.items()}


@pytest.fixture(scope="session")
def llama(files):
    """Models of llama.cpp by family, strategy and options, each opened once."""
    models: dict[tuple, GgufModel] = {}

    def get(family: str, way: str = "auto", **options) -> GgufModel:
        key = (family, way, *sorted(options.items()))
        if key not in models:
            models[key] = GgufModel.open(files[family], threads=1, kv="f32", rollback=way, **options)
        models[key].reset()
        return models[key]

    yield get
    for model in models.values():
        model.close()
