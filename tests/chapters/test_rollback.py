"""Notebook 04 on a tiny random hybrid: drafts, strategies, failures, twin, trees, figures."""

import json
from contextlib import closing

import numpy as np
import pytest

from data.models.convert import write_gguf
from specnb.chapters import delta_rule, rollback
from specnb.chapters.rollback import CONTROL, PLAIN, STRATEGIES, OracleDrafter, attention_twin
from specnb.decode.generate import generate
from specnb.errors import InputError
from specnb.lm import toy
from specnb.lm.load import load
from specnb.params import RollbackParams
from specnb.store import save
from tests.tiny_hybrids import hybrid_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        base = tmp_path_factory.mktemp("strategies")
        patch.setenv("SPECNB_CACHE", str(base / "cache"))
        patch.setenv("SPECNB_RESULTS", str(base / "results"))
        hybrid = hybrid_folder(base / "hybrid", "qwen35-grouped")
        write_gguf(hybrid, base / "hybrid.f16.gguf")
        yield hybrid


@pytest.fixture(scope="module")
def record(folder):
    steps = []
    small = {
        "ks": [2],
        "acceptance": [0.0, 1.0],
        "passages": 1,
        "prompt_tokens": 9,
        "max_new_tokens": 6,
    }
    params = RollbackParams(target=str(folder), draft=str(folder), **small)
    record = rollback.run_strategies(
        params, progress=lambda done, total, _next: steps.append((done, total))
    )
    assert save(record).is_dir()  # all numbers are valid JSON
    assert steps == [(done, 3) for done in range(3)]
    return record


def test_oracle_drafts_have_the_given_acceptance_and_depend_on_the_seed_only():
    target = toy.markov(20, seed=3)
    truth = generate(target, [1], max_new_tokens=400).token_ids

    def run(rate):
        oracle = OracleDrafter(truth, rate, vocab_size=20, seed=7)
        return generate(target, [1], drafter=oracle, k=4, max_new_tokens=300)

    never, half, again, always = map(run, (0.0, 0.5, 0.5, 1.0))
    assert [r.draft_ids for r in half.rounds] == [r.draft_ids for r in again.rounds]
    assert half.acceptance_rate == pytest.approx((0.5 + 0.25 + 0.125 + 0.0625) / 4, abs=0.05)
    assert (never.accepted_tokens, always.acceptance_rate, len(always.rounds)) == (0, 1, 60)


def test_every_strategy_of_both_engines_is_measured_and_exact(record):
    table = rollback.strategies(record).set_index("method", drop=False)
    by_engine = table.groupby("engine")["method"].unique().map(set).to_dict()
    everything = {*STRATEGIES, PLAIN, CONTROL}
    assert by_engine == {"torch": everything, "llama.cpp": everything - {"replay"}}
    assert (table["identical"] == table["n_prompts"]).all() and (table["tokens_per_s"] > 0).all()
    fastest = table[table["method"] != CONTROL].groupby("acceptance")["over_fastest"].max()
    assert (fastest >= 1).all() and table.loc[CONTROL, "over_fastest"].isna().all()
    none_right = table[(table["acceptance"] == 0) & (table["method"] != PLAIN)]
    assert (none_right["tau"] == 1).all()
    all_right = table[(table["acceptance"] == 1) & table["method"].isin(STRATEGIES)]
    # 6 tokens in rounds of K + 1
    assert (all_right["tau"] == 3).all() and (all_right["n_restored"] == 0).all()
    assert (table.drop(["recompute", PLAIN, CONTROL])["recomputed"] == 0).all()
    kept = none_right.groupby(level=0)["kept_mib"].max()
    assert kept["recompute"] == 0 < kept["checkpoint"] < kept["snapshots"]
    drafters = rollback.drafters(record)
    assert (drafters["identical"] == drafters["n_prompts"]).all()
    assert drafters.drop("prompt lookup")["acceptance_rate"].min() > 0.9  # the same weights
    assert rollback.draw_strategies(rollback.strategies(record)).data


def test_both_failures_are_reproduced_and_the_attention_twin_decodes(folder):
    message = rollback.llama_refusal(f"{folder}?backend=llama&weights=f32")
    assert "could not decode" in message and "sequence 0 in the input batch have a" in message
    frame = rollback.transformers_crop(str(folder))
    wrong, right = frame["max_logit_error"]
    assert wrong > 0.05 * frame["spread_of_logits"][0] and right < 1e-4
    twin = attention_twin(f"{folder}?backend=llama")
    assert "could not decode" not in rollback.llama_refusal(f"{twin}?backend=llama&weights=f32")
    attention, hybrid = (json.loads((path / "config.json").read_text()) for path in (twin, folder))
    for field in ("hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size"):
        assert attention[field] == hybrid[field]
    with closing(load(str(twin))) as torch, closing(load(f"{twin}?backend=llama")) as llama:
        expected = torch.forward([5, 6, 7])
        np.testing.assert_allclose(llama.forward([5, 6, 7]), expected, atol=0.01 * np.ptp(expected))
        assert llama.encode("a layer") == torch.encode("a layer")
    with pytest.raises(InputError, match="nowhere"):
        attention_twin("nowhere")


def test_trees_give_the_outputs_of_their_paths(monkeypatch):
    monkeypatch.setattr(delta_rule, "NODES", (1, 5))
    frame = delta_rule.tree_cost()
    assert list(frame["tree"]) == ["chain", "4-ary", "star"] * 2
    assert list(frame["depth"]) == [1, 1, 1, 5, 2, 1] and list(frame["paths"]) == [1, 1, 1, 1, 4, 5]
    assert (frame["max_error"] < 1e-5).all() and rollback.draw_tree_times(frame).data
