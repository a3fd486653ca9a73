"""Who computes logits: models opened by name, in torch (`hf`) or llama.cpp (`gguf`), their vocabulary and their state.

It knows nothing of drafting: a model is fed tokens, gives rows of logits, and goes back.
"""
