"""Two ways in which a recurrent state goes wrong when it is treated like a KV cache: one is loud, one is silent."""

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pandas as pd

from specnb.errors import EngineError, InputError
from specnb.lm import zoo
from specnb.lm.gguf import binding
from specnb.lm.gguf.model import LlamaEngine
from specnb.lm.load import load, local_file, parse

N_PROMPT, N_BLOCK = 12, 4


def llama_refusal(name: str) -> str:
    """What llama.cpp says when the last tokens of a recurrent state are removed, and decoding goes on regardless.

    The field report's error: `llama_memory_seq_rm` answers False, and the next decode finds positions that do not
    follow one another. `name` is a model that llama.cpp opens. Returns the error and the lines of its log.
    Raises InputError for a model whose state lets itself be cropped.
    """
    path = local_file(parse(name))
    if path is None:
        raise InputError(f"{name!r} is not opened by llama.cpp: add ?backend=llama")
    api = binding.library().api
    with ExitStack() as opened:
        model = binding.open_model(path)
        opened.callback(api.llama_model_free, model)
        context = binding.open_context(model, 256, "f32", 1)
        opened.callback(api.llama_free, context)
        return _decoded_on(name, model, context, opened)


def _decoded_on(name: str, model: object, context: object, opened: ExitStack) -> str:
    api = binding.library().api
    engine = LlamaEngine(
        name, context, api.llama_vocab_n_tokens(api.llama_model_get_vocab(model)), width=64, fixed_width=0
    )
    opened.callback(api.llama_batch_free, engine.batch)
    engine.feed(_ids(N_PROMPT), 1)
    engine.feed(_ids(N_BLOCK), N_BLOCK)
    if engine.keep(N_PROMPT):
        raise InputError(f"{name} has no recurrent state: llama.cpp cropped it as asked")
    engine.held = N_PROMPT  # what llama-cpp-python's generate does: it ignores the False
    binding.library().errors.clear()
    try:
        engine.feed(_ids(N_BLOCK), N_BLOCK)
    except EngineError as error:
        return "\n".join([str(error), *binding.library().errors])
    return "llama.cpp decoded on as if nothing had happened"


def transformers_crop(name: str) -> pd.DataFrame:
    """`Cache.crop` of transformers on a recurrent model: no error, and other logits from then on.

    A row each for `Cache.crop` and for the way back that `specnb.load` chooses: the largest difference to the logits
    of a model that never had the tokens, and whether the next token is still the same. `name` is an embedded model
    or a local folder.
    """
    folder = zoo.local_folder(name)
    prompt, wrong, ahead = _ids(N_PROMPT), _ids(N_BLOCK)[::-1], _ids(N_BLOCK)
    expected, cropped = _with_crop(folder, prompt, [], ahead), _with_crop(folder, prompt, wrong, ahead)
    model = load(name)
    try:
        model.forward(prompt)
        model.forward(wrong)
        model.rewind(len(wrong))
        logits_ahead, way = model.forward(ahead), model.caps.rewind
    finally:
        model.close()
    rows = [("transformers, Cache.crop", cropped), (f"specnb, {way}", logits_ahead)]
    return pd.DataFrame(
        {
            "way back": way,
            "max_logit_error": float(np.abs(logits - expected).max()),
            "spread_of_logits": float(expected.std()),
            "same_next_tokens": int((logits.argmax(1) == expected.argmax(1)).sum()),
            "of": len(ahead),
        }
        for way, logits in rows
    )


def _with_crop(folder: Path, prompt: list[int], wrong: list[int], ahead: list[int]) -> np.ndarray:
    """Logits of `ahead` behind `prompt`, after `wrong` was fed and cropped, through transformers alone."""
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    from specnb.lm.hf.files import quiet

    with quiet():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    cache = DynamicCache(config=model.config)

    def fed(ids: list[int], at: int) -> torch.Tensor:
        places = torch.arange(at, at + len(ids))[None]
        return model(torch.tensor([ids]), past_key_values=cache, position_ids=places, use_cache=True).logits[0]

    with quiet(), torch.inference_mode():
        fed(prompt, 0)
        cache.activate_past_recording()  # without it crop says what it cannot do; with it, it says nothing
        if wrong:
            fed(wrong, len(prompt))
            cache.crop(-len(wrong))
        return fed(ahead, len(prompt)).numpy()


def _ids(n: int) -> list[int]:
    return [(37 * i + 11) % 200 + 20 for i in range(n)]
