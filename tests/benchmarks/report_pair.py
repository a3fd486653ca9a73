"""A small version of the report's experiment: Qwen2.5-Coder-1.5B, the 0.5B as draft model, greedy.

.venv/bin/python -m tests.benchmarks.report_pair [SETTING ...]

Runs on code, in 4 bits, with the target in 16 bits, and across engines. Plain decoding and every K
run live, in turn. The speed of each K is also predicted from one pass of the draft model along the
plain text, T(n) and c. Measured and predicted times exclude the prompt. Downloads 1.6 GB and needs
16 GB of memory.
"""

import argparse

import pandas as pd

from specnb.book import tables
from specnb.chapters import ksweep
from specnb.io import project_dir, read_json
from specnb.measure.cost import CostCurve
from specnb.measure.experiment import ProgressBar
from specnb.params import KSweepParams
from tests.benchmarks.record import write_record

TARGET, DRAFT = "qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b"
SETTINGS = {
    "4 bits": (TARGET, DRAFT),
    "16 bits": (f"{TARGET}:f16", f"{DRAFT}:q4_0"),
    "across engines": (f"{TARGET}?backend=hf&dtype=float32", f"{DRAFT}:q4_0?backend=llama"),
}
KS = (4, 8, 12, 16, 20, 24)
N_PROMPTS = 5
N_TOKENS = 256
RECORD = project_dir() / "data" / "report" / "small.json"


def measure(target, draft):
    """Sweep a pair as notebook 01 does; return a row per K (0: plain, in the same engine)."""
    params = KSweepParams.checked(
        target=target,
        backend="",
        dtype="",
        drafter=draft,
        replayed=[],
        ks=[*KS],
        k_max=max(KS),
        temperatures=[0.0],
        categories=["code"],
        prompts_per_category=N_PROMPTS,
        pack_prompts=0,
        live_prompts=N_PROMPTS,
        max_new_tokens=N_TOKENS,
        conversations=0,
        contexts=[],
    )
    with ProgressBar() as progress:
        record = ksweep.run(params, progress=progress)
    curve = CostCurve.model_validate(record.measurements["verify_curve"])
    live, replayed = (
        table[table["category"] == "code"].set_index("k")
        for table in (tables.k_sweep(record), tables.replayed(record))
    )
    rows = live[
        ["tokens_per_s", "drafted", "accepted", "acceptance_rate", "tau", "identical", "n_prompts"]
    ]
    for name, table in (("speedup", live), ("predicted", replayed)):
        ends = table[["speedup", "low", "high"]]
        rows = rows.join(ends.set_axis([name, f"{name}_low", f"{name}_high"], axis=1))
    loops = pd.Series([g.k for g in record.generations if g.loops]).value_counts()
    return (
        rows.join(replayed["tau"].rename("tau_replayed"))
        .assign(
            loops=loops.reindex(rows.index, fill_value=0),
            c=record.measurements["c"],
            busy=tables.busy(record),
            widths=[curve.widths] * len(rows),
            t_ms=[[1e3 * s for s in curve.median_s]] * len(rows),
        )
        .reset_index()
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("settings", nargs="*", choices=SETTINGS, default=list(SETTINGS))
    for setting in parser.parse_args().settings:
        names = dict(zip(("target", "draft"), SETTINGS[setting], strict=True))
        rows = measure(*names.values()).assign(setting=setting, **names).to_dict("records")
        others = [row for row in read_json(RECORD)["rows"] if row["setting"] != setting]
        write_record(RECORD, {"rows": others + rows})


if __name__ == "__main__":
    main()
