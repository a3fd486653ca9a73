"""The planted faults, by what they change; `faults` lists them."""
