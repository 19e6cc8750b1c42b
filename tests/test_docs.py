"""The documentation is true of the code: its Python compiles, its links lead somewhere, its options are the states'."""

import inspect
import re
from pathlib import Path
from typing import get_type_hints

import pytest

import commhooks

DOCS = Path(__file__).parents[1] / "docs"
PAGES = sorted(DOCS.glob("*.md"))
STATES = {
    "allreduce": commhooks.HookState,
    "cast": commhooks.CastState,
    "powersgd": commhooks.PowerSGDState,
    "topk": commhooks.TopKState,
    "randomk": commhooks.RandomKState,
}
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


@pages
def test_python_compiles(page):
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    for block in blocks:
        compile(block, page.name, "exec")


@pages
def test_names_of_the_package_exist(page):
    """Catches: a page that calls what was renamed."""
    for name in re.findall(r"\bcommhooks\.(\w+)\(", page.read_text()):
        assert name in commhooks.__all__, f"commhooks.{name}"


@pages
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if not target.startswith("https://"):
            file, _, anchor = target.partition("#")
            linked = (page.parent / file).resolve() if file else page
            assert linked.is_file(), target
            assert not anchor or anchor in anchors(linked), target


def anchors(page):
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


def defaults(state):
    """The options of a state that are spelled out in its signature."""
    parameters = list(inspect.signature(state).parameters.values())
    return {x.name: x.default for x in parameters if x.kind is not inspect.Parameter.VAR_KEYWORD}


def inherited(state):
    """Those that it takes as keywords and hands on."""
    keywords = [x for x in inspect.signature(state).parameters.values() if x.kind is inspect.Parameter.VAR_KEYWORD]
    return set(get_type_hints(keywords[0].annotation.__args__[0])) if keywords else set()


@pytest.mark.parametrize("name", STATES)
def test_options_are_those_of_the_state(name):
    """Catches: an option that a page forgot, invented, or gives another default."""
    state, text = STATES[name], (DOCS / f"{name}.md").read_text()
    section = text.split("\n## Options of ")[1].split("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", section, re.MULTILINE))
    common = re.search(r"those of every hook\].*?(?=\n\n)", section, re.DOTALL)
    listed = set(re.findall(r"`(\w+)`", common.group())) if common else set()
    own = defaults(state)
    shown = {option: repr(default) for option, default in own.items() if option in rows or option != "process_group"}
    assert rows == shown
    assert rows.keys() | listed == own.keys() | inherited(state)
