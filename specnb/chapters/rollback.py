"""Compare rollback strategies on the same drafts: exactness, speed, memory (notebook 04)."""

import re
import shutil
from collections import ChainMap, Counter
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import plotly.express as px
import plotly.graph_objects as go

from specnb.book.style import dots, dress, error_bars, looks, name_panels, readable
from specnb.decode.generate import generate
from specnb.draft.base import DrafterBase, Picker, Proposal
from specnb.errors import EngineError, InputError, LoadError
from specnb.io import (
    JsonObject,
    cache_dir,
    digest,
    file_digest,
    json_lines,
    make_once,
    plain,
    read_json,
)
from specnb.lm.base import LanguageModel
from specnb.lm.files import embedded_root, folder_gguf, local_folder, parse
from specnb.lm.gguf import binding
from specnb.lm.load import load
from specnb.measure.bench import Method, compare, interleaved, tabulate_speeds
from specnb.measure.experiment import Experiment, Progress, silent
from specnb.measure.intervals import RATIOS
from specnb.params import RollbackParams
from specnb.prompts import Prompt, prompts
from specnb.records import Generation, RunRecord

EXPERIMENT = "04_ssm_rollback"
STRATEGIES = ("replay", "snapshots", "fused", "checkpoint", "recompute")
CONTROL = "control (attention only)"
PLAIN = "plain"
TWIN_PLAIN = "plain, attention only"
ORACLE = "oracle draft (scripted, costs nothing)"
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
SOLVES = {"solve_ms": "one solve for the tree", "chains_ms": "one solve per path"}
"""Columns of `delta_rule.tree_cost` and their labels."""


def run_strategies(params: RollbackParams, *, progress: Progress = silent) -> RunRecord:
    """Generate passages plainly, with real drafters, and with an oracle and every strategy.

    `measurements["drafters"]` has a row for prompt lookup and for `draft`, for each K, on the first
    target. `measurements["ways"]` has a row for each K, acceptance rate of the oracle, engine and
    strategy: speed, memory, and rollback counts (totals of all passages). The control is an
    attention-only model of the same size. Raises what `specnb.load` and `generate` raise; the
    results so far are saved.
    """
    source = params.prompts
    n = params.passages
    chosen = prompts(limit=n, source=source) if source else passages(limit=n)
    with Experiment(EXPERIMENT, params, chosen) as study:
        study.measured |= {"ways": [], "drafters": []}
        groups = [
            group
            for engine in params.engines
            for group in _open(name_in(params.target, engine), study)
        ]
        study.target = groups[0].plain
        targets = [group for group in groups if group.plain_name == PLAIN]
        study.models = [
            {"role": "target", "id": group.plain.name, "sha256": None} for group in targets
        ]
        study.generations += [truth for group in targets for truth in group.truths]
        cells = list(product(params.ks, params.acceptance))
        # 1. Real drafters, with the default strategy.
        progress(0, len(cells) + 1, "prompt lookup and the draft model")
        plainly = partial(study.decode, ignore_eog=True)
        for name in ("lookup", name_in(params.draft, params.engines[0])):
            drafter = study.open_drafter(name)
            methods = {str(k): partial(plainly, drafter=drafter, k=k) for k in params.ks}
            table = compare({PLAIN: plainly} | methods, groups[0].prompts, baseline=PLAIN)[1:]
            row = {"drafter": drafter.name, "k": params.ks, "rollback": study.target.caps.rewind}
            study.measured["drafters"] += _records(table.drop(columns="method").assign(**row))
        # 2. The oracle, with every strategy.
        for done, (k, rate) in enumerate(cells, start=1):
            progress(done, len(cells) + 1, f"oracle drafts, K = {k}, {rate:.0%} right")
            table = _with_oracle(groups, k, rate)
            study.measured["ways"] += _records(
                table.assign(target=params.target, k=k, acceptance=rate)
            )
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


def _open(name: str, study: Experiment) -> list["_Group"]:
    """Open a target with each strategy that its engine and family support, and its twin, if any."""
    models = {}
    for strategy in STRATEGIES:
        try:
            models[strategy] = study.opened(load(name, rollback=strategy))
        except (InputError, LoadError):
            if strategy == "recompute":  # every model supports it
                raise
    groups = [_Group(models, study, PLAIN)]
    with suppress(InputError):  # the model has no twin
        options = name.removeprefix(parse(name).source)
        twin = study.opened(load(f"{attention_twin(name)}{options}"))
        groups.append(_Group({CONTROL: twin}, study, TWIN_PLAIN))
    return groups


class _Group:
    """A target opened with each strategy, or its attention-only twin, and its plain decoding."""

    def __init__(
        self, models: Mapping[str, LanguageModel], study: Experiment, plain_name: str
    ) -> None:
        self.models = models
        self.params = study.params
        self.plain_name = plain_name
        self.plain = next(iter(models.values()))
        self.prompts = [
            self.plain.encode(prompt.without_template)[: self.params.prompt_tokens]
            for prompt in study.chosen
        ]
        # The largest K more tokens, because drafts may extend that far.
        tokens = self.params.max_new_tokens + max(self.params.ks)
        self.truths = [
            generate(self.plain, ids, max_new_tokens=tokens, ignore_eog=True)
            for ids in self.prompts
        ]
        self.counts: dict[str, Counter[str]] = {}

    def key(self, name: str) -> str:
        """Return the name of a method, unique among the groups."""
        return f"{self.plain.caps.engine}: {name}"

    def methods(self, k: int, rate: float) -> dict[str, Method]:
        """Return plain decoding and each strategy, as functions of a passage's index."""
        settings = {"max_new_tokens": self.params.max_new_tokens, "ignore_eog": True}

        def decode(name: str, index: int) -> Generation:
            model = self.models[name]
            truth = self.truths[index].token_ids
            seed = self.params.seed + index
            drafter = OracleDrafter(truth, rate, vocab_size=model.vocab.size, seed=seed)
            generation = generate(model, self.prompts[index], drafter=drafter, k=k, **settings)
            if index == 0:  # the first run and its warm-up
                self.counts[name] = Counter()
            self.counts[name].update(vars(model.rollback.cost))
            return generation

        plainly = {
            self.key(self.plain_name): lambda index: generate(
                self.plain, self.prompts[index], **settings
            )
        }
        return plainly | {self.key(name): partial(decode, name) for name in self.models}

    def costs(self, k: int) -> dict[str, dict[str, int]]:
        """Return each strategy's counts, summed over passages, and its peak memory in a round."""
        costs = {}
        for name, model in self.models.items():
            model.reset()
            model.forward(self.prompts[0])
            model.forward(self.prompts[0][: k + 1])
            costs[self.key(name)] = self.counts[name] | {"kept_bytes": model.rollback.nbytes}
            model.reset()
        return costs


def _with_oracle(groups: Sequence[_Group], k: int, rate: float) -> pd.DataFrame:
    """Time all groups' methods, interleaved; return a row for each, without the twins' plain."""
    # 1. Run them, and compare each with the plain decoding of its group.
    methods = [group.methods(k, rate) for group in groups]
    runs = list(interleaved(dict(ChainMap(*methods)), range(len(groups[0].prompts))))
    tables = []
    for group, names in zip(groups, methods, strict=True):
        own_runs = [run for run in runs if run.method in names]
        tables.append(tabulate_speeds(own_runs, baseline=group.key(group.plain_name)))
    table = pd.concat(tables, ignore_index=True)
    # 2. Compare the targets with their fastest plain decoding.
    is_plain = table["method"].str.endswith(f": {PLAIN}")
    fastest = table["method"][table["tokens_per_s"].where(is_plain).idxmax()]
    over = tabulate_speeds(runs, baseline=fastest).set_index("method")[["speedup", "low", "high"]]
    over = over.set_axis(RATIOS[3:], axis=1)
    # 3. Add rollback counts and memory.
    costs = pd.DataFrame({key: cost for group in groups for key, cost in group.costs(k).items()}).T
    table = table.join(over.join(costs), on="method")
    table[["engine", "method"]] = table["method"].str.split(": ", expand=True)
    table.loc[table["method"] == CONTROL, over.columns] = None  # other weights
    return table[table["method"] != TWIN_PLAIN]


def _records(table: pd.DataFrame) -> list[JsonObject]:
    """Return the rows as dictionaries; NaN becomes None, for JSON."""
    return plain(table.to_dict("records"), nan=None)


def passages(*, limit: int) -> list[Prompt]:
    """Return the first `limit` held-out passages of code, the domain of the embedded pair.

    Raises InputError if there are fewer.
    """
    lines = json_lines(embedded_root() / "held_out.jsonl")
    texts = [passage["text"] for _, passage in lines if passage["kind"] == "code"]
    if limit > len(texts):
        raise InputError(f"got {limit} passages, expected at most {len(texts)}: lower `passages`")
    return [
        Prompt(id=f"held-out-code-{i:02d}", category="code", text=text)
        for i, text in enumerate(texts[:limit])
    ]


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


def _write_twin(folder: Path, config: JsonObject, twin: Path) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from specnb.lm.hf.files import quiet

    with torch.random.fork_rng(), quiet():
        torch.manual_seed(0)
        Qwen3ForCausalLM(Qwen3Config(**{key: config[key] for key in TWIN_FIELDS})).save_pretrained(
            twin
        )
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


class OracleDrafter(DrafterBase):
    """Drafts with a given acceptance rate, to measure costs (`--spec-synth-rates` in llama.cpp).

    Drafts the target's continuation `truth`, up to its end. Each token is correct with probability
    `rate`; after the first wrong token in a round, all are wrong (the correct id + 1).
    """

    def __init__(
        self, truth: Sequence[int], rate: float, *, vocab_size: int, seed: int = 0
    ) -> None:
        self.name = f"{ORACLE}, {rate:.0%} correct"
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

MIB = 2**20


def strategies(record: RunRecord) -> pd.DataFrame:
    """Return the rows of `run_strategies`; `kept_mib` is a round's peak rollback memory in MiB."""
    return mebibytes(pd.DataFrame(record.measurements["ways"]))


def drafters(record: RunRecord) -> pd.DataFrame:
    """Return one row per K for prompt lookup and the draft model, on the first target."""
    return (
        pd.DataFrame(record.measurements["drafters"])
        .set_index(["drafter", "k"])
        .rename(readable, level=0)
    )


def mebibytes(frame: pd.DataFrame) -> pd.DataFrame:
    """Convert columns `*_bytes` to `*_mib` (MiB, three digits)."""
    scaled = (frame.filter(regex="_bytes$") / MIB).round(3)
    return frame.assign(**scaled).rename(columns=lambda name: re.sub("_bytes$", "_mib", name))


def draw_strategies(table: pd.DataFrame) -> go.Figure:
    """Draw the speedup of each strategy, sorted by its mean: a panel per engine and acceptance."""
    rows = table[table["method"] != PLAIN].sort_values(["acceptance", "engine", "k"])
    order = rows.groupby("method")["speedup"].mean().sort_values(ascending=False).index
    figure = dots(
        rows.assign(
            K="K = " + rows["k"].astype(str), drafts=rows["acceptance"].map("{:.0%} right".format)
        ),
        x="speedup",
        y="method",
        by="K",
        facet_col="engine",
        facet_row="drafts",
        height=140 + 250 * rows["acceptance"].nunique(),
        **error_bars(rows, axis="x"),
    )
    figure.update_yaxes(categoryarray=[*order.drop(CONTROL, errors="ignore"), CONTROL])
    title = (
        f"Live speedup of {readable(rows['target'].max())} over plain decoding, "
        f"{rows['n_prompts'].max()} passages<br>{ORACLE}; no mark: not available in that engine"
    )
    return dress(figure, "rollback_strategies", title_text=title)


def draw_tree_times(table: pd.DataFrame) -> go.Figure:
    """Draw the time of one solve for a tree and of one solve per path, with a panel per tree."""
    time = "time (ms, log scale)"
    rows = table.melt(["tree", "nodes"], list(SOLVES), "solve", time).replace({"solve": SOLVES})
    for end in ("low", "high"):
        rows[end] = table.melt(["tree"], [f"{name}_{end}" for name in SOLVES])["value"]
    figure = px.line(
        rows,
        x="nodes",
        y=time,
        facet_col="tree",
        markers=True,
        **looks("solve", SOLVES.values(), by=["line_dash", "symbol"]),
        **error_bars(rows, time),
    )
    name_panels(figure)
    figure.update_xaxes(tickvals=table["nodes"].unique(), title_text="nodes (log scale)")
    gains = (table["chains_ms"] / table["solve_ms"])[table["paths"] > 1]
    title = (
        f"One solve for a tree with branches: {gains.min():.1f} to {gains.max():.1f} times as fast "
        "as one per path<br>PyTorch, one layer with the shapes of Qwen3-Next-80B"
    )
    return dress(figure, "trees", title_text=title)
