"""What the acceptance of a generation says of its cause, without tensors: what `triage` is made of."""
