"""`scripts/setup.sh` on machines that lack something, with a uv and a Python that only say what they were asked."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

UV = """\
case "$1 $2" in
    "--version "*) echo "uv 99.0" ;;
    "cache dir") echo "${UV_CACHE_DIR:-$HOME/.cache/uv}" ;;
    "lock "*) shift 4; echo "lock $*" ;;
    "sync "*) echo "cache ${UV_CACHE_DIR:-its own}" ;;
esac
"""

Setup = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def clone(root: Path, tmp_path: Path) -> Path:
    """What the script needs of the repository, with an environment that is there already."""
    for name in ("scripts/setup.sh", "scripts/check_lock.py", "pyproject.toml", "requirements.lock"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(root / name, tmp_path / name)
    (tmp_path / "home").mkdir()
    put_command(tmp_path / "bin" / "uv", UV)
    put_command(tmp_path / ".venv" / "bin" / "python", """case "$2" in *print*info*) echo 3.12 ;; esac""")
    return tmp_path


def put_command(path: Path, body: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    path.chmod(0o755)


@pytest.fixture
def torch_version(root: Path) -> str:
    uv = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["uv"]
    return next(pin.partition("==")[2] for pin in uv["constraint-dependencies"] if pin.startswith("torch=="))


@pytest.fixture
def run_setup(clone: Path) -> Setup:
    def run(*arguments: str, pip: str, home: str | None = None) -> subprocess.CompletedProcess[str]:
        """`pip`: what `python3 -m pip` does."""
        put_command(clone / "bin" / "python3", f'if [ "$2" = pip ]; then {pip}; fi')
        env = {"PATH": f"{clone / 'bin'}:{os.environ['PATH']}", "HOME": home or str(clone / "home")}
        return subprocess.run(
            [str(clone / "scripts" / "setup.sh"), *arguments],
            env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60,
        )  # fmt: skip

    return run


def test_cache_of_uv_is_its_own_where_that_can_be_written(run_setup: Setup) -> None:
    done = run_setup("--torch", "cuda", pip="true")
    assert (done.returncode, done.stdout) == (0, "lock \ncache its own\n"), done.stderr


def test_cache_of_uv_is_in_the_clone_where_its_own_cannot_be_written(run_setup: Setup, clone: Path) -> None:
    done = run_setup("--torch", "cuda", pip="true", home="/dev/null")
    assert (done.returncode, done.stdout) == (0, f"lock \ncache {clone}/.uv-cache\n"), done.stderr
    assert "cannot write to uv's cache '/dev/null/.cache/uv'" in done.stderr
    assert f"export UV_CACHE_DIR={clone}/.uv-cache" in done.stderr


NOT_OFFERED = "echo WARNING: old; echo ERROR: none of it '(from versions: 1, 2)'; echo ERROR: no match; exit 1"
NOT_REACHED = "echo WARNING: after connection broken by a cut cable; echo ERROR: no match; exit 1"


@pytest.mark.parametrize(
    ("pip", "says"),
    [
        ("exit 1", "python3 has no pip to ask"),
        (f"[ $3 != download ] || {{ {NOT_OFFERED}; }} >&2", "setup: pip: ERROR: none of it\n"),
        (f"[ $3 != download ] || {{ {NOT_REACHED}; }} >&2", "setup: pip: WARNING: after connection broken by a cut"),
    ],
    ids=["no pip", "not offered", "not reached"],
)
def test_why_no_cpu_only_torch_came_is_said(run_setup: Setup, pip: str, says: str) -> None:
    done = run_setup("--torch", "cpu", pip=pip)
    assert done.returncode == 1 and says in done.stderr
    assert "put its wheel into wheelhouse/" in done.stderr


def test_downloads_of_pip_are_no_errors(run_setup: Setup) -> None:
    done = run_setup("--torch", "cpu", pip="echo Saved the wheel; echo WARNING: old >&2")
    assert done.returncode == 0 and "Saved the wheel" in done.stderr and "old" not in done.stderr


def test_pip_is_not_needed_beside_uv(run_setup: Setup) -> None:
    done = run_setup("--torch", "cuda", pip="exit 1")
    assert (done.returncode, done.stdout) == (0, "lock \ncache its own\n"), done.stderr


@pytest.mark.parametrize("locked", ["", 'registry = "wheelhouse"'])
def test_cpu_only_torch_in_the_wheelhouse_is_locked_for_this_machine(
    run_setup: Setup, clone: Path, torch_version: str, locked: str
) -> None:
    """Uv prefers the registry's, which has wheels for more machines, unless an older lock has this one."""
    (clone / "wheelhouse").mkdir()
    (clone / "wheelhouse" / f"torch-{torch_version}+cpu-cp312-cp312-any.whl").touch()
    (clone / "uv.lock").write_text(locked, encoding="utf-8")
    done = run_setup("--torch", "cpu", pip="true")
    here = f"sys_platform == 'linux' and platform_machine == '{platform.machine()}' and python_version == '3.12'"
    wanted = "" if locked else f"--upgrade-package torch=={torch_version}+cpu; {here}"
    assert (done.returncode, done.stdout) == (0, f"lock {wanted}\ncache its own\n"), done.stderr


def test_wheel_for_another_python_is_not_locked(run_setup: Setup, clone: Path, torch_version: str) -> None:
    (clone / "wheelhouse").mkdir()
    (clone / "wheelhouse" / f"torch-{torch_version}+cpu-cp311-cp311-any.whl").touch()
    done = run_setup("--torch", "cpu", pip="true")
    assert (done.returncode, done.stdout) == (0, "lock \ncache its own\n"), done.stderr
