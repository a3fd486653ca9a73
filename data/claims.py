"""Derive what claims are judged by that need no run: `python -m data.claims` writes `claims.json`.

Values follow from a field report's speeds (`report/`), published vocabularies and configurations,
records of `tests/benchmarks`, costs of named machines and toy models. An interval is
`[value, low, high, n]`; null marks a value that is not available. `specnb.book.claims.read_fixed`
reads them.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from specnb.book.claims import report
from specnb.chapters import state_memory
from specnb.chapters.lossless import SameInputDrafter
from specnb.chapters.rollback import mebibytes
from specnb.compat.check import Verdict, check
from specnb.compat.read import describe
from specnb.decode.generate import generate
from specnb.draft.model import ModelDrafter
from specnb.io import read_json
from specnb.lm import toy
from specnb.measure.cost import NAMED, Cost
from specnb.measure.intervals import interval, rate
from specnb.prompts import prompts

FOLDER = Path(__file__).parent
BENCHMARKS = FOLDER.parent / "tests" / "benchmarks"
PAIRS = {
    "coder": ("qwen2.5-coder-32b", "qwen2.5-0.5b-instruct"),
    "r1_small": ("deepseek-r1-distill-qwen-32b", "deepseek-r1-distill-qwen-1.5b"),
    "r1_qwen": ("deepseek-r1-distill-qwen-32b", "qwen2.5-0.5b-instruct"),
    "qwen3": ("qwen3-coder-480b-a35b-instruct", "qwen3-0.6b"),
    "pard": ("qwen3-coder-480b-a35b-instruct", "pard-qwen3-0.6b"),
    "qwen_72b": ("qwen2.5-72b-instruct", "qwen2.5-0.5b-instruct"),
    "neox_mpt": ("gpt-neox", "mpt"),
    "qwen_r1": ("qwen2.5", "deepseek-r1-distill-qwen"),
}
"""Target and draft of the pairs that claims are about."""
VICUNA_HEADS = (0.560, 0.316, 0.201, 0.147)
"""How often each Medusa head on Vicuna 7B is right (Medusa's assets/medusa_acc.csv, Apache-2.0)."""


def derive() -> dict[str, Any]:
    """Return all values by name."""
    values = derive_report(report.read_runs()) | derive_sizes() | derive_hybrid() | derive_pairs()
    values |= derive_cure(SameInputDrafter) | derive_mixture() | derive_quant_gap() | derive_loose()
    return values | derive_heads()


def derive_report(runs: pd.DataFrame) -> dict[str, Any]:
    """Return named values of the report's `runs`; claims of 01, 02 and 09 are judged by them."""
    rows, (copy,) = (
        report.compare_with_line(runs, report.fit_line(runs)),
        runs[runs["content"] == "self"].itertuples(),
    )
    code, prose = (rows[rows["content"] == content].set_index("k") for content in ("code", "prose"))
    target_gb, moe_gb, small_gb, copy_gb = pd.read_csv(FOLDER / "report" / "models.csv")["size_gb"]
    code_rates = code["acceptance_rate"].loc[20:]
    prose_rates = prose["acceptance_rate"].loc[:8]
    in_range = float(code_rates.between(0.8, 0.9).all() and prose_rates.between(0.3, 0.5).all())
    gains = (
        code["tokens_per_s"][24] / code["tokens_per_s"][8],
        prose["tokens_per_s"][8] / prose["tokens_per_s"][24],
    )
    texts = [prompt for prompt in prompts() if prompt.category != "code"]
    as_code = sum(is_code_by_report(prompt.without_template) for prompt in texts)
    copy_plain = copy.tokens_per_s / copy.speedup
    moe_read_gb = moe_gb * 35 / 480
    return {
        "best_k_code": _spread(code["best_k"]),
        "best_k_prose": _spread(prose["best_k"]),
        "expected": [in_range, in_range, in_range, 2],
        "off_code": code["error"].abs().max(),
        "off_prose": prose["error"].abs().max(),
        "round_steps": code["round_ms"][24] / 1000 / copy.plain_s,
        "speedup_24": code["predicted"][24] * copy.plain_s,
        "prose_gain": prose["predicted"][8] / prose["predicted"][24],
        "over_prose": code["tau"][24] / prose["tau"][24],
        "moe_read_gb": moe_read_gb,
        "moe_over_dense": moe_read_gb / target_gb,
        "kept_8": code["acceptance_rate"][8],
        "plain_per_s": 1 / copy.plain_s,
        "copy_plain": copy_plain,
        "baselines": copy_plain * copy.plain_s,
        "read_gb_per_s": target_gb / copy.plain_s,
        "least_speedup": code["tokens_per_s"].min() * copy.plain_s,
        "code_k_gain": gains[0],
        "prose_k_gain": gains[1],
        "k_gain": max(gains),
        "copy_speedup": copy.tokens_per_s * copy.plain_s,
        "copy_by_bytes": copy.tau / (1 + copy.k * copy_gb / target_gb),
        "copy_bytes": copy_gb / target_gb,
        "all_kept": (1 + copy.k) / (1 + copy.k * copy.implied_c),
        "small_c": code["implied_c"].mean(),
        "copy_memory": (target_gb + copy_gb) / (target_gb + small_gb),
        "as_code": as_code,
        "not_code": len(texts),
        "share_as_code": as_code / len(texts),
    }


def derive_sizes() -> dict[str, Any]:
    """Return what follows from given numbers: memory bandwidth, files of 46 and 28 GB, KV slots."""
    channels = 12
    bytes_each = 8
    k = 4
    c = 28 / 46
    slots = (336, 416, 176, 256)
    return {
        "dram_gb_per_s": channels * bytes_each * 5.6,
        "slower_dram_gb_per_s": channels * bytes_each * 4.8,
        "hybrid_c": c,
        "hybrid_by_bytes": 1 / c,
        "hybrid_best": (1 + k) / (1 + k * c),
        "kv_slots": all((slot / 16 - 1) % 5 == 0 for slot in slots),
    }


def derive_hybrid() -> dict[str, Any]:
    """Return Qwen3-Next's configured shape, whether it is the report's, and its state sizes."""
    sizes = mebibytes(state_memory.of_models(state_memory.parts, ["qwen3-next"])).set_index(
        "quantity"
    )["n_mib"]
    config = state_memory.find_config("qwen3-next")
    shape = {
        "linear": config.layer_types.count("linear_attention"),
        "layers": config.num_hidden_layers,
        "experts": config.num_experts,
        "active": config.num_experts_per_tok,
        "state": config.linear_key_head_dim,
        "inner": config.linear_num_value_heads * config.linear_value_head_dim,
        "convolution": config.linear_conv_kernel_dim,
    }
    return {
        "next_shape": shape,
        "next_layers": [shape[name] for name in ("linear", "layers", "experts", "active")]
        == [36, 48, 512, 10],
        "next_state": [shape[name] for name in ("state", "inner", "convolution")] == [128, 4096, 4],
        "snapshot_mib": sizes["snapshot S + R, a position"],
        "token_mib": sizes["raw replay and conv column, a token"],
    }


def is_code_by_report(text: str) -> bool:
    """Return whether the report's detector calls a text code (its section 4, to the letter)."""
    return (
        sum(char in "{}();[]def class import return" for char in text) > 0.05 * len(text)
        or "    " in text
    )


def derive_pairs() -> dict[str, Any]:
    """Return what `compat` says of PAIRS, for 03: each `_fits` if tokens can be verified as is."""
    values: dict[str, Any] = {}
    for name, (target, draft) in PAIRS.items():
        pair = check(describe(target), describe(draft))
        values[name] = {"verdict": str(pair.verdict), "refusal": pair.llama_cpp.reason}
        values[name] |= {"n_different": pair.ids.n_different} if pair.ids else {}
        from_memory = any(fact.endswith("tokenizer") for fact in pair.from_memory)
        values[f"{name}_fits"] = (
            None if from_memory else pair.verdict in (Verdict.DROP_IN, Verdict.SLICING)
        )
    return values | {"by_family": values["neox_mpt_fits"] and not values["qwen_r1_fits"]}


def derive_cure(drafter: type[ModelDrafter]) -> dict[str, Any]:
    """Return how toys that agree fare when `drafter` drafts, and named machines' gain, for 08."""
    prompt = [0, 1]
    k = 4
    cured, sound = (
        generate(toy.cyclic(7), prompt, drafter=kind(toy.cyclic(7)), k=k, max_new_tokens=20)
        .rounds[0]
        .n_accepted
        for kind in (drafter, ModelDrafter)
    )
    costs = [Cost.straight(name, at8).curve.ratio(3) + 2 * c for name, (at8, c) in NAMED.items()]
    gains = [3 / float(np.median(costs)), 3 / max(costs), 3 / min(costs), len(costs)]
    unchanged_tells = not (prompt == [0, 1] and cured < sound)
    return {
        "cured": cured,
        "sound": sound,
        "k": k,
        "cured_share": cured / sound,
        "unchanged_tells": unchanged_tells,
        "two_of_two": gains,
    }


def derive_mixture() -> dict[str, Any]:
    """Return T(5)/T(1) of a mixture of experts over a dense model's, by `report/mixture.json`."""
    measured = read_json(FOLDER / "report" / "mixture.json")
    ratios = {row["model"]: row["ratio"] for row in measured["rows"] if row["width"] == 5}
    return {
        "mixture": [*measured["over_dense"], measured["n"]],
        "mixture_at5": ratios["mixture"],
        "dense_at5": ratios["dense"],
    }


def derive_quant_gap() -> dict[str, Any]:
    """Return the best K of q4_0 drafting for q8_0 in llama.cpp, by `tests.benchmarks.quant_gap`."""
    rows = pd.DataFrame(read_json(BENCHMARKS / "quant_gap.json")["rows"])
    drafted = rows.query("target == 'q8_0' and draft == 'q4_0' and method != 'plain'")
    best = drafted.sort_values("speedup").to_dict("records")[-1]
    return {
        "quant_gap": [best[name] for name in ("speedup", "low", "high", "n_prompts")],
        "quant_k": int(best["method"].removeprefix("K = ")),
        "quant_c": best["c"],
        "quant_at5": best["at5"],
        "quant_bytes": best["draft_bytes"] / best["target_bytes"],
        "quant_rate": best["acceptance_rate"],
    }


def derive_loose() -> dict[str, Any]:
    """Return tokens per target pass, loose suffix matches over exact ones, from `copiers.json`."""
    rows = pd.DataFrame(read_json(BENCHMARKS / "copiers.json")["rows"])
    values = {}
    for content in ("code", "prose"):
        rounds = rows.query("content == @content").pivot(
            index="prompt", columns="drafter", values="rounds"
        )
        gain = interval([*zip(rounds["suffix"], rounds["suffix, loose"], strict=True)], rate)
        values[f"loose_{content}"] = [*gain, len(rounds)]
    return values


def derive_heads() -> dict[str, Any]:
    """Return published heads' acceptance, chains of 1 to 4, and if AdamW steps without gradient."""
    chains = np.cumprod(VICUNA_HEADS).cumsum() / [1, 2, 3, 4]
    frozen = torch.ones(2)
    optimizer = torch.optim.AdamW([frozen])
    optimizer.step()
    return {
        "overall": [chains[-1], chains.min(), chains.max(), len(chains)],
        "chains": dict(zip(("one", "two", "three", "four"), chains.tolist(), strict=True)),
        "optimized": bool(optimizer.state or (frozen != 1).any()),
    }


def _spread(ks: pd.Series) -> list[float]:
    return [float(ks.median()), int(ks.min()), int(ks.max()), len(ks)]


if __name__ == "__main__":
    text = json.dumps(derive(), indent=1)
    (FOLDER / "claims.json").write_text(f"{text}\n", encoding="utf-8")
