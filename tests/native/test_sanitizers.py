"""The C++ of the data plane under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "src/zeroband/kernels/csrc"
FLAGS = ("-std=c++17", "-Og", "-g1", "-fno-omit-frame-pointer", "-ffp-contract=off", "-fno-sanitize-recover=all")
COMPILER = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or ""

Build = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Compile a program of this folder with a sanitizer; the library's sources only once for each sanitizer."""
    if not COMPILER:
        pytest.skip("no C++ compiler on this machine")
    objects: dict[str, Path] = {}

    def compile_library(sanitizer: str) -> Path:
        folder = tmp_path_factory.mktemp(sanitizer.replace(",", "-"))
        sources = [path for path in sorted(SOURCES.glob("*.cpp")) if path.name != "api.cpp"]
        subprocess.run([COMPILER, *FLAGS, f"-fsanitize={sanitizer}", "-c", *sources], cwd=folder, check=True)
        return folder

    def program(name: str, sanitizer: str) -> Path:
        if sanitizer not in objects:
            objects[sanitizer] = compile_library(sanitizer)
        folder = objects[sanitizer]
        options = [*FLAGS, f"-fsanitize={sanitizer}", f"-I{SOURCES}", "-pthread"]
        files = [HERE / f"{name}.cpp", *folder.glob("*.o")]
        subprocess.run([COMPILER, *options, *files, "-ldl", "-o", folder / name], check=True)
        return folder / name

    return program


def succeeds(*command: str | Path, limit_s: float = 240) -> None:
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit_s)
    assert (ran.returncode, ran.stdout) == (0, "ok\n"), ran.stderr[-5000:]


@pytest.mark.parametrize(
    ("program", "sanitizer"),
    [
        pytest.param("reduce_test", "address,undefined", marks=pytest.mark.soak),
        pytest.param("reduce_test", "thread", marks=pytest.mark.soak),
        pytest.param("gather_test", "address,undefined", marks=pytest.mark.soak),
        pytest.param("gather_test", "thread", marks=pytest.mark.soak),
        pytest.param("loss_test", "address,undefined", marks=pytest.mark.soak),
        pytest.param("loss_test", "thread", marks=pytest.mark.soak),
    ],
)
def test_operations_aborts_and_losses_are_clean(build: Build, program: str, sanitizer: str) -> None:
    succeeds(build(program, sanitizer))


@pytest.mark.soak
def test_codecs_write_where_they_should(build: Build) -> None:
    succeeds(build("codec_test", "address,undefined"))


def test_frames_of_a_stranger_do_no_harm(build: Build) -> None:
    succeeds(build("fuzz_frames", "address,undefined"), "10000")


def test_hostile_numbers_and_values_do_no_harm(build: Build) -> None:
    succeeds(build("hostile_numbers", "address,undefined"), "5000")


@pytest.mark.soak
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_many_more_losses_are_clean(build: Build, sanitizer: str) -> None:
    succeeds(build("loss_test", sanitizer), "1500", limit_s=900)


@pytest.mark.soak
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_reductions_of_more_members_are_clean(build: Build, sanitizer: str) -> None:
    succeeds(build("reduce_test", sanitizer), "long")


@pytest.mark.soak
def test_frames_of_a_stranger_do_no_harm_for_minutes(build: Build) -> None:
    succeeds(build("fuzz_frames", "address,undefined"), "5000000", limit_s=1200)
