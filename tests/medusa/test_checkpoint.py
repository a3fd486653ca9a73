"""Files of heads: written and read to the bit, strict about everything, and never a stray error."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specnb.errors import HeadsMismatch, InputError
from specnb.medusa import checkpoint, layouts
from specnb.medusa.checkpoint import convert, folder_of, load_trained_heads, save, shipped
from specnb.medusa.layouts import LAYOUTS
from specnb.medusa.nets import Backbone, Heads, HeadsConfig
from tests.tiny_models import VOCAB, WIDTH, torch_model

MAP = torch.arange(0, VOCAB, 3)
HIDDEN = torch.linspace(-2, 2, WIDTH)[None]
FOREIGN = [name for name in LAYOUTS if name != "specnb"]
LM_HEADS = {"shared": {}, "private": {"lm_head": "private"}, "low_rank": {"lm_head": "low_rank", "rank": 4}}


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    net = torch_model("llama", seed=5)
    with torch.no_grad():
        net.model.norm.weight.uniform_(0.5, 2.0, generator=torch.Generator().manual_seed(1))
    return Backbone.of(net)


def made(backbone: Backbone, token_map: torch.Tensor | None = None, **settings) -> Heads:
    """Heads of random weights."""
    known = {"n_heads": 3, "hidden_size": WIDTH, "vocab_size": VOCAB, "backbone": backbone.digest}
    known |= {"draft_vocab": 0 if token_map is None else len(token_map), "backbone_name": "tiny"}
    heads = Heads(HeadsConfig(**(known | settings)), backbone, token_map)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_(0, 0.2, generator=generator)
    return heads


def saved(backbone: Backbone, folder: Path, **settings) -> Path:
    return save(made(backbone, **settings), folder, dtype="float32")


def same_state(one: Heads, other: Heads) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def alter(folder: Path, change) -> None:
    """Let `change` work on the tensors of a folder in our layout."""
    tensors = load_file(folder / "heads.safetensors")
    change(tensors)
    save_file(tensors, folder / "heads.safetensors")


def reconfigure(folder: Path, **values) -> None:
    config = json.loads((folder / "config.json").read_text()) | values
    (folder / "config.json").write_text(json.dumps(config))


# ---- our own layout


@pytest.mark.parametrize(
    ("kind", "lm_head", "dtype", "token_map", "contract"),
    [
        ("medusa", "shared", "bfloat16", None, "pre_norm"), ("medusa", "private", "float32", MAP, "post_norm"),
        ("medusa", "low_rank", "bfloat16", MAP, "pre_norm"), ("hydra", "shared", "float32", MAP, "post_norm"),
        ("hydra", "private", "bfloat16", None, "pre_norm"), ("hydra", "low_rank", "float32", None, "post_norm"),
    ],
)  # fmt: skip
def test_what_is_saved_is_loaded_bit_by_bit(tmp_path, backbone, kind, lm_head, dtype, token_map, contract):
    heads = made(backbone, token_map, kind=kind, input=contract, n_layers=2, bias=False, **LM_HEADS[lm_head])
    folder = save(heads, tmp_path / "made", dtype=dtype, facts={"steps": 3})
    assert files(folder) == ["config.json", "heads.safetensors", "training.json"]
    loaded, report = load_trained_heads(folder, backbone)
    rounded = {n: t.to(getattr(torch, dtype)).to(t.dtype) for n, t in heads.state_dict().items()}
    assert rounded.keys() == loaded.state_dict().keys()
    assert all(torch.equal(tensor, rounded[name]) for name, tensor in loaded.state_dict().items())
    assert loaded.config == heads.config == report.config
    assert report.clean and report.layout == "specnb" and not report.converted
    again = save(loaded, tmp_path / "again", dtype=dtype)
    assert (again / "heads.safetensors").read_bytes() == (folder / "heads.safetensors").read_bytes()


def test_an_older_folder_is_replaced_and_its_card_kept(tmp_path, backbone):
    folder = save(made(backbone), tmp_path / "made", facts={"steps": 3})
    (folder / "README.md").write_text("card")
    save(made(backbone, n_heads=2), folder)
    assert files(folder) == ["README.md", "config.json", "heads.safetensors"]  # the facts told of other weights
    assert load_trained_heads(folder, backbone)[0].config.n_heads == 2
    assert files(tmp_path) == ["made"]


def test_a_failed_write_leaves_the_old_folder(tmp_path, backbone, monkeypatch):
    folder = saved(backbone, tmp_path / "made")
    before = (folder / "heads.safetensors").read_bytes()

    def full_disk(path, data):
        if path.name == "config.json":
            raise OSError(28, "No space left on device")
        path.write_bytes(data)

    monkeypatch.setattr("specnb.medusa.layouts.write_atomic", full_disk)
    with pytest.raises(InputError, match="No space left"):
        save(made(backbone, n_heads=2), folder)
    assert (folder / "heads.safetensors").read_bytes() == before and files(tmp_path) == ["made"]
    with pytest.raises(InputError, match="No space left"):
        save(made(backbone), tmp_path / "new")
    assert files(tmp_path) == ["made"]


def test_a_folder_of_other_things_is_not_replaced(tmp_path, backbone):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(InputError, match="holds other things"):
        save(made(backbone), tmp_path)
    with pytest.raises(InputError, match="thesis"):
        save(made(backbone), tmp_path / "thesis.tex")
    assert files(tmp_path) == ["thesis.tex"]


def test_a_model_of_the_same_file_names_is_not_replaced(tmp_path, backbone):
    """vLLM's heads are a model.safetensors, and so is the model they sit on."""
    torch_model("llama").save_pretrained(tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    with pytest.raises(InputError, match="holds other things"):
        convert(made(backbone), tmp_path, "vllm")
    assert (tmp_path / "model.safetensors").read_bytes() == before
    convert(made(backbone), tmp_path / "heads", "vllm")
    convert(made(backbone, n_heads=2), tmp_path / "heads", "vllm")
    assert load_trained_heads(tmp_path / "heads", backbone)[0].config.n_heads == 2


# ---- strict


BROKEN = {
    "'heads.1.blocks.0.linear.bias' is missing": lambda t: t.pop("heads.1.blocks.0.linear.bias"),
    "'extra' is unexpected": lambda t: t.update(extra=torch.ones(1)),
    "'heads.3.blocks.0.linear.weight' is unexpected": lambda t: t.update(
        {"heads.3.blocks.0.linear.weight": torch.ones(1)}
    ),
    "shape (5,) instead of (32,)": lambda t: t.update({"heads.0.blocks.0.linear.bias": torch.ones(5)}),
    "torch.int64, not": lambda t: t.update({"heads.1.blocks.0.linear.weight": torch.ones(WIDTH, WIDTH).long()}),
    "'heads.2.blocks.0.linear.weight' has NaN": lambda t: t["heads.2.blocks.0.linear.weight"].fill_(float("nan")),
}


def test_one_error_lists_everything(tmp_path, backbone):
    folder = saved(backbone, tmp_path / "made")
    for change in BROKEN.values():
        alter(folder, change)
    reconfigure(folder, vocab_size=99, backbone="0" * 64)
    with pytest.raises(HeadsMismatch) as caught:
        load_trained_heads(folder, backbone)
    words = (*BROKEN, "vocab_size 99", "another model", str(folder))
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize("values", [{"n_heads": 4}, {"n_heads": 2}, {"n_layers": 2}, {"bias": False}, {"kind": "hydra"},
                                    {"lm_head": "private"}, {"hidden_size": 16}, {"draft_vocab": 8}])  # fmt: skip
def test_a_config_that_lies_is_an_error(tmp_path, backbone, values):
    folder = saved(backbone, tmp_path / "made")
    reconfigure(folder, **values)
    with pytest.raises(HeadsMismatch):
        load_trained_heads(folder, backbone)


def test_heads_of_another_model_are_refused_unless_asked_for(tmp_path, backbone):
    folder = saved(backbone, tmp_path / "made")
    other = Backbone.of(torch_model("llama", seed=6))
    with pytest.raises(HeadsMismatch, match=rf"another model \(tiny, digest {backbone.digest[:12]}"):
        load_trained_heads(folder, other)
    heads, report = load_trained_heads(folder, other, any_backbone=True)
    assert not report.clean and "another model" in str(report) and heads.config.backbone == backbone.digest
    wider = Backbone.of(torch_model("llama", vocab_size=VOCAB + 8))
    with pytest.raises(HeadsMismatch, match="vocab_size 64, the backbone 72"):
        load_trained_heads(folder, wider, any_backbone=True)


def test_findings_and_conversions_are_in_the_report(tmp_path, backbone):
    folder = saved(backbone, tmp_path / "made", token_map=MAP)
    heads, report = load_trained_heads(folder, backbone)
    assert report.n_parameters == sum(p.numel() for p in heads.parameters()) == 3 * (WIDTH * WIDTH + WIDTH)
    words = ("3 medusa heads", "layout specnb", "pre_norm", "shared", "22 of 64 tokens")
    assert report.bytes == (folder / "heads.safetensors").stat().st_size and all(word in str(report) for word in words)
    alter(folder, lambda t: [t[f"heads.1.blocks.0.linear.{part}"].zero_() for part in ("weight", "bias")])
    reconfigure(folder, backbone="")
    report = load_trained_heads(folder, backbone)[1]
    assert report.findings == ("heads.1.blocks.0 is all zero: it was never trained",) and "no digest" in str(report)
    reconfigure(folder, surprise=1)
    with pytest.raises(InputError, match="surprise"):
        load_trained_heads(folder, backbone)


def test_rounding_is_told_and_overflow_refused(tmp_path, backbone):
    folder = saved(backbone, tmp_path / "made")
    half = Backbone.of(torch_model("llama", seed=5).half())
    report = load_trained_heads(folder, half, any_backbone=True)[1]
    assert any("rounded from torch.float32 to torch.float16" in sentence for sentence in report.converted)
    alter(folder, lambda t: t["heads.0.blocks.0.linear.weight"].fill_(1e6))
    with pytest.raises(HeadsMismatch, match=r"NaN or infinity \(in torch.float16\)"):
        load_trained_heads(folder, half, any_backbone=True)


# ---- other layouts


def holds(layout: str, heads: Heads) -> bool:
    """Whether a layout has room for such heads, as its description says."""
    config = heads.config
    if layout == "specnb":
        return True
    if config.kind == "hydra" or config.lm_head == "low_rank" or (config.draft_vocab and layout != "vllm"):
        return False
    if config.n_layers > 1 and layout != "vllm":  # random blocks are not equal
        return False
    return layout != "medusa-v2" or config.lm_head == "shared"


PAIRWISE = [
    ("medusa", "shared", True, 1, None), ("medusa", "shared", False, 2, MAP), ("medusa", "private", True, 2, None),
    ("medusa", "private", False, 1, MAP), ("medusa", "private", False, 1, None), ("medusa", "low_rank", True, 1, MAP),
    ("hydra", "shared", True, 1, MAP), ("hydra", "private", False, 2, None), ("hydra", "low_rank", False, 1, None),
]  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("kind", "lm_head", "bias", "n_layers", "token_map"), PAIRWISE)
def test_every_layout_gives_back_what_it_was_given(
    tmp_path, backbone, layout, kind, lm_head, bias, n_layers, token_map
):
    heads = made(backbone, token_map, kind=kind, bias=bias, n_layers=n_layers, **LM_HEADS[lm_head])
    if not holds(layout, heads):
        with pytest.raises(InputError) as caught:
            convert(heads, tmp_path / "out", layout)
        assert files(tmp_path) == [] and layout in str(caught.value)
        return
    written = convert(heads, tmp_path / "out", layout)
    loaded, report = load_trained_heads(tmp_path / "out", backbone)
    assert report.layout == layout and report.clean
    before, after = heads.state_dict(), loaded.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    added = {name: after[name] for name in after.keys() - before.keys()}
    assert bool(added) <= bool(written)
    assert all(not t.any() if "bias" in n else torch.equal(t, heads.shared_lm_head) for n, t in added.items())
    ids = torch.tensor([[3, 4, 5]])
    for head in range(3):
        ours = heads.logits(head, heads.features(head, heads.normed(HIDDEN), ids))
        fed = loaded.as_input(HIDDEN)  # what this contract asks for, of the same state
        theirs = loaded.logits(head, loaded.features(head, loaded.normed(fed), ids))
        assert torch.equal(ours, theirs)
    assert loaded.config.input == ("pre_norm" if layout == "specnb" else "post_norm")


def test_names_and_shapes_are_those_of_the_others(tmp_path, backbone):
    """Literal names, as the sources of the other projects have them."""
    heads = made(backbone, n_heads=2, lm_head="private")
    expected = {
        "note": {"heads.{i}.res_block.linear.weight": (32, 32), "heads.{i}.res_block.linear.bias": (32,),
                 "heads.{i}.lm_head.weight": (64, 32)},
        "medusa-v1": {"{i}.0.linear.weight": (32, 32), "{i}.0.linear.bias": (32,), "{i}.1.weight": (64, 32)},
        "vllm": {"blocks.{i}.layers.0.weight": (32, 32), "blocks.{i}.layers.0.bias": (32,),
                 "lm_heads.{i}.weight": (64, 32)},
    }  # fmt: skip
    for layout, shapes in expected.items():
        convert(heads, tmp_path / layout, layout)
        found = layouts.open_source(tmp_path / layout).tensors
        assert {name: tuple(t.shape) for name, t in found.items()} == {
            name.format(i=i): shape for name, shape in shapes.items() for i in range(2)
        }
    convert(made(backbone, n_heads=2, bias=False), tmp_path / "medusa-v2", "medusa-v2")
    found = load_file(tmp_path / "medusa-v2" / "medusa_lm_head.safetensors")
    assert set(found) == {f"{i}.0.linear.{part}" for i in range(2) for part in ("weight", "bias")}


def test_the_original_repository_computes_the_same(tmp_path, backbone):
    """Its modules, as its source has them: a Sequential of ResBlocks and a Linear, fed the normed state."""

    class ResBlock(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return x + torch.nn.functional.silu(self.linear(x))

    heads = made(backbone, lm_head="private")
    convert(heads, tmp_path / "v1", "medusa-v1")
    theirs = torch.nn.ModuleList(
        torch.nn.Sequential(ResBlock(), torch.nn.Linear(WIDTH, VOCAB, bias=False)) for _ in range(3)
    )
    theirs.load_state_dict(torch.load(tmp_path / "v1" / "medusa_lm_head.pt", weights_only=True), strict=True)
    normed = backbone.norm(HIDDEN)
    for head in range(3):
        torch.testing.assert_close(theirs[head](normed), heads.draft_logits(head, HIDDEN))


def test_settings_of_vllm_are_told_or_refused(tmp_path, backbone):
    heads = made(backbone)
    convert(heads, tmp_path / "out", "vllm")
    reconfigure(tmp_path / "out", medusa_fc_bias=False)
    loaded, report = load_trained_heads(tmp_path / "out", backbone)
    assert same_state(loaded, heads) and "vLLM drops them" in str(report)
    reconfigure(tmp_path / "out", logit_scale=0.5)
    with pytest.raises(HeadsMismatch, match="logit_scale"):
        load_trained_heads(tmp_path / "out", backbone)
    with pytest.raises(InputError, match="did you mean vllm"):
        convert(heads, tmp_path / "other", "vlm")
    save_file({"model.layers.0.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"model\.layers\.0\.weight"):
        load_trained_heads(tmp_path, backbone)


def test_equal_blocks_fit_the_original_repository(tmp_path, backbone):
    heads = made(backbone, n_layers=2)
    with pytest.raises(InputError, match="medusa-v2"):
        convert(heads, tmp_path / "out", "medusa-v2")
    for head in heads.heads:
        head.blocks[1].load_state_dict(head.blocks[0].state_dict())
    convert(heads, tmp_path / "out", "medusa-v2")
    assert same_state(load_trained_heads(tmp_path / "out", backbone)[0], heads)


@pytest.mark.parametrize("layout", ["medusa-v1", "medusa-v2", "vllm"])
def test_a_foreign_config_that_lies_is_told(tmp_path, backbone, layout):
    convert(made(backbone), tmp_path / "out", layout)
    key = "num_heads" if layout == "vllm" else "medusa_num_heads"
    reconfigure(tmp_path / "out", **{key: 5})
    heads, report = load_trained_heads(tmp_path / "out", backbone)
    assert heads.config.n_heads == 3 and f"{key} 5, the weights have 3" in str(report)
    reconfigure(tmp_path / "out", **{key: "five"})
    with pytest.raises(InputError, match=key):
        load_trained_heads(tmp_path / "out", backbone)


@pytest.mark.parametrize("layout", FOREIGN)
def test_foreign_weights_are_checked_as_strictly(tmp_path, backbone, layout):
    convert(made(backbone), tmp_path / "out", layout)
    file = tmp_path / "out" / LAYOUTS[layout].file
    load, store = (load_file, save_file) if file.suffix == ".safetensors" else (torch.load, torch.save)
    whole = load(file)
    name = next(name for name in sorted(whole) if "linear.bias" in name or "layers.0.bias" in name)
    for change, said in {
        "missing": (lambda t: t.pop(name), "is missing"),
        "unexpected": (lambda t: t.update(extra=torch.ones(1)), "'extra' is unexpected"),
        "shape": (lambda t: t.update({name: torch.ones(3)}), "instead of"),
        "integers": (lambda t: t.update({name: torch.ones(WIDTH, dtype=torch.int8)}), "torch.int8"),
    }.values():
        broken = dict(whole)
        change(broken)
        store(broken, file)
        with pytest.raises(HeadsMismatch, match=said):
            load_trained_heads(tmp_path / "out", backbone)
    wider = Backbone.of(torch_model("llama", hidden_size=48, head_dim=12))
    store(whole, file)
    with pytest.raises(HeadsMismatch, match="hidden_size 32, the backbone 48"):
        load_trained_heads(tmp_path / "out", wider)


def test_a_note_with_its_norm_inside_is_fed_before_it(tmp_path, backbone):
    heads = made(backbone, lm_head="private")
    convert(heads, tmp_path / "out", "note")
    file = tmp_path / "out" / "medusa_heads.pt"
    state = torch.load(file)
    torch.save(state | {f"heads.{i}.norm.weight": backbone.norm.weight for i in range(3)}, file)
    loaded, report = load_trained_heads(file, backbone)
    assert loaded.config.input == "pre_norm" and same_state(loaded, heads) and "norm inside" in str(report)
    torch.save(state | {"heads.0.norm.weight": backbone.norm.weight}, file)
    with pytest.raises(HeadsMismatch, match="in 1 of 3 heads"):
        load_trained_heads(file, backbone)
    torch.save(state | {f"heads.{i}.norm.weight": 2 * backbone.norm.weight for i in range(3)}, file)
    with pytest.raises(HeadsMismatch, match="not the backbone's final norm"):
        load_trained_heads(file, backbone)


def test_a_note_inside_a_training_checkpoint_is_found(tmp_path, backbone):
    heads = made(backbone, lm_head="private")
    convert(heads, tmp_path / "out", "note")
    state = torch.load(tmp_path / "out" / "medusa_heads.pt")
    singly = [{n.split(".", 2)[2]: t for n, t in state.items() if n.startswith(f"heads.{i}.")} for i in range(3)]
    file = tmp_path / "latest.pt"
    for wrapped in ({"step": 5, "heads": state}, {"step": 5, "heads": singly}):
        torch.save(wrapped, file)
        assert same_state(load_trained_heads(file, backbone)[0], heads)
        assert same_state(load_trained_heads(tmp_path, backbone)[0], heads)
    torch.save({"heads": state, "average": state}, file)
    with pytest.raises(InputError, match="2 state dicts"):
        load_trained_heads(file, backbone)


@torch.no_grad()
def test_vllm_maps_in_any_order_and_full_rows(tmp_path, backbone):
    """Most frequent tokens first, as vLLM's own description has it, and lm_heads with a row for every token."""
    heads = made(backbone, MAP, lm_head="private")
    convert(heads, tmp_path / "out", "vllm")
    file = tmp_path / "out" / "model.safetensors"
    whole = load_file(file)
    order = torch.randperm(len(MAP), generator=torch.Generator().manual_seed(2))
    mixed = {n: t[order] if "lm_heads" in n or n == "token_map" else t for n, t in whole.items()}
    save_file({f"medusa_heads.{n}": t for n, t in mixed.items()}, file)
    loaded, report = load_trained_heads(tmp_path / "out", backbone)
    assert same_state(loaded, heads) and "token_map was sorted" in str(report)
    full = torch.zeros(VOCAB, WIDTH)
    full[MAP] = whole["lm_heads.1.weight"]
    save_file(mixed | {"lm_heads.1.weight": full, "token_map": mixed["token_map"].int()}, file)
    assert same_state(load_trained_heads(tmp_path / "out", backbone)[0], heads)
    save_file(mixed | {"token_map": MAP + 5}, file)
    with pytest.raises(HeadsMismatch, match="outside the vocabulary"):
        load_trained_heads(tmp_path / "out", backbone)
    smaller = Backbone.of(torch_model("llama", vocab_size=VOCAB - 8))
    for lm_head in ({"lm_head": "private"}, {}):
        convert(made(backbone, MAP, **lm_head), tmp_path / "other", "vllm")
        with pytest.raises(HeadsMismatch, match="vocab_size 64, the backbone 56"):
            load_trained_heads(tmp_path / "other", smaller)
    save_file({n: t for n, t in mixed.items() if n != "token_map"}, file)
    with pytest.raises(HeadsMismatch, match="no token_map"):
        load_trained_heads(tmp_path / "out", backbone)


def test_vllm_shared_lm_heads(tmp_path, backbone):
    heads = made(backbone)
    convert(heads, tmp_path / "out", "vllm")
    file = tmp_path / "out" / "model.safetensors"
    whole = load_file(file)
    assert torch.equal(whole["lm_head.weight"], backbone.lm_head)
    blocks = {n: t for n, t in whole.items() if n != "lm_head.weight"}
    save_file(blocks | {"lm_heads.0.weight": whole["lm_head.weight"]}, file)
    assert same_state(load_trained_heads(tmp_path / "out", backbone)[0], heads)
    save_file(blocks | {"lm_head.weight": 2 * whole["lm_head.weight"]}, file)
    private, report = load_trained_heads(tmp_path / "out", backbone)
    assert private.config.lm_head == "private" and "not the backbone's" in str(report)
    assert all(torch.equal(h.lm_head.weight, 2 * backbone.lm_head) for h in private.heads)
    save_file(blocks, file)
    with pytest.raises(HeadsMismatch, match="random lm_head"):
        load_trained_heads(tmp_path / "out", backbone)


# ---- hostile files


@pytest.mark.parametrize("layout", ["specnb", "note"])
def test_only_our_errors_come_out_of_damaged_files(tmp_path, backbone, layout):
    convert(made(backbone), tmp_path / "out", layout)
    for file in sorted((tmp_path / "out").iterdir()):
        whole = file.read_bytes()
        for data in (b"", b"garbage", whole[: len(whole) // 2], whole[:9] + b"\xff" * 20 + whole[29:]):
            file.write_bytes(data)
            with pytest.raises(InputError, match=str(tmp_path)):
                load_trained_heads(tmp_path / "out", backbone)
        file.write_bytes(whole)


class Evil:
    def __init__(self, witness):
        self.witness = witness

    def __reduce__(self):
        return (Path.touch, (self.witness,))


def test_nothing_pickled_is_run(tmp_path, backbone):
    torch.save({"heads.0.res_block.linear.weight": Evil(tmp_path / "was_here")}, tmp_path / "evil.pt")
    with pytest.raises(InputError, match=r"evil\.pt.* code") as caught:
        load_trained_heads(tmp_path / "evil.pt", backbone)
    assert not (tmp_path / "was_here").exists() and "weights_only" not in str(caught.value)


# ---- names and the command


def test_shipped_heads_go_by_name(tmp_path, backbone, monkeypatch):
    monkeypatch.setattr(checkpoint, "project_dir", lambda: tmp_path)
    assert shipped() == {}
    folder = saved(backbone, tmp_path / "data" / "heads" / "tiny-medusa")
    (tmp_path / "data" / "heads" / "empty").mkdir()
    assert shipped() == {"tiny-medusa": folder} and folder_of("tiny-medusa") == folder
    assert load_trained_heads("tiny-medusa", backbone)[1].clean
    with pytest.raises(InputError, match="did you mean tiny-medusa"):
        folder_of("tiny-medussa")
    with pytest.raises(InputError, match="holds no heads"):
        load_trained_heads(tmp_path, backbone)


def test_the_command_converts(specnb, tmp_path):
    net = torch_model("llama", seed=5)
    net.save_pretrained(tmp_path / "net")
    heads = made(Backbone.of(net))
    save(heads, tmp_path / "made", dtype="float32")
    words = ["heads", "convert", str(tmp_path / "made"), "--backbone", str(tmp_path / "net"), "--to"]
    code, shown, _ = specnb(*words, "vllm", "--out", str(tmp_path / "out"))
    assert code == 0 and "3 medusa heads, layout specnb" in shown and "layout vllm" in shown
    assert same_state(load_trained_heads(tmp_path / "out", net)[0], heads)
    code, _, message = specnb(*words, "vlm", "--out", str(tmp_path / "no"))
    assert code == 2 and "did you mean vllm" in message
    assert not (tmp_path / "no").exists()
