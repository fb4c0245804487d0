"""Records as data: what each kind of record holds."""

from __future__ import annotations

from dataclasses import replace
from types import CodeType
from typing import Any, TypeAlias

from kiln.base.dataclass import dataclass
from kiln.base.errors import Place
from kiln.base.places import user_place


@dataclass(frozen=True, slots=True)
class Op:
    """One node of a captured graph; `places` is the program's stack at it, outermost first."""

    name: str
    op: str
    kind: str = "call"
    """ "input", "attribute" (a tensor that the graph holds), "call" or "output"."""
    inputs: tuple[str, ...] = ()
    spec: str = ""
    """Dtype and shape of the result: "float32[2, 3]"."""
    places: tuple[Place, ...] = ()
    module: str = ""
    """The path of the module whose forward it belongs to: "encoder.layers.0"."""

    @property
    def place(self) -> Place | None:
        """The line of the program that it stands on, not one within torch's own code."""
        return user_place(self.places)


@dataclass(frozen=True, slots=True)
class Fused:
    """One operation that a kernel computes; `origin` names the node of the captured graph it comes from."""

    op: str
    origin: str = ""
    place: Place | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a plan: "kernel" (`name` is its record's), "native" or "python" call, or "view"."""

    kind: str
    name: str
    origin: str = ""
    place: Place | None = None
    bytes: int = 0
    """What is alive during it, beside the inputs."""
    origins: tuple[str, ...] = ()
    """For a kernel the nodes of the captured graph that this launch of it computes."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A guard that did not hold: what it is about, the value then and now, the line that read it."""

    guard: str
    source: str
    old: str
    new: str
    place: Place | None = None
    advice: str = ""
    """What ends it: a change of the program, or a mark."""

    def __str__(self) -> str:
        return self.guard


@dataclass(frozen=True, slots=True)
class GraphRecord:
    """A graph was captured and handed to the backend; `guards` are those of its entry, each with a `str`."""

    name: str
    """Unique in the process: the region's, with a number from the second graph of that name on."""
    graph: Any
    ops: int
    inputs: int
    start: Place | None
    region: str
    guards: tuple[Any, ...] = ()
    end: Place | None = None
    operations: tuple[Op, ...] = ()
    """Inputs, attributes, calls and output in order; empty where nobody listened."""
    guarded: tuple[tuple[str, Place | None], ...] = ()
    """The guards in words, each with the line that asked for it; empty where nobody listened."""

    def light(self) -> GraphRecord:
        """The record without what keeps the user's objects alive."""
        if self.graph is None and not self.guards:
            return self
        return replace(self, graph=None, guards=(), operations=(), guarded=())

    def __str__(self) -> str:
        to = f" to line {self.end.line}" if self.end else ""
        return f"{self.name}: {self.ops} ops, {self.inputs} inputs, from {self.start}{to}"


@dataclass(frozen=True, slots=True)
class BreakRecord:
    """The graph ended before the end of the frame."""

    kind: str
    place: Place | None
    why: str
    hint: str
    region: str
    graph: str = ""
    """The name of the graph that it ended; "" where nothing was captured before it."""

    def __str__(self) -> str:
        where = f" at {self.place}" if self.place else ""
        return f"[{self.kind}]{where}: {self.why}" + (f"; {self.hint}" if self.hint else "")


@dataclass(frozen=True, slots=True)
class RecompileRecord:
    """No entry of the region held; `reasons` names for each entry the first guard that failed."""

    region: str
    reasons: tuple[str, ...]
    place: Place | None = None
    """Where the function is defined."""
    failures: tuple[Failure, ...] = ()
    limited: bool = False
    """Whether the cache limit was reached: the function runs eagerly from here on."""
    resumed: bool = False
    """Whether it is what goes on after a break."""

    def __str__(self) -> str:
        remedy = f"; {self.failures[0].advice}" if self.failures else ""
        return f"{self.region}: {' | '.join(self.reasons)}{remedy}"


@dataclass(frozen=True, slots=True)
class FallbackRecord:
    """A frame was left to Python, or a graph to eager; `error` says why, `file` has what a report needs."""

    region: str
    error: str
    file: str = ""

    def __str__(self) -> str:
        return f"{self.region}: {self.error}"


@dataclass(frozen=True, slots=True)
class ResidualRecord:
    """The bytecode that runs in place of the frame; `original` is the frame's own, or that of a forward."""

    region: str
    code: CodeType | None
    original: CodeType | None = None
    graph: str = ""
    """The graph that it calls, where it calls one."""
    broke: Place | None = None
    """Where the graph ended, where what it returns is a call of what goes on."""

    def light(self) -> ResidualRecord:
        return replace(self, code=None, original=None)

    def __str__(self) -> str:
        return f"{self.region}: {self.code.co_qualname if self.code else 'none'}"


@dataclass(frozen=True, slots=True)
class CodeRecord:
    """Machine code was made for the kernels of a graph, or found: `source` is compiled, disk or memory."""

    kernels: int
    distinct: int
    """The functions that are launched, after equal ones became one."""
    nests: int
    """The loop nests among them that differ."""
    source: str
    seconds: float

    def __str__(self) -> str:
        counts = f"{self.kernels} kernels, {self.distinct} distinct, {self.nests} nests"
        return f"code: {counts}, {self.source} in {self.seconds * 1000:.0f} ms"


@dataclass(frozen=True, slots=True)
class TunedRecord:
    """Variants of a kernel or a graph were timed: seconds of the usual one and of the best, and its name."""

    kernel: str
    variants: int
    usual: float
    best: float
    schedule: str

    def __str__(self) -> str:
        gain = f"{self.usual / self.best:.2f} times the usual speed by {self.schedule}"
        return f"tuned: {self.kernel}: {self.variants} variants, {gain}"


@dataclass(frozen=True, slots=True)
class StageRecord:
    """A stage ran: for which graph and half of it, since when (`time.perf_counter`), and for how long.

    Stages contain others: capture contains the backend's, and those their own.
    """

    graph: str
    stage: str
    half: str
    start: float
    seconds: float

    def __str__(self) -> str:
        what = " ".join(filter(None, (self.graph, self.half, self.stage)))
        return f"{what}: {self.seconds * 1000:.1f} ms"


@dataclass(frozen=True, slots=True)
class KernelRecord:
    """A kernel of a graph: its loops as text, what is fused in it, the bytes that it reads and writes."""

    graph: str
    half: str
    """ "forward", "backward" or "inference"."""
    name: str
    nest: str
    fused: tuple[Fused, ...]
    reads: int
    writes: int
    device: str = "cpu"
    launches: int = 1
    """How often one call of the graph launches it."""
    functions: tuple[str, ...] = ()
    """The functions that are called for it in the text of the half's code."""

    def __str__(self) -> str:
        ops = ", ".join(one.op for one in self.fused)
        return f"{self.graph} {self.half} {self.name}: {ops}; reads {self.reads}, writes {self.writes} bytes"


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """How a graph runs: the steps in order, and the memory that they need against what eager would hold."""

    graph: str
    half: str
    steps: tuple[Step, ...]
    arena: int
    """Bytes of the memory that the plan arranges values in; 0 where a plan has none."""
    eager: tuple[int, ...]
    """Bytes alive after each op of the graph if it ran op by op, beside the inputs."""

    @property
    def peak(self) -> int:
        """The most bytes that are alive at once."""
        return max((step.bytes for step in self.steps), default=0)

    @property
    def eager_peak(self) -> int:
        return max(self.eager, default=0)

    def __str__(self) -> str:
        memory = f"{self.peak} bytes (eager {self.eager_peak})"
        return f"{self.graph} {self.half}: {len(self.steps)} steps, {memory}"


@dataclass(frozen=True, slots=True)
class Value:
    """A value of a half as it is computed, in primitives; `step` is the step of the plan that computes it."""

    name: str
    op: str
    kind: str
    """ "input", "constant", "pointwise", "reduction", "view", "call" or "output"."""
    inputs: tuple[str, ...] = ()
    spec: str = ""
    origin: str = ""
    """The node of the captured graph that it comes from."""
    step: int = -1
    call: str = ""
    """What computes it, as Python."""


@dataclass(frozen=True, slots=True)
class Lodged:
    """A value's memory in the arena: from the step that writes it to the last that reads it."""

    name: str
    bytes: int
    offset: int
    """Where it lies; -1 where sizes vary."""
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class ValuesRecord:
    """The values of a graph's half in primitives, and where in the arena they lie."""

    graph: str
    half: str
    values: tuple[Value, ...]
    lodged: tuple[Lodged, ...] = ()

    def __str__(self) -> str:
        return f"{self.graph} {self.half}: {len(self.values)} values"


@dataclass(frozen=True, slots=True)
class TextRecord:
    """What a stage made of a graph, as text; stages are captured, joint, prims, loops, kernels and plan."""

    graph: str
    half: str
    stage: str
    language: str
    """ "py", "txt", "ll" or "ptx"."""
    text: str

    def __str__(self) -> str:
        return f"{self.graph} {self.half} {self.stage}"


@dataclass(frozen=True, slots=True)
class CacheRecord:
    """The disk cache was asked: a "hit", a "miss", or an entry "written"."""

    event: str
    key: str
    bytes: int = 0

    def __str__(self) -> str:
        return f"{self.event} {self.key[:16]}" + (f", {self.bytes} bytes" if self.bytes else "")


Record: TypeAlias = (
    GraphRecord | BreakRecord | RecompileRecord | FallbackRecord | ResidualRecord | CodeRecord | TunedRecord
    | StageRecord | KernelRecord | PlanRecord | ValuesRecord | TextRecord | CacheRecord
)  # fmt: skip

#: For each type of record the list of `Records` that holds it, and the topic of KILN_LOG that shows it.
KINDS: dict[type, str] = {
    GraphRecord: "graphs", BreakRecord: "breaks", RecompileRecord: "recompiles", FallbackRecord: "fallbacks",
    ResidualRecord: "residuals", CodeRecord: "codes", TunedRecord: "tuned", StageRecord: "stages",
    KernelRecord: "kernels", PlanRecord: "plans", ValuesRecord: "values", TextRecord: "texts",
    CacheRecord: "caches",
}  # fmt: skip
TOPICS: dict[type, str] = {
    GraphRecord: "graph", BreakRecord: "breaks", RecompileRecord: "recompiles", FallbackRecord: "breaks",
    CodeRecord: "time", TunedRecord: "time", StageRecord: "time", CacheRecord: "cache",
}  # fmt: skip

#: Records that are not kept for nobody.
HEAVY = (StageRecord, KernelRecord, PlanRecord, ValuesRecord, TextRecord, ResidualRecord, CacheRecord)
