"""Programs for a report: a captured graph with its inputs as Python text, run eagerly and compiled."""

from __future__ import annotations

import faulthandler
import importlib
import os
import pickle
import resource
import select
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
from torch import fx

from kiln.base.dataclass import dataclass
from kiln.base.options import config

TOLERANCES = {torch.float64: 1e-6, torch.complex128: 1e-6, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""How far a result may be from eager's, relatively, where it is not 1e-3; a tenth of it absolutely."""

LITERAL = 64
"""Tensors of up to this many elements stand in a script as they are."""
PATIENCE = 120
"""Seconds that one run may take."""

HEADER = '''\
import os

os.environ.setdefault("KILN_STRICT", "1")

import torch
from torch import device, inf, nan

import kiln
'''

HARNESS = '''\
def run(function):
    """Results and gradients."""
    torch.manual_seed(0)
    values = inputs()
    with torch.set_grad_enabled({grad}):
        results = function(*values)
    results = results if isinstance(results, (tuple, list)) else (results,)
    tensors = [r for r in results if isinstance(r, torch.Tensor)]
    roots = [r.abs().sum() if r.is_complex() else r.sum() for r in tensors if r.requires_grad]
    wanted = [v for v in values if isinstance(v, torch.Tensor) and v.requires_grad]
    grads = torch.autograd.grad(sum(roots), wanted, allow_unused=True) if roots and wanted else ()
    return [*tensors, *[g for g in grads if g is not None]]
'''

CHECK = '''\
expected = run(f)
got = run(kiln.compile(f, {arguments}))
for mine, theirs in zip(got, expected, strict=True):
    loose = {tolerances}.get(mine.dtype, 1e-3)
    torch.testing.assert_close(mine, theirs, rtol=loose, atol=loose / 10, equal_nan=True)
print("compiled and eager agree")
'''


@dataclass(frozen=True)
class Outcome:
    """What became of a run: same, raises, differs, crashes; or eager itself raises."""

    kind: str
    detail: str = ""

    def like(self, other: Outcome) -> bool:
        """Whether two runs fail in the same way."""
        first, second = self.detail.partition(":")[0], other.detail.partition(":")[0]
        return self.kind == other.kind and (self.kind != "raises" or first == second)


SAME = Outcome("same")


@dataclass(frozen=True)
class Program:
    """An fx graph of calls alone, the values of its inputs, and whether gradients are recorded."""

    graph: fx.Graph
    inputs: tuple[Any, ...]
    grad: bool = True

    @property
    def calls(self) -> list[fx.Node]:
        return [node for node in self.graph.nodes if node.op in ("call_function", "call_method")]

    def text(self) -> str:
        """The functions `f` and `inputs`."""
        code = self.graph.python_code("self")
        body = code.src.strip().replace("def forward(self, ", "def f(", 1)
        body = body.replace("def forward(self)", "def f()", 1)
        known = {"torch", "device", "inf", "nan", "NoneType", "fx_pytree", "pytree"}
        needed = [imported(name, value) for name, value in code.globals.items() if name not in known]
        return "\n\n\n".join(filter(None, ["\n".join(filter(None, needed)), body, inputs(self.inputs)]))

    def with_graph(self, graph: fx.Graph, inputs: Sequence[Any]) -> Program:
        """Another graph over other inputs, without what nobody reads."""
        graph.eliminate_dead_code()
        kept = []
        for node, value in zip([n for n in graph.nodes if n.op == "placeholder"], inputs, strict=True):
            if node.users:
                kept.append(value)
            else:
                graph.erase_node(node)
        return replace(self, graph=graph, inputs=tuple(kept))


def inputs(values: Sequence[Any]) -> str:
    """The function `inputs`, which gives these values."""
    listed = "".join(f"        {literal(value)},\n" for value in values)
    return f"def inputs():\n    torch.manual_seed(1)\n    return [\n{listed}    ]\n"


def imported(name: str, value: Any) -> str:
    """A line that binds a name to an object of a module; "" for modules that the script imports anyway."""
    module, path = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if isinstance(value, type(torch)):
        return "" if value.__name__ == name else f"import {value.__name__} as {name}"
    if module and path and resolved(module, path) is value:
        return f"import {module}\n{name} = {module}.{path}"
    raise ValueError(f"{value!r} cannot be named in a script")


def resolved(module: str, path: str) -> Any:
    """The object of a module under a dotted name; None where there is none."""
    try:
        return attrgetter(path)(importlib.import_module(module))
    except (ImportError, AttributeError):
        return None


def literal(value: Any) -> str:
    """An input as Python text: its numbers where it is small, else random ones."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    dtype, shape = value.dtype, tuple(value.shape)
    where = f"dtype={dtype}, device={str(value.device)!r}"
    if value.numel() <= LITERAL:
        text = f"torch.tensor({value.detach().cpu().tolist()!r}, {where}).reshape({shape})"
    elif dtype.is_floating_point or dtype.is_complex:
        text = f"torch.randn({shape}, {where})"
    elif dtype is torch.bool:
        text = f"torch.rand({shape}, device={str(value.device)!r}) > 0.5"
    else:
        text = f"torch.randint({int(value.min())}, {int(value.max()) + 1}, {shape}, {where})"
    dense = torch.empty(shape, device="meta").stride()
    if value.numel() and any(n > 1 and s != d for n, s, d in zip(shape, value.stride(), dense, strict=True)):
        text = f"torch.empty_strided({shape}, {value.stride()}, {where}).copy_({text})"
    return f"({text}).requires_grad_()" if value.requires_grad else text


def script(parts: Sequence[str], grad: bool, arguments: Mapping[str, Any]) -> str:
    """A whole script out of definitions of `f` and `inputs`."""
    lines, given = [], []
    for name, value in arguments.items():
        if callable(value):
            lines.append(imported(name, value))
            given.append(f"{name}={name}")
        else:
            given.append(f"{name}={value!r}")
    check = CHECK.format(arguments=", ".join(given), tolerances=TOLERANCES)
    heads = [HEADER + "".join(f"{line}\n" for line in lines), *parts]
    return "\n\n".join([*heads, HARNESS.format(grad=grad), check])


def judged(text: str) -> Outcome:
    """What becomes of a script when it runs in this process."""
    space: dict[str, Any] = {"__name__": "report"}
    before, _, check = text.partition("expected = run(f)\n")
    try:
        exec(compile(before, "<report>", "exec"), space)
        space["expected"] = space["run"](space["f"])
    except Exception as error:
        return Outcome("eager", f"{type(error).__name__}: {error}")
    try:
        with config.patch(strict=True):
            exec(compile(check.replace("print(", "("), "<report>", "exec"), space)
    except AssertionError as error:
        return Outcome("differs", str(error))
    except Exception as error:
        return Outcome("raises", f"{type(error).__name__}: {error}")
    return SAME


def apart(work: Callable[[], Outcome]) -> Outcome:
    """The outcome of work done in a copy of this process, which may crash or hang.

    A copy cannot use a GPU that this process uses: there the work is done in place.
    """
    if torch.cuda.is_initialized():
        return work()
    sys.stdout.flush()
    sys.stderr.flush()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        torch.set_num_threads(1)  # the threads of the pool are not copied
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 2)
        try:
            answer = work()
        except BaseException as error:
            answer = Outcome("raises", f"{type(error).__name__}: {error}")
        with os.fdopen(writing, "wb") as stream:
            pickle.dump((answer.kind, answer.detail), stream)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        if not select.select([stream], [], [], PATIENCE)[0]:
            os.kill(child, signal.SIGKILL)
        said = stream.read()
    status = os.waitpid(child, 0)[1]
    if said:
        return Outcome(*pickle.loads(said))
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    return Outcome("crashes", signal.Signals(number).name if number else f"exit status {status >> 8}")
