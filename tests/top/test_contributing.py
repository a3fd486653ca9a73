"""What developers read is true: the picture of rooms is the contract, files and lines of make exist, one page."""

import re
import tomllib
from itertools import chain

from packaging.requirements import Requirement

from specnb.io import project_dir

ROOT = project_dir()
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_picture_of_the_rooms_is_the_import_contract():
    (doors,) = (c for c in PROJECT["tool"]["importlinter"]["contracts"] if c["name"].startswith("doors"))
    picture = " --> ".join(doors["layers"]).replace("specnb.", "").replace("|", "&")
    assert picture in PAGE, f"the line of the picture has to be: {picture}"


def test_the_page_is_one_and_names_what_exists():
    links = {link for link in re.findall(r"\]\(([^)#:]+)\)", PAGE) if not (ROOT / link).exists()}
    lines = set(re.findall(r"`?make ([a-z]+)", PAGE)) - set(
        re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M)
    )
    assert (links, lines) == (set(), set()) and len(PAGE.splitlines()) <= 100


def test_requirements_are_pinned_within_the_ranges_of_the_project_and_those_of_developers_apart():
    files = [(ROOT / name).read_text(encoding="utf-8") for name in ("requirements.txt", "requirements-dev.txt")]
    users, developers = (dict(re.findall(r"^([\w.-]+)(?:\[\w+\])?==(\S+)", text, re.MULTILINE)) for text in files)
    extras = PROJECT["project"]["optional-dependencies"]
    groups = [Requirement(text) for text in chain(PROJECT["project"]["dependencies"], *extras.values())]
    assert developers.keys() == {Requirement(text).name for text in extras["dev"]}
    assert users.keys() | developers.keys() == {each.name for each in groups}
    assert all(each.specifier.contains((users | developers)[each.name]) for each in groups)
