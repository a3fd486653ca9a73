"""Documents for developers: diagram equals import contract; linked files, make targets exist."""

import re
import tomllib

from specnb.io import project_dir

ROOT = project_dir()
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_diagram_of_the_rooms_equals_the_import_contract():
    (doors,) = (
        c for c in PROJECT["tool"]["importlinter"]["contracts"] if c["name"].startswith("doors")
    )
    picture = " --> ".join(doors["layers"]).replace("specnb.", "").replace("|", "&")
    assert picture in PAGE, f"expected this line in the diagram: {picture}"


def test_contributing_is_one_page_and_its_links_and_make_targets_exist():
    links = {link for link in re.findall(r"\]\(([^)#:]+)\)", PAGE) if not (ROOT / link).exists()}
    lines = set(re.findall(r"`?make ([a-z]+)", PAGE)) - set(
        re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M)
    )
    assert (links, lines) == (set(), set()) and len(PAGE.splitlines()) <= 100
