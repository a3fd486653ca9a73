"""What a notebook shows: tables, figures, the explorer, publishing, headless runs.

It knows records, not how they were measured.
"""
