"""`scripts/setup.sh` on machines that lack something, with a uv and a Python that only say what they were asked.

`scripts/test.sh` and the matrix of `.github/workflows/ci.yml`, which hand it releases of torch and Python.
"""

from __future__ import annotations

import io
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import threading
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from tests.browsers import NAMES

UV = """\
case "$*" in
    --version) echo "uv 99.0" ;;
    "cache dir") echo "${UV_CACHE_DIR:-$HOME/.cache/uv}" ;;
    "python find "*) exit 2 ;;
    "tool run "*) echo "no pip to borrow" >&2; exit 2 ;;
    *" --dry-run "*) exit 1 ;;
    venv*) echo "$*" ;;
    lock*)
        shift 4
        echo lock
        for pin; do [ "$pin" = --upgrade-package ] || echo "$pin"; done >pins ;;
    sync*) echo "cache ${UV_CACHE_DIR:-its own}" ;;
    "pip compile "*)
        while [ "$1" != --output-file ]; do shift; done
        echo "torch==2.11.4" >"$2"
        cat >"$HOME/asked" ;;
    "pip install "*)
        while [ "$1" != --constraint ]; do shift; done
        cp "$2" "$HOME/others"
        shift 4; echo "install $*" ;;
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
    def run(
        *arguments: str, pip: str, home: str | None = None, path: str = "/nowhere", web: str = "exit 1"
    ) -> subprocess.CompletedProcess[str]:
        """`pip`, `web`: what `python3 -m pip` does, and its look at an address; `path`: what stands first on PATH."""
        put_command(clone / "bin" / "python3", f'case "$2" in pip) {pip} ;; *urllib*) {web} ;; esac')
        env = {"PATH": f"{path}:{clone / 'bin'}:{os.environ['PATH']}", "HOME": home or str(clone / "home")}
        return subprocess.run(
            [str(clone / "scripts" / "setup.sh"), *arguments],
            env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60,
        )  # fmt: skip

    return run


def test_cache_of_uv_is_its_own_where_that_can_be_written(run_setup: Setup) -> None:
    done = run_setup("--torch", "cuda", pip="true")
    assert (done.returncode, done.stdout) == (0, "lock\ncache its own\n"), done.stderr


def test_cache_of_uv_is_in_the_clone_where_its_own_cannot_be_written(run_setup: Setup, clone: Path) -> None:
    done = run_setup("--torch", "cuda", pip="true", home="/dev/null")
    assert (done.returncode, done.stdout) == (0, f"lock\ncache {clone}/.uv-cache\n"), done.stderr
    assert "cannot write to uv's cache '/dev/null/.cache/uv'" in done.stderr
    assert f"export UV_CACHE_DIR={clone}/.uv-cache" in done.stderr


NOT_OFFERED = "echo WARNING: old; echo ERROR: none of it '(from versions: 1, 2)'; echo ERROR: no match; exit 1"
NOT_REACHED = "echo WARNING: after connection broken by a cut cable; echo ERROR: no match; exit 1"


@pytest.mark.parametrize(
    ("pip", "says"),
    [
        ("exit 1", "setup: pip: no pip to borrow\n"),
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
    assert (done.returncode, done.stdout) == (0, "lock\ncache its own\n"), done.stderr


@pytest.fixture
def pins(clone: Path) -> list[str]:
    lines = (clone / "requirements.lock").read_text(encoding="utf-8").splitlines()
    return [line.removesuffix("\\").rstrip() for line in lines if re.match(r"[\w.-]+==", line)]


def test_index_with_newer_releases_gives_what_requirements_lock_pins(
    run_setup: Setup, clone: Path, pins: list[str]
) -> None:
    run_setup("--torch", "cuda", pip="true")
    assert len(pins) > 200 and (clone / "pins").read_text(encoding="utf-8").splitlines() == pins


@pytest.mark.parametrize("kept", [True, False])
def test_lock_of_before_is_kept_while_it_is_as_pinned(run_setup: Setup, clone: Path, kept: bool) -> None:
    (clone / "uv.lock").touch()
    if not kept:
        python = """case "$1" in *check_lock.py) [ -e "$HOME/asked" ] || { touch "$HOME/asked"; exit 1; } ;; esac"""
        put_command(clone / ".venv" / "bin" / "python", python + """; case "$2" in *print*info*) echo 3.12 ;; esac""")
    done = run_setup("--torch", "cuda", pip="true")
    assert done.returncode == 0 and done.stdout.count("lock\n") == (1 if kept else 2), done.stderr
    assert (clone / "uv.lock").exists() == kept


@pytest.mark.parametrize("locked", ["", 'registry = "wheelhouse"'])
def test_cpu_only_torch_in_the_wheelhouse_is_locked_for_this_machine(
    run_setup: Setup, clone: Path, torch_version: str, pins: list[str], locked: str
) -> None:
    """Uv prefers the registry's, which has wheels for more machines, unless an older lock has this one."""
    (clone / "wheelhouse").mkdir()
    (clone / "wheelhouse" / f"torch-{torch_version}+cpu-cp312-cp312-any.whl").touch()
    (clone / "uv.lock").write_text(locked, encoding="utf-8")
    done = run_setup("--torch", "cpu", pip="true")
    here = f"sys_platform == 'linux' and platform_machine == '{platform.machine()}' and python_version == '3.12'"
    wanted = [] if locked else [pin for pin in pins if not pin.startswith("torch==")]
    wanted += [] if locked else [f"torch=={torch_version}+cpu; {here}"]
    assert (done.returncode, done.stdout) == (0, "lock\ncache its own\n"), done.stderr
    assert (clone / "pins").read_text(encoding="utf-8").splitlines() == wanted


def test_wheel_for_another_python_is_not_locked(run_setup: Setup, clone: Path, torch_version: str) -> None:
    (clone / "wheelhouse").mkdir()
    (clone / "wheelhouse" / f"torch-{torch_version}+cpu-cp311-cp311-any.whl").touch()
    done = run_setup("--torch", "cpu", pip="true")
    assert (done.returncode, done.stdout) == (0, "lock\ncache its own\n"), done.stderr
    assert "+cpu" not in (clone / "pins").read_text(encoding="utf-8")


@pytest.mark.parametrize("wheels", [[], ["torch-2.11.4+cpu-cp312-cp312-any.whl"]], ids=["registry", "CPU-only"])
def test_another_torch_leaves_all_else_as_locked(run_setup: Setup, clone: Path, wheels: list[str]) -> None:
    (clone / "wheelhouse").mkdir()
    for wheel in wheels:
        (clone / "wheelhouse" / wheel).touch()
    done = run_setup("--dev", "--torch", "2.11", pip="exit 1")
    build = "+cpu" if wheels else ""
    assert done.stdout == f"install --editable . --group local --group dev torch==2.11.4{build}\n", done.stderr
    assert (clone / "home" / "asked").read_text(encoding="utf-8").splitlines() == ["torch>=2.11,<3", "torch==2.11.*"]
    entries = re.findall(r"^([\w.-]+)==", (clone / "home" / "others").read_text(encoding="utf-8"), re.MULTILINE)
    locked = re.findall(r"^([\w.-]+)==", (clone / "requirements.lock").read_text(encoding="utf-8"), re.MULTILINE)
    left_out = {name for name in set(locked) - set(entries) if not name.startswith(("cuda-", "nvidia-"))}
    assert left_out == {"setuptools", "torch", "triton"} and set(entries) < set(locked)


def test_newest_torch_is_the_newest_that_pyproject_allows(run_setup: Setup, clone: Path) -> None:
    run_setup("--torch", "newest", pip="exit 1")
    assert (clone / "home" / "asked").read_text(encoding="utf-8") == "torch>=2.11,<3\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--torch", "new"], "--torch needs auto, cpu, cuda, newest or a release such as 2.11, not 'new'"),
        (["--python", "3.10"], "--python needs 3.11 or later, not '3.10'"),
        (["--python", "3.99"], "no Python 3.99 on the PATH, nor one of uv's"),
        (["--env"], "the last argument needs a value; usage: ./scripts/setup.sh"),
        (["--fast"], "unknown argument --fast; usage: ./scripts/setup.sh"),
    ],
)
def test_what_cannot_be_set_up_is_said(run_setup: Setup, arguments: list[str], says: str) -> None:
    done = run_setup(*arguments, pip="true")
    assert (done.returncode, done.stdout) == (1, "") and says in done.stderr


def test_environments_of_the_clone_are_not_asked_for_pip(run_setup: Setup, clone: Path) -> None:
    put_command(clone / ".venv-torch-2.11" / "bin" / "python3", "exit 1")
    done = run_setup("--torch", "cpu", pip="true", path=f"{clone}/.venv-torch-2.11/bin:{clone}/.venv/bin")
    assert done.returncode == 0, done.stderr


def test_environment_with_another_python_is_made_anew(run_setup: Setup, clone: Path) -> None:
    put_command(clone / "bin" / "python3.99", """case "$2" in *print*info*) echo 3.99 ;; esac""")
    done = run_setup("--python", "3.99", "--torch", "cuda", pip="true")
    assert f"venv --quiet --clear --python {clone}/bin/python3.99 .venv\n" in done.stdout, done.stderr


GPU = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg")


@pytest.mark.skipif(any(Path(path).exists() for path in GPU), reason="there is a GPU")
def test_way_to_a_cpu_only_torch_is_named(run_setup: Setup) -> None:
    done = run_setup(pip="exit 1")
    assert done.returncode == 0 and f"PIP_EXTRA_INDEX_URL=<a mirror of {PYTORCH}>" in done.stderr


PYTORCH = "https://download.pytorch.org/whl/cpu"


@pytest.fixture
def cpu_wheels(clone: Path, torch_version: str) -> Iterator[str]:
    """The address of an index of CPU wheels, which the clone's script takes for PyTorch's own."""
    wheel = f"torch-{torch_version}+cpu-cp{sys.version_info.major}{sys.version_info.minor}-none-any.whl"

    class Index(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_page = self.path == "/whl/cpu/torch/"
            body = f'<a href="{wheel.replace("+", "%2B")}">{wheel}</a>'.encode() if is_page else wheel_of(torch_version)
            self.send_response(200)
            self.send_header("Content-Type", "text/html" if is_page else "application/zip")
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with serving(Index) as address:
        yield f"{address}/whl/cpu"


def wheel_of(version: str) -> bytes:
    """A wheel of torch without a file of it."""
    written, info = io.BytesIO(), f"torch-{version}+cpu.dist-info"
    with zipfile.ZipFile(written, "w") as wheel:
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}+cpu\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return written.getvalue()


PYTHON = str(getattr(sys, "_base_executable", sys.executable))
WEB = f'exec {PYTHON} "$@"'


@pytest.mark.slow
@pytest.mark.skipif(any(Path(path).exists() for path in GPU), reason="there is a GPU")
@pytest.mark.skipif(
    subprocess.run([PYTHON, "-m", "pip", "--version"], capture_output=True).returncode != 0, reason="no pip"
)
def test_cpu_only_torch_comes_from_pytorchs_own_index_where_pips_sources_have_none(
    run_setup: Setup, clone: Path, torch_version: str, cpu_wheels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    script = clone / "scripts" / "setup.sh"
    script.write_text(script.read_text(encoding="utf-8").replace(PYTORCH, cpu_wheels), encoding="utf-8")
    pip = f'case "$*" in *--index-url*) {WEB} ;; *download*) {NOT_OFFERED} >&2 ;; esac'
    done = run_setup(pip=pip, web=WEB)
    assert done.returncode == 0 and f"asking PyTorch's own index of CPU wheels, {cpu_wheels}" in done.stderr
    (wheel,) = (clone / "wheelhouse").iterdir()
    assert wheel.name.startswith(f"torch-{torch_version}+cpu-") and "none came" not in done.stderr


@pytest.mark.skipif(any(Path(path).exists() for path in GPU), reason="there is a GPU")
def test_index_that_does_not_answer_is_passed_over(run_setup: Setup, clone: Path) -> None:
    """A firewall that drops what it does not know: it takes the connection, and says nothing."""
    script = clone / "scripts" / "setup.sh"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        nowhere = f"http://127.0.0.1:{silent.getsockname()[1]}"
        text = script.read_text(encoding="utf-8").replace(PYTORCH, nowhere).replace("timeout 5", "timeout 0.5")
        script.write_text(text, encoding="utf-8")
        done = run_setup(pip=f"[ $3 != download ] || {{ {NOT_OFFERED}; }} >&2", web=WEB)
    assert done.returncode == 0 and "none came: taking the registry's torch" in done.stderr
    assert "PyTorch's own index" not in done.stderr


@pytest.fixture
def index() -> Iterator[str]:
    """The address of an index that claims to have one package, of 123 MB."""
    wheel = "tiny-1-py3-none-any.whl"
    told = {"hashes": {"sha256": "0" * 64}, "size": 123_000_000, "core-metadata": True}
    file = {"filename": wheel, "url": f"/{wheel}", **told}
    listing = {"meta": {"api-version": "1.1"}, "name": "tiny", "versions": ["1"], "files": [file]}
    answers = {
        "/simple/tiny/": ("application/vnd.pypi.simple.v1+json", json.dumps(listing)),
        f"/{wheel}.metadata": ("text/plain", "Metadata-Version: 2.1\nName: tiny\nVersion: 1\n"),
    }

    class Index(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            kind, text = answers[self.path]
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with serving(Index) as address:
        yield f"{address}/simple"


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """The address of a server on loopback, while the context lasts."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, name="index")
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_download_that_is_announced_is_what_uv_lacks(root: Path, tmp_path: Path, index: str) -> None:
    """With the real uv: its debug lines and the sizes in its pylock.toml are what the script reads."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env")], check=True, timeout=60)
    script = f"""
        set -euo pipefail
        {re.search(r"^announce[(][)].*?^}$", (root / "scripts/setup.sh").read_text(), re.DOTALL | re.MULTILINE)[0]}
        say() {{ echo "$*"; }}
        uv={Path(sys.executable).with_name("uv")} python={sys.executable} scratch={tmp_path}
        announce pip install --no-config --python {tmp_path}/env/bin/python tiny
    """
    env = os.environ | {"UV_DEFAULT_INDEX": index, "UV_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout == "about 123 MB to download; wheels that uv's cache lacks: 1\n", done.stderr


@pytest.mark.parametrize(
    ("versions", "folder", "chosen", "tested"),
    [
        ("--torch 2.11", ".venv-torch-2.11", "", "tests/integration tests/contract tests/unit"),
        ("--python 3.12 --torch newest", ".venv-python-3.12-torch-newest", "tests/unit -x", "tests/unit -x"),
        ("", ".venv", "-k ledger", "-k ledger"),
    ],
)
def test_other_versions_are_tested_in_an_environment_of_their_own(
    root: Path, tmp_path: Path, versions: str, folder: str, chosen: str, tested: str
) -> None:
    (tmp_path / "scripts").mkdir()
    shutil.copy(root / "scripts" / "test.sh", tmp_path / "scripts")
    put_command(tmp_path / "scripts" / "setup.sh", 'echo "$*"')
    put_command(tmp_path / folder / "bin" / "pytest", 'echo "$*"')
    command = [str(tmp_path / "scripts" / "test.sh"), *versions.split(), *chosen.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert lines[0].split() == ["--dev", *versions.split(), "--env", folder]
    assert lines[-1].endswith(tested)


def test_matrix_begins_with_the_oldest_versions_and_runs_the_script_where_its_tools_are(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    torch = next(need for need in map(Requirement, project["dependencies"]) if need.name == "torch")
    jobs = yaml.safe_load((root / ".github/workflows/ci.yml").read_text(encoding="utf-8"))["jobs"]
    matrix = jobs["versions"]["strategy"]["matrix"]
    assert matrix["torch"] == [_lower_bound(torch.specifier), "newest"]
    first = _lower_bound(SpecifierSet(project["requires-python"]))
    assert matrix["python"] == [f"3.{int(first[2:]) + after}" for after in range(len(matrix["python"]))]
    steps = [step for job in jobs.values() for step in job["steps"]]
    assert {step["uses"].partition("@")[0] for step in steps if "uses" in step} == {
        "actions/checkout",
        "actions/setup-python",
    }
    runs = {name: [step["run"] for step in job["steps"] if "run" in step] for name, job in jobs.items()}
    assert runs.pop("gpu-check")[-1] == "./scripts/gpu_check.sh --on cpu"
    assert {name: script for name, (_, script) in runs.items()} == {
        "all": (root / ".ci" / "run").read_text(encoding="utf-8").split("exec ")[1].strip(),
        "versions": "./scripts/test.sh --torch ${{ matrix.torch }} --python ${{ matrix.python }}",
    }
    (tools,) = {tools for tools, _ in runs.values()}
    assert all(f"command -v {name}" in tools for name in NAMES) and "install --yes" in tools


def _lower_bound(specifier: SpecifierSet) -> str:
    return next(part.version for part in specifier if part.operator == ">=")
