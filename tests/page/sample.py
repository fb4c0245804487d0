"""Data of a run that never was: as large as a test wants it."""

SOURCE = '''import torch
from torch import nn

import kiln


class Block(nn.Module):
    """One block: attention, then a small network.

    Text of several lines </script><script>alert(1)</script>
    """

    def forward(self, x):
        h = self.norm(x)
        q, k, v = self.qkv(h).chunk(3, dim=-1)
        a = torch.softmax(q @ k.transpose(-1, -2) * 0.125, dim=-1)
        x = x + self.out(a @ v)
        if x.sum() > 0:  # a "branch" on <b>data</b>
            x = x * 2
        return x + self.mlp(self.norm2(x))
'''.splitlines()

FILE = "/home/user/model.py"
OPS = (
    ("mean", "reduction", 14, "norm"), ("sub", "pointwise", 14, "norm"), ("rsqrt", "pointwise", 14, "norm"),
    ("mul", "pointwise", 14, "norm"), ("mm", "call", 15, "qkv"), ("permute", "view", 16, "attn"),
    ("bmm", "call", 17, "attn"), ("amax", "reduction", 16, "attn"), ("exp", "pointwise", 16, "attn"),
    ("sum", "reduction", 16, "attn"), ("div", "pointwise", 16, "attn"), ("bmm", "call", 16, "attn"),
    ("mm", "call", 16, "out"), ("add", "pointwise", 16, ""), ("mm", "call", 19, "mlp"),
    ("gelu", "pointwise", 19, "mlp"), ("mm", "call", 19, "mlp"), ("add", "pointwise", 19, ""),
)  # fmt: skip


def view(count, name="forward"):
    """A graph of about `count` nodes: blocks with residual edges, their pointwise ops in kernels."""
    paths, known, nodes, kernels, places = [[]], {(): 0}, [], [], [[[0, 12, "forward"], [0, line, "forward"]] for line in range(1, 21)]

    codes = [{"title": "LLVM", "text": "define void @nest0(ptr %0, i64 %1) {\n  ret void\n}"}]

    def path(*names):
        if names not in known:
            known[names] = len(paths)
            paths.append(list(names))
        return known[names]

    def node(op, kind, where, reads, line, kernel=-1, spec="float32[8, 128, 512]"):
        nodes.append({"n": f"{op}_{len(nodes)}", "o": op, "k": kind, "s": spec, "p": where, "w": line - 1, "g": kernel, "i": reads, "a": f"{op}({', '.join(map(str, reads))})"})
        return len(nodes) - 1

    x = node("x", "input", 0, [], 12)
    block = 0
    while len(nodes) < count - 1:
        skip, last, kernel = x, x, -1
        for op, kind, line, part in OPS:
            where = path(f"layers.{block}", part) if part else path(f"layers.{block}")
            reads = [last]
            if kind == "call":
                kernel = -1
                reads.append(node(f"weight_{len(nodes)}", "parameter", where, [], line, spec="float32[512, 512]"))
            elif kind != "view":
                if kernel < 0:
                    kernel = len(kernels)
                    kernels.append({"name": f"k{kernel}", "ops": 0, "reads": 2 << 20, "writes": 1 << 20, "bytes": 3 << 20, "codes": [len(codes), 0]})
                    codes.append({"title": "Loops", "text": f"kernel k{kernel}(a: float32) -> b: float32\n  for i in 0 .. 1024\n    t0: float32 = {op}(a[i])\n    b[i] = t0"})
                kernels[kernel]["ops"] += 1
            if op == "sub":
                reads.append(skip)
            if op == "add":
                reads.append(skip)
            last = node(op, kind, where, reads, line, kernel if kind not in ("call", "view") else -1)
            if op == "add":
                skip = last
        x = last
        block += 1
    node("output", "output", 0, [x], 20)
    steps = 12 * block
    values = [{"name": nodes[i]["n"], "bytes": 2097152 // (1 + i % 3), "offset": 2097152 * (i % 5), "first": i * steps // len(nodes), "last": min(steps - 1, i * steps // len(nodes) + 2 + i % 4)} for i in range(1, min(len(nodes), 200), 3)]
    return {"name": name, "label": name.title(), "nodes": nodes, "paths": paths, "places": places, "kernels": kernels, "codes": codes,
            "code": "def graph(x):\n    return (x,)", "memory": {"arena": 5 * 2097152, "eager": 41943040, "steps": steps, "values": values}}  # fmt: skip


def data(count=120, **changes):
    """The data of a page about a run with a graph of `count` nodes."""
    lines = {str(n): {"graphs": [0 if n < 19 else 1], "ops": 3} for n in (14, 15, 16, 17, 20)}
    made = {
        "title": "train.py", "about": "kiln 0.5, torch 2.13, Python 3.11, 15 November 2026", "problems": [],
        "summary": [
            {"label": "Graphs", "value": "2"}, {"label": "Ops captured", "value": "97 %", "note": "36 of 37"},
            {"label": "Breaks", "value": "1", "bad": True}, {"label": "Recompiles", "value": "2"},
            {"label": "Kernels", "value": "11"}, {"label": "Compile time", "value": "1.4 s"},
        ],
        "paths": [FILE],
        "files": [{"path": FILE, "lines": SOURCE, "tints": lines, "breaks": [0]}],
        "graphs": [
            {"title": "Block.forward", "region": "Block.forward", "place": {"file": FILE, "line": 13}, "ops": count, "inputs": 1,
             "guards": [{"text": "x is a float32 tensor of sizes [8, 128, 512] on cpu"}, {"text": "self.training is False"}, {"text": "self.scale equals 0.125"}],
             "views": [view(count), {**view(max(20, count // 2), "backward")}]},
            {"title": "Block.forward, after line 18", "region": "Block.forward", "place": {"file": FILE, "line": 19}, "ops": 18, "inputs": 2, "guards": [], "views": [view(20)]},
        ],
        "breaks": [{"kind": "branch-on-tensor", "place": {"file": FILE, "line": 18, "function": "forward", "text": SOURCE[17].strip(), "column": 3, "width": 11}, "reason": "the condition is a tensor: <img src=x onerror=alert(1)>", "remedy": "use torch.where", "region": "Block.forward", "graphs": ["Block.forward"], "count": 2}],
        "fallbacks": [], "warnings": [],
        "recompiles": [
            {"region": "Block.forward", "source": "x.shape[0]", "guard": "x.shape[0] was 8, now 24", "place": {"file": FILE, "line": 13}, "remedy": "kiln.mark_dynamic(x, 0)", "count": 2, "limited": False,
             "changes": [{"old": "8", "new": "16"}, {"old": "8", "new": "24"}]},
        ],
        "timeline": {
            "compile": {"total": 1.4, "lanes": [{"name": f"Block.forward {i}", "spans": [
                {"label": stage, "kind": stage, "start": 0.45 * i + start, "seconds": took, "graph": 0}
                for stage, start, took in (("capture", 0, 0.12), ("differentiate", 0.12, 0.08), ("expand", 0.2, 0.05), ("fuse", 0.25, 0.07), ("generate", 0.32, 0.1), ("plan", 0.42, 0.02))]} for i in range(3)]},
            "call": {"lanes": [{"name": "forward", "spans": [{"label": f"k{i}" if i % 3 else "mm", "kind": "kernel" if i % 3 else "call", "start": i * 1e-4, "seconds": 9e-5, "graph": 0, "kernel": i % 4 if i % 3 else None} for i in range(14)]}]},
        },
    }  # fmt: skip
    return {**made, **changes}
