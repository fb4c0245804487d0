"""The architecture as tests: who may import whom, what is never imported, what importing costs."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "kiln"
FILES = sorted(PACKAGE.rglob("*.py"))

# What each part may import. A part is a folder, or a file at the top of the package.
STAGES = {"bytecode", "capture", "check", "differentiate", "expand", "ops"}
LAYERS = {
    "base": {"_nests"},
    "bytecode": {"base"},
    "check": {"base", "_hook"},
    "ops": {"base", "_mersenne"},
    "capture": {"base", "bytecode", "check", "ops", "_hook"},
    "differentiate": {"base", "ops"},
    "expand": {"base", "ops"},
    "fuse": {"base", "ops"},
    "generate": {"base", "fuse"},
    "launch": {"base", "expand", "fuse", "generate", "ops", "_held", "_launch"},
    "modes": {"base", "ops"},
    "observe": {"base", "bytecode", "_hook", "_launch"},
    "modules": {"base"},
    "redirect": {"base"},
    "ahead": {"base", "_hook", *STAGES},
    "compiler": {"ahead", "base", "launch", *STAGES},
    "backends": {"ahead", "base", *STAGES},
    "telling": {"base", *STAGES},
    "shared": {"base", "_hook", *STAGES},
    "foreign": {"base", "_hook", "ops"},
    "pipeline": {"base", "_hook", "foreign", "modules", "shared", "telling", *STAGES},
    "api": {"ahead", "base", "_hook", "_launch", "backends", "modules", "observe", "pipeline", "redirect", "shared", *STAGES},
    "__init__": {"ahead", "api", "base", "modes", "observe"},
    "cli": {"__version__", "base", "launch"},
    "scripts": {"api", "backends", "base", "_hook", "pipeline"},
    "doctor": {"api", "base", "check", "generate", "launch"},
    "__main__": {"cli"},
}

FORBIDDEN = (
    "torch._dynamo", "torch._inductor", "torch._functorch", "torch._decomp", "torch._refs", "torch._prims",
    "torch._subclasses", "torch.fx.experimental", "torch._export", "torch.export",
)  # fmt: skip


def part(path):
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def within(name, package):
    return name == package or name.startswith(package + ".")


def imports(tree):
    """Every module that a file imports, at the top or in a function, with the names taken from it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def dotted(node):
    """The text of a chain of names, as in `torch.fx.experimental`."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return base and f"{base}.{node.attr}"
    return None


@pytest.mark.smoke
def test_every_part_has_a_layer():
    assert {part(path) for path in FILES} <= LAYERS.keys()


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_down(path):
    allowed = LAYERS[part(path)] | {part(path)}
    for name in imports(ast.parse(path.read_text())):
        if name.split(".")[0] == "kiln":
            assert name.split(".")[1] in allowed, f"{path.relative_to(PACKAGE)} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_pytorchs_compiler_is_not_imported(path):
    tree = ast.parse(path.read_text())
    used = {*imports(tree), *(dotted(n) for n in ast.walk(tree) if isinstance(n, ast.Attribute))} - {None}
    assert not [name for name in used for package in FORBIDDEN if within(name, package)]


def test_package_files_are_empty_but_the_first():
    assert [p for p in PACKAGE.rglob("__init__.py") if p.read_text() and p.parent != PACKAGE] == []


def fresh(program):
    """The output of a program in a new process, warnings being errors."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert done.returncode == 0, done.stderr
    return done.stdout


SMALL_MODEL = """
import sys, torch
before = set(sys.modules)
import kiln
from torch import nn
model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU(), nn.Dropout(0.1))
x = torch.randn(2, 4)
for backend in ("eager", "aot_eager"):
    compiled = kiln.compile(model.train(), fullgraph=True, backend=backend)
    compiled(x).sum().backward()
    compiled.eval()
    compiled(x)
print("\\n".join(sorted(set(sys.modules) - before)))
"""


def test_a_compiled_model_never_loads_pytorchs_compiler():
    loaded = fresh(SMALL_MODEL).split()
    assert "kiln.pipeline" in loaded
    assert [name for name in loaded for package in FORBIDDEN if within(name, package)] == []


def test_parts_without_torch_import_without_it():
    loaded = fresh("import sys, kiln, kiln._hook, kiln.bytecode.decode; print(' '.join(sys.modules))").split()
    assert "torch" not in loaded and "kiln.api" not in loaded
