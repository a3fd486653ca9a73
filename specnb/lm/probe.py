"""Decodes one token and says which one: what `specnb check` runs in a process of its own.

A llama.cpp build that does not suit the CPU dies by a signal at its first decode, which no `except` catches. So the
doctor starts `python -m specnb.lm.probe MODEL_PATH` and reads one line of JSON, or the signal.
"""

import json
import sys
from pathlib import Path

PROBE_TOKEN = 1
N_CTX = 64


def main(path: str | Path) -> int:
    """Open the GGUF file at `path` in llama.cpp, decode token 1, write `{"ok": true, "argmax": …}` to stdout.

    `argmax` is the id of the likeliest next token. The exit code is 0; it is 1 with `{"ok": false, "error": …}` if
    the model cannot be opened or its logits are not finite.
    """
    import numpy as np

    from specnb.errors import NonFiniteLogits, SpecnbError
    from specnb.lm.gguf.model import GgufModel

    try:
        row = np.asarray(GgufModel.open(path, n_ctx=N_CTX).forward([PROBE_TOKEN], 1))[-1]
        if not np.isfinite(row).all():
            raise NonFiniteLogits(f"{int((~np.isfinite(row)).sum())} of {row.size} logits are not finite")
        answer = {"ok": True, "argmax": int(row.argmax())}
    except SpecnbError as error:
        answer = {"ok": False, "error": str(error)}
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
    return 0 if answer["ok"] else 1


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m specnb.lm.probe MODEL_PATH")
    sys.exit(main(sys.argv[1]))
