"""The page's files: as served by the board, and bundled into one HTML file with its data."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from html import escape
from importlib.util import find_spec
from pathlib import Path

from zeroband.tools.board.document import encode

STATIC = Path(__file__).parent / "static"

_EXPORTED = re.compile(r"^export (?:(?:async )?function|const|class) (\w+)", re.MULTILINE)
_IMPORTED = re.compile(r'^import (?:\* as )?(\w+|\{[^}]+\}) from "\./(\w+)\.js";$', re.MULTILINE)
_PAGE_SCRIPTS = re.compile(r'<script src="/static/(\w+)\.js"[^>]*></script>\n?')
_STYLE = re.compile(r'<link rel="stylesheet" href="/static/([\w.]+)">')


def static_files(static: Path = STATIC) -> dict[str, Path]:
    """Return the page's files by name, uPlot's included."""
    files = {path.name: path for path in sorted(static.glob("*")) if path.is_file()}
    found = find_spec("youplot")
    for folder in [] if found is None else found.submodule_search_locations or []:
        vendor = Path(folder) / "vendor"
        for name, file in (("uplot.js", "uplot.iife.min.js"), ("uplot.css", "uplot.min.css")):
            if (vendor / file).is_file():
                files[name] = vendor / file
    return files


def saved_page(title: str, data: Mapping[str, object]) -> str:
    """Return the page as one HTML file that shows `data` without network access.

    `data`: `saved` in `static/board.js`, embedded as JSON. A content security policy allows only the two scripts of the
    page, by their hashes.
    """
    texts = {name: path.read_text(encoding="utf-8") for name, path in static_files().items()}
    icon = f"data:image/svg+xml;base64,{base64.b64encode(texts['icon.svg'].encode()).decode()}"
    scripts = [texts["uplot.js"], _bundle(texts, "board")]
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(one.encode()).digest()).decode()}'" for one in scripts)
    policy = f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}form-action \'none\'">\n'
    json = encode(data).decode().replace("<", "\\u003c")  # text of a run must not close the element
    inside = f'<script type="application/json" id="saved">{json}</script>\n'
    inside += "".join(f"<script>{one}</script>\n" for one in scripts)
    page = _PAGE_SCRIPTS.sub("", texts["index.html"])
    page = _STYLE.sub(lambda link: f"<style>{texts[link[1]]}</style>", page)
    page = page.replace("/static/icon.svg", icon).replace("<title>zeroband</title>", f"<title>{escape(title)}</title>")
    return page.replace("<head>\n", f"<head>\n{head}", 1).replace("</body>", f"{inside}</body>", 1)


def _bundle(texts: Mapping[str, str], name: str) -> str:
    """Bundle a module and its imports into one script, as files opened from disk cannot import others."""
    parts: dict[str, str] = {}

    def add(module: str) -> None:
        source = texts[f"{module}.js"]
        for imported in _IMPORTED.finditer(source):
            if imported[2] not in parts:
                add(imported[2])
        exported = ", ".join(_EXPORTED.findall(source))
        body = re.sub(r"^export ", "", _IMPORTED.sub(r"const \1 = module_\2;", source), flags=re.MULTILINE)
        parts[module] = f"const module_{module} = (() => {{\n{body}\nreturn {{ {exported} }};\n}})();"

    add(name)
    return "\n".join(parts.values())
