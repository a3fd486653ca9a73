"""The lab judged on planted faults and harmless changes: what `score` runs and writes."""
