"""What the examples' `# zeroband` marks: the loop without it, and how many lines it is.

`# zeroband` at the end of a statement's first line marks the whole statement, at the end of another line that line. A
line `# zeroband, before: CODE` says what was in the place of the line below it.
"""

from __future__ import annotations

import ast

ADDED, CHANGED = "# zeroband", "# zeroband, before: "


def plain_form(source: str) -> tuple[str, int]:
    """The loop without what is marked, and the number of lines that were added to it or changed in it."""
    lines = source.splitlines()
    ends = {
        node.lineno: node.end_lineno or node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.stmt)
    }
    plain: list[str] = []
    marked, at = 0, 0
    while at < len(lines):
        line = lines[at]
        indent, mark, before = line.partition(CHANGED)
        if mark and not indent.strip():
            plain.append(indent + before)
            marked, at = marked + 1, at + 2
        elif line.endswith("  " + ADDED):
            end = ends.get(at + 1, at + 1)
            marked += sum(bool(text.strip()) for text in lines[at:end])
            at = end
        else:
            plain.append(line)
            at += 1
    return "\n".join(plain) + "\n", marked
