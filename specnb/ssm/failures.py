"""Two failures of treating a recurrent state like a KV cache: one with an error, one without."""

from contextlib import closing

import numpy as np
import pandas as pd

from specnb.errors import EngineError
from specnb.lm.files import local_folder
from specnb.lm.gguf import binding
from specnb.lm.load import load

PROMPT = [(37 * i + 11) % 200 + 20 for i in range(12)]
BLOCK = PROMPT[:4]


def llama_refusal(name: str) -> str:
    """Return llama.cpp's error and log if the last tokens of a recurrent state are removed.

    This is the field report's error: `llama_memory_seq_rm` returns False, and the next decode finds
    inconsistent positions. `name` is a model that llama.cpp opens.
    """
    with closing(load(name, rollback="recompute")) as model:
        engine = model.open_engine(2 * len(PROMPT))  # without a rollback strategy
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

    Returns a row for each: the largest difference from the logits of a model that never processed
    the rejected tokens, and the number of equal next tokens. `name` is an embedded recurrent model
    or a local folder.
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
    """Return transformers' logits of BLOCK after PROMPT, and after `rejected` was fed and cropped."""
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
