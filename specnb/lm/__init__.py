"""Models that compute logits, opened by name, in torch (`hf`) or llama.cpp (`gguf`).

Nothing here depends on drafting: a model takes tokens, returns rows of logits, and rolls back.
"""
