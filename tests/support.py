"""What every test of capture uses: run a program eagerly and compiled, and compare all that a program can observe.

With KILN_COURSE_EAGER=1 eager is compared with eager and the pins are skipped: that checks the programs themselves.
KILN_COURSE_BACKEND names a backend that the captured graphs run through, e.g. aot_eager.
"""

from __future__ import annotations

import copy
import operator
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch

from tests.same import Same, tensors_of

EAGER = os.environ.get("KILN_COURSE_EAGER") == "1"
BACKEND = os.environ.get("KILN_COURSE_BACKEND", "")
#: What backends that differentiate leave to run as captured: reasons that the documentation lists.
LEFT = ("global-state", "inner-leaf", "backward: one of the variables needed") if BACKEND else ()

if EAGER:

    class _Quiet:
        """A context manager and decorator that does nothing."""

        def __init__(self, *_: Any, **__: Any) -> None: ...
        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...

    def _as_is(f: Any = None, **_: Any) -> Any:
        return f if f is not None else lambda g: g

    kiln: Any = SimpleNamespace(
        compile=_as_is, disable=_as_is, allow_in_graph=_as_is, disallow_in_graph=_as_is, assume_constant_result=_as_is,
        graph_break=lambda msg="": None, reset=lambda: None, is_compiling=lambda: False, set_stance=_Quiet,
        config=SimpleNamespace(patch=_Quiet),
    )  # fmt: skip
else:
    import kiln
    from kiln.base import records


def t(*shape: int, grad: bool = False, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor of fixed, distinct values between -1 and 2 (or 0, 1, 2, … for integers)."""
    n = torch.Size(shape).numel()
    flat = torch.linspace(-1.0, 2.0, n) + 0.0625 if dtype.is_floating_point or dtype.is_complex else torch.arange(n)
    return flat.to(dtype).reshape(shape).requires_grad_(grad)


@dataclass(frozen=True)
class How:
    """How a program is run: what comes before each call, what else is compared, and whether it may recompile."""

    setup: Callable[[], Any] | None = None
    state: Callable[[], Any] | None = None
    fresh: bool = True  # the second call gets equal arguments, not the ones that the first call may have changed
    recompiles: bool = False
    runs: int | None = None  # how often graphs must have run in both calls together
    options: dict[str, Any] = field(default_factory=dict)
    backend: str = BACKEND  # what runs the graphs; none means that they run as they are


@dataclass
class Result:
    """What a compiled program did: graphs and breaks of both calls, ops in all graphs, calls of the backend."""

    graphs: int = 0
    breaks: int = 0
    ops: int = 0
    compiles: int = 0
    runs: int = 0
    modules: list[torch.fx.GraphModule] = field(default_factory=list)
    found: list[Any] = field(default_factory=list)
    value: Any = None
    raised: BaseException | None = None


def ops_of(gm: torch.fx.GraphModule) -> list[torch.fx.Node]:
    """The nodes that compute something: calls, without the taking apart of tuples."""

    def unpacks(n: torch.fx.Node) -> bool:
        whole = n.args[0].meta.get("example_value") if n.target is operator.getitem else None
        return isinstance(whole, (tuple, list, dict))

    return [n for n in gm.graph.nodes if n.op.startswith("call_") and not unpacks(n)]


class Counting:
    """A backend that runs graphs as they are, or through another backend, and counts them."""

    def __init__(self, backend: str = BACKEND) -> None:
        self.modules: list[torch.fx.GraphModule] = []
        self.runs = 0
        self.backend = backend

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        gm.graph.lint()
        self.modules.append(gm)
        forward = kiln.lookup_backend(self.backend)(gm, example_inputs) if self.backend else gm.forward

        def run(*args: Any) -> Any:
            self.runs += 1
            return forward(*args)

        return run


@contextmanager
def modes_kept() -> Iterator[None]:
    """Leave the global modes of torch as they were."""
    grad, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
    deterministic, device = torch.are_deterministic_algorithms_enabled(), torch.get_default_device()
    autocast, autocast_dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    try:
        yield
    finally:
        torch.set_grad_enabled(grad)
        torch.set_default_dtype(dtype)
        torch.use_deterministic_algorithms(deterministic)
        torch.set_autocast_enabled("cpu", autocast)
        torch.set_autocast_dtype("cpu", autocast_dtype)
        if torch.get_default_device() != device:
            torch.set_default_device(None)


def modes() -> dict[str, Any]:
    """The global modes that a program can leave changed."""
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "device": torch.get_default_device(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "random": random.getstate(),
        "torch.random": torch.get_rng_state(),
    }


def cotangent(x: torch.Tensor) -> torch.Tensor:
    return torch.linspace(0.5, 1.5, max(x.numel(), 1))[: x.numel()].reshape(x.shape).to(x.dtype)


@dataclass
class Outcome:
    """All that one call left behind."""

    value: Any = None
    error: BaseException | None = None
    modes: dict[str, Any] | None = None
    state: Any = None
    backward_error: BaseException | None = None


def run_once(call: Callable[..., Any], args: tuple[Any, ...], kw: dict[str, Any], how: How) -> Outcome:
    """Call with fixed random numbers, then send fixed gradients back from every output that has a history."""
    out = Outcome()
    if how.setup:
        how.setup()
    torch.manual_seed(7)
    random.seed(7)
    with modes_kept():
        try:
            out.value = call(*args, **kw)
        except Exception as error:
            out.error = error
        out.modes = modes()
    if how.state:
        out.state = copy.copy(how.state())
    roots = [x for x in tensors_of(out.value) if x.grad_fn is not None and x.layout == torch.strided]
    if roots:
        try:
            torch.autograd.backward(roots, [cotangent(x) for x in roots])
        except Exception as error:
            out.backward_error = error
    return out


def compare(same: Same, a: Outcome, b: Outcome, path: str) -> None:
    """Compare two outcomes; an exception that eager does not raise is the cause of the failure."""
    if a.error is None and b.error is not None:
        raise AssertionError(f"{path} raised {type(b.error).__name__}: {b.error}") from b.error
    same(a, b, path)


def copies(f: Any, args: tuple[Any, ...], kw: dict[str, Any], how: How) -> tuple[Any, list[Any]]:
    """A copy of the callable, and the arguments of two calls: equal ones, but the same modules in both."""
    memo: dict[int, Any] = {}
    mine = copy.deepcopy(f, memo)
    first = copy.deepcopy((args, kw), memo)
    kept = {key: value for key, value in memo.items() if isinstance(value, torch.nn.Module) or value is mine}
    return mine, [first, copy.deepcopy((args, kw), kept) if how.fresh else first]


def same_as_eager(f: Callable[..., Any], *args: Any, how: How | None = None, **kw: Any) -> Result:
    """Run `f` twice eagerly and twice compiled on copies of the arguments; fail where anything observable differs."""
    how = how or How()
    eager, eager_calls = copies(f, args, kw, how)
    expected = [run_once(eager, *call, how) for call in eager_calls]
    eager_state = copy.copy(how.state()) if how.state else None

    mine, calls = copies(f, args, kw, how)
    backend, r, got = Counting(how.backend), Result(), []
    compiled = mine if EAGER else kiln.compile(mine, backend=backend, **how.options)
    for number, call in enumerate(calls):
        before = len(backend.modules)
        with collected() as log:
            got.append(run_once(compiled, *call, how))
        r.found += log.breaks
        fallbacks = [f for f in log.fallbacks if not f.error.startswith(LEFT)]
        assert not fallbacks, f"fell back to eager: {fallbacks}"
        if number and not how.recompiles:
            assert len(backend.modules) == before, f"the second call recompiled: {reasons(log)}"
    same = Same()
    for number, (a, b) in enumerate(zip(expected, got, strict=True)):
        compare(same, a, b, f"call {number + 1}")
    same([c[0] for c in eager_calls], [c[0] for c in calls], "arguments")
    same([c[1] for c in eager_calls], [c[1] for c in calls], "keywords")
    if isinstance(f, torch.nn.Module) or f is not mine:
        same(eager, mine, "callable")
    same(eager_state, copy.copy(how.state()) if how.state else None, "state")
    r.modules, r.graphs, r.compiles, r.runs = backend.modules, len(backend.modules), len(backend.modules), backend.runs
    r.ops, r.breaks = sum(len(ops_of(gm)) for gm in backend.modules), len(r.found)
    r.value, r.raised = got[0].value, got[0].error
    return r


@contextmanager
def collected() -> Iterator[Any]:
    """The records of what Kiln does meanwhile."""
    if EAGER:
        yield SimpleNamespace(graphs=[], breaks=[], recompiles=[], fallbacks=[], residuals=[])
    else:
        with records.collect() as log:
            yield log


def reasons(log: Any) -> list[str]:
    return [reason for record in log.recompiles for reason in record.reasons]


@dataclass(frozen=True)
class Case:
    """One run of a program and what it must give."""

    args: tuple[Any, ...]
    kw: dict[str, Any]
    graphs: int
    breaks: int
    how: How | None
    raises: type[BaseException] | None


def program(
    *args: Any, graphs: int = 1, breaks: int = 0, how: How | None = None, raises: Any = None, **kw: Any
) -> Callable[[Any], Any]:
    """Make a test of a function: same as eager, this many graphs and breaks. Stacked, each gives one more case."""
    case = Case(args, kw, graphs, breaks, how, raises)

    def wrap(f: Any) -> Any:
        if hasattr(f, "cases"):
            f.cases.insert(0, case)
            return f

        def test() -> None:
            for c in test.cases:  # type: ignore[attr-defined]
                r = same_as_eager(f, *c.args, how=c.how, **c.kw)
                assert type(r.raised) is (c.raises or type(None)), f"raised {r.raised!r}"
                pin(r, c.graphs, c.breaks, c.how)

        test.__name__, test.__module__, test.__doc__ = f.__name__, f.__module__, f.__doc__
        test.cases, test.program = [case], f  # type: ignore[attr-defined]
        return test

    return wrap


def pin(r: Result, graphs: int = 1, breaks: int = 0, how: How | None = None) -> None:
    """The structure of a program; one that raises to its caller need not have a graph."""
    if EAGER:
        return
    assert r.breaks == breaks, f"{r.breaks} breaks, not {breaks}: {[str(b) for b in r.found]}"
    if r.raised is not None:
        return
    assert r.graphs == graphs, f"{r.graphs} graphs, not {graphs}"
    runs = how.runs if how and how.runs is not None else 2 * graphs
    assert r.runs == runs, f"graphs ran {r.runs} times, not {runs}"


def one_graph(f: Callable[..., Any], *args: Any, how: How | None = None, **kw: Any) -> Result:
    """Same as eager, in one graph without a break, and no exception."""
    r = same_as_eager(f, *args, how=how, **kw)
    assert r.raised is None, f"raised {r.raised!r}"
    pin(r, 1, 0, how)
    return r


class Watch:
    """A compiled function that is compared with eager at each call, on copies of the arguments, and counted."""

    def __init__(self, f: Any, **options: Any) -> None:
        self.function, self.backend = f, Counting()
        self.compiled = f if EAGER else kiln.compile(f, backend=self.backend, **options)
        self.breaks: list[Any] = []
        self.reasons: list[str] = []
        self.recompiles = 0

    def __call__(self, *args: Any, **kw: Any) -> Any:
        expected_args, call = copy.deepcopy((args, kw)), copy.deepcopy((args, kw))
        how = How()
        expected = run_once(self.function, *expected_args, how)
        with collected() as log:
            got = run_once(self.compiled, *call, how)
        fallbacks = [f for f in log.fallbacks if not f.error.startswith(LEFT)]
        assert not fallbacks, f"fell back to eager: {fallbacks}"
        self.breaks, self.reasons = self.breaks + list(log.breaks), reasons(log)
        self.recompiles += len(log.recompiles)
        same = Same()
        compare(same, expected, got, "call")
        same(expected_args, call, "arguments")
        if got.error:
            raise got.error
        return got.value

    @property
    def graphs(self) -> int:
        return len(self.backend.modules)

    def pin(self, **wanted: int) -> None:
        """Check graphs, breaks (a count) and recompiles."""
        if EAGER:
            return
        have = {"graphs": self.graphs, "breaks": len(self.breaks), "recompiles": self.recompiles}
        assert {k: have[k] for k in wanted} == wanted, f"{have} {self.reasons} {[str(b) for b in self.breaks]}"


RECOMPILES = How(recompiles=True)
SAME_OBJECTS = replace(How(), fresh=False)
