"""Files of heads: three layouts are written and read bit by bit; every mismatch is a clear error."""

import io
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specnb.errors import HeadsMismatch, InputError
from specnb.medusa.checkpoint import LAYOUTS, load_trained_heads, open_heads, save_heads, write_layout
from specnb.medusa.nets import Backbone, Heads
from tests.medusa.periodic import random_heads
from tests.tiny_models import VOCAB, WIDTH, torch_model

MAP = torch.arange(0, VOCAB, 3)
HIDDEN, IDS = torch.linspace(-2, 2, WIDTH)[None], torch.tensor([[3, 4, 5]])
PRIVATE = {"lm_head": "private"}


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
    a, b = heads.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def alter(folder: Path, change=None, **config) -> None:
    """Let `change` work on the tensors of a folder of any layout, and set values in its config.json."""
    (file,) = (path for path in folder.iterdir() if path.suffix in (".safetensors", ".pt"))
    load, store = (load_file, save_file) if file.suffix == ".safetensors" else (torch.load, torch.save)
    tensors = load(file)
    if change:
        change(tensors)
    store(tensors, file)
    values = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(values))


# --- our own layout -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "lm_head", "dtype", "token_map", "contract"), [
    ("medusa", "private", "bfloat16", None, "pre_norm"), ("hydra", "shared", "float32", MAP, "post_norm"),
    ("hydra", "private", "float32", MAP, "pre_norm"),
])  # fmt: skip
def test_what_is_saved_is_loaded_bit_by_bit(tmp_path, backbone, kind, lm_head, dtype, token_map, contract):
    heads = random_heads(backbone, token_map, kind=kind, input=contract, n_layers=2, bias=False, lm_head=lm_head)
    folder = save_heads(heads, tmp_path / "heads", dtype=dtype, facts={"steps": 3})
    assert files(folder) == ["config.json", "heads.safetensors", "training.json"]
    loaded, report = load_trained_heads(folder, backbone)
    rounded = {n: t.to(getattr(torch, dtype)).to(t.dtype) for n, t in heads.state_dict().items()}
    assert all(torch.equal(tensor, rounded[name]) for name, tensor in loaded.state_dict().items())
    assert loaded.config == heads.config == report.config and rounded.keys() == loaded.state_dict().keys()
    assert not report.findings and report.layout == "specnb" and not report.converted


# --- strict ---------------------------------------------------------------------------------------------------------

KEYS = {
    "heads.1.blocks.0.linear.bias": lambda t: t.pop("heads.1.blocks.0.linear.bias"),
    "extra": lambda t: t.update(extra=torch.ones(1)),
    "heads.0.blocks.0.linear.bias": lambda t: t.update({"heads.0.blocks.0.linear.bias": torch.ones(5)}),
}
BROKEN = {
    "has dtype torch.int64": lambda t: t.update({"heads.1.blocks.0.linear.weight": torch.ones(WIDTH, WIDTH).long()}),
    "'heads.2.blocks.0.linear.weight' has NaN": lambda t: t["heads.2.blocks.0.linear.weight"].fill_(float("nan")),
}


def test_one_error_lists_all_keys_and_one_all_other_faults(tmp_path, backbone):
    folder = save_heads(random_heads(backbone), tmp_path / "heads")
    for change in KEYS.values():
        alter(folder, change)
    with pytest.raises(HeadsMismatch) as caught:
        load_trained_heads(folder, backbone)
    assert all(word in str(caught.value) for word in (*KEYS, str(folder)))
    for change in BROKEN.values():
        alter(folder, change)
    alter(folder, vocab_size=99, backbone="0" * 64)
    with pytest.raises(HeadsMismatch) as caught:
        load_trained_heads(folder, backbone)
    assert all(word in str(caught.value) for word in (*BROKEN, "vocab_size 99", "digest 000000"))


def test_untrained_blocks_rounding_and_overflow_are_reported(tmp_path, backbone):
    folder = save_heads(random_heads(backbone), tmp_path / "heads", dtype="float32")
    half = Backbone.of(torch_model("llama", seed=5).half())
    assert "torch.float32 to torch.float16" in str(load_trained_heads(folder, half)[1])
    alter(folder, lambda t: [t[f"heads.1.blocks.0.linear.{part}"].zero_() for part in ("weight", "bias")], backbone="")
    report = load_trained_heads(folder, backbone)[1]
    assert len(report.findings) == 1 and "heads.1.blocks.0 " in report.findings[0] and "no digest" in str(report)
    alter(folder, lambda t: t["heads.0.blocks.0.linear.weight"].fill_(1e6))
    with pytest.raises(HeadsMismatch, match="float16"):
        load_trained_heads(folder, half)


# --- other layouts --------------------------------------------------------------------------------------------------


EVERY = set(LAYOUTS)
HELD = [
    ("medusa", "shared", True, 1, None, EVERY),
    ("medusa", "shared", False, 2, MAP, {"specnb"}),
    ("medusa", "private", True, 2, None, {"specnb"}),  # the others have one block per head
    ("medusa", "private", True, 1, None, EVERY),
    ("medusa", "private", False, 1, None, {"specnb"}),
    ("hydra", "shared", True, 1, MAP, {"specnb"}),
]
"""Kind, lm_head, bias, layers and draft vocabulary of heads, and the layouts that can hold them."""


@torch.no_grad()
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("kind", "lm_head", "bias", "n_layers", "token_map", "held_by"), HELD)
def test_every_layout_gives_back_what_it_was_given(
    tmp_path, backbone, layout, kind, lm_head, bias, n_layers, token_map, held_by
):
    heads = random_heads(backbone, token_map, kind=kind, bias=bias, n_layers=n_layers, lm_head=lm_head)
    if layout not in held_by:
        with pytest.raises(InputError, match=layout):
            write_layout(heads, tmp_path / "out", layout)
        assert files(tmp_path) == []
        return
    written = write_layout(heads, tmp_path / "out", layout)
    loaded, report = load_trained_heads(tmp_path / "out", backbone)
    assert report.layout == layout and not report.findings
    before, after = heads.state_dict(), loaded.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    added = {name: after[name] for name in after.keys() - before.keys()}
    assert bool(added) <= bool(written)
    assert all(torch.equal(weight, heads.shared_lm_head) for weight in added.values())
    for head in range(3):
        fed = HIDDEN if loaded.config.input == "pre_norm" else loaded.norm(HIDDEN)  # of the same state
        assert torch.equal(heads.draft_logits(head, HIDDEN, IDS), loaded.draft_logits(head, fed, IDS))


LITERAL = {
    "note": {
        "heads.{i}.res_block.linear.weight": (32, 32),
        "heads.{i}.res_block.linear.bias": (32,),
        "heads.{i}.lm_head.weight": (64, 32),
    },
    "medusa-v1": {
        "{i}.0.linear.weight": (32, 32),
        "{i}.0.linear.bias": (32,),
        "{i}.1.weight": (64, 32),
    },
}
"""Names and shapes as in the sources of the other projects."""


@pytest.mark.parametrize("layout", LITERAL)
def test_names_and_shapes_are_those_of_the_others(tmp_path, backbone, layout):
    write_layout(random_heads(backbone, n_heads=2, **PRIVATE), tmp_path / layout, layout)
    tensors = open_heads(tmp_path / layout).tensors
    shapes = LITERAL[layout].items()
    expected = {name.format(i=i): shape for name, shape in shapes for i in range(2)}
    assert {name: tuple(t.shape) for name, t in tensors.items()} == expected


def norms_inside(n, scale=1.0):
    def change(tensors):
        norm = torch.empty(WIDTH).uniform_(0.5, 2.0, generator=torch.Generator().manual_seed(1))
        tensors.update({f"heads.{i}.norm.weight": scale * norm for i in range(n)})

    return change


def without_a_bias(tensors):
    del tensors[next(name for name in sorted(tensors) if name.endswith(".bias"))]


def without_lm_heads(tensors):
    for head in range(3):
        del tensors[f"{head}.1.weight"]


MAPPED = PRIVATE | {"token_map": MAP}
READ = [
    ("medusa-v1", PRIVATE, None, {"medusa_num_heads": 5}, "3 medusa heads"),
    ("note", PRIVATE | {"input": "post_norm"}, None, {}, "no norm inside"),
    ("note", PRIVATE, norms_inside(3), {}, "frozen norm inside"),
]
REFUSED = [
    ("specnb", MAPPED, lambda t: t.update(token_map=MAP + 5), {}, "ascending ids"),
    ("specnb", MAPPED, lambda t: t["token_map"].fill_(1), {}, "ascending ids"),
    ("specnb", MAPPED, lambda t: t.pop("token_map"), {}, "'token_map' holds 0 tokens"),
    ("note", PRIVATE, norms_inside(1), {}, "Unexpected key"),
    ("note", PRIVATE, norms_inside(3, 2.0), {}, "not the backbone's final norm"),
    ("note", {}, without_a_bias, {}, "Missing key"),
    ("medusa-v1", {}, without_a_bias, {}, "Missing key"),
    ("medusa-v1", {}, without_lm_heads, {}, "heads.2.lm_head.weight"),
    ("medusa-v1", {}, None, {"base_model_name_or_path": 3}, "base_model_name_or_path = 3"),
]


@pytest.mark.parametrize(("layout", "settings", "change", "config", "said"), READ + REFUSED)
def test_what_lies_otherwise_is_read_and_reported_or_refused(
    tmp_path, backbone, layout, settings, change, config, said
):
    heads = random_heads(backbone, **settings)
    write_layout(heads, tmp_path / "out", layout)
    alter(tmp_path / "out", change, **config)
    if (layout, settings, change, config, said) in REFUSED:
        with pytest.raises(InputError, match=said):
            load_trained_heads(tmp_path / "out", backbone)
        return
    loaded, report = load_trained_heads(tmp_path / "out", backbone)
    assert same_state(loaded, heads) and said in str(report) and not report.findings
    assert layout != "note" or loaded.config.input == heads.config.input


def in_training_state(tensors):
    return {"state_dict": tensors, "optimizer": {"state": {}, "param_groups": []}, "epoch": 3, "step": torch.ones(1)}


WRAPPED = [
    (lambda tensors: {"state_dict": tensors}, {}, "'state_dict'"),
    (in_training_state, {}, "'state_dict'"),
    (dict, {"_use_new_zipfile_serialization": False}, "no norm inside"),
    (in_training_state, {"_use_new_zipfile_serialization": False}, "'state_dict'"),
    (lambda tensors: tensors | {"rng": {"cpu": torch.ones(1)}}, {}, "no norm inside"),
]


@pytest.mark.parametrize("layout", ["note", "medusa-v1"])
@pytest.mark.parametrize(("wrap", "options", "said"), WRAPPED)
def test_a_dict_that_wraps_the_weights_is_removed_and_reported(tmp_path, backbone, layout, wrap, options, said):
    heads = random_heads(backbone, n_heads=2, **PRIVATE)
    write_layout(heads, tmp_path / "out", layout)
    (file,) = (tmp_path / "out").glob("*.pt")
    torch.save(wrap(torch.load(file)), file, **options)
    loaded, report = load_trained_heads(tmp_path / "out", backbone)
    assert same_state(loaded, heads) and (said in str(report) or layout != "note")
    assert any(said in sentence for sentence in report.converted) or not said.startswith("'")


def test_several_state_dicts_in_a_file_are_not_chosen_from(tmp_path, backbone):
    write_layout(random_heads(backbone, **PRIVATE), tmp_path / "out", "note")
    (file,) = (tmp_path / "out").glob("*.pt")
    torch.save({"model": torch.load(file), "ema": torch.load(file)}, file)
    with pytest.raises(InputError, match="'model', 'ema'"):
        open_heads(file)


# --- what can be told before a model is there -----------------------------------------------------------------------


class Evil:
    """Unpickling it fails the test."""

    def __reduce__(self):
        return (pytest.fail, ("something pickled was run",))


@pytest.mark.parametrize("layout", ["specnb", "note"])
def test_only_our_errors_come_out_of_damaged_files_and_nothing_pickled_is_run(tmp_path, backbone, layout):
    write_layout(random_heads(backbone), tmp_path / "out", layout)
    torch.save({"heads.0.res_block.linear.weight": Evil()}, evil := io.BytesIO())
    for file in sorted((tmp_path / "out").iterdir()):
        whole = file.read_bytes()
        for data in (b"", b"garbage", whole[: len(whole) // 2], whole[:9] + b"\xff" * 20 + whole[29:], evil.getvalue()):
            file.write_bytes(data)
            with pytest.raises(InputError, match=str(tmp_path)):
                open_heads(tmp_path / "out")
        file.write_bytes(whole)
    assert open_heads(tmp_path / "out").layout == layout


def test_the_command_converts_and_refuses_before_a_model_is_opened(tmp_path, net, specnb, monkeypatch):
    net.save_pretrained(tmp_path / "net")
    heads = random_heads(Backbone.of(net), **PRIVATE)
    write_layout(heads, tmp_path / "heads", "note")
    words = ["heads", "convert", str(tmp_path / "heads"), "--backbone", str(tmp_path / "net"), "--out"]
    code, shown, _ = specnb(*words, str(tmp_path / "out"), "--to", "specnb")
    assert code == 0 and "3 medusa heads, layout note" in shown and "layout specnb" in shown
    assert same_state(load_trained_heads(tmp_path / "out", Backbone.of(net))[0], heads)
    monkeypatch.setattr("specnb.lm.load.load", lambda *_, **__: pytest.fail("a model was opened"))
    for out, layout, problem in (("no", "not", "did you mean note"), ("net", "note", "not empty")):
        code, _, error = specnb(*words, str(tmp_path / out), "--to", layout)
        assert code == 2 and problem in error and not (tmp_path / "no").exists()
