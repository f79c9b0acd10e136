"""What a process puts right at its start: closed streams, readers that go away, a user without a home."""

from __future__ import annotations

import gc
import io
import os
import pwd
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from zeroband.node.process_start import LenientStream, ensure_home, load_uncollected


def run(probe: str, redirections: str) -> int:
    """Exit code of a Python program that a shell starts with its streams as told."""
    return subprocess.run(["bash", "-c", f'exec "$0" -c "$1" {redirections}', sys.executable, probe]).returncode


@pytest.mark.parametrize("redirections", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_no_file_gets_the_number_of_a_closed_stream(redirections: str) -> None:
    probe = (
        "import os, sys; from zeroband.node.process_start import open_standard_streams as keep; keep(); "
        "number = os.open('/', os.O_RDONLY); print(end='', flush=True); sys.stderr.write(''); sys.exit(number > 2)"
    )
    assert run(probe, redirections) == 1


@pytest.mark.parametrize("redirections", ["> /dev/full", "2> /dev/full", "> >(true)", "> >(exec >&- <&-)"])
def test_work_goes_on_where_nobody_can_be_told(redirections: str) -> None:
    """The exit code is the program's own, not the 120 of a Python that cannot flush at its end."""
    probe = (
        "import sys; from zeroband.node.process_start import ignore_closed_streams as outlast; outlast(stdout=True); "
        "[print('x' * 9999, file=to, flush=True) for to in (sys.stdout, sys.stderr) * 30]; print('last'); sys.exit(7)"
    )
    assert run(probe, f"2> /dev/null {redirections}") == 7


@pytest.mark.parametrize(("first", "code"), [("pass", -signal.SIGABRT), ("load_unwinder()", 0)])
def test_thread_may_end_without_a_free_descriptor(first: str, code: int) -> None:
    probe = (
        "import ctypes, os, resource, threading; from zeroband.node.process_start import load_unwinder; "
        f"{first}; end = ctypes.CDLL(None).pthread_exit; resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3)); "
        "threading.Thread(target=lambda: end(None), daemon=True).start(); time = __import__('time'); "
        "time.sleep(0.3); os._exit(0)"
    )
    assert subprocess.run([sys.executable, "-c", probe], stderr=subprocess.DEVNULL).returncode == code


def test_letters_that_a_terminal_lacks_are_escaped() -> None:
    written = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    LenientStream(written).write("Zürich\n")
    written.seek(0)
    assert written.read() == "Z\\xfcrich\n"


def unknown(user: int) -> pwd.struct_passwd:
    raise KeyError(user)


def test_user_without_a_home_gets_one_that_nobody_else_can_write_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    environ: dict[str, str] = {}
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    said = ensure_home(environ)
    home = Path(environ["HOME"])
    assert home.parent == tmp_path and home.stat().st_mode & 0o777 == 0o700
    assert environ["USER"] == str(os.getuid()) and str(home) in said
    assert ensure_home(environ) == "" and environ["HOME"] == str(home)
    home.chmod(0o777)
    again: dict[str, str] = {}
    ensure_home(again)
    assert again["HOME"] != str(home)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    nowhere: dict[str, str] = {}
    ensure_home(nowhere)
    assert nowhere["HOME"] == "/nonexistent"


def test_home_of_a_known_user_and_one_that_is_set_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    environ: dict[str, str] = {}
    assert ensure_home(environ) == "" and environ == {}
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    environ = {"HOME": "/data", "USER": "me"}
    assert ensure_home(environ) == "" and environ == {"HOME": "/data", "USER": "me"}


def test_import_finds_the_collector_off_and_leaves_it_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "records_collector.py").write_text("import gc\nWAS_ENABLED = gc.isenabled()\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert load_uncollected("records_collector").WAS_ENABLED is False
    assert gc.isenabled()
    with pytest.raises(ModuleNotFoundError):
        load_uncollected("no_such_module")
    assert gc.isenabled()
    gc.disable()
    try:
        load_uncollected("json")
        assert not gc.isenabled()
    finally:
        gc.enable()
