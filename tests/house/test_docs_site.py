"""The documentation site: built without a warning, whole, and of its own files alone."""

from __future__ import annotations

import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

import zeroband
from zeroband import errors

pytestmark = pytest.mark.slow

LOADS = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "object": "data"}
IS_ELSEWHERE = re.compile(r"\s*(https?:)?//", re.IGNORECASE)


class _Page(HTMLParser):
    """What a page loads and what it can be pointed at."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.ids: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids.add(given.get("id", ""))
        if tag == "link" and given.get("rel") not in {"next", "prev", "index", "search", "canonical"}:
            self.loads.append(given.get("href", ""))
        elif tag in LOADS and given.get(LOADS[tag]):
            self.loads.append(given[LOADS[tag]])


def loads_of_style(text: str) -> list[str]:
    """What a style sheet loads."""
    return re.findall(r"""(?:url\(|@import)\s*["']?([^"')\s;]+)""", text)


@pytest.fixture(scope="module")
def site(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every warning fails the build: a link that leads nowhere, a page that no list of contents names."""
    folder = tmp_path_factory.mktemp("docs") / "site"
    made = subprocess.run([root / "scripts" / "docs.sh", folder], capture_output=True, text=True, timeout=120)
    assert made.returncode == 0, made.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, _Page]:
    found: dict[str, _Page] = {}
    for path in site.rglob("*.html"):
        page = found[path.relative_to(site).as_posix()] = _Page()
        page.feed(path.read_text(encoding="utf-8"))
    return found


def test_loads_from_elsewhere_are_found_in_what_has_them() -> None:
    page = _Page()
    page.feed('<script src="//cdn/x.js"></script><link rel="stylesheet" href="https://cdn/x.css"><a href="https://x">')
    loads = page.loads + loads_of_style("@import 'https://cdn/y.css'; a { background: url(http://cdn/z.png) }")
    assert len(loads) == 4 and all(map(IS_ELSEWHERE.match, loads))


def test_site_has_a_page_of_each_document(root: Path, pages: dict[str, _Page]) -> None:
    documents = [*root.glob("*.md"), *(root / "docs").rglob("*.md")]
    assert len(documents) > 25
    expected = {path.relative_to(root).with_suffix(".html").as_posix() for path in documents} | {"index.html"}
    assert sorted(expected - pages.keys()) == []


def test_site_loads_nothing_from_elsewhere(site: Path, pages: dict[str, _Page]) -> None:
    loads = {(name, load) for name, page in pages.items() for load in page.loads}
    for path in site.rglob("*.css"):
        loads |= {(path.name, load) for load in loads_of_style(path.read_text(encoding="utf-8"))}
    assert len(loads) > 100
    assert sorted(load for load in loads if IS_ELSEWHERE.match(load[1])) == []


def test_links_of_alerts_find_their_entries(root: Path, pages: dict[str, _Page]) -> None:
    alerts = (root / "deploy" / "observe" / "alerts.yml").read_text(encoding="utf-8")
    anchors = re.findall(r'runbook_url: ".*#(\w+)"', alerts)
    assert len(anchors) >= 14
    assert [anchor for anchor in anchors if anchor not in pages["docs/troubleshooting.html"].ids] == []


def test_reference_has_what_users_import_and_every_error(pages: dict[str, _Page]) -> None:
    tree = [name for name, kind in vars(errors).items() if isinstance(kind, type)]
    named = [f"zeroband.{name}" for name in zeroband.__all__] + [f"zeroband.errors.{name}" for name in tree]
    assert len(named) > 15
    assert [name for name in named if name not in pages["docs/api.html"].ids] == []
