"""Models that compute logits, opened by name, in torch (`hf`) or llama.cpp (`gguf`).

This room knows nothing of drafting: a model takes tokens, returns rows of logits, and rolls back.
"""
