"""Two traces, compared without torch: sound runs agree in whatever shapes; of a fault module and token are found."""

import copy
import dataclasses
import json
import math
import subprocess
import sys
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
import torch

from specnb.divergence import pair as small
from specnb.divergence import tolerances
from specnb.divergence.capture import capture
from specnb.divergence.compare import compare
from specnb.divergence.difference import AlignedTrace, Difference, logit_noise
from specnb.divergence.faults import FAULTS
from specnb.divergence.parts import find
from specnb.divergence.script import Feed, Script, run
from specnb.divergence.trace import PARAM_COLUMNS, TENSOR_COLUMNS, Key, Trace, table
from specnb.errors import InputError

TEXT = np.random.default_rng(0).integers(0, 256, 18).tolist()
SCRIPT = Script.drafting(TEXT, prompt=12, k=3, vocab_size=256)
PREFILL = Script.blocks(TEXT, width=len(TEXT))
BLOCKS = Script.blocks(TEXT, width=5)
BENIGN = ("split_k", "uniform_offset")
EXPERTS, ATTENTION, ROUTER = "layers.0.mlp.experts", "layers.0.self_attn", "layers.0.mlp.router"


class Subject:
    """A pair and traces of its draft, under faults or not."""

    def __init__(self, dtype):
        made = small.pair(dtype=dtype)
        self.draft, self.target = made.draft, made.target
        self.reference = self.traced()

    def traced(self, *faults, script=SCRIPT, beside=None, model=None, full=None, at_use=True, **options):
        model, known = model or self.draft, {} if beside is None else {"target": beside}
        with ExitStack() as planted:
            self.faults = [planted.enter_context(FAULTS[name](model, beside, **options)) for name in faults]
            builder = planted.enter_context(capture(model, known=known, full=full, at_use=at_use))
            run(model, script, before=lambda feed: beside and self.step(beside, builder))
        return builder.trace()

    @staticmethod
    def step(beside, builder):
        with builder.paused():
            beside(torch.tensor([TEXT[:16]]))


@pytest.fixture(scope="module", params=["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def pair(request):
    return Subject(request.param)


@pytest.fixture(scope="module")
def single():
    return Subject("float32")


def prefixed(trace, prefix):
    """The same trace as an engine writes it that holds the model inside another one."""
    tensors, params = (part.assign(module=[prefix + name for name in part["module"]])
                       for part in (trace.tensors, trace.params))  # fmt: skip
    return Trace(trace.facts, tensors, params.assign(owner_path=prefix + params["owner_path"]), trace.arrays)


QUICK = ("positional_registry", "foreign_routing", "kv_slot_swap", "rope_mismatch", "dummy_tokens", "uniform_offset")
"""One of each kind; the others are slow."""


@pytest.mark.parametrize("fault", [pytest.param(f, marks=[] if f in QUICK else pytest.mark.slow) for f in FAULTS])
def test_of_every_fault_the_module_and_the_token_are_found_from_sketches(pair, fault):
    found = compare(pair.reference, pair.traced(fault, beside=pair.target))
    planted = pair.faults[0]
    if fault in BENIGN:
        assert found.verdict != "DIVERGENT" and found.first is None
        return
    assert found.first.module == planted.first
    assert any(start <= found.first.first_token and (end is None or found.first.first_token < end)
               for start, end in planted.tokens)  # fmt: skip
    # other tokens may have been fed on purpose: two traces alone cannot tell
    assert found.verdict == ("INCONCLUSIVE" if fault == "dummy_tokens" else "DIVERGENT")


@pytest.mark.parametrize("script", [PREFILL, BLOCKS, Script.blocks(TEXT, width=1)], ids=["prefill", "blocks", "steps"])
def test_sound_runs_of_other_shapes_are_never_divergent(pair, script):
    other = pair.traced(script=script)
    for ours, theirs in ((pair.reference, other), (other, pair.reference)):
        found = compare(ours, theirs)
        assert found.verdict == "PRECISION_ONLY" and not found.minimal
        assert found.coverage.tokens == len(TEXT) and found.coverage.compared == found.coverage.modules


@pytest.mark.parametrize("fault", ["positional_registry", "kv_slot_swap"])
def test_a_fault_is_found_against_steps_of_other_lengths(pair, fault):
    found = compare(pair.traced(script=BLOCKS), pair.traced(fault, beside=pair.target))
    assert found.first.module == pair.faults[0].first and found.verdict == "DIVERGENT"


def test_two_faults_are_both_minimal(pair):
    found = compare(pair.reference, pair.traced("kv_slot_swap", "expert_scale"))
    assert [(node.module, node.first_token) for node in found.minimal] == [(ATTENTION, 5), (EXPERTS, 0)]
    assert "also layers.0.mlp.experts" in found.line


def test_a_tensor_that_changes_between_its_maker_and_its_reader_is_put_down_to_the_holder(single):
    """Also where something else in the same holder is wrong: the reader was given another module's output."""

    def changed(layer, args):
        return (args[0] * 1.5, *args[1:])

    handle = single.draft.model.layers[0].register_forward_pre_hook(changed)
    try:
        found = compare(single.reference, single.traced("rope_mismatch", start=0))
    finally:
        handle.remove()
    assert [(node.module, node.at) for node in found.minimal] == [("rotary_emb", "rotary_emb"), ("model", "layers.0")]
    assert found.minimal[1].n_tokens == len(TEXT)


def test_floors_of_sound_runs_are_taken(single):
    candidate = single.traced(script=Script.blocks(TEXT, width=1))
    assert compare(single.reference, candidate).verdict == "PRECISION_ONLY"
    prefill, blocks = single.traced(script=PREFILL), single.traced(script=BLOCKS)
    assert compare(single.reference, candidate, sound=[candidate, (prefill, blocks)]).verdict == "SOUND"
    # a run that is said to be right as it is sets its own floor
    scaled = single.traced("expert_scale_in_op")
    assert compare(single.reference, scaled).verdict == "DIVERGENT"
    assert compare(single.reference, scaled, sound=[scaled]).verdict == "PRECISION_ONLY"
    with pytest.raises(InputError, match="sound"):
        compare(single.reference, candidate, sound=[Trace({"steps": []}, *empty())])


@pytest.mark.parametrize("changed", [1, len(TEXT) - 1])
def test_sound_runs_must_be_of_the_text_that_is_compared(single, changed):
    """One token in common is enough to compare, and says nothing of the rounding of the others."""
    text = list(TEXT)
    text[changed] = (text[changed] + 1) % 256
    other = single.traced(script=Script.blocks(text, width=5))
    with pytest.raises(InputError, match=f"no position {changed} of the text that is compared"):
        compare(single.reference, single.traced(), sound=[other])
    candidate = single.traced(script=Script.blocks(TEXT[:changed], width=5))  # all of it is in the sound run
    assert compare(single.reference, candidate, sound=[other]).verdict in ("SOUND", "PRECISION_ONLY")


def test_all_sequences_of_a_batch_must_be_in_a_sound_run(single):
    def traced(*texts):
        with capture(single.draft) as builder:
            single.draft(input_ids=torch.tensor(texts))
        return builder.trace()

    mine, other, third = TEXT[:6], TEXT[6:12], TEXT[12:18]
    for sound in ([mine, third], [mine]):
        with pytest.raises(InputError, match="not all sequences of the text"):
            compare(traced(mine, other), traced(mine, other), sound=[traced(*sound)])
    with pytest.raises(InputError, match="not all sequences of the text"):
        compare(traced(mine), traced(mine), sound=[(traced(mine, other), traced(mine, third))])
    assert compare(traced(mine), traced(mine), sound=[traced(mine, third)]).verdict == "SOUND"


def test_a_precise_run_excuses_what_is_no_further_from_it(pair):
    """The float32 run of a draft is as far from the bfloat16 one as a sound one: that alone is no fault."""
    precise = pair.traced(model=small.make("draft"), script=PREFILL)
    assert compare(pair.reference, pair.traced(script=BLOCKS), precise=precise).verdict != "DIVERGENT"
    assert compare(pair.reference, precise).verdict != "DIVERGENT"
    found = compare(pair.reference, pair.traced("experts_permuted"), precise=precise)
    assert found.first.module == EXPERTS and found.verdict == "DIVERGENT"


def test_an_error_as_large_as_the_references_own_is_rounding(single):
    """The reference is off by 2 % against a precise run, the candidate by as much, to the other side."""
    less, more = (single.traced("expert_scale_in_op", eps=eps) for eps in (-0.02, 0.02))
    assert compare(less, more).verdict == "DIVERGENT"
    found = compare(less, more, precise=single.reference)
    assert found.verdict == "PRECISION_ONLY" and not found.minimal and "precise" in found.reason
    worse = single.traced("expert_scale_in_op", eps=0.1)
    assert compare(less, worse, precise=single.reference).first.module == EXPERTS


def said_to_be(trace, **facts):
    return Trace(trace.facts | facts, trace.tensors, trace.params, trace.arrays)


def test_a_small_error_of_quantised_weights_needs_sound_runs_to_be_a_fault(single):
    reference = said_to_be(single.reference, dtype="q4_1")
    small_one, large_one = (said_to_be(single.traced("expert_scale_in_op", eps=eps), dtype="q4_1") for eps in (0.05, 2))
    doubtful = compare(reference, small_one)
    assert doubtful.verdict == "INCONCLUSIVE" and not doubtful.minimal and len(doubtful.nodes)
    assert "nothing is known of the rounding of q4_1" in doubtful.reason and "--width 5" in doubtful.reason
    assert compare(reference, small_one, sound=[single.traced(script=BLOCKS)]).first.module == EXPERTS
    assert compare(reference, large_one).first.module == EXPERTS


def test_modules_are_found_under_other_names(single):
    faulty = single.traced("expert_scale")
    for prefix in ("draft_model.model.", "model."):  # a capture takes them away; a trace of another's hand keeps them
        found = compare(single.reference, prefixed(faulty, prefix), rename={r"^(draft_model\.|model\.)+": ""})
        assert found.first.module == EXPERTS and not found.coverage.only_candidate
        assert found.reads["says"].tolist() == ["changed"] * len(found.reads) and len(found.reads) == 2
    engine = prefixed(faulty, "engine.")
    with pytest.raises(InputError, match=r"no module in common.*rename"):
        compare(single.reference, engine)
    found = compare(single.reference, engine, rename={r"^engine\.": ""})
    assert found.first.module == EXPERTS
    assert r"engine\.layers\.0\.mlp\.experts" in found.around() and r"|layers\.0\.mlp\.experts" in found.around()


def test_a_second_pass_in_full_gives_exact_errors(single):
    found = compare(single.reference, single.traced("expert_scale_in_op", eps=0.05))
    again = [single.traced(*fault, full=found.around(), eps=0.05) for fault in ((), ("expert_scale_in_op",))]
    kept = {row.module for row in again[0].tensors.itertuples() if again[0].array(row.row, "full") is not None}
    assert kept == {ROUTER, EXPERTS, "layers.1"}  # in the order they are entered
    exact = compare(*again)
    assert exact.first.error == pytest.approx(0.05, rel=1e-3) and exact.first.gain == pytest.approx(1.05, abs=1e-4)
    assert abs(found.first.error - 0.05) > 1e-3 and "a scale" in found.likely and "a scale" in exact.likely


def test_batch_rows_are_matched_by_their_text(single):
    """The text alone, and in the middle of a batch of three."""

    def traced(rows):
        with capture(single.draft) as builder, torch.no_grad():
            single.draft(torch.tensor(rows), use_cache=True)
        return builder.trace()

    others = [np.random.default_rng(seed).integers(0, 256, len(TEXT)).tolist() for seed in (1, 2)]
    alone, batch = traced([TEXT]), traced([others[0], TEXT, others[1]])
    found = compare(alone, batch)
    assert found.verdict in ("SOUND", "PRECISION_ONLY") and found.fork is None and found.coverage.sequences == 1
    assert compare(batch, alone).verdict == found.verdict
    with FAULTS["expert_scale"](single.draft):
        assert compare(alone, traced([others[0], TEXT, others[1]])).first.module == EXPERTS
    forked = compare(traced([TEXT, others[0]]), traced([TEXT, others[1]]))
    assert forked.verdict == "INCONCLUSIVE" and "1 sequences of the batch" in forked.line and "alone" in forked.line


def test_foreign_parameters_are_named_where_inputs_agree(single):
    found = compare(single.reference, single.traced("positional_registry", beside=single.target))
    assert "it read target:model.layers.0.mlp.experts" in found.line and "other operands" in found.likely
    assert set(found.reads.loc[found.reads["says"] == "foreign", "module"]) == {
        f"layers.{i}.mlp.experts" for i in range(4)
    }
    # beside itself the values agree, and yet the modules are not its own
    copied = compare(single.reference, single.traced("positional_registry", beside=small.copy_of(single.draft)))
    assert copied.verdict == "SOUND" and "target:model.layers.0.mlp.experts" in copied.line
    assert copied.reads["same_values"].all() and not found.reads["same_values"].any()
    assert not compare(single.reference, single.traced(at_use=False)).coverage.parameters


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("expert_scale", "1.02 times"), ("stale_row", "token, position 12"), ("rope_mismatch", "from position 8 on"),
        ("kv_slot_swap", "row of position 5 holds that of 9, that of position 9 holds that of 5"),
        ("random_head", "other operands"), ("experts_permuted", "other operands"), ("untrimmed", "holds that of"),
        ("dummy_tokens", "token 0 only"),
    ],
)  # fmt: skip
def test_the_shape_of_the_error_is_told(single, fault, says):
    assert says in compare(single.reference, single.traced(fault, beside=single.target)).likely


def test_positions_counted_otherwise_are_told(single):
    found = compare(single.reference, single.traced("untrimmed"))
    assert found.drift is not None and f"counts position {found.drift.position} as {found.drift.counted}" in found.line
    assert found.fork is None and found.first.module == ATTENTION


def test_runs_that_were_fed_other_tokens(single):
    other = [*TEXT[:6], *np.random.default_rng(1).integers(0, 256, 12).tolist()]
    found = compare(single.reference, single.traced(script=Script.blocks(other, width=4)))
    assert found.verdict == "INCONCLUSIVE" and found.coverage.tokens == 6 == found.fork.position
    assert (
        found.line.startswith("INCONCLUSIVE: the runs were not fed the same tokens") and "teacher-force" in found.line
    )
    # a draft that goes wrong chooses other tokens: what comes before them tells why
    faulty = compare(single.reference, single.traced("expert_scale", script=Script.blocks(other, width=4)))
    assert faulty.verdict == "DIVERGENT" and faulty.first.module == EXPERTS and faulty.first.last_token == 5
    assert "not fed the same tokens" in faulty.line
    nothing = compare(single.reference, single.traced(script=Script.blocks(other[6:], width=4)))
    assert nothing.verdict == "INCONCLUSIVE" and nothing.coverage.tokens == 0
    late = compare(single.reference, single.traced(script=Script.blocks([TEXT[0], TEXT[0], *TEXT[1:]], width=4)))
    assert late.fork.shift == 1 and "1 positions later" in late.line


def test_what_was_fed_last_counts(single):
    """Wrong tokens that were taken back do not matter, also those that were never fed again."""
    feeds = (Feed(tuple(TEXT[:10])), Feed((1, 2, 3), 3), Feed(tuple(TEXT[10:])))
    assert compare(single.traced(script=PREFILL), single.traced(script=Script(feeds))).verdict == "PRECISION_ONLY"
    short = Script((*feeds[:2], Feed((TEXT[10],))))  # of 1, 2, 3 only the first place is fed again
    found = compare(single.traced(script=PREFILL), single.traced(script=short))
    assert found.fork is None and found.coverage.tokens == 11


@contextmanager
def hooked(*changes):
    """Modules whose output is what a function makes of it."""
    handles = [
        module.register_forward_hook(lambda _, args, out, change=change: change(out)) for module, change in changes
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def later(out, factor, start=0):
    out = out.clone()
    out[:, start:] *= factor
    return out


class Rerouted:
    """Router 0 whose logits are a rounding off, and which at one position takes its fifth expert for its fourth."""

    def __init__(self, model, position=7):
        self.model, self.position = model, position
        self.router = find(model).router(0)[1]

    def traced(self, full=None, noise=2e-7):
        def other(router, args, out):
            logits, scores, chosen = out
            chosen, order = chosen.clone(), logits.argsort(-1, descending=True)
            if len(chosen) > self.position:
                left = [one for one in order[self.position] if one not in chosen[self.position]]
                chosen[self.position, 3] = left[0]
            return logits * (1 + noise), scores, chosen

        handle = self.router.register_forward_hook(other)
        try:
            with capture(self.model, full=full) as builder:
                run(self.model, PREFILL)
        finally:
            handle.remove()
        return builder.trace()


def test_another_choice_is_excused_by_a_tie_only(single):
    clean = {full: single.traced(script=PREFILL, full=full) for full in (None, "router")}
    wrong = Rerouted(single.draft)
    doubtful = compare(clean[None], wrong.traced())
    assert doubtful.verdict == "INCONCLUSIVE" and [tuple(one) for one in doubtful.doubts] == [(ROUTER, 7, 1)]
    assert "unknown margin" in doubtful.line and r"layers\.0\.mlp\.router" in doubtful.around()
    same_bits = compare(clean[None], wrong.traced(noise=0.0))
    assert same_bits.verdict == "DIVERGENT" and same_bits.first.module == ROUTER
    known = compare(clean["router"], wrong.traced("router"))
    assert known.verdict == "DIVERGENT" and (known.first.module, known.first.first_token) == (ROUTER, 7)
    tied = small.copy_of(single.draft)
    router = find(tied).router(0)[1]
    with capture(tied, full="router") as builder:
        run(tied, PREFILL)
    rows = builder.trace().rows(module=ROUTER, role="out", name="out")["row"]
    fourth, fifth = np.argsort(-builder.trace().array(int(rows.iloc[0]), "full")[7])[3:5]
    with torch.no_grad():  # two experts that always get the same logits
        router.weight[int(fifth)], router.bias[int(fifth)] = router.weight[int(fourth)], router.bias[int(fourth)]
    clean, rerouted = single.traced(script=PREFILL, model=tied, full="router"), Rerouted(tied).traced("router")
    unknown = compare(clean, rerouted)
    assert unknown.verdict == "INCONCLUSIVE" and "from position 7 on another expert" in unknown.line
    sound = [Rerouted(tied).traced("router", noise=-2e-7)]
    excused = compare(clean, rerouted, sound=sound)
    assert excused.verdict == "PRECISION_ONLY" and "ties" in excused.reason
    with hooked((tied.lm_head, lambda out: later(out, 2.0, 9))):
        spoilt = compare(clean, Rerouted(tied).traced("router"), sound=sound)
    assert spoilt.verdict == "INCONCLUSIVE" and "from position 7 on" in spoilt.line
    # neither errors nor choices behind a tie are a measure of noise
    apart = Difference(AlignedTrace(clean), AlignedTrace(rerouted))
    logits, chosen = (Key(f"layers.1.{ROUTER[9:]}", 0, "out", name) for name in ("out", "out.2"))
    assert np.nanmax(apart.errors[logits]) > 1e-3 > logit_noise([apart], logits)
    assert apart.errors[chosen].sum() and not np.nansum(apart.unflipped(chosen))


def test_errors_in_full_and_not_a_number(single):
    broken = copy.deepcopy(single.draft)
    with torch.no_grad():
        find(broken).bank(1)[1].down_proj_bias[:, 3] = float("nan")
    found = compare(single.reference, single.traced(model=broken))
    assert found.first.module == "layers.1.mlp.experts" and "NaN" in found.likely
    assert json.loads(json.dumps(found.document(), allow_nan=False))["first"]["error"] is None


ODD = ((0.0, np.nan, np.s_[:, 7], True), (np.nan, 0.0, np.s_[:, 7], True), (0.0, np.nan, np.s_[:, 7, 3], False))


@pytest.mark.parametrize(
    ("full", "ours", "theirs", "where", "known"),
    [
        *((full, *one) for full in (None, "lm_head") for one in ODD),
        ("lm_head", np.inf, np.nan, np.s_[:, 7, 3], False),  # of two kinds of odd values sketches know the number only
    ],
)
def test_what_is_not_a_number_is_found_where_the_other_run_has_zeros(single, full, ours, theirs, where, known):
    """Sketches count both as 0, so of one odd value among others they tell that it is there, not at which token."""

    def traced(value):
        def put(out):
            out = out.clone()
            out[where] = value
            return out

        with hooked((single.draft.lm_head, put)):
            return single.traced(script=PREFILL, full=full)

    found = compare(traced(ours), traced(theirs))
    assert found.verdict == "DIVERGENT" and found.first.module == "lm_head" and "NaN" in found.likely
    if known or full:
        assert (found.first.first_token, found.first.n_tokens) == (7, 1)
    assert compare(traced(ours), traced(ours)).verdict == "SOUND"


def test_a_token_before_the_one_that_is_no_number_is_not_blamed(single):
    """Attention over a whole prefill multiplies it by a weight of 0, and that is NaN: at earlier tokens, too."""

    def put(out):
        return out.index_fill(1, torch.tensor([7]), math.nan)

    sound = single.traced(script=PREFILL)
    with hooked((single.draft.model.layers[1].input_layernorm, put)):
        found = compare(sound, single.traced(script=PREFILL))
    assert [node.module for node in found.minimal] == ["layers.1.input_layernorm"] and found.first.first_token == 7


def growing(draft, first, second, last):
    """The last three modules, each off by so much: where they could have made as much of what they were given."""

    def whole(out):
        out.logits = out.logits * last
        return out

    return hooked(
        (draft.model.norm, lambda out: out * first), (draft.lm_head, lambda out: out * second), (draft, whole)
    )


@pytest.mark.slow
@pytest.mark.parametrize("calibrated", [False, True])
def test_errors_that_nobody_is_to_blame_for_have_a_ceiling(single, calibrated):
    sound = [single.traced(script=BLOCKS)] if calibrated else []
    with growing(single.draft, 1 + 1.5e-6, 1 + 1.2e-5, 1.2):
        found = compare(single.reference, single.traced(), sound=sound)
    assert found.verdict == "INCONCLUSIVE" and "errors grow" in found.line
    assert ("sound runs show" in found.line) == calibrated
    with growing(single.draft, 1 + 1.5e-6, 1 + 1.2e-5, 1 + 1e-5):
        assert compare(single.reference, single.traced(), sound=sound).verdict == "PRECISION_ONLY"


@pytest.mark.slow
def test_a_precise_run_excuses_no_later_fault(single):
    less = single.traced("expert_scale_in_op", eps=-0.02)
    with hooked((single.draft.lm_head, lambda out: out * 1.5)):
        found = compare(less, single.traced("expert_scale_in_op", eps=0.02), precise=single.reference)
    assert found.verdict == "INCONCLUSIVE"


@pytest.mark.parametrize("start", [15, 9])
def test_positions_that_start_again_are_no_offset_of_all(single, start):
    def again(out):
        cos, sin = (one.clone() for one in out)
        cos[:, start:], sin[:, start:] = cos[:, : len(TEXT) - start], sin[:, : len(TEXT) - start]
        return cos, sin

    clean = single.traced(script=PREFILL)
    with hooked((single.draft.model.rotary_emb, again)):
        found = compare(clean, single.traced(script=PREFILL))
    assert found.verdict == "DIVERGENT" and (found.first.module, found.first.first_token) == ("rotary_emb", start)


def test_heat_and_document(single):
    found = compare(single.reference, single.traced("kv_slot_swap", layer=1))
    heat = found.heat()
    assert heat.index.name == "module" and heat.columns.tolist() == list(range(len(TEXT)))
    order = heat.index.tolist()
    assert order[0] == "" and order.index(EXPERTS) < order.index("layers.1.self_attn") < order.index("lm_head")
    hot = heat.loc["layers.1.self_attn"] > 2
    assert hot[hot].index.min() == 5 and (heat.loc[EXPERTS] == -1).all() and heat.max(axis=None) <= 8
    document = json.loads(json.dumps(found.document(), allow_nan=False))
    assert document["schema"] == 1 and document["first"]["module"] == "layers.1.self_attn"
    assert document["coverage"]["tensors"] == found.coverage.tensors and document["line"] == found.line
    own = found.nodes[found.nodes["own"]]
    assert {*own["module"]} == {"layers.1.self_attn"} and len(found.nodes) > len(own)
    assert (own["in_error"] == 0).all() and (own["out_error"] > 0.1).all()


def test_what_was_not_compared_is_counted(single):
    part = single.traced()
    gone = part.tensors["module"] == "layers.2.mlp.experts"
    part = Trace(part.facts, part.tensors[~gone], part.params, part.arrays)
    found = compare(single.reference, part)
    assert "layers.2.mlp.experts:out:out" in found.coverage.only_reference and not found.coverage.only_candidate
    assert found.coverage.compared == found.coverage.modules - 1
    assert any("attention_mask" in name for name in found.coverage.left_out)
    head = copy.deepcopy(single.draft)
    head.lm_head = torch.nn.Linear(64, 200, bias=False)
    found = compare(single.reference, single.traced(model=head))
    assert "lm_head:out:out" in found.coverage.reshaped
    assert found.verdict == "INCONCLUSIVE" and "out of the model itself" in found.line
    whole = single.traced()
    inner = Trace(whole.facts, whole.tensors[whole.tensors["module"] != ""], whole.params, whole.arrays)
    assert compare(single.reference, inner).verdict == "INCONCLUSIVE"
    assert compare(inner, single.reference).verdict == "SOUND"


def empty():
    return table([], TENSOR_COLUMNS), table([], PARAM_COLUMNS), {}


def changed(trace, **columns):
    return dataclasses.replace(trace, tensors=trace.tensors.assign(**columns))


def test_tokens_that_fill_up_a_step_are_not_in_the_text(single):
    steps = copy.deepcopy(single.reference.facts["steps"])
    text = AlignedTrace(single.reference).positions.tolist()
    steps[-1]["padding"] = 1
    padded = AlignedTrace(dataclasses.replace(single.reference, facts={"steps": steps}))
    assert padded.positions.tolist() == text[:-1]


def test_a_parameter_that_the_reference_read_too_is_not_foreign(single):
    ours, theirs = (single.traced("positional_registry", beside=single.target) for _ in range(2))
    foreign = theirs.params["owner"] == "target"
    theirs = dataclasses.replace(
        theirs, params=theirs.params.assign(digest=theirs.params["digest"].where(~foreign, "x"))
    )
    assert set(compare(ours, theirs).reads["says"]) == {"changed"}
    assert set(compare(single.reference, theirs).reads["says"]) == {"foreign"}


def test_what_cannot_be_compared_is_refused(single):
    with pytest.raises(InputError, match="candidate trace shows no tensor"):
        compare(single.reference, Trace({"steps": []}, *empty()))
    with pytest.raises(InputError, match="does not work"):
        compare(single.reference, single.reference, rename={"(": ""})
    with pytest.raises(InputError, match="keep them apart"):
        compare(single.reference, single.reference, rename={r"layers\.\d": "layers"})


@pytest.mark.slow
def test_comparing_needs_no_torch(single, tmp_path):
    single.reference.save(tmp_path / "a")
    single.traced("kv_slot_swap").save(tmp_path / "b")
    code = f"""
import sys
from pathlib import Path
from specnb.divergence.compare import compare
from specnb.divergence.trace import Trace
found = compare(*(Trace.load(Path({str(tmp_path)!r}) / name) for name in "ab"))
print(found.verdict, found.first.module, [name for name in ("torch", "transformers") if name in sys.modules])
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.strip() == f"DIVERGENT {ATTENTION} []"


def test_the_tolerances():
    assert tolerances.rounding(["float32", "None", "bfloat16", "int64"]) == 2**-8 and tolerances.rounding([]) == 1e-6
    logits = np.array([[5.0, 1.0, 0.99, -3.0]])
    assert tolerances.margins(logits, np.array([[0, 1]]), np.array([[0, 2]])) == pytest.approx(0.01)
    assert tolerances.margins(logits, np.array([[0, 1]]), np.array([[0, 9]])) == np.inf
    error, none = np.array([[4e-6, 1e-2, 1e-2, np.nan]]), np.zeros((1, 4), bool)
    given = np.array([[0.0, 0.0, 5e-3, 0.0]])
    assert tolerances.wrong_by_itself(error, 1e-6, given, none).tolist() == [[True, True, False, False]]
    assert not tolerances.wrong_by_itself(error, 1e-6, given, ~none).any()
    few, many = np.array([[0.0, 1, 0, 0]]), np.array([[1.0, 1, 1, 1]])
    assert tolerances.no_worse(few, few, discrete=True, least=0).all()
    assert not tolerances.no_worse(many, few, discrete=True, least=0).any()
    # one other choice of the reference makes no error rounding, before it or behind
    off, behind = np.array([[1e-3, 1e-3, 1.0, 1.0]]), np.array([[False, False, True, True]])
    excused = tolerances.no_worse(np.array([[2e-3, 0.5, 0.05, 0.5]]), off, discrete=False, least=1e-6, behind=behind)
    assert excused.tolist() == [[True, False, True, False]]
    assert not tolerances.no_worse(many, behind.astype(float), discrete=True, least=0, behind=behind).any()
    assert tolerances.chance_flips(100, 8, 1e-7) < 2 < tolerances.chance_flips(100, 8, 1e-2)
