"""Parts of a document as HTML text. Whatever is shown goes through `text`. Pure, but for reading the style once."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files

from zeroband.config.problems import MASK

NOT_MEASURED = "not measured"

_USER_OF_URL = re.compile(r"(?<=://)[^/\s@'\"]*@")
_SECRET_OF_QUERY = re.compile(
    r"(?i)([?&][^=&\s]*(?:token|signature|secret|password|credential|key|sig)[^=&\s]*=)[^&\s'\"]+"
)
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


def text(value: object) -> str:
    """Anything as text of a document: escaped, without what URLs carry of users, passwords and signatures.

    Control characters, which HTML does not have, become U+FFFD.
    """
    shown = _SECRET_OF_QUERY.sub(rf"\g<1>{MASK}", _USER_OF_URL.sub(f"{MASK}@", str(value)))
    return escape(re.sub(r"[^\t\n\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", shown))


def document(title: str, body: Sequence[str]) -> str:
    """A whole document. `body`: HTML; empty parts are left out."""
    style = files("zeroband.tools.document").joinpath("document.css").read_text(encoding="utf-8")
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{text(title)}</title><style>\n{style}</style>"
    )
    parts = "\n".join(part for part in body if part)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body><main>\n{parts}\n</main></body></html>\n'


def section(title: str, *parts: str, about: str = "", anchor: str = "") -> str:
    """A titled part; nothing where it has no content. `about`: a sentence below the title."""
    content = "\n".join(part for part in parts if part)
    if not content:
        return ""
    words = f'<p class="about">{text(about)}</p>' if about else ""
    name = f' id="{text(anchor)}"' if anchor else ""
    return f"<section{name}><h2>{text(title)}</h2>{words}\n{content}\n</section>"


def card(title: str, *parts: str) -> str:
    """A framed part, with a small title; nothing where it has no content."""
    content = "\n".join(part for part in parts if part)
    return f'<div class="card"><h3>{text(title)}</h3>{content}</div>' if content else ""


def side_by_side(*parts: str) -> str:
    """Parts beside one another, where the page is wide enough."""
    shown = [part for part in parts if part]
    return f'<div class="beside">{"".join(shown)}</div>' if shown else ""


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    units: Mapping[str, str] | None = None,
    meanings: Mapping[str, str] | None = None,
    marked: Sequence[int] = (),
) -> str:
    """A table of plain texts; nothing without rows.

    `units`, `meanings`: of columns, by their names. `marked`: numbers of rows that stand out.
    """
    if not rows:
        return ""
    columns = ""
    for name in header:
        unit = f' <span class="unit">{text(units[name])}</span>' if units and units.get(name) else ""
        meaning = f' title="{text(meanings[name])}"' if meanings and name in meanings else ""
        columns += f'<th scope="col"{meaning}>{text(name)}{unit}</th>'
    lines = "\n".join(
        f"<tr{' class=marked' if number in marked else ''}>{''.join(f'<td>{text(cell)}</td>' for cell in row)}</tr>"
        for number, row in enumerate(rows)
    )
    return f'<div class="scroll"><table><thead><tr>{columns}</tr></thead><tbody>\n{lines}\n</tbody></table></div>'


def bullets(lines: Sequence[str]) -> str:
    """A list of plain texts; nothing without any."""
    return f"<ul>{''.join(f'<li>{text(line)}</li>' for line in lines)}</ul>" if lines else ""


def definitions(pairs: Sequence[tuple[str, str]]) -> str:
    """Names and what is said of them."""
    shown = "".join(f"<dt>{text(name)}</dt><dd>{text(value)}</dd>" for name, value in pairs)
    return f"<dl>{shown}</dl>" if pairs else ""


def figures(items: Sequence[tuple[str, str, str]]) -> str:
    """Large figures: name, value, and a small line below it."""
    shown = "".join(
        f"<div><dt>{text(name)}</dt><dd>{text(value)}<small>{text(beside)}</small></dd></div>"
        for name, value, beside in items
    )
    return f'<dl class="figures">{shown}</dl>'


def folded(title: str, *parts: str) -> str:
    """A part that opens on demand; nothing where it has no content."""
    content = "\n".join(part for part in parts if part)
    return f"<details><summary>{text(title)}</summary>{content}</details>" if content else ""
