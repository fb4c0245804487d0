"""The GPU target: PTX by LLVM, in this process; the driver makes machine code of it."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

import llvmlite
import llvmlite.binding as llvm

from kiln.generate.cpu import at_once, emitted, module

TRIPLE = "nvptx64-nvidia-cuda"
#: The language version by the architecture: the first one that knows it, and what drivers have long had.
#: From 80 on LLVM adds pairs of 16 bits at once, half of them undefined; sums of such came out wrong.
VERSIONS = {(7, 0): 63, (7, 5): 63, (8, 0): 70, (8, 6): 71, (8, 7): 74, (8, 9): 78, (9, 0): 78}
NEWEST = 86
#: The first architecture whose kernels wait themselves for those before them, and have blocks in clusters.
WAITING = (9, 0)
#: A kernel's first words: wait for what was started before, and let what comes after be started.
WAIT = 'call void asm sideeffect "griddepcontrol.wait;", "~{memory}"()'
NEXT = 'call void asm sideeffect "griddepcontrol.launch_dependents;", "~{memory}"()'
#: Instructions of that architecture: the word of a wait, and the bits by which a load is known.
WAITS, LOADS, KIND = 0x782E, 0x981, 0xFFF
#: Names of functions that a module calls and does not have; those of LLVM are instructions.
DECLARED = re.compile(r"^declare [^@]*@(?!llvm\.)([\w.]+)", re.MULTILINE)


class Unsupported(Exception):
    """A kernel needs what the target has not."""


@functools.cache
def target() -> Any:
    """LLVM's target for NVIDIA's GPUs."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    return llvm.Target.from_triple(TRIPLE)


def depends_on() -> str:
    """What PTX depends on beside its text and the architecture."""
    return f"llvmlite {llvmlite.__version__}, LLVM {'.'.join(map(str, llvm.llvm_version_info))}"


def machine(capability: tuple[int, int], least: int = 0) -> Any:
    features = f"+ptx{max(VERSIONS.get(capability, NEWEST), least)}"
    return target().create_target_machine(cpu="sm_{}{}".format(*capability), features=features, opt=3)


def ptx(text: str, threads: Mapping[str, int], capability: tuple[int, int] = (9, 0), least: int = 0) -> str:
    """PTX, of a language version not less than `least`, for a module of kernels with these many threads.

    Modules may be compiled at the same time.
    """
    marks = [f'!{i} = !{{ptr @{name}, !"maxntidx", i32 {n}}}' for i, (name, n) in enumerate(threads.items())]
    marks.append(f"!nvvm.annotations = !{{{', '.join(f'!{i}' for i in range(len(threads)))}}}")
    made = machine(capability, least)
    if capability < WAITING:
        text = text.replace(WAIT, "").replace(NEXT, "")
    unknown = sorted(set(DECLARED.findall(text)) - {"__assertfail"})
    if unknown:
        raise Unsupported(f"functions that the GPU has not: {', '.join(unknown)}")
    with module("\n".join([f'target triple = "{TRIPLE}"', text, *marks])) as parsed:
        tuning = llvm.create_pipeline_tuning_options(speed_level=2)
        tuning.loop_vectorization = tuning.slp_vectorization = False
        with llvm.create_pass_builder(made, tuning) as builder:
            at_once("LLVMPY_RunNewModulePassManager")(builder.getModulePassManager(), parsed, builder)
        found = emitted(parsed, made, binary=False).decode()
    return reading_in_order(found) if capability > WAITING else found


def reading_in_order(text: str) -> str:
    """PTX whose loads stay after the wait: what it calls read only may be read at any time."""
    return text.replace("ld.global.nc.", "ld.global.")


def reads_early(code: bytes) -> bool:
    """Whether machine code of the first architecture that waits reads memory before it does."""
    words = memoryview(code)[: len(code) // 16 * 16].cast("Q").tolist()[::2]
    before = words[: words.index(WAITS)] if WAITS in words else []
    return any(word & KIND == LOADS for word in before)
