"""The lab judged on planted faults and harmless changes, beside the tools that people use instead."""
