"""The law of going back in llama.cpp, where it needs care: its snapshots, saved states, memory, closing and threads.

That every strategy brings back what was is held in `test_rollback`, for both engines.
"""

from contextlib import closing
from functools import partial

import numpy as np
import pytest

from specnb.draft.model import ModelDrafter
from specnb.errors import InputError, LoadError, MemoryShortError
from specnb.lm.busy import ThreadPace
from specnb.lm.gguf.model import GgufModel, PlaneRecorder, _set_threads, state_bytes
from specnb.lm.preflight import need_bytes
from tests.laws.test_rollback import IDS, check_same_ahead, decoded
from tests.tiny_hybrids import GGUFS, LlamaHybrids

QWEN = "qwen35-grouped.gguf"


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    with closing(LlamaHybrids(tmp_path_factory.mktemp("hybrids"))) as hybrids:
        yield hybrids


@pytest.mark.parametrize("way", ["snapshots", "fused", "checkpoint"])
def test_a_hybrid_draft_model_drafts_for_a_hybrid_target(way, llama):
    target, twin = llama(QWEN), llama(QWEN, way, n_ctx=400)
    truth = decoded(target, tokens=60).token_ids
    made = decoded(target, ModelDrafter(twin), tokens=60, k=4)
    assert made.token_ids == truth and made.acceptance_rate > 0.9
    assert twin.rollback.cost.recomputed == 0


def test_drafts_beyond_the_snapshots_go_back_by_the_saved_state(llama):
    model, plain = llama(QWEN, "snapshots", rollback_depth=3), llama(QWEN, "recompute")
    for each in (model, plain):
        each.forward(IDS[:9])
    model.forward(IDS[20:21])
    model.rewind(0)
    model.forward(IDS[21:30])
    model.rewind(8)
    plain.forward(IDS[20:22])
    check_same_ahead(model, plain)
    assert model.rollback.cost.recomputed == 0 and model.rollback.cost.n_restored == 1


def test_a_reach_that_believes_llama_is_seen_and_such_a_model_not_opened(llama, monkeypatch):
    """seq_rm says True to the whole of the last decode, and the logits are wrong: the planted fault."""
    model, plain = llama(QWEN, "snapshots"), llama(QWEN, "recompute")
    monkeypatch.setattr(PlaneRecorder, "reach", property(lambda recorder: recorder.depth))
    for each in (model, plain):
        each.forward(IDS[:9])
    model.forward(IDS[20:24])
    model.rewind(4)
    assert np.abs(model.forward([4, 8]) - plain.forward([4, 8])).max() > 0.5
    with pytest.raises(LoadError, match="no exact way back: snapshots does not bring back"):
        GgufModel.open(llama.files[QWEN], threads=1, rollback="snapshots")
    other = GgufModel.open(llama.files[QWEN], threads=1)
    assert other.caps.rewind == "fused"
    other.close()


def test_saved_states_do_not_outlive_a_reset(llama):
    """A blob loaded into a cleared context brings a state without its attention entries, and says nothing."""
    model, plain = llama(QWEN, "checkpoint"), llama(QWEN, "recompute")
    model.forward(IDS[:9])
    model.forward(IDS[9:12])
    model.reset()
    for each in (model, plain):
        each.forward(IDS[30:33])
        each.rewind(1)
    check_same_ahead(model, plain)


def test_memory_for_the_snapshots_is_checked_and_done_without_where_it_is_short(llama, monkeypatch):
    file = llama.files[QWEN]
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


def test_more_snapshots_than_llama_survives_are_refused(llama):
    with pytest.raises(InputError, match=r"rollback_depth is 24, but llama\.cpp fails on more than 16 for LFM2"):
        GgufModel.open(llama.files["lfm2.gguf"], threads=1, rollback_depth=24)
    for n_ctx in (2, 4, 17):  # too few tokens a batch for so many planes
        model = GgufModel.open(llama.files["lfm2.gguf"], threads=1, n_ctx=n_ctx)
        assert np.isfinite(model.forward([3, 4])).all()
        model.close()


def test_a_closed_model_says_so_and_ends_no_process(llama):
    model = GgufModel.open(llama.files[QWEN], threads=1)
    model.forward(IDS[:9])
    kept = model.rollback
    model.close()
    model.close()
    for use in (lambda: kept.nbytes, lambda: kept.forward([3], 1), kept.reset, lambda: model.n_past):
        with pytest.raises(InputError, match="was closed: load it again"):
            use()


@pytest.mark.parametrize("family", GGUFS)
def test_the_number_of_threads_changes_no_bit_and_may_change_between_forwards(llama, family):
    """Threads follow the load of the machine, so no result may depend on them; flash attention's does."""
    alone, paced = (GgufModel.open(llama.files[family], threads=1, kv="f32") for _ in range(2))
    fixed = GgufModel.open(llama.files[family], flash_attention=True)
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
