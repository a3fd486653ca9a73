"""Two failures of a recurrent state that is treated like a KV cache: one is loud, one is silent."""

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
    """Return what llama.cpp says when the last tokens of a recurrent state are removed, and decoding goes on.

    The field report's error: `llama_memory_seq_rm` answers False, and the next decode finds positions that do not
    follow one another. `name` is a model that llama.cpp opens. The text is the error and the lines of its log.
    """
    with closing(load(name, rollback="recompute")) as model:
        engine, log = model.open_engine(2 * len(PROMPT)), binding.load_library().errors  # no rollback strategy
        engine.name = name
        try:
            engine.feed(PROMPT, 1)
            engine.feed(BLOCK, 1)
            log.clear()
            engine.keep(len(PROMPT))
            engine.n_held = len(PROMPT)  # what llama-cpp-python's generate does: it ignores the False
            engine.feed(BLOCK, len(BLOCK))
            return "llama.cpp decoded on: this state can be cropped"
        except EngineError as error:
            return "\n".join([str(error), *log])


def transformers_crop(name: str) -> pd.DataFrame:
    """Compare `Cache.crop` of transformers on a recurrent model, which raises nothing, with the rollback of specnb.

    A row each: the largest difference to the logits of a model that never had the tokens, and how many of the next
    tokens are still the same. `name` is an embedded model or a local folder.
    """
    rejected = BLOCK[::-1]
    expected, cropped = _logits_after_crop(name, []), _logits_after_crop(name, rejected)
    with closing(load(name)) as model:
        model.forward(PROMPT)
        model.forward(rejected)
        model.rewind(len(rejected))
        rewound, strategy = model.forward(BLOCK), model.caps.rewind
    both = [cropped, rewound]
    return pd.DataFrame({
        "way back": ["transformers, Cache.crop", f"specnb, {strategy}"],
        "max_logit_error": [np.abs(logits - expected).max() for logits in both],
        "spread_of_logits": expected.std(),
        "same_next_tokens": [(logits.argmax(1) == expected.argmax(1)).sum() for logits in both],
        "of": len(BLOCK),
    })  # fmt: skip


def _logits_after_crop(name: str, rejected: list[int]) -> np.ndarray:
    """Return the logits of BLOCK behind PROMPT, after `rejected` was fed and cropped, through transformers alone."""
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    from specnb.lm.hf.files import quiet

    with quiet(), torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(local_folder(name), dtype=torch.float32).eval()
        cache = DynamicCache(config=model.config)

        def feed(ids: list[int], at: int) -> torch.Tensor:
            positions = torch.arange(at, at + len(ids))[None]
            return model(torch.tensor([ids]), past_key_values=cache, position_ids=positions, use_cache=True).logits[0]

        feed(PROMPT, 0)
        cache.activate_past_recording()  # without it crop says what it cannot do; with it, it says nothing
        if rejected:
            feed(rejected, len(PROMPT))
            cache.crop(-len(rejected))
        return feed(BLOCK, len(PROMPT)).numpy()
