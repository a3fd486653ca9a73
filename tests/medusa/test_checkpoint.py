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


def require_same(heads: Heads, other: Heads) -> None:
    torch.testing.assert_close(heads.state_dict(), other.state_dict(), rtol=0, atol=0)


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
    ("dtype", "token_map", "options"),
    [
        (torch.bfloat16, None, PRIVATE),
        (torch.float32, MAP, {"kind": "hydra", "input": "post_norm"}),
    ],
)
def test_heads_are_loaded_as_they_were_saved(tmp_path, backbone, dtype, token_map, options):
    heads = random_heads(backbone, token_map, n_layers=2, bias=False, **options)
    save_heads(heads, tmp_path / "heads", dtype=str(dtype).partition(".")[2], facts={"steps": 3})
    loaded, report = load_trained_heads(tmp_path / "heads", backbone)
    require_same(loaded, heads.to(dtype).float())
    assert loaded.config == heads.config == report.config and report.training == {"steps": 3}
    assert not report.findings and report.layout == "specnb" and not report.converted


@torch.no_grad()
@pytest.mark.parametrize("lm_head", ["shared", "private"])
def test_the_notes_layout_round_trips_heads_under_the_notes_names(tmp_path, backbone, lm_head):
    heads = random_heads(backbone, lm_head=lm_head)
    assert bool(write_layout(heads, tmp_path / "out", "note")) == (lm_head == "shared")
    names = ("res_block.linear.weight", "res_block.linear.bias", "lm_head.weight")
    assert torch.load(tmp_path / "out" / "medusa_heads.pt").keys() == {
        f"heads.{i}.{name}" for name in names for i in range(3)
    }
    loaded, report = load_trained_heads(tmp_path / "out", backbone)
    assert report.layout == "note" and not report.findings and loaded.config.input == "post_norm"
    for head in range(3):
        rows = loaded.draft_logits(head, loaded.norm(HIDDEN))
        assert torch.equal(heads.draft_logits(head, HIDDEN), rows)


@pytest.mark.parametrize(
    ("token_map", "options"),
    [(None, {"bias": False}), (None, {"n_layers": 2}), (None, {"kind": "hydra"}), (MAP, {})],
)
def test_heads_that_the_notes_layout_cannot_store_are_refused(
    tmp_path, backbone, token_map, options
):
    with pytest.raises(InputError, match="note"):
        write_layout(random_heads(backbone, token_map, **options), tmp_path / "out", "note")
    assert not [*tmp_path.iterdir()]


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
    ("specnb", other_keys, {}, f"{BLOCK}bias extra heads.0.lm_head.weight heads.2.lm_head.weight"),
    ("specnb", other_values, {"hidden_size": 16}, f"{BLOCK}bias {BLOCK}weight hidden_size"),
    ("specnb", lambda t: t.update(token_map=MAP + 5), {"backbone": "0" * 64}, "000000 token_map"),
    ("specnb", lambda t: t["token_map"].fill_(1), {}, "token_map"),
    ("specnb", lambda t: t.pop("token_map"), {}, "token_map"),
    ("note", norms_inside(1), {}, "heads.0.norm.weight"),
    ("note", norms_inside(3, 2.0), {}, "heads.0.norm.weight heads.2.norm.weight"),
    ("note", lambda t: t.pop("heads.1.res_block.linear.bias"), {}, f"{BLOCK}bias"),
]


@pytest.mark.parametrize(("layout", "change", "config", "named"), REFUSED)
def test_one_error_names_everything_that_does_not_fit(
    tmp_path, backbone, layout, change, config, named
):
    heads = random_heads(backbone, MAP if layout == "specnb" else None, **PRIVATE)
    write_layout(heads, tmp_path / "out", layout)
    alter(tmp_path / "out", change, **config)
    with pytest.raises(HeadsMismatch) as caught:
        load_trained_heads(tmp_path / "out", backbone)
    assert all(word in str(caught.value) for word in (str(tmp_path), *named.split()))


def test_new_files_of_the_note_have_norms_and_take_pre_norm_states(tmp_path, backbone):
    heads = random_heads(backbone, **PRIVATE)
    write_layout(heads, tmp_path / "out", "note")
    alter(tmp_path / "out", norms_inside(3))
    loaded, report = load_trained_heads(tmp_path / "out", backbone)
    require_same(loaded, heads)
    assert loaded.config.input == "pre_norm" and "norm inside" in str(report)


def test_a_head_of_zeros_is_reported_and_overflow_is_refused(tmp_path, backbone):
    folder = save_heads(random_heads(backbone), tmp_path / "heads", dtype="float32")
    alter(folder, lambda t: [t[BLOCK + part].zero_() for part in ("weight", "bias")], backbone="")
    report = load_trained_heads(folder, backbone)[1]
    (finding,) = report.findings
    assert "heads.1.blocks.0 " in finding and "no digest" in str(report)
    alter(folder, lambda t: t["heads.0.blocks.0.linear.weight"].fill_(1e6))
    with pytest.raises(HeadsMismatch, match="float16"):
        load_trained_heads(folder, Backbone.of(torch_model("llama", seed=5).half()))


# --- training checkpoints and damaged files ---


@pytest.mark.parametrize(
    ("wrap", "key", "zipped"),
    [
        (lambda tensors: {"state_dict": tensors, "optimizer": {}, "epoch": 3}, "state_dict", False),
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
    require_same(loaded, heads)
    assert report.converted[0].startswith(f"the weights were in '{key}'" if key else "no norm")
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
    words = f"heads convert {tmp_path}/heads --backbone {tmp_path}/net --out".split()
    code, shown, _ = specnb(*words, str(tmp_path / "out"), "--to", "specnb")
    assert code == 0 and "3 medusa heads, layout note" in shown
    require_same(load_trained_heads(tmp_path / "out", Backbone.of(net))[0], heads)
    monkeypatch.setattr("specnb.lm.load.load", lambda *_, **__: pytest.fail("a model was opened"))
    for out, layout, problem in (("no", "not", "did you mean note"), ("net", "note", "not empty")):
        code, _, error = specnb(*words, str(tmp_path / out), "--to", layout)
        assert code == 2 and problem in error and not (tmp_path / "no").exists()
