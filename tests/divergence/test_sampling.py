"""The sampling audit: calm where sampling is sound, loud and right for planted faults, and blind where it must be."""

import json
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest

from specnb.decode import accept
from specnb.decode.generate import generate
from specnb.divergence import sampling
from specnb.divergence.lossless import PLANTED, misreported_q, related, resampled_from_target, trial
from specnb.divergence.sampling import Position, Tally, audit, terms
from specnb.divergence.sampling.log import listened
from specnb.divergence.sampling.terms import STATISTICS
from specnb.draft import translate as draft_translate
from specnb.draft.lookup import LookupDrafter
from specnb.draft.model import ModelDrafter
from specnb.errors import InputError
from specnb.lm import load as lm_load
from specnb.lm import toy

V = 32
FAULTS = {
    "top-k": lambda drafter: misreported_q(drafter, top_k=8),
    "greedy": lambda drafter: misreported_q(drafter, greedy=True),
    "from p": lambda _drafter: resampled_from_target(),
    "none": lambda _drafter: nullcontext(),
}


def logged(seed, n_tokens=150, fault="none", share=0.5, **options):
    """Positions of one generation, and what was generated."""
    target, draft = related(seed, share)
    drafter, heard = ModelDrafter(draft), []
    settings = {"temperature": 1.0, "k": 4, "max_new_tokens": n_tokens, "seed": seed} | options
    with FAULTS[fault](drafter):
        made = listened(target, [seed % V], drafter=drafter, hear=heard.append, **settings)
    return heard, made


def blind(positions):
    """The same log without random numbers: no replay, as of an engine that does not log them."""
    return [one._replace(accept_u=None, resample_u=None) for one in positions]


def zs(found):
    return {one.name: one.z for one in found.panel}


def far(found):
    return {one.name for one in found.panel if one.far}


def pooled(fault, seeds=range(6), **options):
    return [one for seed in seeds for one in logged(seed, fault=fault, **options)[0]]


ROW_P, ROW_Q = np.array([0.5, 0.3, 0.2, 0.0]), np.array([0.25, 0.25, 0.25, 0.25])
SOUND = Position(ROW_P, ROW_Q, 0, True, 0)


# --- sound decoding -------------------------------------------------------------------------------------------------


def test_sound_sampling_is_sound_once_the_positions_are_enough_and_inconclusive_before():
    heard = pooled("none", range(10))
    found, early = audit(heard), audit(heard[:200])
    assert found.verdict == "sound" and found.exit_code == 0 and found.causes == () and found.flaws == {}
    assert found.replayed == found.n == len(heard) and "0.1 that these sums see would have been seen" in found.line
    assert early.verdict == "inconclusive" and early.exit_code == 125
    assert audit(heard[: 200 + early.more]).more < 0.1 * early.more, "what it asks for is about what it takes"
    assert audit(heard[:200], effect=0.5).verdict == "sound"
    assert audit(heard, effect=0.01).more > 20 * len(heard)


@pytest.mark.parametrize("drafter", [LookupDrafter, lambda: ModelDrafter(related(3)[0])], ids=["lookup", "itself"])
def test_deterministic_drafters_and_perfect_ones_are_not_accused(drafter):
    """Of a draft that is the target itself nothing is ever rejected, and what little varies is rounding."""
    tally = Tally()
    for seed in range(8):
        made = listened(
            related(3)[0], [1, 2, 1, 2, seed], drafter=drafter(), hear=tally.add, temperature=0.7, k=3,
            max_new_tokens=150, seed=seed,
        )  # fmt: skip
        assert made.total_draft_tokens
    found = tally.audit()
    assert found.causes == () and found.flaws == {} and found.replayed == found.n > 100


def test_greedy_decoding_is_checked_exactly_and_is_enough_at_once():
    heard, _ = logged(0, 30, temperature=0.0)
    found = audit(heard)
    assert found.exact == found.n and found.replayed == 0
    assert found.verdict == "sound" and all(one.z is None for one in found.panel) and "all is exact" in found.line
    kept = next(i for i, one in enumerate(heard) if one.accepted)
    heard[kept] = heard[kept]._replace(accepted=False, committed_id=(heard[kept].committed_id + 1) % V)
    found = audit(heard)
    assert found.verdict == "wrong" and found.flaws["accept"][1].position == kept and "committed" in found.flaws


def test_a_replay_counts_as_exact_only_where_it_says_which_token_is_committed():
    kept, rejected = SOUND._replace(accept_u=0.5), SOUND._replace(draft_id=2, accepted=False, accept_u=0.9)
    log = [kept, rejected, rejected._replace(resample_u=0.1), Position(ROW_P, None, None, False, 0, resample_u=0.1)]
    assert [audit([one]).exact for one in log] == [1, 0, 1, 1] and not audit(log).flaws


# --- planted faults: seen, named, and undone ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "cause", "must", "must_not"),
    [
        ("top-k", "q misreported", "z_draft", set()),
        ("greedy", "draft not drawn from q", "z_draft", set()),
        ("from p", "resampled from p instead of the residual", "z_dir", {"z_acc", "z_draft"}),
    ],
)
def test_a_planted_fault_is_seen_by_its_statistic_and_named_and_gone_afterwards(fault, cause, must, must_not):
    rules = (accept.token_verification, accept.point_mass)
    positions = blind(pooled(fault, range(4)))
    found = audit(positions)
    assert found.verdict == "wrong" and found.exit_code == 1 and cause in found.line and found.causes == (cause,)
    assert must in far(found) and not must_not & far(found)
    assert (accept.token_verification, accept.point_mass) == rules
    assert logged(5)[1].token_ids == logged(5)[1].token_ids != logged(5, fault=fault)[1].token_ids


def test_a_resample_from_p_is_named_by_its_statistic_alone(monkeypatch):
    monkeypatch.setattr(terms, "_flaws", lambda *_: iter(()))
    found = audit(pooled("from p", range(4)))
    assert found.causes == ("resampled from p instead of the residual",) and zs(found)["z_dir"] < -5
    assert "after a rejection p is drawn from" in found.panel[3].meaning
    positions = [
        one._replace(committed_id=one.draft_id) for one in pooled("none", range(4)) if one.draft_id is not None
    ]
    assert "resampled from p instead of the residual" in audit(positions).causes, "so it leans where all drafts stay"
    positions = [one._replace(committed_id=int(np.argmax(one.p_target / one.q_draft))) for one in positions]
    assert audit(positions).causes == ("something else",)


def test_a_resample_from_p_that_stays_within_the_residual_is_found_by_its_random_number():
    p, q = np.array([0.1, 0.5, 0.4]), np.array([0.8, 0.1, 0.1])  # the residual's edges are at 0, 0.571, 1
    log = Position(p, q, 0, False, 2, accept_u=0.9, resample_u=0.7)
    assert not audit([log]).flaws, "both rows give token 2"
    found = audit([log._replace(committed_id=1, resample_u=0.58)])
    assert (
        found.causes == ("resampled from p instead of the residual",) and "u = 0.58" in found.flaws["residual"][1].says
    )
    assert audit([log._replace(committed_id=1, resample_u=0.9)]).causes == ("something else",)


def test_a_lossy_output_with_honest_rows_is_something_else():
    """The committed tokens are sharper than p, nothing before them is odd, and no random number is known."""
    rng, positions = np.random.default_rng(0), []
    for _ in range(2000):
        p = rng.dirichlet(np.ones(8))
        sharp = p**2 / (p**2).sum()
        y = int(rng.choice(8, p=sharp))
        positions.append(Position(p, p, y, True, y))
    found = audit(positions)
    assert found.causes == ("q misreported",), "as the same token is the draft, its row is what is seen first"
    uniform = np.full(8, 1 / 8)
    positions = [one._replace(q_draft=uniform, draft_id=int(rng.integers(8)), accepted=False) for one in positions]
    assert "something else" in audit(positions).causes


def test_acceptances_alone_accuse_q_where_each_decision_was_replayed_and_else_nobody():
    """Drafts of another law that are as surprising under q as those of its own: z_draft cannot see them."""
    p, q = np.array([0.6, 0.1, 0.2, 0.1]), np.array([0.3, 0.3, 0.2, 0.2])
    x = np.random.default_rng(0).choice(4, 300, p=[0.6, 0, 0.4, 0])
    positions = [Position(p, q, token, True, token, accept_u=0.5) for token in x]
    found = audit(positions)
    assert "z_acc" in far(found) and "z_draft" not in far(found) and found.causes == ("q misreported",)
    assert audit(blind(positions)).causes == ("something else",)


# --- exact checks ---------------------------------------------------------------------------------------------------


def test_one_flipped_acceptance_in_a_log_is_found():
    heard, _ = logged(1)
    assert not audit(heard).flaws
    for at in (next(i for i, one in enumerate(heard) if one.accepted is kept) for kept in (True, False)):
        flipped = [*heard]
        flipped[at] = heard[at]._replace(accepted=not heard[at].accepted)
        found = audit(flipped)
        assert found.verdict == "wrong" and "something else" in found.causes
        assert found.flaws["accept"][0] == 1 and found.flaws["accept"][1].position == at


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"accepted": False, "committed_id": 1}, "accept"),  # p > q is always kept
        ({"draft_id": 3, "committed_id": 3}, "accept"),  # p = 0 never
        ({"draft_id": 3, "committed_id": 3}, "committed"),
        ({"committed_id": 1}, "committed"),
        ({"draft_id": None, "q_draft": None, "accepted": False, "committed_id": 3}, "committed"),
        ({"draft_id": 2, "accepted": False, "committed_id": 2}, "residual"),
        ({"q_draft": np.array([0, 0.5, 0.5, 0])}, "draft"),
        ({"q_draft": ROW_P, "accepted": False, "committed_id": 1}, "accept"),
        ({"accept_u": 0.99, "accepted": False, "committed_id": 1}, "accept"),
        ({"q_draft": None, "accepted": False, "committed_id": 0}, "residual"),
    ],
)
def test_what_cannot_be_needs_one_position(change, kind):
    assert not audit([SOUND]).flaws
    assert kind in audit([SOUND._replace(**change)]).flaws


# --- logging --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"temperature": 0.0}, {"top_k": 5, "top_p": 0.8}, {"k": 1}], ids=str)
def test_listening_changes_no_token_no_random_number_and_no_round(options):
    for seed in range(4):
        settings = {"temperature": 1.0, "k": 4, "max_new_tokens": 60, "seed": seed} | options
        target, draft = related(seed)
        plain = generate(target, [seed], drafter=ModelDrafter(draft), **settings)
        heard, made = logged(seed, 60, **options)
        timeless = lambda generation: [r[:6] for r in generation.rounds]  # noqa: E731
        assert made.token_ids == plain.token_ids and timeless(made) == timeless(plain)
        assert (made.rule, made.lossless) == (plain.rule, plain.lossless)
        # a generation may end within a round that was decided as a whole
        drafted = [one for one in heard if one.draft_id is not None]
        assert sum(r.n_tested for r in made.rounds) <= len(drafted) <= sum(r.k for r in made.rounds)


def test_positions_behind_a_rejection_and_second_visits_do_not_count():
    heard, _ = logged(2)
    once = audit(heard)
    twice = audit([*heard, *(one._replace(accepted=None) for one in heard), *heard])
    assert zs(twice) == zs(once) and (twice.n, twice.repeated) == (once.n, once.n)
    nameless = audit([one._replace(prefix=None) for one in heard + heard])
    assert nameless.n == 2 * once.n and nameless.repeated == 0


@pytest.mark.parametrize("rule", ["block", "typical"])
def test_rules_that_do_not_test_draft_by_draft_are_refused(rule):
    with pytest.raises(InputError, match=rule):
        logged(0, rule=rule)


# --- input from elsewhere -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "value"),
    [
        ({"p_target": ROW_P * 2}, "p_target .* 2 "),
        ({"q_draft": np.zeros(4)}, "q_draft .* 0 "),
        ({"p_target": np.array([np.nan, 1, 0, 0])}, "p_target .*nan"),
        ({"q_draft": np.array([1.5, 0, -0.5, 0])}, "q_draft .*-0.5"),
        ({"q_draft": np.array([0.5, 0.5])}, "p_target .* 4 .*q_draft 2"),
        ({"p_target": np.eye(2)}, r"p_target .*\(2, 2\)"),
        ({"p_target": ["a", "b"]}, "p_target"),
        ({"draft_id": 4}, "draft_id .*4"),
        ({"committed_id": 0.5}, "committed_id .*0.5"),
        ({"accept_u": 1.0}, "accept_u .*1.0"),
    ],
)
def test_a_log_that_is_none_is_one_error_that_names_the_position(change, value):
    with pytest.raises(InputError, match=f"^position 1: {value}"):
        audit([SOUND, SOUND._replace(**change)])


def test_an_empty_log_is_inconclusive_and_a_level_must_be_a_share():
    for log in ([], [SOUND._replace(accepted=None)]):
        found = audit(log)
        assert found.verdict == "inconclusive" and found.n == 0 and found.more > 0
    for wrong in ({"effect": 0.0}, {"effect": 10}, {"alpha": float("nan")}):
        with pytest.raises(InputError, match="must be between 0 and 1"):
            audit([SOUND], **wrong)


def test_one_rejection_of_drafts_that_are_all_but_certain_accuses_nobody():
    """The 1000 drafts promise 0.001 rejections; in standard deviations of that sum the one there was would be 32."""
    p, q = np.array([1 - 1e-6, 1e-6]), np.array([1.0, 0.0])
    heard = [Position(p, q, 0, True, 0)] * 999 + [Position(p, q, 0, False, 1)]
    assert audit(heard).verdict == "sound" and abs(zs(audit(heard))["z_acc"]) < 1
    assert audit([*heard[:900], *[heard[-1]] * 100]).verdict == "wrong"


def test_the_more_statistics_vary_the_further_one_must_be():
    """Holm: the farthest of five must be beyond a fifth of the level, once it is the next beyond a quarter."""
    panel = lambda *z: sampling._panel(np.array([[one * 100, 1e4, 80.0, 1e4, 0.0] for one in z]), 10_000, 0.1, 0.05)  # noqa: E731
    # two-sided levels 0.01, 0.0125, 0.0167, 0.025, 0.05 are at 2.576, 2.498, 2.394, 2.241, 1.960
    assert [one.far for one in panel(2.55, 0.0, 0.0, 0.0, 0.0)] == [False] * 5
    assert [one.far for one in panel(2.6, 2.51, 0.0, 2.2, 0.0)] == [True, True, False, False, False]
    assert [one.far for one in panel(2.6, -2.51, 2.4, -2.25, 2.0)] == [True] * 5


# --- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def command(specnb, monkeypatch):
    """`specnb divergence audit` with toys that know all the letters of the shipped prompts."""
    target, draft = related(0)

    def load(name, **_options):
        if name == "missing":
            raise InputError("no model missing")
        kind = target if name == "target" else draft
        model = toy.ToyLM(kind._logits_of, kind.vocab, name=name)
        model.encode = lambda text, special=True: [ord(letter) % V for letter in text[:8]]
        return model

    monkeypatch.setattr(lm_load, "load", load)
    monkeypatch.setattr(draft_translate, "load", load)
    return partial(specnb, "divergence", "audit", "--target", "target")


def test_the_command_says_sound_with_the_panel_and_exit_code_zero(command):
    code, out, _ = command("--draft", "draft", "--prompts", "10")
    assert code == 0 and out.startswith("sound: ") and all(name in out for name in STATISTICS)


def test_the_command_says_inconclusive_and_how_much_is_missing(command):
    code, out, _ = command("--draft", "draft", "--prompts", "1", "--json")
    document = json.loads(out)
    assert code == document["exit_code"] == 125 and document["verdict"] == "inconclusive" and document["more"] > 100
    assert [one["name"] for one in document["panel"]] == list(STATISTICS)


def test_the_command_finds_a_planted_fault(command):
    with resampled_from_target():
        code, out, err = command("--draft", "draft", "--prompts", "2")
    assert code == 1, err
    assert out.startswith("wrong: resampled from p") and "after a rejection token" in out


@pytest.mark.parametrize(
    ("words", "code", "value"),
    [
        (["--draft", "missing"], 125, "missing"),
        (["--draft", "draft", "--prompts", "0"], 2, "--prompts"),
        (["--draft", "draft", "--prompts", "99999"], 2, "99999"),
        (["--draft", "missing", "--temperature", "nan"], 2, "temperature"),
        (["--draft", "missing", "--top-p", "2"], 2, "top_p"),
        (["--draft", "missing", "--k", "0"], 2, "--k"),
        (["--draft", "draft", "--effect", "10"], 2, "effect"),
    ],
)
def test_what_cannot_be_audited_is_no_verdict(command, words, code, value):
    got, out, err = command(*words)
    assert got == code and out == "" and value in err and "Traceback" not in err


# --- the token behind the last draft --------------------------------------------------------------------------------


def test_the_token_behind_the_last_draft_is_audited():
    heard, made = logged(0, 100)
    extra = [one for one in heard if one.draft_id is None]
    assert len(extra) > 5 and len(heard) - len(extra) < made.n_tokens if hasattr(made, "n_tokens") else extra
    assert audit(heard).flaws == {} and audit(extra).panel[2].n == len(extra)
    wrong = [one._replace(committed_id=int(np.argmin(one.p_target))) if one.draft_id is None else one for one in heard]
    assert audit(wrong).causes == (sampling.BONUS,)
    found = audit([one for seed in range(4) for one in blind(logged(seed)[0])])
    assert found.causes == ()
    worst = [
        one._replace(committed_id=int(np.argmin(one.p_target))) for one in blind(pooled("none")) if one.draft_id is None
    ]
    assert audit(worst).verdict == "wrong"


def test_an_engine_that_cumulates_in_float32_is_not_accused_of_it():
    rng, found = np.random.default_rng(0), []
    for _ in range(40):
        p, q = (rng.dirichlet(np.full(20_000, 0.3)).astype(np.float32) for _ in range(2))
        residual = np.maximum(p - q, np.float32(0))
        u = float(rng.random())
        edges = np.cumsum(residual, dtype=np.float32)
        y = int(np.searchsorted(edges, np.float32(u) * edges[-1], side="right"))
        found.append(Position(p, q, int(np.argmax(q - p)), False, y, 0.999999, u))
    assert "resample" not in audit(found).flaws and "residual" not in audit(found).flaws


@pytest.mark.parametrize("logged_as", [np.asarray, np.float64, np.ndarray.tolist])
def test_rows_of_float32_are_trusted_no_further_when_they_are_logged_as_something_else(logged_as):
    rng, found = np.random.default_rng(0), []
    for _ in range(40):
        logits = rng.normal(size=32_000).astype(np.float32)
        p = np.exp(logits - logits.max())
        p, u = p / p.sum(dtype=np.float32), np.float32(rng.random())
        edges = np.cumsum(p, dtype=np.float32)
        y = int(np.searchsorted(edges, u * edges[-1], side="right"))
        found.append(Position(logged_as(p), None, None, False, y, resample_u=float(u)))
    assert audit(found).flaws == {}


# --- rows in half precision -----------------------------------------------------------------------------------------


def half(position):
    """The position with its rows as an engine in float16 would log them."""
    q = None if position.q_draft is None else position.q_draft.astype(np.float16)
    return position._replace(p_target=position.p_target.astype(np.float16), q_draft=q)


def test_sound_sampling_is_not_accused_of_the_rounding_of_half_precision():
    rng, heard = np.random.default_rng(0), []
    for knows in [0.5, 0.99] * 20:  # of the target; then what is left to draw from is little
        p, other = rng.dirichlet(np.full(20_000, 0.05), 2)
        q = knows * p + (1 - knows) * other
        for x, u, v in ((rng.choice(20_000, p=q), *rng.random(2)), (np.argmax(q - p), 1 - 1e-6, rng.random())):
            kept = bool(u * q[x] < p[x])
            y = x if kept else terms._Given(v).categorical(np.maximum(p - q, 0))
            heard.append(Position(p, q, x, kept, y, u, None if kept else v))
            heard.append(Position(p, None, None, False, terms._Given(v).categorical(p), resample_u=v))
    assert (
        audit(heard).flaws == {} and audit(map(half, heard)).flaws == {} and audit(blind(map(half, heard))).flaws == {}
    )


@pytest.mark.parametrize(
    "change",
    [
        {"draft_id": 3, "committed_id": 3},  # p = 0 may be 2e-8
        {"q_draft": np.array([0, 0.5, 0.5, 0])},  # and so may q
        {"q_draft": ROW_P, "accepted": False, "committed_id": 1},  # rows that are equal may be so by rounding
        {"draft_id": 2, "accept_u": 0.8005, "committed_id": 2},  # p/q = 0.8 is known to one in 250
    ],
)
def test_what_rounding_may_have_done_is_judged_in_float32_alone(change):
    log = SOUND._replace(**change)
    assert audit([log]).flaws and not audit([half(log)]).flaws


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"accepted": False, "committed_id": 1}, "accept"),
        ({"committed_id": 1}, "committed"),
        ({"draft_id": 2, "accepted": False, "committed_id": 2}, "residual"),
        ({"draft_id": 2, "accept_u": 0.81, "committed_id": 2}, "accept"),
        ({"draft_id": None, "q_draft": None, "accepted": False, "committed_id": 1, "resample_u": 0.49}, "bonus"),
    ],
)
def test_what_is_further_off_than_half_precision_is_a_flaw_in_it_too(change, kind):
    assert kind in audit([half(SOUND._replace(**change))]).flaws


def test_a_replay_in_half_precision_is_exact_only_where_the_residual_is_more_than_its_rounding():
    """The residual holds 0.008, less than what 50,000 entries of float16 may be off by: no token would be a flaw."""
    rng = np.random.default_rng(0)
    rows = np.exp(1.5 * rng.normal(size=50_000) + 0.02 * rng.normal(size=(2, 50_000)))
    p, q = rows / rows.sum(1, keepdims=True)
    log = Position(p, q, int(np.argmax(q - p)), False, int(np.argmax(p - q)), 0.999999, resample_u=0.0)
    assert "resample" in audit([log]).flaws and audit([log]).exact == 1
    vague = audit([half(log)])
    assert vague.flaws == {} and (vague.n, vague.replayed, vague.exact) == (1, 1, 0)
    clear = half(log._replace(q_draft=None, committed_id=terms._Given(0.3).categorical(p), resample_u=0.3))
    assert audit([clear]).flaws == {} and audit([clear]).exact == 1
    behind = half(clear._replace(draft_id=None))
    assert audit([behind]).flaws == {} and audit([behind]).exact == 1


# --- over many seeds ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"top_k": 12, "top_p": 0.9, "temperature": 0.8}], ids=["raw", "cut"])
def test_over_many_seeds_all_five_have_mean_zero_and_deviation_one(options):
    panels = np.array([list(zs(audit(logged(seed, 100, **options)[0])).values()) for seed in range(110)])
    assert np.abs(panels.mean(0)).max() < 3 / np.sqrt(len(panels))
    assert np.abs(panels.std(0) - 1).max() < 3 / np.sqrt(2 * len(panels))


@pytest.mark.slow
def test_acceptances_and_drafts_are_blind_to_a_resample_from_p_and_so_is_the_replay_of_the_tests():
    """Over seeds they still have mean 0 and deviation 1, while z_dir has a mean far below 0."""
    panels = np.array([list(zs(audit(logged(s, 140, "from p")[0])).values()) for s in range(50)])
    assert np.abs(panels.mean(0)[:2]).max() < 4 / np.sqrt(len(panels))
    assert np.abs(panels.std(0)[:2] - 1).max() < 4 / np.sqrt(2 * len(panels))
    assert panels.mean(0)[3] < -2.5
    assert "accept" not in audit(pooled("from p", range(2))).flaws


# --- the study of notebook 06 ---------------------------------------------------------------------------------------


def test_the_study_names_each_planted_fault_and_nothing_where_nothing_is():
    told = []
    found = trial(prompts=4, max_new_tokens=150, progress=lambda done, total, what: told.append((done, total, what)))
    causes = dict(zip(found["planted"], found["causes"], strict=True))
    assert causes == {
        "nothing": "",
        "top-k drafts, raw row reported": sampling.MISREPORTED,
        "greedy drafts, raw row reported": sampling.NOT_DRAWN,
        "resampled from p": sampling.FROM_TARGET,
    }
    assert [what for _, _, what in told] == list(PLANTED) and np.abs(
        found.loc[0, list(STATISTICS)].astype(float)
    ).max() < 4
