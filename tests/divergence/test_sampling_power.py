"""The statistics of the sampling audit: the order of ids, and that power and level are what is said."""

import math

import numpy as np
import pytest

from specnb.divergence import sampling
from specnb.divergence.sampling import audit, terms
from specnb.divergence.sampling.terms import STATISTICS, Moments, Position


def alike(rng):
    """A row of four pairs of tokens that are equally likely, at random places; the fault takes the first of a pair."""
    places, chances = rng.permutation(8), rng.dirichlet(np.ones(4)) / 2
    rows = [np.empty(8), np.empty(8)]
    for row, values in zip(rows, (chances, rng.dirichlet(np.ones(4)) / 2), strict=True):
        row[places] = np.repeat(values, 2)
    first = np.empty(8, int)
    for pair in places.reshape(-1, 2):
        first[pair] = min(pair)
    return *rows, first


def decided(rng, first_of_pairs, n=1500):
    """Positions of sound tests of drafts, where the sampler takes the first of two tokens that are alike, or either."""
    for _ in range(n):
        p, q, first = alike(rng)
        residual = np.maximum(p - q, 0)
        x, y = rng.choice(8, p=q), rng.choice(8, p=residual / residual.sum())
        if first_of_pairs:
            x, y = first[x], first[y]
        kept = bool(rng.random() < p[x] / q[x])
        yield Position(p, q, x, kept, x if kept else y)


def test_a_sampler_that_takes_the_first_of_tokens_alike_is_seen_by_their_order_alone():
    found = audit(decided(np.random.default_rng(0), True))
    assert found.flaws == {} and found.causes == ("something else",)
    assert [one.far for one in found.panel] == [False] * 4 + [True]
    assert found.panel[4].z < -5 and max(abs(one.z) for one in found.panel[:4]) < 3
    assert "the first is taken" in found.panel[4].meaning
    assert audit(decided(np.random.default_rng(0), False)).verdict == "sound"


def test_the_order_of_ids_has_the_variance_of_the_mid_distribution():
    p = np.array([0.1, 0.4, 0.2, 0.3])
    moments = np.array([terms.position_terms(Position(p, None, None, False, y)).moments[4] for y in range(4)])
    assert moments[:, 0] @ p == pytest.approx(0) and np.allclose(moments[:, 1], (1 - (p**3).sum()) / 12)
    assert moments[:, 0] ** 2 @ p == pytest.approx(moments[0, 1])


def outcomes(n, spread, seed=0):
    """For each statistic and n rows of 8 tokens: what each token gives (n, 8) and its chance (n, 8); the sums."""
    rng, gives, chances = np.random.default_rng(seed), [], []
    sums = np.zeros((len(STATISTICS), 5))
    for _ in range(n):
        p, q = rng.dirichlet(np.full(8, spread), 2)
        each = np.array([terms.position_terms(Position(p, q, one, True, one)).moments for one in range(8)])
        rejected = terms.position_terms(Position(p, q, 0, False, 0)).moments[0, 0]
        overlap = np.minimum(p, q).sum()
        each[1:, 0, 0] = rejected  # "token 0" is a kept draft, the others are a rejected one
        gives.append(each[:, :, 0].T)
        chances.append([np.eye(8)[0] * overlap + np.eye(8)[1] * (1 - overlap), q, p, p, p])
        sums += each[0]
    return np.array(gives).swapaxes(0, 1), np.array(chances).swapaxes(0, 1), sums


def moved(gives, chances, share):
    """The law (n, 8) after `share` went from one side of the mean to the other, as much as there is; upwards if > 0."""
    above = np.where(gives > 0, chances, 0)
    up, down = above, chances - above
    source, goal = (down, up) if share > 0 else (up, down)
    there, other = source.sum(1, keepdims=True), goal.sum(1, keepdims=True)
    size = np.minimum(abs(share), there)
    return source * (1 - size / there) + goal * (1 + size / other), float(np.mean(size))


def drawn(rng, gives, law, times):
    """Sums of what was given, (times,)."""
    edges = np.cumsum(law, axis=1)
    total = np.zeros(times)
    for row, edge in zip(gives, edges, strict=True):
        total += row[np.minimum(np.searchsorted(edge, rng.random(times)), 7)]
    return total


@pytest.mark.slow
@pytest.mark.parametrize(("n", "spread"), [(300, 1.0), (1500, 1.0), (600, 0.3), (1500, 0.3)])
def test_what_is_said_to_be_detectable_is_seen_with_the_power_that_is_said(n, spread):
    rng, times = np.random.default_rng(1), 4000
    gives, chances, sums = outcomes(n, spread)
    tried = set()
    for at, one in enumerate(sampling._panel(sums, n, 0.1, sampling.ALPHA)):
        for share in (one.detectable, -one.detectable):
            law, mean = moved(gives[at], chances[at], share)
            if mean < 0.999 * abs(share):
                continue  # so much mass is not there on this side
            z = drawn(rng, gives[at], law, times) / sampling.divisor(Moments(*sums[at]))
            p_values = np.array([math.erfc(abs(value) / math.sqrt(2)) for value in z])
            seen = np.mean(p_values <= sampling.ALPHA / len(STATISTICS))
            assert seen > sampling.POWER - 3 * math.sqrt(0.09 / times), (one.name, share)
            tried.add(one.name)
    assert len(tried) >= 4


@pytest.mark.parametrize(("n", "spread"), [(100, 1.0), pytest.param(1000, 0.3, marks=pytest.mark.slow)])
def test_sound_sums_are_far_no_more_often_than_their_share_of_the_level(n, spread):
    rng, times, level = np.random.default_rng(2), 4000, 0.05
    gives, chances, sums = outcomes(n, spread)
    for at, name in enumerate(STATISTICS):
        z = drawn(rng, gives[at], chances[at], times) / sampling.divisor(Moments(*sums[at]))
        far_off = np.mean(np.abs(z) > 2.576)  # a fifth of the level, two-sided
        assert far_off < level / 5 + 4 * math.sqrt(0.01 / times), name


@pytest.mark.parametrize("effect", [0.05, 0.3])
def test_the_positions_that_are_needed_make_the_effect_detectable(effect):
    _, _, sums = outcomes(400, 0.5)
    for row, one in zip(sums, sampling._panel(sums, 400, effect, 1e-3), strict=True):
        scaled = lambda count, row=row: sampling.detectable(Moments(*(row * count / 400)), 1e-3 / 5)  # noqa: E731
        assert scaled(one.needed) <= effect < scaled(0.98 * one.needed)


def sharp(rng, temperature, size=200):
    """A row of a low temperature: one token has nearly all, the others down to 1e-300."""
    logits = rng.normal(size=size) * 3 / temperature
    row = np.exp(logits - logits.max())
    return row / row.sum()


@pytest.mark.parametrize("temperature", [0.5, 0.02])
def test_a_fault_moves_a_sharp_row_by_no_more_than_the_range_of_what_is_summed(temperature):
    rng = np.random.default_rng(0)
    for _ in range(30):
        p, q = sharp(rng, temperature), sharp(rng, temperature)
        x = int(q.argmax())
        moments = [Moments(*row) for row in terms.position_terms(Position(p, q, x, False, int(p.argmax()))).moments]
        surprises = [np.ptp(np.log(row[row > 0])) for row in (q, p)]
        for one, most in zip(moments, (1, *surprises, 2 * terms.CLIP, 1), strict=True):
            assert 0 <= one.apart <= most * (1 + 1e-9) and abs(one.leaning) <= most**2 * (1 + 1e-9)


def test_a_token_that_is_the_mean_itself_is_the_side_that_mass_comes_from():
    """All but 2e-20 of this row is at 1/2: mass that leaves it moves by 1/2, not from 0 to 1."""
    p = np.array([1e-20, 1.0, 1e-20])
    assert Moments(*terms.position_terms(Position(p, None, None, False, 1)).moments[4]).apart == pytest.approx(0.5)


@pytest.mark.parametrize("n_sharp", [0, 30])
def test_a_few_sharp_rows_do_not_make_a_short_log_sound(n_sharp):
    """The law of what is drawn from the 30 flat rows is off by a total variation of 0.2."""
    rng = np.random.default_rng(0)
    log = [Position(np.full(2, 0.5), None, None, False, int(rng.random() < 0.3)) for _ in range(30)]
    for row in (sharp(rng, 0.05) for _ in range(n_sharp)):
        log.append(Position(row, None, None, False, int(row.argmax())))
    found = audit(log)
    assert found.verdict == "inconclusive" and found.more > 100 and found.panel[4].detectable > 0.1
