"""Plans on a GPU as CUDA graphs: recorded once and replayed, in memory that stays where it is.

A recording reads its inputs where they lay when it was made, and is used for calls in which they lie there;
those that move from call to call are copied to one place. It writes its outputs to places of its own. What a
caller sees is copied out of there, or is lent: then the recording rests until nobody holds what it lent, and
another one, or the plan itself, does what is asked for meanwhile. Memory between the steps is shared by all
recordings for a stream, since they run one after the other.

What a forward pass saves is there until the backward pass has run; its memory is idle otherwise. Recordings
that save nothing are guests there. None in such a memory is replayed while somebody holds what another one
wrote; a guest that was in the way, or could not be replayed, is recorded again in memory of its own.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakSet

import torch

from kiln._launch import Plan, addresses, aliases, lend
from kiln.base import log, profiling
from kiln.base.collecting import uncollected
from kiln.fuse.program import Program
from kiln.fuse.steps import Call
from kiln.launch.events import forgetful

WARM = 2  # calls before anything is recorded: what is made at first use exists then
MOST = 8  # recordings of one plan
AT_ONCE = 2  # recordings of one plan for the same places
FEWEST = 4  # kernels and calls, below which starting them costs no more than starting a graph
SMALL = 1 << 20  # bytes of an output that is copied for the caller
WORD = 8

_count = torch._C._storage_Use_Count  # type: ignore[attr-defined]
_storage = torch._C._construct_storage_from_data_pointer  # type: ignore[attr-defined]
_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_capturing: Any = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)

_lent: dict[int, int] = {}
"""The addresses of what recordings write, with how many of them do: what takes it finds it there again."""
_shared: dict[tuple[int, int], tuple[Any, torch.Tensor]] = {}
"""By device and stream: the stream to record on, and the memory between steps."""
_hosts: WeakSet[Recording] = WeakSet()
"""Recordings that may have guests."""
_lock = threading.Lock()


def can_record(program: Program) -> bool:
    """Whether a graph of a program would do what the program does, each time."""
    calls = [step.node.op for step in program.steps if isinstance(step, Call)]
    many = sum(1 for op in calls if op is not operator.getitem) + len(program.steps) - len(calls)
    return many >= FEWEST and all(op is operator.getitem or forgetful(op) for op in calls)


def shared(device: int, stream: int, size: int) -> tuple[Any, torch.Tensor]:
    """The stream on which to record for a stream, and memory of at least this size."""
    with _lock:
        side, memory = _shared.get((device, stream), (None, None))
        if side is None:
            side = torch.cuda.Stream(device)
        if memory is None or memory.nbytes < size:
            memory = torch.empty(max(size, 1), dtype=torch.uint8, device=f"cuda:{device}")
        _shared[device, stream] = side, memory
        return side, memory


class Lent:
    """What a recording writes for others, and how many hold each piece of memory of it while it is idle."""

    def __init__(self, outputs: tuple[Any, ...], buffers: list[torch.Tensor], places: Iterable[int]) -> None:
        self.buffers, self.leaves = buffers, False  # whether it was in the way of others in the same memory
        self.put(outputs, places)

    def put(self, outputs: tuple[Any, ...], places: Iterable[int]) -> None:
        self.outputs = outputs
        self.counts = [(place, _count(place)) for place in places]

    def is_held(self) -> bool:
        """Whether somebody has some of it."""
        return any(_count(place) != count for place, count in self.counts)


class Memory:
    """The memory of a recording and its guests: what is lent of it. It is left when the first one is gone."""

    def __init__(self) -> None:
        self.lent: tuple[Lent, ...] = ()
        self.lock, self.left = threading.RLock(), False  # a collector may end a recording at any time


class Recording:
    """A graph of one plan for inputs that lie in these places; see `Recorded`."""

    def __init__(
        self, plan: Plan, values: list[Any], moving: bytes, shown: int, at: tuple[int, int], copies: bool,
        guest: bool,
    ) -> None:  # fmt: skip
        side, self.scratch = shared(*at, plan.bytes(values))
        self.places = [i for i, moves in enumerate(moving) if moves]
        given = list(values)
        for i in self.places:
            given[i] = torch.empty_strided(
                values[i].shape, values[i].stride(), dtype=values[i].dtype, device=values[i].device
            )
        self.buffers = [given[i] for i in self.places]
        if any(n > 1 and not s for one in self.buffers for n, s in zip(one.shape, one.stride(), strict=True)):
            raise RuntimeError("an input that moves lies over itself")
        self.graph = torch.cuda.CUDAGraph()
        host, pool = home(at) if guest else (None, None)
        outputs = self.record(plan, list(given), side, pool)
        inputs = {id(value): i for i, value in enumerate(given) if isinstance(value, torch.Tensor)}
        self.passed = [(k, inputs[id(out)]) for k, out in enumerate(outputs) if id(out) in inputs]
        through = {k for k, _ in self.passed}
        outputs = tuple([None if k in through else out for k, out in enumerate(outputs)])
        theirs = {key(v) for i, v in enumerate(given) if isinstance(v, torch.Tensor) and not moving[i]}
        made = [(k, out) for k, out in enumerate(outputs) if isinstance(out, torch.Tensor)]
        mine = [(k, out) for k, out in made if key(out) not in theirs]
        seen = [(k, out) for k, out in mine if k < shown or shown < 0]
        self.copied = [k for k, out in seen if copies or out.nbytes <= SMALL]
        self.kept = {key(out) for k, out in seen if k < shown and k not in self.copied}
        watched = {key(out): None for k, out in mine if k not in self.copied}
        watched.update({key(buffer): None for buffer in self.buffers})
        if len({key(outputs[k]) for k in self.copied}) < len(self.copied):
            raise RuntimeError("outputs share memory")
        self.lent, self.at, self.is_guest = Lent(outputs, self.buffers, watched), at, host is not None
        self.memory: Memory = Memory() if host is None else host.memory
        with self.memory.lock:
            self.memory.lent += (self.lent,)
        visible = {key(out) for _, out in seen}
        self.saved = [k for k, out in mine if k >= shown > 0 and key(out) not in visible]
        if self.saved:
            _hosts.add(self)
        self.addresses = [out.data_ptr() for _, out in mine]
        for address in self.addresses:
            _lent[address] = _lent.get(address, 0) + 1

    def emptied(self) -> Any:
        """The pool of its memory, in which nobody owns what it saves from now on; None while it is held."""
        with self.memory.lock:
            lent = self.lent
            if any(one.is_held() for one in self.memory.lent):
                return None
            saved = [lent.outputs[k] for k in self.saved]
            theirs = {key(out) for out in saved}
            places = [place for place, _ in lent.counts if place not in theirs]
            fresh = dict(zip(self.saved, unowned(saved), strict=True))
            del saved
            outputs = tuple([fresh.get(k, out) for k, out in enumerate(lent.outputs)])
            lent.put(outputs, [*places, *{key(out): None for out in fresh.values()}])
            return self.graph.pool()

    def record(self, plan: Plan, given: list[Any], side: Any, pool: Any) -> tuple[Any, ...]:
        side.wait_stream(torch.cuda.current_stream(side.device))
        with torch.cuda.stream(side), uncollected():
            self.graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            lend(self.scratch.data_ptr(), self.scratch.nbytes)
            try:
                outputs = plan(given)
            finally:
                lend(0, 0)
                self.graph.capture_end()
        return outputs

    def __del__(self) -> None:
        for address in getattr(self, "addresses", ()):
            _lent[address] -= 1
            if not _lent[address]:
                del _lent[address]
        if (memory := getattr(self, "memory", None)) is not None:
            with memory.lock:
                memory.left |= not self.is_guest
                if not self.lent.is_held():
                    memory.lent = tuple([one for one in memory.lent if one is not self.lent])

    def is_kept(self) -> bool:
        """Whether somebody holds a result of a pass with gradients: then he may do so in each call."""
        return any(place in self.kept and _count(place) != count for place, count in self.lent.counts)

    def replay(self, values: list[Any]) -> Sequence[Any] | None:
        """The outputs; None where somebody holds something in its memory, or it may be there no longer."""
        with self.memory.lock:
            held = [one for one in self.memory.lent if one.is_held()]
            for one in held:
                one.leaves |= one is not self.lent
            if held or self.is_guest and (self.lent.leaves or self.memory.left):
                return None
            return self.replayed(values)

    def replayed(self, values: list[Any]) -> Sequence[Any]:
        if self.buffers:
            torch._foreach_copy_(self.buffers, [values[i] for i in self.places])
        self.graph.replay()
        if not self.passed and not self.copied:
            return aliases(self.lent.outputs)
        made = list(aliases(self.lent.outputs))
        for k, i in self.passed:
            made[k] = values[i]
        for k in self.copied:
            made[k] = made[k].clone()
        return made


def key(tensor: torch.Tensor) -> int:
    """What a tensor shares with those in the same memory."""
    return int(tensor.untyped_storage()._cdata)


def unowned(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors in the same places, in memory that they do not keep."""
    places: dict[int, Any] = {}
    with torch.inference_mode(False):
        for one in tensors:
            memory = one.untyped_storage()
            places[memory._cdata] = _storage(memory.data_ptr(), one.device, memory.nbytes())
        return [
            torch.empty(0, dtype=one.dtype, device=one.device).set_(
                places[key(one)], one.storage_offset(), one.size(), one.stride()
            )
            for one in tensors
        ]


def home(at: tuple[int, int]) -> tuple[Recording | None, Any]:
    """The recording for a stream that saves most, and its pool, for a guest; None where it is not idle."""
    with _lock:
        able = [one for one in _hosts if one.at == at]
    host = max(able, key=lambda one: sum(one.lent.outputs[k].nbytes for k in one.saved), default=None)
    pool = host.emptied() if host is not None else None
    return (None, None) if pool is None else (host, pool)


class Recorded:
    """Runs a plan by recordings of it: takes a list with the values of the inputs, gives the outputs.

    `written` are the inputs, by place, that it may write to.
    """

    def __init__(self, plan: Plan, device: int, written: frozenset[int] = frozenset()) -> None:
        self.plan, self.device, self.written = plan, device, written
        self.symbols = plan.owner.settled.symbols
        self.shown, self.copies, self.alone = -1, False, False
        self.known: dict[Any, list[Recording]] = {}
        self.calls, self.made = 0, 0
        self.moving, self.last, self.from_others = b"", b"", set[int]()
        self.lock, self.threads = threading.Lock(), set[int]()

    def shows(self, count: int) -> None:
        """Say that only the first outputs are for the caller, and others for graphs like this one."""
        self.shown = count

    def __call__(self, values: list[Any]) -> Sequence[Any]:
        if self.made > MOST or profiling.active or _capturing():
            return self.plan(values)
        with self.lock:
            stream = _stream(self.device)
            place = (stream, addresses(values, self.moving), self.sizes(values) if self.symbols else None)
            outputs = self.replayed(values, place)
        if outputs is None:
            return self.plan(values)
        values.clear()
        return outputs

    def replayed(self, values: list[Any], place: Any) -> Sequence[Any] | None:
        """What a recording gives for values in a place; None where the plan itself is to run."""
        found = self.known.get(place, [])
        for one in found[:]:
            outputs = one.replay(values)
            if outputs is not None:
                return outputs
            if one.is_guest and (one.lent.leaves or not one.lent.is_held()):
                self.alone |= not one.memory.left
                found.remove(one)
        if any(one.is_kept() for one in found):
            self.copies = True
            self.known.clear()  # the next ones give copies
        elif len(found) < AT_ONCE and all(one.lent.is_held() for one in found):
            made = self.recording(values, place)
            return made.replay(values) if made is not None else None
        return None

    def sizes(self, values: list[Any]) -> tuple[Any, ...]:
        """The sizes, strides and numbers that the plan depends on."""
        return tuple([
            values[i] if what == -1 else values[i].size(what) if what >= 0 else values[i].stride(-2 - what)
            for what, i in self.symbols
        ])  # fmt: skip

    def recording(self, values: list[Any], place: Any) -> Recording | None:
        """A new recording for these values; None where there is to be none, or not yet."""
        now, before = addresses(values, b""), self.last
        self.last = now
        self.calls += 1
        if threading.get_ident() not in self.threads:  # libraries make handles for each thread at first use
            self.threads.add(threading.get_ident())
            return None
        if self.calls <= WARM or len(before) != len(now):
            return None
        words = [int.from_bytes(now[k : k + WORD], "little") for k in range(0, len(now), WORD)]
        if any(words[i] not in _lent for i in self.from_others):
            return None  # what it comes from was not replayed this time
        known = self.moving or bytes(len(values))
        moving = bytes([
            known[i] or self.moves(value, words[i], before[i * WORD : (i + 1) * WORD])
            for i, value in enumerate(values)
        ])  # fmt: skip
        if any(moving[i] for i in self.written):
            self.stop("an input that it writes to moves")
            return None
        self.made += 1
        if self.made > MOST:
            self.stop(f"places or sizes of inputs changed in more than {MOST} calls")
            return None
        if moving != self.moving:
            self.known.clear()
            self.moving = moving
            place = (place[0], addresses(values, moving), place[2])
        try:
            at, guest = (self.device, place[0]), self.shown < 0 and not self.alone
            made = Recording(self.plan, values, moving, self.shown, at, self.copies, guest)
        except RuntimeError as error:
            self.stop(str(error).partition("\n")[0])
            return None
        self.from_others = {i for i, word in enumerate(words) if word in _lent and not moving[i]}
        self.known.setdefault(place, []).append(made)
        return made

    def moves(self, value: Any, address: int, before: bytes) -> bool:
        """Whether a value is elsewhere in each call."""
        if not isinstance(value, torch.Tensor) or isinstance(value, torch.nn.Parameter) or address in _lent:
            return False
        return address != int.from_bytes(before, "little")

    def stop(self, why: str) -> None:
        """Record nothing more."""
        self.made = MOST + 1
        self.known.clear()
        title = self.plan.title or "a graph"
        log.warn_once(("graphs", title, why), f"{title} is no longer replayed as a CUDA graph: {why}")
