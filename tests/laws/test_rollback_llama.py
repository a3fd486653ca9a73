"""The law of going back in llama.cpp: after a rewind, logits are those of a context that never had the tokens.

On tiny random hybrids as GGUF files: Qwen3.5 and LFM2 keep snapshots, Mamba-2 and Mamba keep none.
"""

from functools import partial

import numpy as np
import pytest

from specnb.draft.model import ModelDrafter
from specnb.errors import InputError, LoadError, MemoryShortError
from specnb.lm.busy import ThreadPace
from specnb.lm.gguf.convert import write_gguf
from specnb.lm.gguf.model import GgufModel, PlaneRecorder, _set_threads, state_bytes
from specnb.lm.hf.files import quiet
from specnb.lm.preflight import need_bytes
from tests.laws.test_rollback import (
    IDS,
    K,
    check_decoding,
    check_interrupt,
    check_rounds,
    check_single_steps,
    decoded,
)
from tests.tiny_hybrids import hybrid_folder

CHOSEN = {"qwen35-grouped": "snapshots", "lfm2": "snapshots", "mamba2": "fused"}
"""What the architecture keeps decides."""
STRATEGIES = ("snapshots", "fused", "checkpoint", "recompute")
PAIRS = [(f, way) for f in CHOSEN for way in STRATEGIES if way != "snapshots" or CHOSEN[f] == way]
CLOSE = 2e-3
"""Of logits with a spread of several: llama.cpp's kernels for one token round otherwise than those for several."""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    base = tmp_path_factory.mktemp("hybrids")
    with quiet():
        return {
            name: write_gguf(hybrid_folder(base / name, name), base / f"{name}.gguf", dtype="f32") for name in CHOSEN
        }


@pytest.fixture(scope="module")
def opened(files):
    made: dict[tuple, GgufModel] = {}

    def get(family: str, way: str = "auto", **options) -> GgufModel:
        key = (family, way, *sorted(options.items()))
        if key not in made:
            made[key] = GgufModel.open(files[family], threads=1, kv="f32", rollback=way, **options)
        made[key].reset()
        return made[key]

    yield get
    for model in made.values():
        model.close()


def check_same_ahead(model: GgufModel, plain: GgufModel) -> None:
    assert model.n_past == plain.n_past
    for ids in ([4, 8], [15]):
        np.testing.assert_allclose(model.forward(ids), plain.forward(ids), atol=CLOSE)


@pytest.mark.parametrize(("family", "way"), PAIRS)
def test_logits_after_any_number_of_accepted_tokens_are_those_of_the_plain_run(family, way, opened):
    model, plain = opened(family, way), opened(family, "recompute", n_ctx=500)
    assert model.caps.rewind == way and opened(family).caps.rewind == CHOSEN[family]
    check_rounds(model, plain, check_same_ahead)


@pytest.mark.parametrize(("family", "way"), PAIRS)
def test_a_drafting_model_goes_back_over_its_single_steps(family, way, opened):
    check_single_steps(opened(family, way), opened(family, "recompute", n_ctx=500), check_same_ahead)


@pytest.mark.parametrize(("family", "way"), PAIRS)
def test_greedy_decoding_is_that_of_the_plain_run(family, way, opened):
    model = opened(family, way)
    check_decoding(model, tokens=150)
    cost = model.rollback.cost
    assert (cost.recomputed == 0) == (way != "recompute")
    if way == "fused":
        assert cost.fused > 0 and cost.n_restored > 0
    if way == "snapshots":
        assert cost.taken_back > 0 and cost.refed <= K  # only the first round reaches behind a decode


@pytest.mark.slow
@pytest.mark.parametrize(("family", "way"), [pair for pair in PAIRS if pair[1] != "recompute"])
def test_greedy_decoding_over_a_thousand_rounds(family, way, opened):
    assert len(check_decoding(opened(family, way, n_ctx=4096), tokens=2600).rounds) >= 1000


@pytest.mark.parametrize("way", ["snapshots", "fused", "checkpoint"])
def test_a_hybrid_draft_model_drafts_for_a_hybrid_target(way, opened):
    target, twin = opened("qwen35-grouped"), opened("qwen35-grouped", way, n_ctx=400)
    truth = decoded(target, tokens=60).token_ids
    made = decoded(target, ModelDrafter(twin), tokens=60, k=4)
    assert made.token_ids == truth and made.acceptance_rate > 0.9
    assert twin.rollback.cost.recomputed == 0


def test_drafts_beyond_the_snapshots_go_back_by_the_saved_state(opened):
    model, plain = opened("qwen35-grouped", "snapshots", rollback_depth=3), opened("qwen35-grouped", "recompute")
    for each in (model, plain):
        each.forward(IDS[:9])
    model.forward(IDS[20:21])
    model.rewind(0)
    model.forward(IDS[21:30])
    model.rewind(8)
    plain.forward(IDS[20:22])
    check_same_ahead(model, plain)
    assert model.rollback.cost.recomputed == 0 and model.rollback.cost.n_restored == 1


def test_a_reach_that_believes_llama_is_seen_and_such_a_model_not_opened(opened, files, monkeypatch):
    """seq_rm says True to the whole of the last decode, and the logits are wrong: the planted fault."""
    model, plain = opened("qwen35-grouped", "snapshots"), opened("qwen35-grouped", "recompute")
    monkeypatch.setattr(PlaneRecorder, "reach", property(lambda recorder: recorder.depth))
    for each in (model, plain):
        each.forward(IDS[:9])
    model.forward(IDS[20:24])
    model.rewind(4)
    assert np.abs(model.forward([4, 8]) - plain.forward([4, 8])).max() > 0.5
    with pytest.raises(LoadError, match="no exact way back: snapshots does not bring back"):
        GgufModel.open(files["qwen35-grouped"], threads=1, rollback="snapshots")
    other = GgufModel.open(files["qwen35-grouped"], threads=1)
    assert other.caps.rewind == "fused"
    other.close()


def test_saved_states_do_not_outlive_a_reset(opened):
    """A blob loaded into a cleared context brings a state without its attention entries, and says nothing."""
    model, plain = opened("qwen35-grouped", "checkpoint"), opened("qwen35-grouped", "recompute")
    model.forward(IDS[:9])
    model.forward(IDS[9:12])
    model.reset()
    for each in (model, plain):
        each.forward(IDS[30:33])
        each.rewind(1)
    check_same_ahead(model, plain)


def test_memory_for_the_snapshots_is_checked_and_done_without_where_it_is_short(files, monkeypatch):
    file = files["qwen35-grouped"]
    model = GgufModel.open(file, threads=1, rollback="snapshots")
    model.forward(IDS[:9])  # an empty state saves as nothing
    one = model._engine.state_bytes
    none, eight, sixteen = (state_bytes(model._model, 512, "f32", n) for n in (0, 8, 16))
    assert 16 * 0.8 * one < sixteen - none < 16 * 2 * one  # an upper bound: every layer is counted as recurrent
    model.close()
    room = need_bytes(file.stat().st_size, eight)
    monkeypatch.setattr("specnb.lm.preflight.free_bytes", lambda _device: room)
    model = GgufModel.open(file, threads=1, kv="f32")
    assert model.caps.rewind == "fused"
    model.close()
    with pytest.raises(MemoryShortError, match="does not fit on cpu"):
        GgufModel.open(file, threads=1, kv="f32", rollback="snapshots")


def test_more_snapshots_than_llama_survives_are_refused(files):
    with pytest.raises(InputError, match=r"rollback_depth is 24, but llama\.cpp fails on more than 16 for LFM2"):
        GgufModel.open(files["lfm2"], threads=1, rollback_depth=24)
    for n_ctx in (2, 4, 17):  # too few tokens a batch for so many planes
        model = GgufModel.open(files["lfm2"], threads=1, n_ctx=n_ctx)
        assert np.isfinite(model.forward([3, 4])).all()
        model.close()


def test_a_closed_model_says_so_and_ends_no_process(files):
    model = GgufModel.open(files["qwen35-grouped"], threads=1)
    model.forward(IDS[:9])
    kept = model.rollback
    model.close()
    model.close()
    for use in (lambda: kept.nbytes, lambda: kept.forward([3], 1), kept.reset, lambda: model.n_past):
        with pytest.raises(InputError, match="was closed: load it again"):
            use()


@pytest.mark.parametrize("way", ["fused", "checkpoint", "recompute"])
def test_an_interrupt_while_going_back_leaves_no_wrong_state(way, opened):
    model, plain = opened("qwen35-grouped", way), opened("qwen35-grouped", "recompute", n_ctx=500)
    check_interrupt(model, plain, check_same_ahead, model._engine, "restore" if way == "fused" else "feed")


@pytest.mark.parametrize("family", CHOSEN)
def test_the_number_of_threads_changes_no_bit_and_may_change_between_forwards(files, family):
    """Threads follow the load of the machine, so no result may depend on them; flash attention's does."""
    alone, paced = (GgufModel.open(files[family], threads=1, kv="f32") for _ in range(2))
    fixed = GgufModel.open(files[family], flash_attention=True)
    try:
        pace = paced._engine.pace = ThreadPace(3, partial(_set_threads, paced._context, {}))
        assert fixed._engine.pace is None is alone._engine.pace
        for at, n in enumerate((9, 1, 4, 1, 2)):
            pace._apply(1 + at % 3)
            assert np.array_equal(alone.forward(IDS[:n]), paced.forward(IDS[:n])), f"{n} tokens"
            for model in (alone, paced):
                model.rewind(n // 2)
    finally:
        for model in (alone, paced, fixed):
            model.close()
