"""The shape of the facts: what `kiln.observe.facts` gives, and the page and programs read."""

from __future__ import annotations

from typing import TypedDict


class PlaceFact(TypedDict):
    """A line of the program; `column` and `width` say which part of `text` (the line, stripped) is meant."""

    file: str
    line: int
    function: str
    text: str
    column: int
    width: int


class OpFact(TypedDict):
    """A node of a graph; `kind` is input, attribute, call or output, `inputs` are names of other nodes."""

    name: str
    op: str
    kind: str
    inputs: list[str]
    spec: str
    module: str
    place: PlaceFact | None
    stack: list[PlaceFact]
    kernels: list[str]
    """Ids of the kernels that compute it, forward and backward."""
    calls: list[str]
    """Eager kernels that compute it, as "forward mm"."""


class GuardFact(TypedDict):
    """A guard in words, and the line that asked for it."""

    text: str
    place: PlaceFact | None


class GraphFact(TypedDict):
    """A captured graph; its name is unique."""

    name: str
    region: str
    ops: int
    inputs: int
    start: PlaceFact | None
    end: PlaceFact | None
    operations: list[OpFact]
    guards: list[GuardFact]


class BreakFact(TypedDict):
    """A place at which graphs end, and how often they did."""

    kind: str
    region: str
    graphs: list[str]
    """The graphs that ended there."""
    place: PlaceFact | None
    reason: str
    remedy: str
    count: int


class ChangeFact(TypedDict):
    """One recompile: what the value was and what it became."""

    old: str
    new: str


class RecompileFact(TypedDict):
    """A guard of a function that failed, how often, and with which values in order."""

    region: str
    function: PlaceFact | None
    source: str
    guard: str
    """The sentence about its latest failure."""
    place: PlaceFact | None
    """The line that reads the value."""
    remedy: str
    count: int
    changes: list[ChangeFact]
    limited: bool
    """Whether the cache limit was reached: the function runs eagerly since."""
    follows: bool
    """Whether it only follows from another: what goes on after a break is compiled again with the rest."""


class StageFact(TypedDict):
    """A stage's run, in seconds since the first began; `own` leaves out the stages within it."""

    graph: str
    half: str
    stage: str
    start: float
    seconds: float
    own: float


class FusedFact(TypedDict):
    """A captured op within a kernel: its name in the graph ("" where unknown), what it calls, its line."""

    origin: str
    op: str
    place: PlaceFact | None


class KernelFact(TypedDict):
    """A kernel; `id` is unique, as "f forward k2"."""

    id: str
    graph: str
    half: str
    name: str
    device: str
    nest: str
    fused: list[FusedFact]
    reads: int
    writes: int
    launches: int
    functions: list[str]
    """Its functions in the text of the half's code."""


class StepFact(TypedDict):
    """A step of a plan: kind is kernel, native (C entry of torch), python or view; `kernel` is its id."""

    kind: str
    name: str
    kernel: str
    origin: str
    place: PlaceFact | None
    bytes: int
    """What is alive during it, beside the inputs."""


class PlanFact(TypedDict):
    """How a graph or a half of it runs, and its memory."""

    graph: str
    half: str
    steps: list[StepFact]
    arena: int
    peak: int
    eager_peak: int
    eager: list[int]
    """Bytes alive during each op if the graph ran op by op."""


class ValueFact(TypedDict):
    """A value in primitives: what computes it, from which values; `step` is one of the plan's, or -1.

    `kind` is input, constant, pointwise, reduction, view, call or output; `origin` names the captured node.
    """

    name: str
    op: str
    kind: str
    inputs: list[str]
    spec: str
    origin: str
    step: int
    call: str


class LodgedFact(TypedDict):
    """Where a value lies in the arena, and between which steps; `offset` is -1 where sizes vary."""

    name: str
    bytes: int
    offset: int
    first: int
    last: int


class ValuesFact(TypedDict):
    """A half of a graph in primitives."""

    graph: str
    half: str
    values: list[ValueFact]
    lodged: list[LodgedFact]


class FallbackFact(TypedDict):
    """A frame or graph left to eager after an error; `file` is what to attach to a report."""

    region: str
    error: str
    file: str


class TextFact(TypedDict):
    """What a stage made of a graph, as text."""

    graph: str
    half: str
    stage: str
    language: str
    text: str


class CacheFact(TypedDict):
    """What the disk cache was asked."""

    hits: int
    misses: int
    written: int


class SummaryFact(TypedDict):
    """The counts, and seconds spent compiling."""

    graphs: int
    ops: int
    outside: int
    """Operations that ran between graphs: the instructions that broke them."""
    share: float
    """Of the operations, those that were captured: from 0 to 1."""
    breaks: int
    recompiles: int
    fallbacks: int
    kernels: int
    calls: int
    """Calls of eager kernels in one run of every graph."""
    bytes: int
    """What the kernels read and write in one run of every graph."""
    peak: int
    eager_peak: int
    seconds: float


class Facts(TypedDict):
    """Everything."""

    version: int
    summary: SummaryFact
    graphs: list[GraphFact]
    breaks: list[BreakFact]
    recompiles: list[RecompileFact]
    stages: list[StageFact]
    kernels: list[KernelFact]
    plans: list[PlanFact]
    values: list[ValuesFact]
    """Empty where texts were not asked for."""
    fallbacks: list[FallbackFact]
    texts: list[TextFact]
    cache: CacheFact
