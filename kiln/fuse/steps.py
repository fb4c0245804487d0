"""Steps of programs: what runs one after the other."""

from __future__ import annotations

from typing import TypeAlias

from kiln.base.dataclass import dataclass
from kiln.base.graph import Node, TensorSpec
from kiln.fuse.nest import Buffer, Kernel


@dataclass(frozen=True, eq=False, slots=True)
class Launch:
    """A step that runs a kernel: the nodes whose memory it reads and writes, and memory of its own.

    Launches of repeated blocks share a kernel, and with it the buffers.
    """

    kernel: Kernel
    reads: dict[Buffer, Node]
    writes: dict[Buffer, Node]
    scratch: dict[Buffer, TensorSpec]


@dataclass(frozen=True, eq=False, slots=True)
class Call:
    """A step that calls a node's op: an eager kernel, or a view of memory."""

    node: Node


Step: TypeAlias = Launch | Call
