"""Does a mixture of experts leave as much room for drafts as a dense model? T(n) of both, in llama.cpp, f16.

.venv/bin/python -m tests.benchmarks.mixture

The dense model is SmolLM2-135M. In the mixture, written here, each of its feed-forward layers is 32 random experts of a
quarter of the width, of which a random router takes 4 for each token: as many weights a token, eight times as many in
all. A real router may take the same experts for neighbouring tokens more often.
"""

import json
import tempfile
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter

from specnb.io import project_dir, write_atomic
from specnb.lm.files import zoo_file
from specnb.lm.load import load
from specnb.measure.bench import interval
from specnb.measure.cost import verify_curve
from specnb.provenance import provenance

DENSE, EXPERTS, USED = "smollm2-135m:f16", 32, 4
WIDTHS, REPEATS = (1, 2, 3, 5, 9, 17), 21
RECORD = project_dir() / "data" / "report" / "mixture.json"


def write_mixture(dense: Path, dest: Path) -> None:
    """Write the GGUF of the mixture: all of the dense file but its feed-forward layers."""
    reader, rng = GGUFReader(dense), np.random.default_rng(0)
    writer = GGUFWriter(dest, "llama")
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "llama.feed_forward_length"):
            kind, *of_items = field.types
            writer.add_key_value(name, field.contents(), kind, of_items[-1] if of_items else None)
    hidden = reader.get_field("llama.feed_forward_length").contents() // USED
    writer.add_feed_forward_length(hidden)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(USED)
    for tensor in reader.tensors:
        layer, _, part = tensor.name.rpartition(".ffn_")
        if part not in ("gate.weight", "up.weight", "down.weight"):
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
            continue
        width = min(tensor.data.shape)
        shape = (EXPERTS, width, hidden) if part == "down.weight" else (EXPERTS, hidden, width)
        experts = (0.02 * rng.standard_normal(shape, np.float32)).astype(np.float16)
        writer.add_tensor(f"{layer}.ffn_{part.replace('.', '_exps.')}", experts, raw_dtype=GGMLQuantizationType.F16)
        if part == "gate.weight":
            router = rng.standard_normal((EXPERTS, width), np.float32)
            writer.add_tensor(f"{layer}.ffn_gate_inp.weight", router)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as opened:
        file = Path(folder) / "mixture.gguf"
        write_mixture(zoo_file(DENSE), file)
        names = {"dense": DENSE, "mixture": str(file)}
        models = {kind: opened.enter_context(closing(load(name))) for kind, name in names.items()}
        curves = {kind: verify_curve(model, widths=WIDTHS, repeats=REPEATS) for kind, model in models.items()}
    rows = [{"model": kind, "width": n, "ms": 1e3 * curve.seconds(n), "ratio": curve.ratio(n), "busy": curve.busy}
            for kind, curve in curves.items() for n in WIDTHS]  # fmt: skip
    samples = zip(*(curve.samples_s[WIDTHS.index(n)] for curve in curves.values() for n in (5, 1)), strict=True)
    over = interval([*samples], lambda s: float(np.exp((np.log(s) @ [-1, 1, 1, -1]).mean())))
    for row in rows:
        print(f"{row['model']}: T({row['width']}) = {row['ms']:.0f} ms, {row['ratio']:.2f}")
    print("T(5)/T(1) of the mixture over the dense model's:", over)
    facts = provenance(models=[{"id": DENSE}])
    write_atomic(
        RECORD, json.dumps({"cpu": facts["cpu"], "rows": rows, "over_dense": over, "n": REPEATS}, indent=1).encode()
    )


if __name__ == "__main__":
    main()
