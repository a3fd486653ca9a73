"""Files of heads: both layouts are written and read exactly; a mismatch raises one clear error."""

import io
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specnb.errors import HeadsMismatch, InputError
from specnb.medusa.checkpoint import (
    LAYOUTS,
    load_trained_heads,
    open_heads,
    save_heads,
    write_layout,
)
from specnb.medusa.nets import Backbone, Heads
from tests.medusa.periodic import random_heads
from tests.tiny_models import VOCAB, WIDTH, torch_model

MAP = torch.arange(0, VOCAB, 3)
HIDDEN = torch.linspace(-2, 2, WIDTH)[None]
IDS = torch.tensor([[3, 4, 5]])
PRIVATE = {"lm_head": "private"}
BLOCK = "heads.1.blocks.0.linear."


@pytest.fixture(scope="module")
def net():
    model = torch_model("llama", seed=5)
    with torch.no_grad():
        model.model.norm.weight.uniform_(0.5, 2.0, generator=torch.Generator().manual_seed(1))
    return model


@pytest.fixture(scope="module")
def backbone(net) -> Backbone:
    return Backbone.of(net)


def same_state(heads: Heads, other: Heads) -> bool:
    a = heads.state_dict()
    b = other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def alter(folder: Path, change=None, **config) -> None:
    """Apply `change` to the tensors of a folder of either layout; set values in its config.json."""
    (file,) = (path for path in folder.iterdir() if path.suffix in (".safetensors", ".pt"))
    load, store = (
        (load_file, save_file) if file.suffix == ".safetensors" else (torch.load, torch.save)
    )
    tensors = load(file)
    if change:
        change(tensors)
    store(tensors, file)
    if config:
        values = json.loads((folder / "config.json").read_text()) | config
        (folder / "config.json").write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("kind", "lm_head", "dtype", "token_map", "contract"),
    [
        ("medusa", "private", "bfloat16", None, "pre_norm"),
        ("hydra", "shared", "float32", MAP, "post_norm"),
        ("hydra", "private", "float32", MAP, "pre_norm"),
    ],
)
def test_heads_are_loaded_as_they_were_saved(
    tmp_path, backbone, kind, lm_head, dtype, token_map, contract
):
    heads = random_heads(
        backbone, token_map, kind=kind, input=contract, n_layers=2, bias=False, lm_head=lm_head
    )
    folder = save_heads(heads, tmp_path / "heads", dtype=dtype, facts={"steps": 3})
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "heads.safetensors",
        "training.json",
    }
    loaded, report = load_trained_heads(folder, backbone)
    rounded = {n: t.to(getattr(torch, dtype)).to(t.dtype) for n, t in heads.state_dict().items()}
    assert all(torch.equal(tensor, rounded[name]) for name, tensor in loaded.state_dict().items())
    assert (
        loaded.config == heads.config == report.config
        and rounded.keys() == loaded.state_dict().keys()
    )
    assert not report.findings and report.layout == "specnb" and not report.converted


@torch.no_grad()
@pytest.mark.parametrize(
    ("lm_head", "bias", "n_layers", "token_map", "fits"),
    [
        ("shared", True, 1, None, True),
        ("private", True, 1, None, True),
        ("private", False, 1, None, False),
        ("private", True, 2, None, False),
        ("shared", True, 1, MAP, False),
    ],
)
def test_the_notes_layout_round_trips_the_heads_it_can_store(
    tmp_path, backbone, lm_head, bias, n_layers, token_map, fits
):
    heads = random_heads(backbone, token_map, bias=bias, n_layers=n_layers, lm_head=lm_head)
    if not fits:
        with pytest.raises(InputError, match="note"):
            write_layout(heads, tmp_path / "out", "note")
        assert not [*tmp_path.iterdir()]
        return
    assert bool(write_layout(heads, tmp_path / "out", "note")) == (lm_head == "shared")
    stored = torch.load(tmp_path / "out" / "medusa_heads.pt")
    names = ("res_block.linear.weight", "res_block.linear.bias", "lm_head.weight")
    shapes = dict(zip(names, ((WIDTH, WIDTH), (WIDTH,), (VOCAB, WIDTH)), strict=True))
    assert {n: (*t.shape,) for n, t in stored.items()} == {
        f"heads.{i}.{n}": s for n, s in shapes.items() for i in range(3)
    }
    loaded, report = load_trained_heads(tmp_path / "out", backbone)
    assert report.layout == "note" and not report.findings and loaded.config.input == "post_norm"
    for head in range(3):
        assert torch.equal(
            heads.draft_logits(head, HIDDEN, IDS),
            loaded.draft_logits(head, loaded.norm(HIDDEN), IDS),
        )


# --- files that do not fit ---


def norms_inside(n, scale=1.0):
    def change(tensors):
        norm = torch.empty(WIDTH).uniform_(0.5, 2.0, generator=torch.Generator().manual_seed(1))
        tensors.update({f"heads.{i}.norm.weight": scale * norm for i in range(n)})

    return change


def other_keys(tensors):
    tensors.pop(BLOCK + "bias")
    tensors |= {"extra": torch.ones(1), "heads.0.lm_head.weight": torch.ones(5)}
    tensors.pop("heads.2.lm_head.weight")


def other_values(tensors):
    tensors[BLOCK + "bias"] = torch.ones(WIDTH).long()
    tensors[BLOCK + "weight"].fill_(float("nan"))


REFUSED = [
    (
        "specnb",
        other_keys,
        {},
        (BLOCK + "bias", "extra", "heads.0.lm_head.weight", "heads.2.lm_head.weight"),
    ),
    (
        "specnb",
        other_values,
        {"hidden_size": 16},
        (BLOCK + "bias", BLOCK + "weight", "hidden_size 16"),
    ),
    (
        "specnb",
        lambda t: t.update(token_map=MAP + 5),
        {"backbone": "0" * 64},
        ("digest 000000", "token_map"),
    ),
    ("specnb", lambda t: t["token_map"].fill_(1), {}, ("token_map",)),
    ("specnb", lambda t: t.pop("token_map"), {}, ("token_map",)),
    ("note", norms_inside(1), {}, ("heads.0.norm.weight",)),
    ("note", norms_inside(3, 2.0), {}, ("heads.0.norm.weight", "heads.2.norm.weight")),
    ("note", lambda t: t.pop("heads.1.res_block.linear.bias"), {}, (BLOCK + "bias",)),
]


@pytest.mark.parametrize(("layout", "change", "config", "expected"), REFUSED)
def test_one_error_names_everything_that_does_not_fit(
    tmp_path, backbone, layout, change, config, expected
):
    heads = random_heads(backbone, MAP if layout == "specnb" else None, **PRIVATE)
    write_layout(heads, tmp_path / "out", layout)
    alter(tmp_path / "out", change, **config)
    with pytest.raises(HeadsMismatch) as caught:
        load_trained_heads(tmp_path / "out", backbone)
    assert all(word in str(caught.value) for word in (*expected, str(tmp_path)))


def test_new_files_of_the_note_have_norms_and_take_pre_norm_states(tmp_path, backbone):
    heads = random_heads(backbone, **PRIVATE)
    write_layout(heads, tmp_path / "out", "note")
    alter(tmp_path / "out", norms_inside(3))
    loaded, report = load_trained_heads(tmp_path / "out", backbone)
    assert (
        same_state(loaded, heads)
        and loaded.config.input == "pre_norm"
        and "norm inside" in str(report)
    )


def test_a_head_of_zeros_is_reported_and_overflow_is_refused(tmp_path, backbone):
    folder = save_heads(random_heads(backbone), tmp_path / "heads", dtype="float32")
    alter(folder, lambda t: [t[BLOCK + part].zero_() for part in ("weight", "bias")], backbone="")
    report = load_trained_heads(folder, backbone)[1]
    assert (
        len(report.findings) == 1
        and "heads.1.blocks.0 " in report.findings[0]
        and "no digest" in str(report)
    )
    alter(folder, lambda t: t["heads.0.blocks.0.linear.weight"].fill_(1e6))
    with pytest.raises(HeadsMismatch, match="float16"):
        load_trained_heads(folder, Backbone.of(torch_model("llama", seed=5).half()))


# --- training checkpoints and damaged files ---


def in_training_state(tensors):
    return {
        "state_dict": tensors,
        "optimizer": {"state": {}, "param_groups": []},
        "epoch": 3,
        "step": torch.ones(1),
    }


@pytest.mark.parametrize(
    ("wrap", "key", "zipped"),
    [
        (in_training_state, "'state_dict'", False),
        (lambda tensors: tensors | {"rng": {"cpu": torch.ones(1)}}, "", True),
    ],
)
def test_a_dict_that_wraps_the_weights_is_removed_and_reported(
    tmp_path, backbone, wrap, key, zipped
):
    heads = random_heads(backbone, n_heads=2, **PRIVATE)
    write_layout(heads, tmp_path / "out", "note")
    file = tmp_path / "out" / LAYOUTS["note"]
    tensors = torch.load(file)
    torch.save(wrap(tensors), file, _use_new_zipfile_serialization=zipped)
    loaded, report = load_trained_heads(file, backbone)
    assert (
        same_state(loaded, heads)
        and ("the weights were in" in str(report)) == bool(key)
        and key in str(report)
    )
    torch.save({"model": tensors, "ema": tensors}, file)
    with pytest.raises(InputError, match="'model', 'ema'"):
        open_heads(file)


class Evil:
    """Unpickling it fails the test."""

    def __reduce__(self):
        return (pytest.fail, ("something pickled was run",))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_damaged_files_raise_input_errors_and_nothing_pickled_is_run(tmp_path, backbone, layout):
    write_layout(random_heads(backbone), tmp_path / "out", layout)
    torch.save({"heads.0.res_block.linear.weight": Evil()}, evil := io.BytesIO())
    for file in sorted((tmp_path / "out").iterdir()):
        whole = file.read_bytes()
        for data in (
            b"",
            b"garbage",
            whole[: len(whole) // 2],
            whole[:9] + b"\xff" * 20 + whole[29:],
            evil.getvalue(),
        ):
            file.write_bytes(data)
            with pytest.raises(InputError, match=str(tmp_path)):
                open_heads(tmp_path / "out")
        file.write_bytes(whole)
    assert open_heads(tmp_path / "out")[0].layout == layout


def test_the_command_converts_and_refuses_before_a_model_is_opened(
    tmp_path, net, specnb, monkeypatch
):
    net.save_pretrained(tmp_path / "net")
    heads = random_heads(Backbone.of(net), **PRIVATE)
    write_layout(heads, tmp_path / "heads", "note")
    words = [
        "heads",
        "convert",
        str(tmp_path / "heads"),
        "--backbone",
        str(tmp_path / "net"),
        "--out",
    ]
    code, shown, _ = specnb(*words, str(tmp_path / "out"), "--to", "specnb")
    assert code == 0 and "3 medusa heads, layout note" in shown
    assert same_state(load_trained_heads(tmp_path / "out", Backbone.of(net))[0], heads)
    monkeypatch.setattr("specnb.lm.load.load", lambda *_, **__: pytest.fail("a model was opened"))
    for out, layout, problem in (("no", "not", "did you mean note"), ("net", "note", "not empty")):
        code, _, error = specnb(*words, str(tmp_path / out), "--to", layout)
        assert code == 2 and problem in error and not (tmp_path / "no").exists()
