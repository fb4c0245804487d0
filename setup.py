"""Builds the C extensions; everything else about the package is in pyproject.toml."""

import compileall
import glob

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

HOOK = Extension(
    "kiln._hook",
    sources=["kiln/_hook.c"],
    depends=sorted(glob.glob("kiln/_hook_*.h")),
    extra_compile_args=["-O2", "-std=c11", "-fvisibility=hidden"],
)

LAUNCH = Extension(
    "kiln._launch",
    sources=[f"kiln/_{part}.c" for part in ("launch", "arena", "call", "grid", "plan", "products", "run")],
    depends=["kiln/_launch.h"],
    extra_compile_args=["-O2", "-std=c11", "-fvisibility=hidden"],
)

HELD = Extension(
    "kiln._held", sources=["kiln/_held.c"], extra_compile_args=["-O2", "-std=c11", "-fvisibility=hidden"]
)

NESTS = Extension(
    "kiln._nests", sources=["kiln/_nests.c"], extra_compile_args=["-O2", "-std=c11", "-fvisibility=hidden"]
)

MERSENNE = Extension(
    "kiln._mersenne",
    sources=["kiln/_mersenne.c"],
    extra_compile_args=["-O3", "-std=c11", "-fvisibility=hidden"],
)


class Build(build_ext):  # type: ignore[misc]
    """Builds in place leave bytecode files beside the sources, as installing does.

    Where Python may not write them (PYTHONDONTWRITEBYTECODE) each process would compile 300 modules first.
    """

    def run(self) -> None:
        super().run()
        if self.inplace:
            compileall.compile_dir("kiln", quiet=2)


setup(ext_modules=[HOOK, LAUNCH, HELD, NESTS, MERSENNE], cmdclass={"build_ext": Build})
