"""The committed notebooks are clean."""

import re

import pytest
from nbval.plugin import get_sanitize_patterns

from specnb.io import project_dir
from tests.book import hygiene

FOLDER = project_dir() / "notebooks"
COMMITTED = sorted(FOLDER.glob("[0-9]*.ipynb"))


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.name)
def test_committed_notebooks_are_clean(path):
    assert hygiene.problems(path) == []


def test_sanitize_rules_mask_the_machine_and_nothing_else():
    masked = r"in '/tmp/pytest-1/x', C:\Users\x, 123e4567-e89b-12d3-a456-426614174000, 1.25 s, K 4, 1.25, https://a.org/tmp/x"
    masked += ', </div><p class="quick">x</p>'
    for pattern, replacement in get_sanitize_patterns((FOLDER / "sanitize.cfg").read_text(encoding="utf-8")):
        masked = re.sub(pattern, replacement, masked)
    assert masked == "in 'PATH', PATH, UUID, SECONDS, K 4, 1.25, https://a.org/tmp/x, </div>"
