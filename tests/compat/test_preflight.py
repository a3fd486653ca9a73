"""Preflight: a planted fault fails its own check, with evidence; a sound pair passes all checks."""

import pytest

from specnb.compat import preflight as checks
from specnb.compat.preflight import preflight
from specnb.divergence.faults.planting import replaced
from specnb.draft.lookup import LookupDrafter
from specnb.draft.model import ModelDrafter
from specnb.errors import RewindError
from specnb.lm.hf.model import HfModel
from specnb.lm.toy import markov
from tests.laws.test_greedy import Appending
from tests.tiny_models import torch_folder

TOKENS = (3, 10, 17, 24)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    opened = HfModel.open(torch_folder(tmp_path_factory.mktemp("tiny") / "draft"))
    yield opened
    opened.close()


def test_a_sound_pair_passes_all_checks_and_its_states_are_emptied(model):
    drafter = ModelDrafter(model)
    findings = preflight(drafter, model)
    assert [finding.verdict for finding in findings] == ["ok"] * 4
    assert model.n_past == 0 and drafter.model is model and "in 4 rounds" in str(findings)
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
        self.model.rewind(max(0, self.model.n_past - len(tokens)))
        self._fed = []

    def propose(self, tokens, k, picker):
        if self.model.n_past >= len(tokens):
            tokens = (*range(self.model.n_past), tokens[-1])
        return super().propose(tokens, k, picker)


def test_a_faulty_drafter_fails_with_the_place_in_the_evidence():
    verdict, evidence, _ = checks.recurrence(Untrimmed(markov(64, order=2)), TOKENS, 3)
    assert verdict == "fail" and "after a round with 0 accepted drafts, draft 1" in evidence
    verdict, evidence, _ = checks.purity(Appending(), TOKENS, 3)
    assert verdict == "fail" and "4 tokens are 5" in evidence


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
