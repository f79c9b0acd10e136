"""The documentation site: the Markdown of this repository as it lies there, and the docstrings of what users import.

The source is the repository's root, so that links between documents, and from them to files, are the same here and on a
forge. Nothing is loaded from elsewhere, neither while it is built nor when it is read.
"""

from __future__ import annotations

import gc
import re
from pathlib import Path
from typing import Any

from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx

import zeroband

ROOT = Path(__file__).resolve().parents[2]
READ = {"deploy", "docs", "wheelhouse"}

gc.disable()  # a build keeps what it reads; looking through that for garbage took a third of its time

project = "zeroband"
author = "the authors of zeroband"
version = release = zeroband.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]

root_doc = "docs/index"
include_patterns = ["*.md", "docs/**.md", "deploy/README.md", "wheelhouse/*.md"]
exclude_patterns = [path.name for path in ROOT.iterdir() if path.is_dir() and path.name not in READ]

myst_heading_anchors = 4
myst_enable_extensions = ["attrs_inline"]
suppress_warnings = ["myst.strikethrough"]
nitpick_ignore_regex = [("py:.*", ".*")]  # types of torch and of Python: nothing to link to without a network

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_type_aliases = {name: name for name in ("OptimizerFactory", "Params", "SchedulerFactory")}
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88

html_theme = "furo"
html_title = f"zeroband {version}"
html_extra_path = ["index.html"]
html_static_path = html_css_files = ["site.css"]
html_show_copyright = html_show_sphinx = False
html_copy_source = False


def _restructured(text: str) -> str:
    """Plain English with names in single backticks, as docutils has to be told it."""
    parts = re.split(r"(`[^`\n]+`)", text)
    return "".join(f"`{part}`" if part[:1] == "`" else re.sub(r"([\\*_|])", r"\\\1", part) for part in parts)


def _as_written(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Have a docstring mean what it says: each topic (`name`: ..., Raises ..., Shapes: ...) begins a paragraph."""
    written: list[str] = []
    for line in lines:
        if re.match(r"`\w+`(, `\w+`)*: |(Raises|Shapes?|Source|Error|Returns)\b", line) and written and written[-1]:
            written.append("")
        is_code = line.startswith("    ")
        if is_code and written and not written[-1] and (len(written) < 2 or not written[-2].startswith("    ")):
            written += ["::", ""]
        written.append(line if is_code else _restructured(line))
    lines[:] = written


def _aliases_by_name(app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: Any, returns: Any) -> Any:
    """Write aliases of types as they are called, where autodoc writes what it has in their place."""
    return signature and re.sub(r"TypeAliasForwardRef\('(\w+)'\)", r"\1", signature), returns


def setup(app: Sphinx) -> None:
    """Docstrings are plain text; figures in Mermaid stay text, since what draws them would come from elsewhere."""
    app.connect("autodoc-process-docstring", _as_written)
    app.connect("autodoc-process-signature", _aliases_by_name)
    app.add_lexer("mermaid", TextLexer)
