"""What a notebook shows: tables, figures, the explorer, publishing, headless runs.

It knows records, not how they were measured.
"""

import pandas as pd

pd.set_option("display.max_colwidth", None)  # a check is a sentence, and is shown whole
