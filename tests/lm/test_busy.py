"""A busy machine, on a fake clock: who takes the cores, which forwards are slow, and how many threads are left."""

import pytest

from specnb.lm import busy, toy
from specnb.lm.base import Capabilities
from specnb.lm.busy import Neighbours, ThreadPace, slow_forwards
from specnb.measure import cost

CORES = 4


class Machine:
    """A clock, and processes that take `others` cores of CORES as it goes on."""

    now = foreign = others = 0.0

    def run(self, seconds):
        self.now += seconds
        self.foreign += self.others * seconds


@pytest.fixture
def machine(monkeypatch):
    fake = Machine()
    monkeypatch.setattr(busy, "perf_counter", lambda: fake.now)
    monkeypatch.setattr(busy, "foreign_s", lambda: fake.foreign)
    monkeypatch.setattr(busy, "allowed_cores", lambda: list(range(CORES)))
    return fake


def caps(threads) -> Capabilities:
    return Capabilities("e", "cpu", "f32", 9, 9, "crop", details={"threads": threads})


def test_a_forward_of_many_times_the_usual_cost_for_its_width_is_slow():
    usual = [(1, 1.0)] * 10
    for more, slow in (([(1, 20.0)] * 2, 2), ([(9, 20.0)] * 9, 0), ([(1, 20.0)] * 10, 10), ([(0, 1e-9), (0, 1.0)], 0)):
        assert slow_forwards(usual + more) == slow  # each width has its own cost, and none where nothing is computed
    assert slow_forwards([]) == 0


CASES = [(4, 0.0, 0, False), (4, 0.2, 0, False), (4, 1.0, 0, True), (2, 1.0, 0, False), (2, 2.5, 0, True)]


@pytest.mark.parametrize(("threads", "others", "slow", "is_busy"), [*CASES, (2, 0, 3, True)])
def test_a_machine_is_busy_where_others_leave_too_few_cores_or_forwards_are_slow(
    machine, threads, others, slow, is_busy
):
    machine.others, seen = others, Neighbours()
    machine.run(busy.LOOK_S / 2)  # too short for the processor's clock
    assert seen.contention(caps(threads), [])[:2] == (False, None)
    machine.run(10)
    contention = seen.contention(caps(threads), [(1, 1.0)] * (40 - slow) + [(1, 20.0)] * slow)
    assert (contention.busy, contention.other_cores, contention.slow_forwards) == (is_busy, others, slow)
    assert (contention.cores, contention.threads, contention.n_forwards) == (CORES, threads, 40)


def test_threads_follow_the_free_cores_down_and_up(machine):
    applied = []
    pace = ThreadPace(3, applied.append)
    history = []
    for others in (0.0, 1.0, 2.0, 2.9, 9.0, 2.0, 0.2, 0.0):
        machine.others = others
        machine.run(busy.LOOK_S)
        pace.step()
        history.append(pace.threads)
    assert history == [3, 3, 2, 1, 1, 2, 3, 3] and applied == [2, 1, 2, 3]


def test_a_curve_measured_under_load_is_marked(machine, monkeypatch):
    model = toy.cyclic(5)
    forward = model.forward
    model.forward = lambda ids, n_logits=None: (machine.run(1.0), forward(ids, n_logits))[1]
    monkeypatch.setattr(cost, "perf_counter", lambda: machine.now)
    for machine.others in (0.0, 3.5):
        assert cost.verify_curve(model, widths=(1, 2), context=4).busy is (machine.others > 1)
