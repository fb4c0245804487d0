"""Runs the stages in order: a miss of a region becomes a capture, a compiled graph and a new entry."""

from __future__ import annotations

import functools
import types
from collections import Counter
from dataclasses import replace
from importlib._bootstrap import _find_and_load  # type: ignore[attr-defined]
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch.autograd import forward_ad

from kiln import _hook, foreign, modules, telling
from kiln.base import live, log, options, records, state
from kiln.base.collecting import uncollected
from kiln.base.dataclass import dataclass
from kiln.base.errors import Break, Bug, Place, RecompileError, Skip, Specialised
from kiln.base.options import Compile
from kiln.base.progress import working
from kiln.base.tracebacks import add_lines
from kiln.capture import nested, runtime
from kiln.capture.finish import Captured
from kiln.capture.frame import place_at
from kiln.capture.module import CapturedModule
from kiln.capture.nested import hide
from kiln.capture.run import capture
from kiln.capture.varying import Dynamic
from kiln.capture.world import TEXTS
from kiln.check.failures import failure
from kiln.check.guards import Equals, Guard
from kiln.check.shapes import varying
from kiln.check.state import observed
from kiln.check.tree import GuardSet
from kiln.shared import KEPT, LOCK, Alike, Between, Family, Kept, family_of


@dataclass(eq=False, slots=True)
class Entry:
    """What is remembered of one entry of a region."""

    found: GuardSet
    foreseen: Any = None

    @property
    def guards(self) -> tuple[Guard, ...]:
        return self.found.guards

    @property
    def texts(self) -> list[Guard]:
        """The guards on texts that the program may only have kept."""
        return [g for g in self.guards if type(g) is Equals and type(g.value) in TEXTS]

    def place(self, guard: Guard) -> Place | None:
        """Where the program asked for a guard."""
        at = self.found.place(guard)
        return None if at is None else place_at(*at)


#: From so many entries on that no later call has run, misses run the original before another is compiled, and
#: twice as many each time: a list that is longer in every call would be compiled for in each of them.
UNUSED = 8

#: Methods that reading an attribute runs: the code and the guards of a region read attributes themselves.
ATTRIBUTE_LOOKUP = frozenset({"__getattribute__", "__getattr__"})


def frame_region(function: types.FunctionType, between: Between) -> Any:
    """The region of a function that code outside any graph calls while a compiled region runs."""
    if function.__code__.co_name in ATTRIBUTE_LOOKUP:
        return None
    key = ("frame", function.__code__)
    known = between.resumes.get(key)
    if known is None:
        known = between.resumes[key] = make_region(function, Family(between.options, between))
    return known if known.function is function else None


nested.install(frame_region)
hide(foreign, nested, runtime, state)
_hook.leave_alone(_find_and_load.__code__)  # modules that the program imports on its way


class BackendRaised(Exception):
    """The backend that the user chose refused a graph; its error is the user's to see."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        super().__init__(error)


def region(function: types.FunctionType, asked: Compile, kept: Kept | None = None) -> Any:
    """A callable that runs the function captured and compiled, with what other such have captured."""
    if kept is None:
        return make_region(function, family_of(asked))
    return registered(function, lambda region, argv: miss(region, argv, kept.family, kept), asked.fullgraph)


#: The regions of modules, each with the first module that was compiled so and what its regions share.
COMPILED: WeakKeyDictionary[Any, tuple[ref[torch.nn.Module], Family]] = WeakKeyDictionary()


def forget() -> None:
    """Forget what is kept for compile calls to come."""
    COMPILED.clear()
    for kept in list(KEPT):
        kept.entries.clear()
        kept.family.between.resumes.pop("failures", None)  # of branches that were foreseen


def module_region(function: types.FunctionType, module: torch.nn.Module, asked: Compile) -> Any:
    """A region for calls of a module: its own, or, to train, that of one built alike that was not called."""
    for known, (first, family) in list(COMPILED.items()):
        other = first()
        fits = type(other) is type(module) and known.function is function and family.options.like(asked)
        if other is module and fits and family.settings == options.config.now:
            return known
        free = module.training and (family.modules > 1 or not known.entries)
        if other is not None and other is not module and fits and free and modules.alike(module, other):
            family.modules += 1
            return known
    made = make_region(function, family := family_of(asked))
    COMPILED[made] = ref(module), family
    return made


def make_region(function: types.FunctionType, family: Family) -> Any:
    fullgraph = family.options.fullgraph
    return registered(function, lambda region, argv: miss(region, argv, family), fullgraph)


def registered(function: types.FunctionType, missed: Any, whole: bool = False) -> Any:
    _hook.hide(missed.__code__, _hook.HIDDEN)
    made = _hook.Region(function, missed)
    live.register(made)
    if whole:
        live.whole.add(made)
    return made


def resumed_region(function: types.FunctionType, family: Family) -> Any:
    """The region after a break; a full graph has one only if the program did not raise as capture saw it."""

    def resumed(region: Any, argv: tuple[Any, ...]) -> Any:
        seen, family.raising = family.raising, None
        if seen is not None:
            name = family.options.name or function.__qualname__
            records.emit(records.BreakRecord("capture-raised", seen.at, seen.why, seen.hint, name))
            if family.options.fullgraph:
                raise Break("capture-raised", seen.why, seen.hint, seen.at)
        return miss(region, argv, family)

    made = registered(function, resumed)
    family.resumed.add(made)
    return made


def miss(region: Any, argv: tuple[Any, ...], family: Family, kept: Kept | None = None) -> Any:
    """No entry holds: capture, add an entry, and have the region run it."""
    function = region.function
    if kept is not None and kept.function.__code__ is not function.__code__:
        kept = None  # it has got other code
    if kept is not None and kept.alike is not None and kept.alike.count > 1 and not region.entries:
        return _hook.then(given_to_caller(region, kept.alike))
    lent = kept is not None and kept.lend(region)
    if kept is not None:
        function = kept.function
    refused = None
    _hook.pause()
    try:
        run = find_run(region, function, argv, family)
        if kept is not None and lent:
            kept.keep(region)
    except BackendRaised as error:
        refused = error.error
    except (Break, Skip, Specialised, RecompileError) as error:
        # A refusal is for the program's author: the traceback ends at the line that it is about.
        error.__traceback__ = None
        place = getattr(error, "at", None)
        add_lines(error, () if place is None else (place,))
        raise
    finally:
        _hook.resume()
    if refused is not None:  # out here, where no error of ours is its context
        raise refused
    return _hook.then(nested.eager(function) if run is None else run)


def given_to_caller(region: Any, alike: Alike) -> Any:
    """How a function runs that is one of many alike: from now on, whatever it is called with."""
    kept = alike.kept
    caller = registered(kept.function, lambda inner, argv: miss(inner, argv, kept.family, kept))
    run = functools.partial(caller, region.function)
    region.add(GuardSet().build(), run, Entry(GuardSet()))
    return run


def find_run(region: Any, function: types.FunctionType, argv: tuple[Any, ...], family: Family) -> Any:
    with LOCK:
        for entry in region.entries:  # another thread may have been faster
            if entry.guards.check(argv):
                return entry.run
        with uncollected():
            return compile_entry(region, function, argv, family)


def compile_entry(region: Any, function: types.FunctionType, argv: tuple[Any, ...], family: Family) -> Any:
    asked, name = family.options, family.options.name or function.__qualname__
    entries = region.entries
    stance = live.stance()
    transformed = torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0
    traced = torch._C._get_tracing_state() is not None
    if stance == "eager_on_recompile" or transformed or traced or observed():
        # Tensors of a functorch transform, or with tangents, are not those of a graph; modes and
        # TorchScript's tracer are to see ops.
        return None
    failing = [(entry.info, failing_guards(entry.info, argv)) for entry in entries]
    failures = [[failure(guard, argv, entry.place(guard)) for guard in found] for entry, found in failing]
    if stance == "fail_on_recompile":
        why = "; ".join(str(found[0]) for found in failures if found) or "it has not been compiled yet"
        raise RecompileError(f"{name} would be compiled again under the stance {stance!r}: {why}")
    causes = family.causes.setdefault(region, Counter()) if entries else Counter()
    limit = asked.setting("cache_limit") * family.modules
    if entries and telling.recompiled(
        function, argv, name, failures, limit, region in family.resumed, asked.dynamic, causes
    ):
        region.limit_hit = True
        return None
    first_failing = [found[0] for _, found in failing if found]
    often = Counter(guard.about() for guard in first_failing)
    unstable = frozenset(g.about() for g in first_failing if often[g.about()] >= g.patience)
    unstable |= {g.about() for entry in entries for g in entry.info.texts if not g.holds(argv)}
    if family.modules > 1:
        names = function.__code__.co_varnames
        given = {name: v for name, v in zip(names, argv, strict=False) if isinstance(v, torch.nn.Module)}
        its_own = not torch.is_grad_enabled() or any(map(modules.watched, given.values()))
        unstable = unstable - given.keys() if its_own else unstable | given.keys()
    known = [entry.info.guards for entry in entries]
    first = stance in live.FIRST_AS_IS and not entries and region not in family.first
    if first:
        asked = replace(asked, backend=as_is)
    elif region in family.first:
        known.append(family.first[region])
    # What this call has other than the guards of earlier ones have, and what varies in them already.
    seen_to_vary = frozenset[Any]().union(*[varying(guards, argv) for guards in known])
    try:
        with records.timed("capture", name) as time, working(f"capturing {name}"):
            captured = capture(function, argv, functools.partial(compiled, asked, name),
                               lambda f: resumed_region(f, family), family.between.resumes,
                               asked.fullgraph, unstable,
                               lambda target: _hook.in_python(target, family.between),
                               getattr(asked.backend, "specialises", True),
                               getattr(asked.backend, "writes_last", False),
                               Dynamic(asked.dynamic, seen_to_vary))  # fmt: skip
            if captured.graph is not None:
                time.graph = captured.graph.meta["name"]
    except Skip as e:
        return skip(region, name, e, family)
    except (Break, Specialised, BackendRaised, MemoryError):
        raise
    except Exception as e:
        return failed(region, name, e, asked)
    reason = captured.reason
    family.raising = reason if reason is not None and reason.kind == "raises" else None
    if first:
        family.first[region] = captured.guards.guards
        return captured.run
    unused = sum(not entry.hit for entry in entries) - UNUSED * family.modules
    if unused >= 0 and not asked.fullgraph:  # which promises a graph
        region.wait = 1 << min(unused, 16)
        log.say("recompiles", f"{name}: graphs served one call each, {region.wait} without one run in Python")
    return install(region, captured, name, argv)


def as_is(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    """The backend of a first call that is not compiled: the graph itself."""
    return graph.forward


def compiled(asked: Compile, name: str, graph: CapturedModule, inputs: list[Any]) -> Any:
    """What the backend makes of a graph, under the options of a compile call."""
    changes = {name: value for name, value in asked.options.items() if name in options.OPTION_NAMES}
    if asked.mode is not None:
        changes["mode"] = asked.mode
    if asked.fullgraph:
        changes["strict"] = True
    graph.meta["name"] = made = records.unique(name)
    if log.wants("graph"):
        log.say("graph", f"{made} captured\n{graph.code.strip()}")
    if not getattr(asked.backend, "reads_graph", False):
        graph.write()
    try:
        with options.config.patch(**changes), records.timed("backend", made):
            built = foreign.built(asked.backend, graph, inputs, asked.setting("cache_limit"))
    except Bug:  # ours, whoever's backend it is
        raise
    except Exception as e:
        raise BackendRaised(e) from e
    inner = getattr(built, "__func__", built)
    if isinstance(inner, types.FunctionType):
        _hook.skip(inner.__code__)  # what runs a graph is not a frame of the program
    return built


def install(region: Any, captured: Captured, name: str, argv: tuple[Any, ...]) -> Any:
    made = "" if captured.graph is None else captured.graph.meta["name"]
    with records.timed("guards", made or name):
        built = captured.guards.build()
    entry = Entry(captured.guards, captured.foreseen)
    telling.captured_frame(region.function, captured, entry, made, name, argv)
    region.add(built, captured.run, entry)
    captured.foreseen.forget = forget_entry
    return captured.run


def forget_entry(foreseen: Any) -> None:
    """Take out the entry whose branches went another way than foreseen."""
    with LOCK:
        for kept in list(KEPT):
            kept.entries = [entry for entry in kept.entries if entry.info.foreseen is not foreseen]
        for region in live.regions():
            entries = region.entries
            others = [entry for entry in entries if entry.info.foreseen is not foreseen]
            if len(others) < len(entries):
                region.clear()
                for entry in reversed(others):
                    region.add(entry.guards, entry.run, entry.info)


def skip(region: Any, name: str, error: Skip, family: Family) -> Any:
    if family.options.fullgraph:
        raise error
    why = error.broke or Break("skipped", error.why)
    at = why.at or telling.defined(region.function)
    records.emit(records.BreakRecord(why.kind, at, why.why, why.hint, name))
    _hook.skip(region.function.__code__)
    region.add(GuardSet().build(), nested.unchanged(region.function, family.between), Entry(GuardSet()))
    return region.entries[0].run


def failed(region: Any, name: str, error: Exception, asked: Compile) -> None:
    """An internal error: one line, and the function runs eagerly."""
    if asked.fullgraph or options.config.strict:
        raise error
    telling.failed(name, error, region.function)
    region.enabled = False


def failing_guards(entry: Entry, argv: tuple[Any, ...]) -> list[Guard]:
    """The first guard of an entry that does not hold, or all of them while somebody listens."""
    found = (guard for guard in entry.guards if not guard.holds(argv))
    return list(found if records.listening() else islice(found, 1))
