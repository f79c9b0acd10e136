"""Gather a corpus that every clone can make again: the text files of pinned packages, checked against a list of hashes.

.venv/bin/python scripts/corpus.py [--update] [--out FILE]

After ./scripts/setup.sh --dev. Takes each package whose wheel is the same for every platform and which
requirements.lock pins once, so that any clone has the same files: sources, stubs, Markdown and reStructuredText in
UTF-8, in the order of their names, without those of which half stands in others already. Writes runs/corpus.parquet,
one document a row, after checking each package's documents against experiments/corpus.txt; --update writes that list
anew.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "experiments" / "corpus.txt"
SUFFIXES = (".py", ".pyi", ".md", ".rst", ".h", ".hpp")
SHORTEST = 256
"""Bytes below which a file is left out: most of these are empty, or import others."""
SMALLEST = 500_000
"""Bytes of text below which a package is left out, to keep the list short."""
HEAD = "# Package, version, documents, bytes, sha256 of the documents' sha256. Written by scripts/corpus.py --update.\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true", help=f"write {LIST.relative_to(ROOT)} anew")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "corpus.parquet", help="the file to write")
    options = parser.parse_args()
    update, out = options.update, options.out
    listed = {} if update else read_list(LIST.read_text(encoding="utf-8"))
    found = dict(packages(pins(), None if update else {name.split()[0] for name in listed}))
    lines = {name: line_of(name, texts) for name, texts in found.items()}
    if update:
        LIST.write_text(HEAD + "".join(f"{line}\n" for line in lines.values()), encoding="utf-8")
    elif wrong := differences(listed, lines):
        sys.exit("\n".join(["this environment has another corpus; run ./scripts/setup.sh --dev:", *wrong]))
    documents = [text for texts in found.values() for text in texts]
    arrow: Any = importlib.import_module("pyarrow")  # has no types
    parquet: Any = importlib.import_module("pyarrow.parquet")
    out.parent.mkdir(parents=True, exist_ok=True)
    draft = out.with_suffix(".part")
    column = arrow.array(documents, arrow.large_string())
    parquet.write_table(arrow.table({"text": column}), draft, compression="zstd")
    draft.replace(out)
    megabytes = sum(map(len, documents)) / 1e6
    print(f"{out}: {len(documents)} documents, {megabytes:.1f} MB, of {len(found)} packages")


def pins() -> Mapping[str, str]:
    """Return the versions of the packages that requirements.lock pins once, whatever the platform."""
    found: dict[str, set[str]] = {}
    text = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    for name, version in re.findall(r"^([a-z0-9][a-z0-9._-]*)==([^ ;\\]+)", text, re.MULTILINE):
        found.setdefault(name, set()).add(version)
    return {name: version for name, (version, *others) in found.items() if not others}


def packages(pinned: Mapping[str, str], only: Set[str] | None) -> Iterator[tuple[str, Sequence[bytes]]]:
    """Yield the name and version of each package that every clone has alike, with its documents.

    `only`: the packages to take; None: all that hold enough text.
    """
    seen = set[bytes]()
    named = {re.sub(r"[-_.]+", "-", one.metadata["Name"]).lower(): one for one in distributions()}
    for name, one in sorted(named.items()):
        if pinned.get(name) != one.version or "py3-none-any" not in (one.read_text("WHEEL") or ""):
            continue
        files = [text for text in map(text_of, files_of(one)) if text]
        if sum(map(len, files)) >= SMALLEST if only is None else name in only:
            yield f"{name} {one.version}", list(without_copies(files, seen))


def files_of(package: Distribution) -> Sequence[Path]:
    """Return the files of a package that may be text, in the order of their names."""
    names = sorted(str(file) for file in package.files or () if str(file).endswith(SUFFIXES) and ".." not in str(file))
    return [Path(str(package.locate_file(name))) for name in names]


def text_of(file: Path) -> bytes:
    """Return what a file holds; nothing where it is short, or no text in UTF-8."""
    content = file.read_bytes() if file.is_file() else b""
    try:
        is_text = "\0" not in content.decode()
    except UnicodeDecodeError:
        is_text = False
    return content if is_text and len(content) >= SHORTEST else b""


def without_copies(texts: Iterable[bytes], seen: set[bytes]) -> Iterator[bytes]:
    """Yield the texts of which at least half, in bytes, are lines that were not seen before."""
    for text in texts:
        lines = text.splitlines()
        if 2 * sum(len(line) for line in lines if line not in seen) >= sum(map(len, lines)):
            yield text
        seen.update(lines)


def line_of(name: str, texts: Sequence[bytes]) -> str:
    """The line of the list about a package."""
    whole = hashlib.sha256(b"".join(hashlib.sha256(text).digest() for text in texts)).hexdigest()
    return f"{name} {len(texts)} {sum(map(len, texts))} {whole}"


def read_list(text: str) -> Mapping[str, str]:
    """The lines of the list by package and version."""
    return {" ".join(line.split()[:2]): line for line in text.splitlines() if not line.startswith("#")}


def differences(listed: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """What is missing or other than listed."""
    return [
        f"{name}: {'other files' if name in found else 'not installed'}"
        for name, line in listed.items()
        if found.get(name) != line
    ]


if __name__ == "__main__":
    main()
