"""Score the lab, and the tools that people use instead, on planted faults and harmless changes."""
