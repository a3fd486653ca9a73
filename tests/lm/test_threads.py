"""Threads: how many a model uses, and concurrent use of one model."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from specnb.errors import InputError, StateError
from specnb.lm import toy
from specnb.lm.gguf.model import GgufModel
from specnb.lm.hf.model import HfModel
from specnb.lm.probe import PROBED_WIDTHS, certified
from tests.tiny_models import llama_gguf, mamba_gguf, torch_folder

IDS = [4, 9, 6, 7]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("threads")
    return {
        "llama.cpp": llama_gguf(folder / "tiny.gguf"),
        "recurrent": mamba_gguf(folder / "mamba.gguf"),
        "torch": torch_folder(folder / "hf"),
    }


def opened(files, engine, **options):
    return (HfModel if engine == "torch" else GgufModel).open(files[engine], **options)


# ---- number of threads


@pytest.fixture
def two_cores(monkeypatch):
    """A machine with two cores, of which other processes use `load["other"]` on average."""
    load = {"other": 0.0}
    monkeypatch.setattr("specnb.lm.gguf.model.available_cores", lambda: 2)
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)
    monkeypatch.setattr("torch.set_num_threads", lambda _n: None)
    monkeypatch.setattr("specnb.machine.allowed_cores", lambda: [0, 1])
    monkeypatch.setattr(
        "specnb.machine.Neighbours.cores", lambda _self, _least_s=0.5: load["other"]
    )
    return load


@pytest.mark.parametrize(
    ("differ", "expected"),
    [
        ((), (PROBED_WIDTHS[-1], True)),
        (range(1, 99), (PROBED_WIDTHS[-1], False)),
        (PROBED_WIDTHS[4:], (PROBED_WIDTHS[3], False)),
    ],
)
def test_a_certificate_is_the_minimum_over_thread_counts_and_is_cached(
    differ, expected, tmp_path, monkeypatch
):
    """With one thread, passes over n tokens round differently for n in `differ`."""
    monkeypatch.setenv("SPECNB_CACHE", str(tmp_path))
    model = toy.markov(8, seed=1)
    right = model.forward
    now = []
    model.forward = lambda ids, n_logits=None: (
        right(ids, n_logits) * (1 + 1e-6 * (now[-1] == 1 and len(ids) in differ))
    )
    for _ in range(2):
        assert certified(model, [1, 2], now.append) == expected
    assert now == [1, 2]


@pytest.mark.parametrize("engine", ["llama.cpp", "torch", "recurrent"])
def test_threads_follow_free_cores_within_a_text_if_bit_identical(engine, files, two_cores):
    model = opened(files, engine)
    any_time = model.caps.details["threads_change"] == "within a text"
    assert any_time or not model.caps.same_bits_up_to or engine == "torch"
    assert (model.caps.details["threads"], model.caps.details["thread_counts"]) == (2, [1, 2])

    def used(other):
        """Return the number of threads for a text."""
        two_cores["other"] = other
        model.reset()
        model.forward(IDS)
        return model.pace.threads

    assert used(0.0) == 2
    two_cores["other"] = 1.0
    model.forward(IDS)
    assert model.pace.threads == (1 if any_time else 2)
    assert used(1.0) == 1 and used(0.0) == 2
    model.close()
    if engine != "torch":  # another thread may close the model after the number is selected
        two_cores["other"] = 1.0
        with pytest.raises(InputError, match="closed"):
            model.pace.begin()


@pytest.mark.parametrize("engine", ["llama.cpp", "torch"])
def test_a_thread_count_set_by_the_user_does_not_change(engine, files, two_cores):
    two_cores["other"] = 1.9
    model = opened(files, engine, threads=2)
    model.forward(IDS)
    assert model.pace is None and model.caps.details["threads"] == 2
    model.close()


# ---- concurrent use


@pytest.mark.parametrize("use", ["forward", "rewind", "reset", "close"])
def test_a_model_in_use_by_another_thread_raises_an_error(use, files):
    model = opened(files, "llama.cpp", threads=1)
    model.forward(IDS)
    arguments = {"forward": ([5],), "rewind": (1,)}.get(use, ())
    with model._engine.alone(), ThreadPoolExecutor(1) as pool:
        refused = pool.submit(getattr(model, use), *arguments).exception(timeout=10)
    assert isinstance(refused, StateError) and "tiny.gguf" in str(refused)
    assert model.n_past == len(IDS) and len(model.forward([5])) == 1
    model.close()


TWO_THREADS = """
import sys
from threading import Thread
from specnb.decode.generate import generate
from specnb.errors import SpecnbError
from tests.lm.test_threads import opened

def use(model, outcomes):
    for _ in range(10):
        try:
            generate(model, [4, 9, 6, 7] * 8, max_new_tokens=24, drafter="lookup", ignore_eog=True)
            outcomes.append("done")
        except SpecnbError as error:
            outcomes.append(type(error).__name__)

for engine in ("llama.cpp", "torch"):
    model, outcomes = opened({engine: sys.argv.pop(1)}, engine, threads=1), []
    for closes in (False, True):
        threads = [Thread(target=use, args=(model, outcomes)) for _ in range(2)]
        for thread in threads:
            thread.start()
        while closes:
            try:
                model.close()
                break
            except SpecnbError:
                pass
        for thread in threads:
            thread.join()
    assert len(outcomes) == 40, outcomes
    print(*sorted(set(outcomes)))
"""


def test_concurrent_use_and_close_raise_errors_and_never_abort(files):
    """In a subprocess, because without a lock, llama.cpp would abort the process."""
    words = [sys.executable, "-c", TWO_THREADS, str(files["llama.cpp"]), str(files["torch"])]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    raised = {*done.stdout.split()} - {"done"}
    assert raised <= {"StateError", "InputError", "EngineError", "RewindError"}
