"""Chapters, the parts that one notebook alone uses: its experiment, tables and figures, in the order of the notebook.

`k_sweep`, the explorer and `lanes` (notebooks 00, 01, 09) are shared and lie in `measure` and `book`. `delta_rule` and
`state_memory` belong to notebook 04, next to `rollback`. Only notebooks and tests import a chapter.
"""
