"""Preflight: a planted fault fails its own check, with evidence; a sound pair passes all checks."""

import pytest

from specnb.compat import preflight as checks
from specnb.compat.preflight import preflight
from specnb.divergence.faults.planting import replaced
from specnb.draft.lookup import LookupDrafter
from specnb.draft.model import ModelDrafter
from specnb.errors import RewindError
from specnb.lm.hf.model import HfModel
from specnb.lm.toy import cyclic, markov
from tests.laws.test_greedy import Appending
from tests.tiny_models import torch_folder

TOKENS = (3, 10, 17, 24)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    opened = HfModel.open(torch_folder(tmp_path_factory.mktemp("tiny") / "draft"))
    yield opened
    opened.close()


def test_a_sound_pair_passes_all_checks_and_its_states_are_emptied(model):
    findings = preflight(model, model)
    assert [finding.verdict for finding in findings] == ["ok"] * 4
    assert model.n_past == 0 and all(finding.evidence for finding in findings)
    assert [finding.verdict for finding in preflight(model)] == ["ok", "ok", "ok", "skipped"]


def test_a_check_that_raises_fails_and_the_others_still_run(model):
    class Broken(LookupDrafter):
        def propose(self, tokens, k, picker):
            raise OSError("damaged index")

    findings = preflight(Broken(), model)
    assert findings[0].check == "purity" and "damaged index" in findings[0].evidence
    assert [finding.verdict for finding in findings] == ["fail", "ok", "skipped", "skipped"]


# drafters


class Untrimmed(ModelDrafter):
    """Leaves one rejected token in the state, and feeds only the newest token in the next round."""

    def commit(self, tokens):
        wrong = max(0, self.model.n_past - (len(tokens) - 1) - 1)
        self.model.rewind(min(wrong, self.model.n_past))
        self._fed = []

    def propose(self, tokens, k, picker):
        behind = (
            (*range(self.model.n_past), *tokens[-1:])
            if self.model.n_past >= len(tokens)
            else tokens
        )
        return super().propose(behind, k, picker)


def test_real_drafters_are_pure_and_see_their_own_drafts(model):
    for drafter in (ModelDrafter(cyclic(20)), ModelDrafter(model)):
        network = drafter.model
        assert checks.purity(drafter, TOKENS[:2], 4)[0] == "ok"
        verdict, evidence = checks.recurrence(drafter, TOKENS[:2], 4)
        assert verdict == "ok" and "in 4 rounds" in evidence and drafter.model is network
    assert checks.purity(LookupDrafter(), (1, 2, 1, 2, 1), 4)[0] == "ok"
    assert checks.recurrence(LookupDrafter(), TOKENS, 4)[0] == "skipped"


@pytest.mark.parametrize(
    ("check", "drafter", "value"),
    [
        (
            checks.recurrence,
            lambda: Untrimmed(markov(64, order=2)),
            "after a round with 0 accepted drafts, draft 1",
        ),
        (checks.purity, Appending, "4 tokens are 5"),
    ],
)
def test_a_faulty_drafter_fails_with_the_place_in_the_evidence(check, drafter, value):
    verdict, evidence, _ = check(drafter(), TOKENS, 3)
    assert verdict == "fail" and value in evidence


@pytest.mark.parametrize(
    ("by", "verdict"), [(-1, "fail"), (1, "fail"), (0, "ok"), (None, "skipped")]
)
def test_a_wrongly_trimmed_cache_is_detected_by_its_logits(by, verdict):
    model = markov(64, order=4)
    right = model.rewind

    def rewind(n):
        if by is None:
            raise RewindError("its state cannot be cropped")
        right(n and n + by)

    with replaced(model, "rewind", rewind):
        assert checks.cache_after_rejection(model)[0] == verdict
