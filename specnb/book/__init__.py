"""The output of notebooks: tables, figures, the explorer, publishing, headless runs.

It depends on records, not on how they were measured.
"""

import sys

# jsonschema, which nbformat and plotly import, builds a grammar of IRIs if it can: two seconds
sys.modules.setdefault("rfc3987_syntax", None)  # pyright: ignore[reportArgumentType]
