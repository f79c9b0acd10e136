"""Where the tests of pages find a Chromium: under its names, or by apt-get, as root or with sudo; else they say why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.browsers import find_chromium

Program = Callable[..., Path]


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """Make a program, a shell script, on a PATH that has nothing else."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))

    def make(name: str, script: str) -> Path:
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
        return tmp_path / name

    return make


def found() -> str:
    try:
        return find_chromium()
    except pytest.skip.Exception as skipped:
        pytest.fail(str(skipped))


@pytest.mark.parametrize("name", ["chromium", "chromium-browser", "google-chrome"])
def test_chromium_is_found_under_its_names(program: Program, name: str) -> None:
    chromium = program(name, "echo Chromium 150")
    assert found() == str(chromium)


def test_one_that_does_not_run_is_passed_over(program: Program) -> None:
    program("chromium", "echo it is a snap now >&2; exit 1")
    chrome = program("google-chrome", "echo Google Chrome 150")
    assert found() == str(chrome)


@pytest.mark.parametrize(("user", "program_before"), [(0, None), (1000, "sudo")])
def test_chromium_is_installed_once_the_lists_are_there(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user: int, program_before: str | None
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: user)
    there, lists, asked = tmp_path / "chromium", tmp_path / "lists", tmp_path / "asked"
    program(
        "apt-get",
        f'echo "$@" >> {asked}\n[ "$2" = update ] && : > {lists} && exit\n'
        f'[ -e {lists} ] || exit 100\nprintf "#!/bin/sh\\n" > {there}\n/bin/chmod 755 {there}',
    )
    if program_before is not None:
        program(program_before, '[ "$1" = -n ] && shift && exec "$@"')
    assert found() == str(there)
    assert [line.split()[1] for line in asked.read_text().splitlines()] == ["install", "update", "install"]


@pytest.mark.parametrize("user", [0, 1000])
def test_machine_that_can_have_none_skips_with_the_reason(
    program: Program, monkeypatch: pytest.MonkeyPatch, user: int
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: user)
    program("apt-get", "echo E: Unable to locate package chromium >&2; exit 100")
    with pytest.raises(pytest.skip.Exception, match="Unable to locate package" if user == 0 else "sudo"):
        find_chromium()
