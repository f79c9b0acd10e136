"""The lock, the metadata and the tracked files."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REGISTRY_HOSTS = re.compile(r"pypi\.org|pythonhosted\.org|pytorch\.org/whl(?!/cpu)")
"""PyTorch's own index of CPU wheels is no registry: it has nothing but them, and only `setup.sh` asks it."""

LOCKED = """\
torch==2.13.0 \\
    --hash=sha256:aa \\
    --hash=sha256:bb
redis==8.1.0 ; python_version > '3' \\
    --hash=sha256:cc
"""


@pytest.fixture(scope="module")
def pyproject(root: Path) -> dict[str, Any]:
    return tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def check_lock(root: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_lock", root / "scripts" / "check_lock.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _requirements(pyproject: dict[str, Any]) -> list[Requirement]:
    project, groups = pyproject["project"], pyproject["dependency-groups"]
    lists = (
        project["dependencies"],
        *project["optional-dependencies"].values(),
        *groups.values(),
        pyproject["tool"]["uv"]["constraint-dependencies"],
    )
    return [Requirement(text) for texts in lists for text in texts]


def test_requirements_lock_was_written_for_this_pyproject(root: Path, check_lock: ModuleType) -> None:
    written = check_lock.DIGEST_LINE.search((root / "requirements.lock").read_text(encoding="utf-8"))
    assert written is not None
    assert written[1] == check_lock.inputs_digest(root / "pyproject.toml"), "run ./scripts/lock.sh"


def test_requirements_lock_holds_a_hashed_version_within_every_bound(
    root: Path, pyproject: dict[str, Any], check_lock: ModuleType
) -> None:
    pins = check_lock.pins((root / "requirements.lock").read_text(encoding="utf-8"))
    assert all(pins.values())
    versions: dict[str, list[str]] = {}
    for pin in pins:
        name, _, version = pin.partition("==")
        versions.setdefault(canonicalize_name(name), []).append(version)
    own = canonicalize_name(pyproject["project"]["name"])
    outside = [
        f"{need} against {versions.get(canonicalize_name(need.name))}"
        for need in _requirements(pyproject)
        if canonicalize_name(need.name) != own
        and not all(need.specifier.contains(version) for version in versions.get(canonicalize_name(need.name), [""]))
    ]
    assert outside == []


@pytest.mark.parametrize(
    ("export", "complaint"),
    [
        (LOCKED, None),
        (LOCKED + "torch==2.13.0+cpu ; sys_platform == 'linux'\n", None),
        (LOCKED + "torch==2.14.0+cpu\n", "torch==2.14.0+cpu is not in it"),
        (LOCKED + "redis==9.0+cpu\n", "redis==9.0+cpu is not in it"),
        (LOCKED.replace("sha256:cc", "sha256:dd"), "redis==8.1.0 has other hashes in it"),
        (LOCKED.replace("    --hash=sha256:aa \\\n", ""), "torch==2.13.0 has other hashes in it"),
    ],
)
def test_check_lock_refuses_what_the_lock_does_not_hold(
    check_lock: ModuleType, export: str, complaint: str | None
) -> None:
    assert check_lock.differences(export, LOCKED) == ([complaint] if complaint else [])


def test_extra_all_brings_every_extra(pyproject: dict[str, Any]) -> None:
    extras = pyproject["project"]["optional-dependencies"]
    (every,) = map(Requirement, extras["all"])
    assert canonicalize_name(every.name) == canonicalize_name(pyproject["project"]["name"])
    assert every.extras == extras.keys() - {"all"}


def test_command_of_the_distribution_exists(pyproject: dict[str, Any]) -> None:
    module, _, function = pyproject["project"]["scripts"]["zeroband"].partition(":")
    assert callable(getattr(importlib.import_module(module), function))


@pytest.fixture(scope="module")
def installed(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a wheel puts into site-packages, but for the native library, which takes a compiler and time."""
    pytest.importorskip("setuptools", minversion="77")
    clone, out = tmp_path_factory.mktemp("clone"), tmp_path_factory.mktemp("site-packages")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(root / name, clone)
    skipped = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info")
    for name in ("src", "configs"):
        shutil.copytree(root / name, clone / name, symlinks=True, ignore=skipped)
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(clone)!r})"
    environ = os.environ | {"CC": "false", "CXX": "false"}
    subprocess.run([sys.executable, "-c", build], cwd=clone, env=environ, capture_output=True, check=True, timeout=60)
    with zipfile.ZipFile(next(clone.glob("*.whl"))) as wheel:
        wheel.extractall(out)
    return out


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", ["train @150M --outer none", "launch --nproc-per-node 1 @1B --outer none", "config @debug/normal"]
)
def test_wheel_brings_the_presets_from_any_folder(installed: Path, tmp_path: Path, command: str) -> None:
    program = "import sys, zeroband.cli; print(zeroband.__file__, flush=True); sys.exit(zeroband.cli.main())"
    done = subprocess.run(
        [sys.executable, "-c", program, *command.split(), *(["--dry-run"] if "config" not in command else [])],
        cwd=tmp_path, env={"PATH": os.environ["PATH"], "PYTHONPATH": str(installed)},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    where, _, printed = done.stdout.partition("\n")
    assert (done.returncode, where) == (0, str(installed / "zeroband/__init__.py")), done.stderr
    preset = re.search(r"@(\S+)", command)
    assert preset is not None
    asked = tomllib.loads((installed / "zeroband/presets" / f"{preset[1]}.toml").read_text(encoding="utf-8"))
    assert tomllib.loads(printed)["model"].items() >= asked["model"].items()


@pytest.mark.slow
def test_wheel_has_every_preset(root: Path, installed: Path) -> None:
    configs, presets = root / "configs", installed / "zeroband/presets"
    tracked = {path.relative_to(configs): path.read_bytes() for path in configs.rglob("*.toml")}
    assert {path.relative_to(presets): path.read_bytes() for path in presets.rglob("*.toml")} == tracked


def test_scripts_parse_and_may_be_executed(root: Path) -> None:
    scripts = [*sorted((root / "scripts").glob("*.sh")), root / ".ci" / "run"]
    assert [path.name for path in scripts if not os.access(path, os.X_OK)] == []
    for path in scripts:
        subprocess.run(["bash", "-n", str(path)], check=True, timeout=10)


def test_no_file_names_a_package_registry(root: Path) -> None:
    if not (root / ".git").exists():
        pytest.skip("not a clone: cannot tell what is tracked")
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root, capture_output=True, text=True, check=True, timeout=30,
    )  # fmt: skip
    named: list[str] = []
    for name in filter(None, listing.stdout.split("\0")):
        path = root / name
        if path.is_file() and REGISTRY_HOSTS.search(path.read_text(encoding="utf-8", errors="replace")):
            named.append(name)
    assert named == []
