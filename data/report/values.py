"""Derive what claims about the report's runs are judged by: `python -m data.report.values` writes `values.json`.

An interval is `[value, low, high, n]`. `specnb.book.claims.report_values` reads them, beside the rows themselves.
"""

import json
from pathlib import Path
from typing import Any

import pandas as pd

from specnb.book.claims import compare_with_report, fit_line, report_runs
from specnb.prompts import prompts

FOLDER = Path(__file__).parent


def derive(runs: pd.DataFrame) -> dict[str, Any]:
    """Return the named values of the report's `runs`, which claims of notebooks 01, 02 and 09 are judged by."""
    rows, (copy,) = compare_with_report(runs, fit_line(runs)), runs[runs["content"] == "self"].itertuples()
    code, prose = (rows[rows["content"] == content].set_index("k") for content in ("code", "prose"))
    target_gb, moe_gb, small_gb, copy_gb = pd.read_csv(FOLDER / "models.csv")["size_gb"]
    code_rates, prose_rates = code["acceptance_rate"].loc[20:], prose["acceptance_rate"].loc[:8]
    in_range = float(code_rates.between(0.8, 0.9).all() and prose_rates.between(0.3, 0.5).all())
    gains = code["tokens_per_s"][24] / code["tokens_per_s"][8], prose["tokens_per_s"][8] / prose["tokens_per_s"][24]
    texts = [prompt for prompt in prompts() if prompt.category != "code"]
    as_code = sum(is_code_by_report(prompt.without_template) for prompt in texts)
    copy_plain, moe_read_gb = copy.tokens_per_s / copy.speedup, moe_gb * 35 / 480
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


def is_code_by_report(text: str) -> bool:
    """Return whether the report's detector calls a text code (its section 4, to the letter)."""
    return sum(char in "{}();[]def class import return" for char in text) > 0.05 * len(text) or "    " in text


def _spread(ks: pd.Series) -> list[float]:
    return [float(ks.median()), int(ks.min()), int(ks.max()), len(ks)]


if __name__ == "__main__":
    text = json.dumps(derive(report_runs()), indent=1)
    (FOLDER / "values.json").write_text(f"{text}\n", encoding="utf-8")
