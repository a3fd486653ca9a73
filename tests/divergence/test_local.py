"""Shadow replay: sound runs agree in whatever shapes, and of a planted fault the first module and token are found."""

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from specnb.divergence import pair as small
from specnb.divergence import replay
from specnb.divergence.capture import capture
from specnb.divergence.errors import floors, judged, locate
from specnb.divergence.faults import FAULTS
from specnb.divergence.replay import local_errors
from specnb.divergence.script import Along, Feed, Script, run
from specnb.divergence.trace import Key
from specnb.errors import InputError

TEXT = np.random.default_rng(0).integers(0, 256, 20).tolist()
SCRIPT = Script.drafting(TEXT, prompt=12, k=3, vocab_size=256)
BENIGN_BY_RELATION = ("uniform_offset",)
"""A module that is wrong by itself, and yet nothing is: positions count relative to one another."""


def test_a_script_ends_with_its_text_whatever_was_taken_back():
    assert SCRIPT.text == tuple(TEXT) and any(feed.forget for feed in SCRIPT.feeds)
    assert Script.blocks(TEXT, width=4).text == tuple(TEXT)
    fed = [None] * len(TEXT)
    for start, feed in zip(SCRIPT.starts, SCRIPT.feeds, strict=True):
        fed[start : start + len(feed.ids)] = feed.ids
    assert fed[: len(TEXT)] == TEXT
    for position, number in enumerate(SCRIPT.last_feeds):
        assert SCRIPT.feeds[number].ids[position - SCRIPT.starts[number]] == TEXT[position]


@pytest.mark.parametrize("feeds", [(), (Feed(()),), (Feed((1,), 1),), (Feed((1, 2)), Feed((3,), 4)), (Feed((1,), -1),)])
def test_a_script_that_cannot_be_run_is_refused(feeds):
    with pytest.raises(InputError):
        Script(feeds)


def test_running_gives_the_logits_of_the_text(pair):
    whole = pair.reference(torch.tensor([TEXT])).logits[0]
    logits = run(pair.draft, SCRIPT)
    for position, number in enumerate(SCRIPT.last_feeds):
        row = logits[number][position - SCRIPT.starts[number]]
        assert (row - whole[position]).abs().max() < pair.noise


class Subject:
    """A pair, a pristine copy of its draft, and the floors of sound runs."""

    def __init__(self, dtype):
        made = small.pair(dtype=dtype)
        self.draft, self.target, self.reference = made.draft, made.target, small.copy_of(made.draft)
        self.noise = {"float32": 1e-4, "bfloat16": 0.6}[dtype]
        self.sound = [self.errors(script=script) for script in (SCRIPT, Script.blocks(TEXT, width=5))]
        self.floor = floors(self.sound, dtype)

    def errors(self, fault=None, beside=None, script=SCRIPT, **options):
        planted = FAULTS[fault](self.draft, beside, **options) if fault else nullcontext()
        with planted as self.fault, capture(self.draft, full="", at_use=False) as builder:
            run(self.draft, script, before=lambda feed: beside and beside(torch.tensor([TEXT[:16]])))
        return local_errors(self.reference, Along.of(builder.trace(), script))

    def first(self, fault, **options):
        found = locate(judged(self.errors(fault, self.target, **options), self.floor, SCRIPT.last_feeds))
        return found.iloc[0] if len(found) else None


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def pair(request):
    return Subject(request.param)


def test_sound_runs_are_within_their_floors_in_every_shape(pair):
    for errors in (*pair.sound, pair.errors(script=Script.blocks(TEXT, width=7)), pair.errors(beside=pair.target)):
        assert {"layers.0.mlp.experts", "layers.3.self_attn", "lm_head", "model"} <= {*errors["at"]}
        assert locate(judged(errors, pair.floor, Script.blocks(TEXT, width=7).last_feeds)).empty


QUICK = ("positional_registry", "stale_row", "foreign_routing", "expert_scale_in_op", "overtrimmed", "split_k")
"""One of each kind; the others are slow."""


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow)
        for name in FAULTS
        if name not in BENIGN_BY_RELATION
    ],
)
def test_the_first_module_and_token_of_a_fault_are_found(pair, fault):
    found = pair.first(fault)
    if pair.fault.first is None:
        assert found is None
        return
    assert found["module"] == pair.fault.first
    assert any(
        start <= found["position"] and (end is None or found["position"] < end) for start, end in pair.fault.tokens
    )


@pytest.mark.slow
@pytest.mark.parametrize("layer", [1, 3])
@pytest.mark.parametrize("fault", ["positional_registry", "expert_scale_in_op", "kv_slot_swap", "foreign_routing"])
def test_a_fault_in_a_later_layer_is_found_there(pair, fault, layer):
    assert pair.first(fault, layer=layer)["module"].startswith(f"layers.{layer}.")


def test_how_much_larger_is_told(pair):
    errors = pair.errors("expert_scale_in_op", pair.target, eps=0.05)
    wrong = locate(judged(errors, pair.floor, SCRIPT.last_feeds))
    assert {*wrong["module"]} == {"layers.0.mlp.experts"}
    assert wrong["gain"].median() == pytest.approx(1.05, abs=0.01)


def test_two_faults_are_both_found_and_nothing_else(pair):
    with FAULTS["kv_slot_swap"](pair.draft, layer=2):
        errors = pair.errors("expert_scale_in_op", pair.target)
    wrong = locate(judged(errors, pair.floor, SCRIPT.last_feeds))
    assert {*wrong["module"]} == {"layers.0.mlp.experts", "layers.2.self_attn"}


def test_a_module_that_some_step_did_not_run_is_left_out(pair):
    with capture(pair.draft, full="") as builder:
        run(pair.draft, SCRIPT)
    trace = builder.trace()
    skipped = (trace.tensors["module"] == "lm_head") & (trace.tensors["step"] == 0)
    along = Along.of(replace(trace, tensors=trace.tensors[~skipped]), SCRIPT)
    assert {key.module for key in along.left_out} >= {"lm_head"} and not along.gaps


def test_where_the_run_made_nothing_the_copys_own_values_go_on(pair):
    with capture(pair.draft, full="") as builder:
        run(pair.draft, SCRIPT)
    along, key = Along.of(builder.trace(), SCRIPT), Key("layers.0.mlp.experts", 0, "out", "out")
    along.values[key][3:5] = 0
    errors = local_errors(pair.reference, replace(along, gaps={key: np.array([3, 4])}))
    assert locate(judged(errors, pair.floor, SCRIPT.last_feeds)).empty
    assert {3, 4}.isdisjoint(errors.loc[errors["module"] == key.module, "position"][errors["role"] == "out"])


class InPlace(nn.Module):
    """Writes into what it is given, and makes logits of all tokens, or of each step's last."""

    def __init__(self, *, last):
        super().__init__()
        self.embed, self.act, self.head = nn.Embedding(256, 4), nn.ReLU(inplace=True), nn.Linear(4, 7)
        self.last = last

    def forward(self, input_ids, use_cache=False):
        hidden = self.act(self.embed(input_ids))
        return self.head(hidden[:, -1:] if self.last else hidden)


def test_what_was_captured_is_not_changed_by_the_replay():
    model, reference, script = InPlace(last=True), InPlace(last=False), Script.blocks(TEXT, width=5)
    along = traced(model, script)
    kept = {key: value.copy() for key, value in along.values.items()}
    local_errors(reference, along)
    assert along.gaps and all(np.array_equal(value, kept[key]) for key, value in along.values.items())


class Holder(nn.Module):
    """A list of heads under a name: no module of its own that runs."""

    def __init__(self, name):
        super().__init__()
        self.heads, self.name = nn.ModuleDict({name: nn.Linear(4, 4)}), name

    def forward(self, x):
        return self.heads[self.name](x)


class TwoHolders(nn.Module):
    """Lists of modules that are called as others are once the prefix is gone."""

    def __init__(self):
        super().__init__()
        self.embed, self.model, self.draft_model = nn.Embedding(256, 4), Holder("a"), Holder("b")
        self.act, self.model.act = nn.ModuleList(), nn.Identity()

    def forward(self, input_ids, use_cache=False):
        return self.draft_model(self.model.act(self.model(self.embed(input_ids))))


def test_what_can_be_captured_can_be_replayed():
    model, script = TwoHolders(), Script.blocks(TEXT, width=5)
    errors = local_errors(model, traced(model, script))
    assert {"heads.a", "heads.b", "model.act"} <= {*errors["at"]} and errors["error"].max() < 1e-5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_choices_that_were_made_on_a_gpu_are_compared():
    scores, chosen = torch.tensor([[0.5, 0.4, 0.1]], device="cuda"), torch.tensor([[0]], device="cuda")
    assert replay._margins(chosen, torch.tensor([[1]]), [scores])[0] == pytest.approx(0.1 / scores.norm().item())


def traced(model, script):
    with capture(model, full="", at_use=False) as builder, torch.no_grad():
        for feed in script.feeds:
            model(input_ids=torch.tensor([feed.ids]))
    return Along.of(builder.trace(), script)


def test_a_trace_of_another_run_is_refused(pair):
    with capture(pair.draft, full="") as builder:
        run(pair.draft, Script.blocks(TEXT, width=5))
    with pytest.raises(InputError, match="other ones"):
        Along.of(builder.trace(), SCRIPT)
