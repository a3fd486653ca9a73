"""The site: every page there, every link and picture of it leads somewhere, nothing comes from elsewhere."""

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

from specnb.batch.site import write_site
from specnb.book.notebook import notebooks
from specnb.errors import InputError
from specnb.io import project_dir, write_atomic
from specnb.store import save
from tests.batch.test_results import record


class Links(HTMLParser):
    """The targets of links and sources of a page, and its ids. A source is never elsewhere."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.targets, self.ids = [], set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = dict(attrs)
        assert not (known.get("src") or "").startswith("http"), known
        self.targets += [known[name] for name in ("href", "src") if known.get(name) and tag != "link"]
        self.ids |= {known["id"]} if known.get("id") else set()


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    save(record(2), folder / "results")
    write_site(folder / "site", project_dir() / "figures", folder / "results")
    return folder / "site"


def test_every_link_and_picture_is_there_and_none_is_from_elsewhere(site):
    pages = [*site.glob("*.html"), *site.glob("notebooks/*.html"), *site.glob("figures/0*.html")]
    assert {page.stem for page in pages} >= {path.stem for path in notebooks()} | {"index", "figures", "results"}
    for page in pages:
        for target in Links(page).targets:
            path, _, anchor = target.partition("#")
            if target.startswith(("data:", "https://")):
                continue  # a picture, or what a text cites
            there = (page.parent / path).resolve() if path else page
            assert there.is_file() and site in there.parents, (page.name, target)
            assert not anchor or path or anchor in Links(there).ids, (page.name, target)


@pytest.mark.parametrize("outcome", [{}, {"status": "completed", "notebook": 7}], ids=str)
def test_a_damaged_outcome_is_named(outcome, tmp_path):
    write_atomic(tmp_path / "results" / "outcome.json", json.dumps(outcome).encode())
    with pytest.raises(InputError, match=r"outcome\.json"):
        write_site(tmp_path / "site", project_dir() / "figures", tmp_path / "results")


def test_the_table_of_results_has_every_run(site):
    assert record(2).run_id in (site / "results.html").read_text()
