"""Loading the native library, and what is said where that does not work."""

from __future__ import annotations

from pathlib import Path

import pytest

from zeroband.kernels import native

WAY_OUT = "or in a clone `uv sync --reinstall-package zeroband-elastic`"


def test_missing_library_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"^the native library was not built \(_native\.so is missing\)") as raised:
        native.load(tmp_path / "_native.so")
    assert "install a C++ compiler" in str(raised.value) and WAY_OUT in str(raised.value)


def test_library_of_another_version_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "_native.so"
    path.symlink_to(native.library_path())
    has = native.ABI
    monkeypatch.setattr(native, "ABI", has + 1)
    with pytest.raises(OSError, match=rf"^_native\.so has interface {has}, this version needs {has + 1}") as raised:
        native.load(path)
    assert WAY_OUT in str(raised.value)


def test_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "_native.so"
    path.write_bytes(b"half of a library")
    with pytest.raises(OSError, match=r"_native\.so"):
        native.load(path)


def test_library_is_loaded_once() -> None:
    assert native.load() is native.load()
    assert native.problem() is None


def test_problem_is_what_loading_says(monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> None:
        raise OSError("it was not built")

    monkeypatch.setattr(native, "load", load)
    assert native.problem() == "it was not built"


def test_variants_are_named_from_the_plainest_to_the_best() -> None:
    known = ["generic", "avx2", "avx512"]
    assert native.variants() == known[: len(native.variants())]
    assert native.variants(), "every machine has the portable one"


def test_variant_that_this_machine_lacks_has_no_name() -> None:
    library = native.load()
    assert [library.zb_variant_name(i) for i in (-1, library.zb_variants())] == [None, None]
