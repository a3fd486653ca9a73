"""Comparison of two traces: sound runs of any shape agree; a fault's module and token are found."""

import copy
import dataclasses
import json
import math
from contextlib import ExitStack

import numpy as np
import pytest
import torch

from specnb.divergence import pair as small
from specnb.divergence.capture import capture
from specnb.divergence.offline import compare_traces
from specnb.divergence.script import Feed, Script, feed_script
from specnb.errors import InputError
from tests.benchmarks.divergence_score.faults import FAULTS
from tests.benchmarks.divergence_score.grid import within
from tests.divergence.lab import patched

TEXT = np.random.default_rng(0).integers(0, 256, 18).tolist()
SCRIPT = Script.drafting(TEXT, prompt=12, k=3, vocab_size=256)
PREFILL = Script.blocks(TEXT, width=len(TEXT))
BLOCKS = Script.blocks(TEXT, width=5)
BENIGN = ("split_k", "uniform_offset")
EXPERTS, ATTENTION, ROUTER = "layers.0.mlp.experts", "layers.0.self_attn", "layers.0.mlp.router"


class Subject:
    """A pair, and traces of its draft with and without faults and services."""

    def __init__(self, dtype):
        self.draft, self.target = small.pair(dtype=dtype)
        self.reference = self.traced()

    def traced(self, *faults, script=SCRIPT, beside=None, model=None, at_use=True, **options):
        model = model or self.draft

        def step(feed):
            if beside:
                with builder.paused():
                    beside(torch.tensor([TEXT[:16]]))

        with ExitStack() as planted:
            for fault in faults:
                service = FAULTS.get(fault, fault)
                self.fault = planted.enter_context(service(model, beside, **options))
            known = {"target": beside} if beside else {}
            builder = planted.enter_context(capture(model, known=known, at_use=at_use))
            feed_script(model, script, before=step)
        return builder.trace()

    def compared(self, *faults, **options):
        return compare_traces(self.reference, self.traced(*faults, **options))


@pytest.fixture(
    scope="module", params=["float32", pytest.param("bfloat16", marks=pytest.mark.slow)]
)
def pair(request):
    return Subject(request.param)


@pytest.fixture(scope="module")
def single():
    return Subject("float32")


SHAPES = {"expert_scale": "1.02", "random_head": "other operands", "dummy_tokens": "token 0 only"}
"""How `likely` describes the first error, by fault."""
QUICK = (
    "positional_registry",
    "foreign_routing",
    "kv_slot_swap",
    "rope_mismatch",
    "dummy_tokens",
    "uniform_offset",
)
"""One fault of each kind; the others run as slow tests."""


@pytest.mark.parametrize(
    "fault", [pytest.param(f, marks=[] if f in QUICK else pytest.mark.slow) for f in FAULTS]
)
def test_the_module_and_the_token_of_every_fault_are_found(pair, fault):
    comparison = pair.compared(fault, beside=pair.target)
    first = comparison.first
    if fault in BENIGN:
        assert comparison.verdict != "DIVERGENT" and first is None
        return
    assert first.module == pair.fault.first and within(pair.fault, first.first_token)
    # two traces alone do not show whether other tokens were fed on purpose
    assert comparison.verdict == ("INCONCLUSIVE" if fault == "dummy_tokens" else "DIVERGENT")
    assert SHAPES.get(fault, "") in comparison.likely
    assert (comparison.drift is not None) == (
        fault in ("untrimmed", "overtrimmed", "overtrimmed_by_two")
    )


@pytest.mark.parametrize(
    "script", [PREFILL, BLOCKS, Script.blocks(TEXT, width=1)], ids=["prefill", "blocks", "steps"]
)
def test_sound_runs_of_other_shapes_are_never_divergent(pair, script):
    other = pair.traced(script=script)
    for a, b in ((pair.reference, other), (other, pair.reference)):
        comparison = compare_traces(a, b)
        assert comparison.verdict in ("SOUND", "PRECISION_ONLY") and not comparison.minimal
        assert comparison.coverage["tokens"] == len(TEXT)
        assert comparison.coverage["compared"] == comparison.coverage["modules"]


def test_a_tensor_that_changes_between_modules_is_blamed_on_the_container(single):
    """An input that equals another module's output is compared with it, whatever else is wrong."""
    with single.draft.model.layers[0].register_forward_pre_hook(
        lambda _, args: (args[0] * 1.5, *args[1:])
    ):
        minimal = single.compared("rope_mismatch", start=0).minimal
    assert [(node.module, node.at) for node in minimal] == [
        ("rotary_emb", "rotary_emb"),
        ("model", "layers.0"),
    ]
    assert minimal[1].n_tokens == len(TEXT)


# --- floors, ties ---------------------------------------------------------------------------------


def test_sound_runs_set_the_floors(single):
    scaled = single.traced("expert_scale_in_op", layer=3, eps=0.05)  # no router follows layer 3
    comparison = compare_traces(single.reference, scaled)
    assert comparison.verdict == "DIVERGENT" and "a scale" in comparison.likely
    assert comparison.first.error == pytest.approx(0.05, rel=1e-3)
    assert comparison.first.gain == pytest.approx(1.05, abs=1e-4)
    # a run that is given as sound sets its own floor
    assert compare_traces(single.reference, scaled, sound=[scaled]).verdict == "SOUND"


def test_sound_runs_must_have_the_compared_text(single):
    """A sound run of another text shows no rounding after the first different token."""
    text = [*TEXT[:-1], (TEXT[-1] + 1) % 256]
    other = single.traced(script=Script.blocks(text, width=5))
    with pytest.raises(InputError, match="no position 17"):
        compare_traces(single.reference, single.reference, sound=[other])
    # the sound run has all of these tokens
    candidate = single.traced(script=Script.blocks(TEXT[:-1], width=5))
    comparison = compare_traces(single.reference, candidate, sound=[other])
    assert comparison.verdict in ("SOUND", "PRECISION_ONLY")
    with capture(single.draft) as builder:
        single.draft(input_ids=torch.tensor([TEXT[:6], TEXT[6:12]]))
    batch = builder.trace()
    with pytest.raises(InputError, match="batch of 2"):
        compare_traces(batch, batch)


def rerouted(routed):
    """Choose the fifth expert, not the fourth, at position 7, with rounded logits."""
    logits, scores, chosen = routed
    chosen = chosen.clone()
    order = logits[7].argsort(descending=True)
    chosen[7, 3] = next(expert for expert in order if expert not in chosen[7])
    return logits * (1 + 2e-7), scores, chosen


def test_another_expert_is_a_fault_but_a_tie_only_ends_the_comparison(single):
    service = patched(f"model.{ROUTER}", rerouted)
    clean = single.traced(script=PREFILL)
    wrong = compare_traces(clean, single.traced(service, script=PREFILL))
    assert wrong.verdict == "DIVERGENT"
    assert (wrong.first.module, wrong.first.first_token) == (ROUTER, 7)
    digest = clean.rows(module=ROUTER, role="out", name="out")["digest"].iloc[0]
    fourth, fifth = np.argsort(-clean.arrays[digest][7])[3:5].tolist()
    tied = small.copy_of(single.draft)
    router = tied.get_submodule(f"model.{ROUTER}")
    with torch.no_grad():  # two experts that always get the same logits
        router.weight[fifth], router.bias[fifth] = router.weight[fourth], router.bias[fourth]
    clean = single.traced(script=PREFILL, model=tied)
    other = single.traced(service, script=PREFILL, model=tied)
    unknown = compare_traces(clean, other)
    assert unknown.verdict == "INCONCLUSIVE"
    assert "from position 7 on, another expert" in unknown.line
    # After such a choice, a sound run sets no floor.
    scaled = single.traced("expert_scale_in_op", layer=3, script=PREFILL, model=tied)
    assert compare_traces(clean, scaled, sound=[other]).verdict == "DIVERGENT"


@pytest.mark.parametrize(("last", "verdict"), [(1.2, "INCONCLUSIVE"), (1 + 1e-5, "PRECISION_ONLY")])
def test_errors_that_no_module_causes_are_tolerated_up_to_a_limit(single, last, verdict):
    """The errors of the last three modules may all have grown from earlier errors."""

    def whole(out):
        out.logits = out.logits * last
        return out

    norm = patched("model.norm", lambda out: out * (1 + 1.5e-6))
    head = patched("lm_head", lambda out: out * (1 + 1.2e-5))
    assert single.compared(norm, head, patched("", whole)).verdict == verdict


# --- texts, batches, names ------------------------------------------------------------------------


def test_foreign_parameters_are_named_if_the_inputs_agree(single):
    comparison = single.compared("positional_registry", beside=single.target)
    assert f"target:model.{EXPERTS}" in comparison.line
    assert "other operands" in comparison.likely
    foreign = comparison.reads.loc[comparison.reads["says"] == "foreign", "module"]
    assert {*foreign} == {f"layers.{i}.mlp.experts" for i in range(4)}
    # next to a copy of itself the values agree, but the parameters are not its own
    copied = single.compared("positional_registry", beside=small.copy_of(single.draft))
    assert copied.verdict == "SOUND" and f"target:model.{EXPERTS}" in copied.line
    assert not single.compared(at_use=False).coverage["parameters"]


def test_runs_are_compared_up_to_the_first_different_token(single):
    other = [*TEXT[:6], *TEXT[11::-1]]
    script = Script.blocks(other, width=4)
    sound = single.compared(script=script)
    assert sound.verdict == "INCONCLUSIVE" and sound.coverage["tokens"] == 6 == sound.fork.position
    # a faulty draft chooses other tokens; the positions before them show why
    faulty = single.compared("expert_scale", script=script)
    assert faulty.verdict == "DIVERGENT" and "not fed the same tokens" in faulty.line
    assert (faulty.first.module, faulty.first.last_token) == (EXPERTS, 5)
    nothing = single.compared(script=Script.blocks(other[6:], width=4))
    assert nothing.verdict == "INCONCLUSIVE" and nothing.coverage["tokens"] == 0


def test_the_token_fed_last_at_a_position_counts(single):
    """Rolled-back tokens do not matter, even if nothing was fed in their place."""
    feeds = (Feed(tuple(TEXT[:10])), Feed((1, 2, 3), 3))
    # then only the position of token 1 is fed again
    short = single.traced(script=Script((*feeds, Feed((TEXT[10],)))))
    comparison = compare_traces(single.traced(script=PREFILL), short)
    assert comparison.verdict == "PRECISION_ONLY" and comparison.fork is None
    assert comparison.coverage["tokens"] == 11


# --- NaN and infinity -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "other", "where"),
    [
        (0.0, math.nan, np.s_[:, 7]),
        (math.nan, 0.0, np.s_[:, 7, 3]),
        (math.inf, math.nan, np.s_[:, 7, 3]),
    ],
)
def test_nan_is_found_where_the_other_run_has_another_value(single, value, other, where):
    def traced(value):
        def put(out):
            out = out.clone()
            out[where] = value
            return out

        return single.traced(patched("lm_head", put), script=PREFILL)

    comparison = compare_traces(traced(value), traced(other))
    first = comparison.first
    assert (first.module, first.first_token, first.n_tokens) == ("lm_head", 7, 1)
    assert comparison.verdict == "DIVERGENT" and "NaN" in comparison.likely
    assert json.loads(json.dumps(comparison.document(), allow_nan=False))["first"]["error"] is None
    assert compare_traces(traced(value), traced(value)).verdict == "SOUND"


def test_tokens_before_the_first_nan_are_not_blamed(single):
    """In a prefill, attention multiplies NaN by a weight of 0, so earlier tokens get NaN, too."""
    norm = "layers.1.input_layernorm"
    service = patched(f"model.{norm}", lambda out: out.index_fill(1, torch.tensor([7]), math.nan))
    sound = single.traced(script=PREFILL)
    minimal = compare_traces(sound, single.traced(service, script=PREFILL)).minimal
    assert [(node.module, node.first_token) for node in minimal] == [(norm, 7)]


# --- coverage -------------------------------------------------------------------------------------


def test_tensors_that_were_not_compared_are_listed(single):
    def without(trace, module):
        return dataclasses.replace(trace, tensors=trace.tensors[trace.tensors["module"] != module])

    whole = single.traced()
    coverage = compare_traces(single.reference, without(whole, EXPERTS)).coverage
    assert f"{EXPERTS}:out:out" in coverage["only_reference"] and not coverage["only_candidate"]
    assert coverage["compared"] == coverage["modules"] - 1
    head = copy.deepcopy(single.draft)
    head.lm_head = torch.nn.Linear(64, 200, bias=False)
    comparison = single.compared(model=head)
    assert comparison.verdict == "INCONCLUSIVE"
    assert "lm_head:out:out" in comparison.coverage["reshaped"]
    assert compare_traces(single.reference, without(whole, "")).verdict == "INCONCLUSIVE"
