"""Check whether a draft model fits a target, from tokenizers and configs, without weights."""
