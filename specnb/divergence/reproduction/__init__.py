"""The smallest script that shows a divergence again: what `repro` is made of."""
