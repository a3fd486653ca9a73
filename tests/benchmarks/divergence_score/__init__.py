"""Score the lab, and common manual methods, on planted faults and harmless changes."""
