"""Doctor: whether Kiln works on this machine, part by part, and what to do where it does not."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from kiln import api
from kiln.base.dataclass import dataclass
from kiln.base.options import config
from kiln.check import layout
from kiln.generate.cpu import host, load, machine_code
from kiln.launch import cache, native

PYTHONS = ((3, 11), (3, 13))
TORCH = (2, 11)
LIBRARIES = ("llvmlite", "numpy", "rich", "typer", "platformdirs")
ANSWER = 'define i64 @answer() {\n  ret i64 42\n}\n'  # fmt: skip


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found of a part: `ok` is None where it is merely absent."""

    part: str
    ok: bool | None
    found: str
    remedy: str = ""


def examined() -> list[Finding]:
    """All findings; a check that raises is one that fails."""
    findings = []
    for part, (check, remedy) in CHECKS.items():
        try:
            ok, found = check()
        except Exception as error:
            ok, found = False, f"{type(error).__name__}: {' '.join(str(error).split())}"
        findings.append(Finding(part, ok, found, "" if ok else remedy))
    return findings


def python() -> tuple[bool, str]:
    return PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1], f"{platform.python_version()}, {sys.executable}"


def torch_version() -> tuple[bool, str]:
    found = tuple(int(part) for part in torch.__version__.split(".")[:2])
    return found >= TORCH, str(torch.__version__)


def libraries() -> tuple[bool, str]:
    found, missing = [], []
    for name in LIBRARIES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(f"{name} missing")
    return not missing, ", ".join([*found, *missing])


def system() -> tuple[bool, str]:
    return native.CALLS_ANY, f"{platform.system()} {platform.machine()}"


def processor() -> tuple[bool, str]:
    found = host()
    threads = f"{torch.get_num_threads()} of {os.cpu_count()} cores used"
    names = ("avx2", "fma", "avx512f", "avx512bf16", "amx-bf16")
    known = [name for name in names if f"+{name}" in found.features]
    return True, f"{found.name}, vectors of {found.vector_bytes} bytes, {threads}; {' '.join(known)}"


def gpu() -> tuple[bool | None, str]:
    if not torch.cuda.is_available():
        return None, "none that torch can use"
    facts = torch.cuda.get_device_properties(0)
    doubled = torch.ones(4, device="cuda") * 2
    works = bool(torch.equal(api.compile(lambda x: x * 2)(torch.ones(4, device="cuda")), doubled))
    return works, f"{facts.name}, compute {facts.major}.{facts.minor}, CUDA {torch.version.cuda}"


def hook() -> tuple[bool, str]:
    told = api.explain(_sample, backend="eager")(torch.ones(3))
    whole = (told.graph_count, told.break_count) == (1, 0)
    return whole, "a function is captured as one graph" if whole else told.summary()


def guards() -> tuple[bool, str]:
    ready = layout.ready()
    return ready, "tensors are read in memory" if ready else "tensors are read through Python"


def llvm() -> tuple[bool, str]:
    load(machine_code(ANSWER)).address("answer")
    return True, "compiles and loads machine code"


def functions() -> tuple[bool, str]:
    native.set_up()
    return True, f"{len(native.FUNCTIONS)} functions found in torch's libraries"


def whole() -> tuple[bool, str]:
    x = torch.linspace(-1, 1, 64, requires_grad=True)
    with config.patch(strict=True):
        made = api.compile(_sample, fullgraph=True)(x)
        made.sum().backward()
    good = torch.allclose(made, _sample(x.detach())) and x.grad is not None
    return bool(good), "a function and its gradient agree with eager" if good else "results differ from eager"


def folder() -> tuple[bool | None, str]:
    place = cache.folder()
    if not cache.is_on():
        return None, f"{place}, switched off by KILN_CACHE"
    found = cache.Cache(place, config.cache_bytes, create=True)
    taken = sum(entry.size for entry in found.entries())
    free = shutil.disk_usage(place).free
    rights = os.access(place, os.W_OK | os.X_OK)
    size = f"{taken >> 20} MiB of at most {config.cache_bytes >> 20}, {free >> 20} free"
    return rights and free > taken, f"{place}, {size}"


def _sample(x: Any) -> Any:
    return torch.relu(x * 2 + 1).sin()


Check = Callable[[], tuple[bool | None, str]]
RECOMPILE = "reinstall Kiln for this Python: pip install --force-reinstall --no-binary torchkiln torchkiln"

#: Each part, what examines it, and what to do where it fails.
CHECKS: dict[str, tuple[Check, str]] = {
    "Python": (python, "use CPython 3.11, 3.12 or 3.13"),
    "torch": (torch_version, "pip install 'torch>=2.11'"),
    "libraries": (libraries, "pip install --upgrade torchkiln"),
    "system": (system, "use Linux on x86_64 or aarch64: elsewhere eager kernels are called through Python"),
    "processor": (processor, "pip install --upgrade llvmlite"),
    "GPU": (gpu, "install a build of torch for your driver, if the machine has a GPU"),
    "capture": (hook, RECOMPILE),
    "guards": (guards, "results are right but calls slower: report the versions of torch and Python"),
    "LLVM": (llvm, "pip install --force-reinstall llvmlite"),
    "torch's C functions": (functions, "use a released build of torch of 2.11 or later"),
    "compiler": (whole, "run with KILN_STRICT=1 and report the error"),
    "cache": (folder, "chmod 700 the folder, free space on its disk, or set KILN_CACHE_DIR"),
}
