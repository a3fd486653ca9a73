"""The embedded pair: corpus, batches, the training loop, and the two models in data/models."""

import importlib.metadata
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specnb import corpus
from specnb.errors import InputError, NonFiniteLogits
from specnb.lm import embedded
from specnb.paths import project_dir
from specnb.ssm import tiny, train_data
from specnb.ssm.train_recipe import PRESETS, Recipe, command, recipe

CODE = "def area(width, height):\n    return width * height  # plain text of one line or so\n"
MODELS = embedded.root()
ABSOLUTE_PATH = re.compile(r"(?:^|[^\w.:/])/(?:[\w.-]+/)+", re.MULTILINE)
"""A path from the root, as machines have them; neither an address nor a path inside a package."""


def source(folder: Path, files: dict[str, str | bytes], package: str = "rich", description: str = "") -> corpus.Source:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    found = corpus.readable((path.relative_to(folder).as_posix(), path) for path in folder.rglob("*.py"))
    return corpus.Source(package, "1.0", "MIT", found, description)


def code(seed: int, lines: int = 30) -> str:
    rng = np.random.default_rng(seed)
    words = ["".join(rng.choice(list("abcdefghijklmnop"), 8)) for _ in range(3 * lines)]
    return "".join(f"def {a}({b}):\n    return {b} + {c}\n" for a, b, c in zip(*[iter(words)] * 3, strict=True))


# --- corpus -------------------------------------------------------------------------------------------------------


def test_the_corpus_does_not_depend_on_the_order_of_the_file_system(tmp_path):
    texts = {f"pkg/m{i}.py": code(i) for i in range(8)}
    one = corpus.documents([source(tmp_path / "a", texts)])
    two = corpus.documents([source(tmp_path / "b", dict(reversed(texts.items())))])
    assert [d.name for d in one] == [f"rich/pkg/m{i}.py" for i in range(8)]
    assert corpus.corpus_digest(one) == corpus.corpus_digest(two)
    assert corpus.corpus_digest(one[:-1]) != corpus.corpus_digest(one)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tiny.py", CODE),
        ("huge.py", code(1, 9000)),
        ("minified.py", code(1) + "x=" + "1+" * 300 + "1\n"),
        ("table.py", "T = [\n" + "    0x1234, 0x5678, 0x9abc, 0xdef0,\n" * 90 + "]\n"),
        ("binary.py", code(1).encode() + b"\xff\xfe"),
        ("nul.py", code(1) + "\0"),
        ("made.py", "# This file was automatically generated, do not edit.\n" + code(1)),
        ("tests/test_a.py", code(1)),
        ("pkg/_vendor/other.py", code(1)),
        ("private.py", code(1) + f"ROOT = '{Path.home() / 'x'}'\n"),
        ("foreign.py", code(1) + "# " + "слово " * 60 + "\n"),
    ],
)
def test_what_teaches_nothing_or_is_not_ours_to_read_is_left_out(tmp_path, name, text):
    found = corpus.documents([source(tmp_path, {"good.py": code(7), name: text})])
    assert [d.name for d in found] == ["rich/good.py"]


def test_links_and_names_outside_the_package_are_not_followed(tmp_path):
    source(tmp_path / "elsewhere", {"secret.py": code(3)})
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "link.py").symlink_to(tmp_path / "elsewhere" / "secret.py")
    found = corpus.documents([source(tmp_path / "pkg", {"good.py": code(7)})])
    assert [d.name for d in found] == ["rich/good.py"]
    assert corpus.readable([("../elsewhere/secret.py", tmp_path / "elsewhere" / "secret.py")]) == ()


def test_a_text_that_was_seen_is_left_out_and_so_is_a_head_about_rights(tmp_path):
    head = "# Copyright somebody\n# All rights reserved.\n"
    (found,) = corpus.documents([source(tmp_path, {"a.py": head + code(1), "b.py": code(1) + CODE})])
    assert found.name == "rich/a.py" and found.text == code(1)


def test_docstrings_are_taken_from_large_packages_and_broken_code_is_left_out(tmp_path):
    doc = "What this does, in a few words.\n\n" + "It goes on and on about details. " * 12
    doc = doc.replace("details. It", "details.\n    It")
    text = f'def f():\n    """{doc}"""\n    return 12345\n'
    (found,) = corpus.documents([source(tmp_path, {"a.py": text, "b.py": "def (:\n" + code(1)}, "sympy")])
    assert found.name == "sympy/a.py#docstrings" and found.kind == "prose"
    assert found.text.startswith("What this does") and "\nIt goes on" in found.text and "12345" not in found.text


def test_the_split_goes_by_file_and_is_disjoint():
    names = [f"pkg/module_{i}.py" for i in range(4000)]
    documents = [corpus.Document(name + part, "code", "") for name in names for part in ("", "#docstrings")]
    training, held_out = corpus.split(documents)
    files = [{d.name.split("#")[0] for d in side} for side in (training, held_out)]
    assert not files[0] & files[1] and len(files[0] | files[1]) == 4000
    assert len(training) + len(held_out) == 8000
    assert len(files[1]) / 4000 == pytest.approx(corpus.HELD_OUT_SHARE, abs=0.012)


def test_only_packages_with_a_recorded_licence_are_read():
    (found,) = corpus.installed(["typer"])
    assert found.licence == "MIT" and found.version and any(name == "typer/main.py" for name, _ in found.files)
    with pytest.raises(InputError, match="no licence is recorded for 'tqdm'"):
        corpus.installed(["tqdm"])


@pytest.mark.parametrize("package", sorted(set(corpus.LICENCES) - {corpus.STDLIB}))
def test_the_recorded_licence_is_the_one_the_package_states(package):
    try:
        stated = importlib.metadata.metadata(package)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed")
    classes = [line for line in stated.get_all("Classifier", []) if line.startswith("License")]
    text = " ".join(filter(None, [stated.get("License-Expression"), stated.get("License"), *classes])).lower()
    assert corpus.LICENCES[package].split("-")[0].lower() in text
    assert not re.search(r"\b[al]?gpl|\bmpl|mozilla", text)


# --- tokens and batches -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer():
    return train_data.train_tokenizer([code(i) for i in range(20)], vocab_size=400)


def test_the_tokenizer_is_reproducible(tokenizer):
    assert train_data.train_tokenizer([code(i) for i in range(20)], vocab_size=400).to_str() == tokenizer.to_str()


@given(text=st.text(max_size=80))
def test_every_text_comes_back(tokenizer, text):
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text and tiny.END_ID not in ids


def test_a_corpus_that_is_too_small_for_the_vocabulary_is_refused():
    with pytest.raises(InputError, match="too small"):
        train_data.train_tokenizer(["abc"], vocab_size=400)


def test_a_stream_has_an_end_token_around_every_text(tokenizer):
    ids = train_data.stream(tokenizer, ["ab", "ba"])
    assert ids.dtype == np.uint16 and ids[0] == ids[-1] == tiny.END_ID and (ids == tiny.END_ID).sum() == 3


@given(length=st.integers(2, 9), batch_size=st.integers(1, 4), seed=st.integers(0, 3), n=st.integers(60, 200))
def test_an_epoch_visits_every_window_at_most_once_and_resuming_changes_nothing(length, batch_size, seed, n):
    ids = np.arange(n, dtype=np.uint16)
    size = {"batch_size": batch_size, "length": length, "seed": seed}
    steps = ((n - 1) // length - 1) // batch_size
    for epoch in range(2):
        rows = np.concatenate([train_data.batch(ids, step=epoch * steps + s, **size) for s in range(steps)])
        assert (np.diff(rows) == 1).all()  # windows of the stream, one token longer than what is read
        seen = Counter(rows[:, :-1].ravel().tolist())
        assert set(seen.values()) == {1} and len(seen) == steps * batch_size * length
    assert (train_data.batch(ids, step=1, **size) == train_data.batch(ids, step=1, **size)).all()


def test_a_stream_that_is_too_short_is_refused():
    with pytest.raises(InputError, match="no 4 windows"):
        train_data.batch(np.zeros(100, np.uint16), step=0, batch_size=4, length=32, seed=0)


@pytest.mark.parametrize("ids", [np.zeros(0, np.uint16), np.full(9, 4096, np.uint16), np.zeros(9, np.int32)])
def test_streams_of_another_kind_are_refused(tmp_path, ids):
    for name in train_data.STREAMS:
        np.save(tmp_path / f"{name}.npy", ids)
    (tmp_path / train_data.SOURCES_FILE).write_text("{}")
    with pytest.raises(InputError, match="not a stream of uint16"):
        train_data.open_data(tmp_path)


# --- recipes ------------------------------------------------------------------------------------------------------


@given(steps=st.integers(1, 500), longer=st.integers(0, 300), warmup=st.integers(0, 50))
def test_the_rate_does_not_depend_on_the_number_of_steps_until_it_falls(steps, longer, warmup):
    one, two = (Recipe(tiny.DRAFT, n, warmup=warmup) for n in (steps, steps + longer))
    rates = [one.lr(step) for step in range(steps)]
    assert rates[: one.decay_start] == [two.lr(step) for step in range(one.decay_start)]
    assert all(0 < rate <= one.peak_lr for rate in rates)
    falling = rates[max(one.decay_start, warmup) :]
    assert all(later < earlier for earlier, later in pairwise(falling))


def test_the_command_of_a_recipe_gives_the_recipe():
    for preset, stages in PRESETS.items():
        for stage in stages:
            words = command(stage, recipe(preset, stage, steps=7, seed=3, bf16=False))
            assert f"--preset {preset} --stage {stage} --steps 7 --seed 3 --no-bf16" in words
    with pytest.raises(InputError, match="no preset"):
        command("target", replace(recipe("cpu", "target"), clip=9.0))
    with pytest.raises(InputError, match="no recipe 'fast'"):
        recipe("fast", "target")


def test_steps_without_a_stage_are_refused_and_the_command_line_needs_no_torch():
    script = "import sys, specnb.ssm.train_tiny as t; print(any(m in sys.modules for m in ('torch', 'transformers')))"
    assert subprocess.check_output([sys.executable, "-c", script], text=True).strip() == "False"
    words = [sys.executable, "-m", "specnb.ssm.train_tiny", "--steps", "5"]
    answer = subprocess.run(words, capture_output=True, text=True)
    assert answer.returncode == 2 and "--steps 5 needs --stage" in answer.stderr


# --- the loop -----------------------------------------------------------------------------------------------------

SHORT = Recipe(tiny.DRAFT, 6, batch_size=2, length=24, warmup=2, bf16=False)


@pytest.fixture(scope="module")
def data():
    ids = np.random.default_rng(0).integers(0, 64, 3000).astype(np.uint16)
    return train_data.Data(Path("nowhere"), ids[:2500], ids[2500:], {"digest": "0" * 64})


def state(folder):
    from specnb.ssm.train_loop import read_checkpoint

    return read_checkpoint(folder)


def equal(one, two) -> bool:
    """Bit-equality of nested checkpoints; seconds are of the clock."""
    import torch

    if isinstance(one, dict):
        return one.keys() == two.keys() and all(equal(one[key], two[key]) for key in one if key != "seconds")
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(equal, one, two))
    return torch.equal(one, two) if isinstance(one, torch.Tensor) else one == two


class Stopped(Exception):
    pass


def stop_at(step):
    def on_step(now, loss):
        if now == step:
            raise Stopped

    return on_step


@pytest.fixture(scope="module")
def straight(data, tmp_path_factory):
    from specnb.ssm.train_loop import train

    folder = tmp_path_factory.mktemp("straight")
    train(SHORT, data, folder, save_every=2)
    return state(folder)


def test_a_run_that_was_stopped_goes_on_bit_equal(data, tmp_path, straight):
    from specnb.ssm.train_loop import train

    with pytest.raises(Stopped):
        train(SHORT, data, tmp_path, save_every=2, on_step=stop_at(3))  # one step is lost
    assert state(tmp_path)["step"] == 2
    train(SHORT, data, tmp_path, save_every=2)
    assert equal(state(tmp_path), straight)
    assert [line["step"] for line in straight["log"]] == [2, 4, 6]
    shown = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert equal(shown, straight["log"]) and shown[-1]["tokens"] == 6 * 2 * 24


def test_the_number_of_steps_may_change_until_the_rate_falls_and_the_recipe_never(data, tmp_path, straight):
    from specnb.ssm.train_loop import train

    with pytest.raises(Stopped):
        train(replace(SHORT, steps=100), data, tmp_path, save_every=2, on_step=stop_at(3))
    with pytest.raises(InputError, match="another recipe"):
        train(replace(SHORT, peak_lr=1.0), data, tmp_path)
    with pytest.raises(InputError, match="another corpus"):
        train(SHORT, replace(data, facts={"digest": "1" * 64}), tmp_path)
    train(SHORT, data, tmp_path, save_every=2)
    assert equal(state(tmp_path), straight)
    with pytest.raises(InputError, match="already falls"):
        train(replace(SHORT, steps=100), data, tmp_path)


def test_rows_that_are_not_finite_stop_the_run_with_their_place(data, tmp_path):
    from specnb.ssm.train_loop import new_model, train

    model = new_model(tiny.DRAFT, 0)

    def poison(module, inputs, rows):
        rows = rows.clone()
        rows[1, 5, 7] = float("nan")
        return rows

    model.lm_head.register_forward_hook(poison)
    with pytest.raises(NonFiniteLogits, match="step 0 is not finite, first at window 1, position 5"):
        train(SHORT, data, tmp_path, start=model)
    assert not list(tmp_path.iterdir())


def test_a_broken_checkpoint_is_refused_and_kept(data, tmp_path):
    from specnb.ssm.train_loop import train

    (tmp_path / "checkpoint.pt").write_bytes(b"not a checkpoint")
    with pytest.raises(InputError, match="cannot be read"):
        train(SHORT, data, tmp_path)
    assert (tmp_path / "checkpoint.pt").read_bytes() == b"not a checkpoint"


def test_distillation_moves_the_draft_to_the_target_and_leaves_the_target(data, tmp_path):
    from specnb.ssm.train_loop import new_model, train

    target = new_model(tiny.DRAFT, 1).requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    seen = []
    made = replace(SHORT, steps=12, distilled=True)
    train(made, data, tmp_path, teacher=target, on_step=lambda step, loss: seen.append(loss))
    assert seen[-1] < 0.7 * seen[0]
    assert equal(target.state_dict(), before)
    same = new_model(tiny.DRAFT, 1)
    train(
        replace(made, steps=1), data, tmp_path / "same", start=same, teacher=target, on_step=lambda s, x: seen.append(x)
    )
    assert abs(seen[-1]) < 1e-6
    with pytest.raises(InputError, match="distilled=True"):
        train(made, data, tmp_path / "none")


def test_unigram_loss_is_never_below_the_entropy_of_the_text():
    from specnb.ssm.train_score import entropy, unigram_loss

    ids = np.array([0, 0, 1, 2], np.uint16)
    assert entropy(ids) == pytest.approx(1.5 * np.log(2))
    assert entropy(ids) < unigram_loss(ids, ids, 4) < np.log(4)
    assert unigram_loss(np.zeros(0, np.uint16), ids, 4) == pytest.approx(np.log(4))


# --- what ships ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair():
    from specnb.ssm.train_export import read_model

    return {name: read_model(MODELS / name) for name in tiny.SHAPES}  # refuses missing and unexpected weights


@pytest.fixture(scope="module")
def passages():
    return [json.loads(line) for line in (MODELS / "held_out.jsonl").read_text(encoding="utf-8").splitlines()]


def test_the_pair_is_small_shares_a_tokenizer_and_has_the_shapes_of_the_package(pair):
    from safetensors import safe_open
    from transformers import AutoTokenizer

    assert sum(file.stat().st_size for file in MODELS.rglob("*") if file.is_file()) <= 20_000_000
    texts = {(MODELS / name / "tokenizer.json").read_bytes() for name in tiny.SHAPES}
    assert len(texts) == 1
    for name, model in pair.items():
        expected = tiny.config(name).to_dict()
        assert {key: model.config.to_dict()[key] for key in tiny.shape(name)} == {
            k: expected[k] for k in tiny.shape(name)
        }
        with safe_open(MODELS / name / "model.safetensors", "pt") as weights:
            assert {weights.get_slice(key).get_dtype() for key in weights.keys()} == {"F16"}  # noqa: SIM118 (no dict)
        auto = AutoTokenizer.from_pretrained(MODELS / name)
        text = "class A:\n    def f(self):\n        return 'été' + \"don't\"  # 123\n"
        assert auto.decode(auto.encode(text)) == text
        assert auto.encode(text) == auto.backend_tokenizer.encode(text).ids and auto.eos_token_id == tiny.END_ID


def test_the_passages_are_held_out_and_carry_their_licence(passages):
    assert Counter(one["kind"] for one in passages) == {"code": 16, "prose": 16}
    for one in passages:
        assert corpus.is_held_out(one["name"]) and one["licence"] == corpus.LICENCES[one["name"].split("/")[0]]


def test_the_models_predict_held_out_text_far_better_than_any_blind_guess(pair, passages):
    import torch

    from specnb.ssm.train_export import tokenizer_of
    from specnb.ssm.train_score import entropy

    ids = [np.array(tokenizer_of(MODELS).encode(one["text"]).ids) for one in passages]
    blind = entropy(np.concatenate(ids))
    for model in pair.values():
        with torch.no_grad():
            tokens = [torch.from_numpy(one)[None] for one in ids]
            losses = [model(one, labels=one, use_cache=False).loss.item() for one in tokens]
        assert np.mean(losses) < blind - 1.0


def test_the_draft_says_what_the_target_says_more_often_than_not(pair):
    from specnb.ssm.train_export import prompts
    from specnb.ssm.train_score import accepted, greedy

    target, draft = pair[tiny.TARGET], pair[tiny.DRAFT]
    continued = [greedy(target, prompt, 32) for kind in ("code", "prose") for prompt in prompts(MODELS, kind)[:4]]
    counts = [accepted(draft, ids, 32) for ids in continued]
    assert sum(counts) / (32 * len(counts)) >= 0.5
    assert sum(accepted(target, ids, 32) for ids in continued) >= 32 * len(counts) - 2  # itself, but for near ties
    shuffled = [np.concatenate([ids[:-32], np.random.default_rng(0).permutation(ids[-32:])]) for ids in continued]
    assert sum(accepted(target, ids, 32) for ids in shuffled) < sum(counts)


def test_the_card_says_what_the_facts_say_and_nothing_of_the_machine(pair):
    from specnb.ssm.train_card import card

    facts = json.loads((MODELS / "training.json").read_text())
    text = (MODELS / "README.md").read_text(encoding="utf-8")
    assert text == card(facts) and "--seed 0" in text and "not finished" not in text
    assert facts["parameters"] == {name: model.num_parameters() for name, model in pair.items()}
    accepted, positions = map(sum, zip(*facts["alpha_1"]["distil"].values(), strict=True))
    assert accepted / positions >= 0.5
    losses = facts["held_out_loss"]
    assert losses[tiny.TARGET] < losses[tiny.DRAFT] < losses["unigram"] - 1.5
    for stage, name in (("target", tiny.TARGET), ("distil", tiny.DRAFT)):
        log = [json.loads(line) for line in (MODELS / name / "training_log.jsonl").read_text().splitlines()]
        assert log[-1] == {"stage": stage, **{k: v for k, v in facts["stages"][stage].items() if k != "recipe"}}
        assert log[-1]["held_out_loss"] < log[0]["held_out_loss"]
    for file in MODELS.rglob("*.*"):
        if file.suffix in (".json", ".jsonl", ".md") and file.name != "tokenizer.json":
            text = file.read_text(encoding="utf-8")
            assert not ABSOLUTE_PATH.search(text)
            assert not any(str(place) in text for place in (project_dir(), Path.home(), tempfile.gettempdir()))
