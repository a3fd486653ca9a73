"""What traces are made of and stored in: names, steps, digests, sketches, parameters at use."""
