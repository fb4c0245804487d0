"""Backends with a fault: each does something wrong about one op and is right about all others."""

import os
import signal

import torch


def has(graph, name):
    return any(name in str(getattr(node.target, "__name__", node.target)) for node in graph.graph.nodes)


def wrong(graph, inputs):
    """Programs with a tanh come out a little larger."""
    if not has(graph, "tanh"):
        return graph.forward
    return lambda *args: tuple(r + 0.5 if isinstance(r, torch.Tensor) else r for r in graph.forward(*args))


def raising(graph, inputs):
    """Programs with a cumsum are refused."""
    if has(graph, "cumsum"):
        raise LookupError("no rule for cumsum")
    return graph.forward


def crashing(graph, inputs):
    """Programs with a softmax end the process."""

    def run(*args):
        os.kill(os.getpid(), signal.SIGSEGV)

    return run if has(graph, "softmax") else graph.forward
