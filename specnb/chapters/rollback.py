"""Compare rollback strategies on the same drafts: exactness, speed, memory (notebook 04)."""

import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly.express as px
import plotly.graph_objects as go

from specnb.book.style import dress, error_bars, looks
from specnb.decode.generate import generate
from specnb.draft.base import DrafterBase, Picker, Proposal
from specnb.errors import EngineError, InputError, LoadError
from specnb.io import cache_dir, digest, file_digest, json_lines, make_once, plain, read_json
from specnb.lm.base import LanguageModel
from specnb.lm.files import embedded_root, folder_gguf, local_folder, parse
from specnb.lm.gguf import binding
from specnb.lm.load import load
from specnb.measure.bench import compare
from specnb.measure.experiment import Experiment, Progress, silent
from specnb.params import RollbackParams
from specnb.prompts import Prompt, prompts
from specnb.records import Generation, RunRecord

EXPERIMENT = "04_ssm_rollback"
STRATEGIES = ("replay", "snapshots", "fused", "checkpoint", "recompute")
FREE = "crop, attention only"
PLAIN = "plain"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
TWIN_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
)
"""Config fields that an attention-only twin copies from its hybrid model."""
TWIN_DISK_BYTES = 1 << 30


def run_strategies(params: RollbackParams, *, progress: Progress = silent) -> RunRecord:
    """Generate passages plainly, with every strategy, K and acceptance rate, and with drafters.

    `measurements["ways"]` has a row for each target, K, acceptance rate and strategy: tokens/s,
    speedup over plain decoding of the same model (interval over passages), memory and rollback
    counts. The strategy "crop, attention only" is an attention-only model of the same size.
    `measurements["drafters"]` has prompt lookup and `draft` on the first target. Raises what
    `specnb.load` and `generate` raise; the results so far are saved.
    """
    source = params.prompts
    n = params.passages
    chosen = prompts(limit=n, source=source) if source else passages(limit=n)
    with Experiment(EXPERIMENT, params, chosen) as study:
        study.measured |= {"ways": [], "drafters": []}
        bench = [_Bench(name_in(params.target, engine), study) for engine in params.engines]
        study.target = bench[0].plain
        study.models = [{"role": "target", "id": model.name, "sha256": None} for model in bench]
        study.generations += [truth for model in bench for truth in model.truths]
        # 1. Scripted drafts, with every strategy.
        cells = list(product(bench, params.ks, params.acceptance))
        for done, (model, k, rate) in enumerate(cells):
            progress(done, len(cells) + 1, f"{model.name}, K = {k}, {rate:.0%} correct")
            study.measured["ways"] += model.rows(k, rate)
        # 2. Real drafters, with the default strategy.
        progress(len(cells), len(cells) + 1, "lookup and the draft model")
        plainly = partial(study.decode, ignore_eog=True)
        for name in ("lookup", name_in(params.draft, params.engines[0])):
            drafter = study.open_drafter(name)
            for k in params.ks:
                methods = {PLAIN: plainly, name: partial(plainly, drafter=drafter, k=k)}
                _, row = _rows(methods, bench[0].prompts)
                key = {
                    "target": bench[0].name,
                    "way": study.target.caps.rewind,
                    "k": k,
                    "drafter": row.pop("method"),
                }
                study.measured["drafters"].append(key | row)
        return study.record()


def name_in(model: str, engine: str) -> str:
    """Return the name that opens `model` in an engine, "llama" or "torch", with one thread.

    Small models do not gain from more threads, and llama.cpp's waiting threads are slow if other
    processes run. llama.cpp opens folders in float32. Options in the name take precedence.
    """
    options = {"backend": "hf" if engine == "torch" else engine, "threads": 1}
    if engine == "llama" and parse(model).where == "hf":
        options["weights"] = "f32"
    new = {key: value for key, value in options.items() if f"{key}=" not in model}
    return parse(model, **new).text


class _Bench:
    """A target opened with each strategy, and its attention-only twin if it has one."""

    def __init__(self, name: str, study: Experiment) -> None:
        self.name = name
        self._params = study.params
        # 1. Open the target with each strategy that its engine and family support.
        self.models = {}
        for strategy in STRATEGIES:
            try:
                self.models[strategy] = study.opened(load(name, rollback=strategy))
            except (InputError, LoadError):
                if strategy == "recompute":  # every model supports it
                    raise
        self.plain = next(iter(self.models.values()))
        n = study.params.prompt_tokens
        self.prompts = [self.plain.encode(prompt.without_template)[:n] for prompt in study.chosen]
        self.truths = self._continuations(self.plain)
        # 2. Open the twin.
        self._twins = {}
        with suppress(InputError):  # the model has no twin
            options = name.removeprefix(parse(name).source)
            twin = study.opened(load(f"{attention_twin(name)}{options}"))
            self._twins = {FREE: twin}
            self._twin_truths = self._continuations(twin)

    def rows(self, k: int, rate: float) -> list[dict[str, Any]]:
        """Return the rows of one K and acceptance rate."""
        rows = self._timed(self.models, self.truths, k, rate)
        if self._twins:  # speedups are over the twin's plain decoding
            rows += self._timed(self._twins, self._twin_truths, k, rate)[1:]
        cell = {"target": self.name, "engine": self.plain.caps.engine, "k": k, "acceptance": rate}
        costs = {strategy: self._cost(model, k) for strategy, model in self.models.items()}
        return [cell | row | costs.get(row["method"], {}) for row in rows]

    def _timed(
        self, models: Mapping[str, LanguageModel], truths: Sequence[Generation], k: int, rate: float
    ) -> list[dict[str, Any]]:
        """Compare speculative decoding with each model to plain decoding with the first."""
        settings = {"max_new_tokens": self._params.max_new_tokens, "ignore_eog": True}

        def decode(model: LanguageModel, index: int) -> Generation:
            truth = truths[index].token_ids
            seed = self._params.seed + index
            drafter = ScriptedDrafter(truth, rate, vocab_size=model.vocab.size, seed=seed)
            return generate(model, self.prompts[index], drafter=drafter, k=k, **settings)

        first = next(iter(models.values()))
        methods = {PLAIN: lambda index: generate(first, self.prompts[index], **settings)}
        methods |= {name: partial(decode, model) for name, model in models.items()}
        return _rows(methods, range(len(self.prompts)))

    def _cost(self, model: LanguageModel, k: int) -> dict[str, Any]:
        """Return the peak rollback memory of a round, and the counts of the last generation."""
        counts = vars(model.rollback.cost).copy()
        model.reset()
        model.forward(self.prompts[0])
        model.forward(self.prompts[0][: k + 1])
        counts["kept_bytes"] = model.rollback.nbytes
        model.reset()
        return counts

    def _continuations(self, model: LanguageModel) -> list[Generation]:
        """Decode plainly, with the largest K more tokens, because drafts may extend that far."""
        tokens = self._params.max_new_tokens + max(self._params.ks)
        return [generate(model, ids, max_new_tokens=tokens, ignore_eog=True) for ids in self.prompts]


def _rows(methods: Mapping[str, Any], prompts: Sequence[Any]) -> list[dict[str, Any]]:
    """Return a row for each method, plain decoding first; NaN becomes None, for JSON."""
    return plain(compare(methods, prompts, baseline=PLAIN).to_dict("records"), nan=None)


def passages(*, limit: int) -> list[Prompt]:
    """Return the first `limit` held-out passages of code, the domain of the embedded pair.

    Raises InputError if there are fewer.
    """
    lines = json_lines(embedded_root() / "held_out.jsonl")
    texts = [passage["text"] for _, passage in lines if passage["kind"] == "code"]
    if limit > len(texts):
        raise InputError(f"got {limit} passages, expected at most {len(texts)}: lower `passages`")
    return [Prompt(id=f"held-out-code-{i:02d}", category="code", text=text) for i, text in enumerate(texts[:limit])]


def attention_twin(name: str) -> Path:
    """Return a cached folder of a Qwen3 model with depth, widths, heads and vocabulary of `name`.

    The twin has random weights and no recurrent layers. It shows the cost of the same speculation
    if rollback is free. `name` is an embedded hybrid or a local folder; for llama.cpp, a GGUF file
    is written next to the cached folder. Raises InputError for other names, and for a model without
    attention heads or tokenizer.
    """
    spec = parse(name)
    folder = local_folder(spec.source)
    config = read_json(folder / "config.json")
    if not config.keys() >= {*TWIN_FIELDS}:
        raise InputError(f"{folder} has no attention-only twin: its config has no attention heads")
    sha256 = digest([file_digest(folder / file) for file in ("config.json", *TOKENIZER)])
    twin = cache_dir() / "twins" / f"{folder.resolve().name}-{sha256[:16]}"
    make_once(twin, partial(_write_twin, folder, config), n_bytes=TWIN_DISK_BYTES)
    if spec.backend == "llama":
        gguf = partial(_write_twin_gguf, twin, folder_gguf(folder, "f16"))
        make_once(twin.with_name(f"{twin.name}.f16.gguf"), gguf, n_bytes=TWIN_DISK_BYTES)
    return twin


def _write_twin(folder: Path, config: Mapping[str, Any], twin: Path) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from specnb.lm.hf.files import quiet

    with torch.random.fork_rng(), quiet():
        torch.manual_seed(0)
        Qwen3ForCausalLM(Qwen3Config(**{key: config[key] for key in TWIN_FIELDS})).save_pretrained(twin)
    for file in TOKENIZER:
        shutil.copy(folder / file, twin / file)


def _write_twin_gguf(twin: Path, hybrid: Path, dest: Path) -> None:
    """Write `twin` in float16, with its hybrid's GGUF header minus the recurrent keys."""
    from gguf import MODEL_ARCH, GGUFReader, GGUFWriter, get_tensor_name_map
    from safetensors.numpy import load_file

    fields = GGUFReader(hybrid).fields
    writer = GGUFWriter(dest, "qwen3")
    arch = fields["general.architecture"].contents()
    left_out = ("GGUF.", "general.architecture")
    left_out += (f"{arch}.rope.", f"{arch}.ssm.", f"{arch}.attention.recurrent_layers")
    for key, value in fields.items():
        if not key.startswith(left_out):
            key = key.replace(f"{arch}.", "qwen3.")
            writer.add_key_value(key, value.contents(), value.types[0], value.types[-1])
    names = get_tensor_name_map(MODEL_ARCH.QWEN3, fields[f"{arch}.block_count"].contents())
    for name, weight in load_file(twin / "model.safetensors").items():
        # llama.cpp expects vectors in float32.
        stored = weight.astype(np.float16) if weight.ndim == 2 else weight
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class ScriptedDrafter(DrafterBase):
    """Drafts with a given acceptance rate, to measure costs (`--spec-synth-rates` in llama.cpp).

    Drafts the target's continuation `truth`, up to its end. Each token is correct with probability
    `rate`; after the first wrong token in a round, all are wrong (the correct id + 1).
    """

    def __init__(self, truth: Sequence[int], rate: float, *, vocab_size: int, seed: int = 0) -> None:
        self.name = f"scripted, {rate:.0%} correct"
        self._n_prompt = 0
        self._truth = truth
        self._wrong = [(token + 1) % vocab_size for token in truth]
        self._is_right = np.random.default_rng(seed).random(len(truth)) < rate

    def start(self, tokens: Sequence[int]) -> None:
        self._n_prompt = len(tokens)

    def propose(self, tokens: Sequence[int], k: int, picker: Picker) -> Proposal:
        start = len(tokens) - self._n_prompt
        drafted = slice(start, start + k)
        n_right = int(self._is_right[drafted].cumprod().sum())
        return Proposal((*self._truth[drafted][:n_right], *self._wrong[drafted][n_right:]))


# --- Cropping a recurrent state like a KV cache: an error in llama.cpp, none in transformers ---

PROMPT = [(37 * i + 11) % 200 + 20 for i in range(12)]
BLOCK = PROMPT[:4]


def llama_refusal(name: str) -> str:
    """Return llama.cpp's error and log after removing the last tokens of a recurrent state.

    This is the field report's error: `llama_memory_seq_rm` returns False, and the next decode finds
    inconsistent positions. `name` is a model that llama.cpp can open.
    """
    with closing(load(name, rollback="recompute")) as model:
        engine = model._engine  # bypasses the rollback strategy
        log = binding.load_library().errors
        engine.name = name
        try:
            engine.feed(PROMPT, 1)
            engine.feed(BLOCK, 1)
            log.clear()
            engine.keep(len(PROMPT))
            engine.n_held = len(PROMPT)  # like llama-cpp-python's generate, which ignores the False
            engine.feed(BLOCK, len(BLOCK))
            return "llama.cpp raised no error: this state can be cropped"
        except EngineError as error:
            return "\n".join([str(error), *log])


def transformers_crop(name: str) -> pd.DataFrame:
    """Compare transformers' `Cache.crop`, which raises no error, with specnb's rollback.

    Returns one row for each: the largest difference from the logits of a model that never processed
    the rejected tokens, and the number of next tokens that agree. `name` is an embedded recurrent
    model or a local folder.
    """
    rejected = BLOCK[::-1]
    expected = _logits_after_crop(name, [])
    cropped = _logits_after_crop(name, rejected)
    with closing(load(name)) as model:
        model.forward(PROMPT)
        model.forward(rejected)
        model.rewind(len(rejected))
        rewound = model.forward(BLOCK)
        strategy = model.caps.rewind
    both = [cropped, rewound]
    columns = {
        "rollback": ["transformers, Cache.crop", f"specnb, {strategy}"],
        "max_logit_error": [np.abs(logits - expected).max() for logits in both],
        "spread_of_logits": expected.std(),
        "same_next_tokens": [(logits.argmax(1) == expected.argmax(1)).sum() for logits in both],
        "of": len(BLOCK),
    }
    return pd.DataFrame(columns)


def _logits_after_crop(name: str, rejected: list[int]) -> np.ndarray:
    """Return transformers' logits of BLOCK after PROMPT and `rejected`, which is cropped."""
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    from specnb.lm.hf.files import quiet

    with quiet(), torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(local_folder(name), dtype=torch.float32).eval()
        cache = DynamicCache(config=model.config)

        def feed(ids: list[int], at: int) -> torch.Tensor:
            positions = torch.arange(at, at + len(ids))[None]
            tokens = torch.tensor([ids])
            output = model(tokens, past_key_values=cache, position_ids=positions, use_cache=True)
            return output.logits[0]

        feed(PROMPT, 0)
        cache.activate_past_recording()  # without it, crop raises an error
        if rejected:
            feed(rejected, len(PROMPT))
            cache.crop(-len(rejected))
        return feed(BLOCK, len(PROMPT)).numpy()


# --- Tables and figures of notebook 04: rollback strategies, their memory, and trees ---

CELL = ["target", "engine", "k", "acceptance"]
"""Columns that identify one measurement of all strategies."""

MIB = 2**20


def strategies(record: RunRecord) -> pd.DataFrame:
    """Return the rows of `run_strategies`; `kept_mib` is a round's peak rollback memory in MiB."""
    frame = pd.DataFrame(record.measurements["ways"])
    return frame.assign(kept_mib=frame.pop("kept_bytes") / MIB)


def drafters(record: RunRecord) -> pd.DataFrame:
    """Return one row per K for prompt lookup and the draft model, on the first target."""
    return pd.DataFrame(record.measurements["drafters"])


def fused(table: pd.DataFrame) -> pd.DataFrame:
    """Return the speed of fused replay relative to `checkpoint` and to a free rewind.

    One row per K and acceptance rate. The speeds compared are speedups over plain decoding of the
    same model. The free rewind is that of an attention-only model of the same size.
    """
    wide = table.pivot(index=CELL, columns="method", values="speedup")
    others = {"checkpoint": "over checkpoint", FREE: "over a free rewind"}
    ratios = wide.filter(others).rdiv(wide["fused"], axis=0).rename(columns=others)
    return ratios.rename_axis(columns=None).reset_index()


def fastest_strategies(table: pd.DataFrame) -> pd.DataFrame:
    """Return the fastest strategy by K and acceptance rate, with its speed-up, tau and memory."""
    measured = table.query("method in @STRATEGIES")
    best = measured.loc[measured.groupby(CELL)["speedup"].idxmax(), [*CELL, "method", "speedup", "tau", "kept_mib"]]
    return best.rename(columns={"method": "fastest"}).reset_index(drop=True)


def mebibytes(frame: pd.DataFrame) -> pd.DataFrame:
    """Convert columns `*_bytes` to `*_mib` (MiB, three digits)."""
    return _scaled(frame, "_bytes", "_mib", 1 / MIB)


def milliseconds(frame: pd.DataFrame) -> pd.DataFrame:
    """Convert columns `*_s` to `*_ms` (milliseconds, three digits), and round the ratio."""
    return _scaled(frame, "_s", "_ms", 1e3).round({"ratio": 3})


def _scaled(frame: pd.DataFrame, suffix: str, unit: str, factor: float) -> pd.DataFrame:
    scaled = (frame.filter(regex=f"{suffix}$") * factor).round(3)
    return frame.assign(**scaled).rename(columns=lambda name: re.sub(f"{suffix}$", unit, name))


def draw_strategies(table: pd.DataFrame, target: str) -> go.Figure:
    """Draw the speed-up over plain decoding: a mark per strategy, a panel per K and acceptance."""
    rows = table[(table["target"] == target) & (table["method"] != PLAIN)].sort_values(["k", "acceptance"])
    panel = "K = " + rows["k"].astype(str) + ", " + rows["acceptance"].map("{:.0%} of drafts correct".format)
    columns = rows["acceptance"].nunique()
    lines = rows["k"].nunique()
    look = looks("method", (*STRATEGIES, FREE), by=["symbol"])  # the same in every figure
    look["category_orders"]["method"] = [name for name in (*STRATEGIES, FREE) if name in set(rows["method"])]
    figure = px.scatter(
        rows.assign(panel=panel),
        x="speedup",
        y="method",
        facet_col="panel",
        facet_col_wrap=columns,
        facet_col_spacing=0.03,
        facet_row_spacing=0.32 / lines,
        height=120 + 220 * lines,
        **look,
        **error_bars(rows, axis="x"),
    )
    figure.for_each_annotation(lambda note: note.update(text=note.text.removeprefix("panel=")))
    figure.update_traces(marker_size=10).update_xaxes(title_text="speed (plain decoding = 1)", row=1)
    title = f"Cost of rollback: {rows['engine'].iloc[0]}, {rows['n_prompts'].max()} passages"
    return dress(figure, "ways_back", title_text=title)


def draw_tree_times(table: pd.DataFrame) -> go.Figure:
    """Draw the time of the serial rule over that of one masked solve, by tree size."""
    figure = (
        px.line(
            milliseconds(table),
            x="nodes",
            y="ratio",
            text=table["tree"].mask(table["tree"].duplicated("last"), ""),
            hover_data=["solve_ms", "paths_ms"],
            markers=True,
            **looks("tree", table["tree"]),
        )
        .update_traces(textposition="top left")
        .update_xaxes(tickvals=table["nodes"].unique())
    )
    return dress(figure, "trees")
