"""Every way back on the same drafts: is it exact, how fast is it, what does it keep? The measurement of notebook 04."""

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from filelock import FileLock

from specnb.decode.generate import generate
from specnb.draft.base import Picker, Proposal
from specnb.draft.load import load_drafter
from specnb.errors import InputError, LoadError
from specnb.lm import zoo
from specnb.lm.base import LanguageModel
from specnb.lm.load import load, parse
from specnb.lm.zoo import files_digest
from specnb.measure.bench import Method, compare
from specnb.measure.experiment import Progress, record_of, saving_failures, silent
from specnb.params import RollbackParams
from specnb.paths import cache_dir, project_dir
from specnb.prompts import Prompt
from specnb.records import Generation, RunRecord

EXPERIMENT = "04_ssm_rollback"
WAYS = ("replay", "snapshots", "fused", "checkpoint", "recompute")
FREE = "crop, attention only"
PLAIN = "plain"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
TWIN_FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "tie_word_embeddings", "bos_token_id", "eos_token_id",
)  # fmt: skip
"""What an attention-only twin takes over from the config of its hybrid."""


def run(params: RollbackParams, *, progress: Progress = silent) -> RunRecord:
    """Generate every passage plainly and with every way back, at each K and acceptance; then with real drafters.

    `measurements["ways"]`: a row for each target, K, acceptance and way, with tokens/s, its ratio to plain decoding of
    the same model (interval over passages), the bytes kept for going back and what it cost; "crop, attention only"
    is the same for an attention-only model of the same size. `measurements["drafters"]`: lookup and `draft` with the
    first target. Raises what `specnb.load` and `generate` raise; what was measured before is saved.
    """
    started = datetime.now(UTC)
    chosen = passages(limit=params.passages)
    generations: list[Generation] = []
    measured: dict[str, Any] = {"ways": [], "drafters": []}
    cells = len(params.engines) * len(params.ks) * len(params.acceptance)
    with ExitStack() as opened:
        bench = [_Bench(name_in(params.target, engine), params, chosen, opened) for engine in params.engines]

        def recorded(error: BaseException | None = None) -> RunRecord:
            used = [{"role": "target", "id": model.name, "sha256": None} for model in bench]
            return record_of(
                EXPERIMENT, params, chosen, bench[0].plain, used, started, generations, measured, error=error
            )

        with saving_failures(generations, recorded):
            done = 0
            for model in bench:
                generations.extend(model.truths)
                for k in params.ks:
                    for rate in params.acceptance:
                        progress(done, cells + 1, f"{model.name}, K = {k}, {rate:.0%} right")
                        measured["ways"] += model.rows(k, rate)
                        done += 1
            progress(done, cells + 1, "lookup and the draft model")
            measured["drafters"] += list(_drafters(bench[0], params))
            return recorded()


def name_in(model: str, engine: str) -> str:
    """The name that opens `model` in an engine, "llama" or "torch", on one thread, a converted one in float32.

    Small models gain nothing from more threads, and llama.cpp's threads that wait for one another lose all beside
    any other load. Options in the name win.
    """
    spec = parse(model)
    options = {"backend": "llama" if engine == "llama" else "hf", "threads": 1}
    if engine == "llama" and spec.where == "hf":
        options["weights"] = "f32"
    return parse(model, **{key: value for key, value in options.items() if f"{key}=" not in model}).text


class _Bench:
    """One target, opened once for each way back, and its attention-only twin."""

    def __init__(self, name: str, params: RollbackParams, chosen: Sequence[Prompt], opened: ExitStack) -> None:
        self.name, self._params = name, params
        self.models = dict(_in_every_way(name, opened))
        self.plain: LanguageModel = next(iter(self.models.values()))
        self._twin = _twin_of(name, opened)
        self.prompts = [self.plain.encode(prompt.text)[: params.prompt_tokens] for prompt in chosen]
        self.truths = [self._plainly(self.plain, ids) for ids in self.prompts]
        self._twin_truths = [self._plainly(self._twin, ids) for ids in self.prompts] if self._twin else []

    def rows(self, k: int, rate: float) -> list[dict[str, Any]]:
        """The rows of one K and acceptance."""
        methods: dict[str, Method] = {PLAIN: partial(self._decode, self.plain, self.truths, 0, 0.0)}
        methods |= {way: partial(self._decode, model, self.truths, k, rate) for way, model in self.models.items()}
        frame = compare(methods, range(len(self.prompts)), baseline=PLAIN)
        kept = {way: self._kept(model, k) for way, model in self.models.items()}
        return [
            {"target": self.name, "engine": self.plain.caps.engine, "k": k, "acceptance": rate}
            | row
            | kept.get(row["method"], {})
            for row in [*_rows(frame), *self._free(k, rate)]
        ]

    def _free(self, k: int, rate: float) -> list[dict[str, Any]]:
        """The row of the attention-only twin, where there is one."""
        if self._twin is None:
            return []
        run = partial(self._decode, self._twin, self._twin_truths)
        methods: dict[str, Method] = {PLAIN: partial(run, 0, 0.0), FREE: partial(run, k, rate)}
        return _rows(compare(methods, range(len(self.prompts)), baseline=PLAIN))[1:]

    def _decode(self, model: LanguageModel, truths: Sequence[Generation], k: int, rate: float, at: int) -> Generation:
        settings = {"max_new_tokens": self._params.max_new_tokens, "ignore_eog": True}
        if not k:
            return generate(model, self.prompts[at], **settings)
        seed = self._params.seed + at
        drafter = ScriptedDrafter(truths[at].token_ids, rate, vocab_size=model.vocab.size, seed=seed)
        return generate(model, self.prompts[at], drafter=drafter, k=k, **settings)

    def _kept(self, model: LanguageModel, k: int) -> dict[str, Any]:
        """Bytes at the widest moment of a round, and the counts of the generation that came last."""
        cost = vars(model.rollback.cost).copy()
        model.reset()
        model.forward(self.prompts[0])
        model.forward(self.prompts[0][: k + 1])
        kept = model.rollback.nbytes
        model.reset()
        return {"kept_bytes": kept, **cost}

    def _plainly(self, model: LanguageModel, ids: Sequence[int]) -> Generation:
        """As far as drafts may reach: K tokens beyond what is generated later."""
        tokens = self._params.max_new_tokens + max(self._params.ks)
        return generate(model, ids, max_new_tokens=tokens, ignore_eog=True)


def _rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """With None for what does not exist, which a record holds and NaN it does not."""
    return frame.astype(object).where(frame.notna(), None).to_dict("records")


def _in_every_way(name: str, opened: ExitStack) -> Iterator[tuple[str, LanguageModel]]:
    """The model, opened for each way back that its engine and family have. Raises InputError when there is none."""
    reasons = []
    for way in WAYS:
        try:
            model = load(name, rollback=way)
        except (InputError, LoadError) as error:
            reasons.append(f"{way}: {error}")
            continue
        opened.callback(model.close)
        yield way, model
    if len(reasons) == len(WAYS):
        raise InputError(f"{name} has no way back to measure: {'; '.join(reasons)}")


def _twin_of(name: str, opened: ExitStack) -> LanguageModel | None:
    """The attention-only model of the same size and engine; None for a model that has none."""
    spec = parse(name)
    try:
        model = load(str(attention_twin(spec.source)) + name.removeprefix(spec.source))
    except InputError:
        return None
    opened.callback(model.close)
    return model


def _drafters(bench: _Bench, params: RollbackParams) -> Iterator[dict[str, Any]]:
    """Lookup and the draft model, at the largest K, with the target as `specnb.load` opens it."""
    with ExitStack() as opened:
        target = load(bench.name)
        opened.callback(target.close)
        spec = parse(bench.name)
        engine = "llama" if spec.backend == "llama" else "torch"
        for name in ("lookup", name_in(params.draft, engine)):
            drafter = load_drafter(name, target, strict=True).drafter
            opened.callback(drafter.close)
            for k in params.ks:
                settings = {"max_new_tokens": params.max_new_tokens, "ignore_eog": True}
                methods: dict[str, Method] = {
                    PLAIN: lambda ids, s=settings: generate(target, ids, **s),
                    name: lambda ids, k=k, s=settings, d=drafter: generate(target, ids, drafter=d, k=k, **s),
                }
                row = _rows(compare(methods, bench.prompts, baseline=PLAIN))[1]
                yield {"target": bench.name, "way": target.caps.rewind, "k": k, "drafter": row.pop("method"), **row}


def passages(*, limit: int) -> list[Prompt]:
    """The first `limit` held-out passages of code, such as the embedded pair was trained on, to be continued.

    Raises InputError where there are fewer.
    """
    lines = (project_dir() / "data" / "models" / "held_out.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [passage["text"] for passage in map(json.loads, lines) if passage["kind"] == "code"]
    if not 0 < limit <= len(texts):
        raise InputError(f"got {limit} passages, expected 1 to {len(texts)}")
    return [Prompt(id=f"held-out-code-{i:02d}", category="code", text=text) for i, text in enumerate(texts[:limit])]


def attention_twin(name: str) -> Path:
    """A cached transformers folder (Qwen3): depth, widths, heads and vocabulary of the hybrid `name`, no recurrence.

    Its weights are random, for nothing but time is measured with it: what the same speculation costs where going back
    is free. `name` is an embedded model or a local folder. Raises InputError for anything else, and for a model
    without attention heads or a tokenizer.
    """
    folder = zoo.local_folder(name)
    if not (folder / "config.json").is_file():
        known = ", ".join(zoo.embedded_names())
        raise InputError(f"{name!r} is neither an embedded model ({known}) nor a model's folder")
    files = (folder / file for file in ("config.json", *TOKENIZER))
    digest = files_digest(path for path in files if path.is_file())
    twin = cache_dir() / "twins" / f"{folder.resolve().name}-{digest[:16]}"
    twin.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{twin}.lock"):
        if not (twin / "model.safetensors").is_file():
            _make_twin(folder, twin)
    return twin


def _make_twin(folder: Path, twin: Path) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from specnb.lm.hf.files import quiet

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    missing = [key for key in TWIN_FIELDS if key not in config] + [f for f in TOKENIZER if not (folder / f).is_file()]
    if missing:
        raise InputError(f"{folder} has no attention-only twin: it lacks {', '.join(missing)}")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(Qwen3Config(**{key: config[key] for key in TWIN_FIELDS}))
    partial_twin = twin.with_name(f"{twin.name}.part")
    shutil.rmtree(partial_twin, ignore_errors=True)
    with quiet():
        model.save_pretrained(partial_twin)
    for file in TOKENIZER:
        shutil.copy(folder / file, partial_twin / file)
    shutil.rmtree(twin, ignore_errors=True)
    partial_twin.replace(twin)


class ScriptedDrafter:
    """Acceptance known beforehand: for measuring what rounds cost. llama.cpp has it as `--spec-synth-rates`.

    Drafts the target's own continuation `truth`, each token right with probability `rate` until one is wrong: that and
    all behind it are the next id in the vocabulary. Where `truth` ends, no more is drafted.
    """

    vocab = None

    def __init__(self, truth: Sequence[int], rate: float, *, vocab_size: int, seed: int = 0) -> None:
        self.name = f"scripted, {rate:.0%} right"
        self._truth, self._rate, self._vocab_size, self._seed = truth, rate, vocab_size, seed
        self._prompt, self._draws = 0, np.random.default_rng(seed)

    def start(self, tokens: Sequence[int]) -> None:
        self._prompt = len(tokens)
        self._draws = np.random.default_rng(self._seed)

    def propose(self, tokens: Sequence[int], k: int, rng: Picker) -> Proposal:
        at = len(tokens) - self._prompt
        right = np.cumprod(self._draws.random(k) < self._rate)
        ahead = self._truth[at : at + k]
        return Proposal(tuple(t if ok else (t + 1) % self._vocab_size for t, ok in zip(ahead, right, strict=False)))

    def commit(self, tokens: Sequence[int]) -> None:
        """Nothing to keep in step: where the text stands is read from its length."""

    def close(self) -> None:
        """Nothing was opened."""
