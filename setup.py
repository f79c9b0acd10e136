"""Builds the native library: plain C++ behind a C interface, loaded with ctypes. Without a compiler it is left out."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = Path("src/zeroband/kernels/csrc")
FLAGS = ["-std=c++17", "-O3", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
FLAGS += ["-g1"]  # lines for stack traces; the -g of most Pythons takes half as long again


class BuildNative(build_ext):
    """A library for ctypes carries no Python version in its name."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + ".so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []

    def build_extension(self, ext: Extension) -> None:
        """Compile the files side by side, which setuptools does with extensions alone."""
        compile_files = self.compiler.compile

        def compile_all(sources: list[str], **options: Any) -> list[str]:
            with ThreadPoolExecutor() as pool:
                return list(chain.from_iterable(pool.map(lambda one: compile_files([one], **options), sources)))

        self.compiler.compile = compile_all
        super().build_extension(ext)


native = Extension(
    "zeroband.kernels._native",
    sources=sorted(str(path) for path in SOURCES.glob("*.cpp")),
    depends=sorted(str(path) for path in SOURCES.iterdir()),
    extra_compile_args=FLAGS,
    extra_link_args=["-pthread", "-ldl"],
    language="c++",
    optional=True,
)
setup(ext_modules=[native], cmdclass={"build_ext": BuildNative})
