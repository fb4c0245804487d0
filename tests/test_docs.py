"""The documentation says what the code does: kinds of breaks, examples, pages made of code, links."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kiln
from kiln.capture.calls import BREAKING
from kiln.capture.nodes import LEAVING
from tests import kinds as examples

ROOT = Path(__file__).parent.parent
DOCS = sorted((ROOT / "docs").glob("*.md"))
#: Raised inside capture alone: an exception of the program's own.
INNER = {"raises"}


def generator():
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    module = sys.modules["docs_generate"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


KINDS = generator().kinds()


def raised():
    """The kinds of all breaks in the sources."""
    source = "\n".join(path.read_text() for path in (ROOT / "kiln").rglob("*.py"))
    written = re.findall(r"(?:Break|refuses)\(\s*\"([a-z-]+)\"", source)
    return {*written, *LEAVING.values(), *(kind for kind, *_ in BREAKING.values())} - INNER


def test_the_table_of_kinds_is_that_of_the_sources():
    assert len(raised()) > 50
    assert raised() == set(KINDS) - {"backward-fails"}


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
def test_examples_of_kinds(kind):
    if kind.since and tuple(map(int, kind.since.split("."))) > sys.version_info:
        pytest.skip(f"its program is written in Python {kind.since}")
    name = kind.name.removesuffix("-fails")
    found = examples.run(kind.failing, kind.ahead)
    if name not in found:  # a break that another one hides
        found = examples.run(kind.failing, kind.ahead, fullgraph=True)
    assert name in found
    assert examples.run(kind.fixed, kind.ahead) == []


@pytest.mark.parametrize("page", ["breaks.md", "interface.md"])
def test_pages_made_of_code_are_up_to_date(page):
    assert (ROOT / "docs" / page).read_text() == generator().PAGES[page](), "run `make docs`"


def test_every_public_name_is_on_the_page_of_the_interface():
    listed = " ".join(generator().GROUPS.values()).split()
    assert sorted(listed) == sorted(set(dir(kiln)) - {"__version__"})


#: Pages whose programs are no whole ones, or take a model that is not here.
UNRUN = {"breaks.md": "each is run as an example of its kind", "fake.md": "needs transformers", "levels.md": "a declaration"}


def blocks(path):
    return re.findall(r"^```python\n(.*?)^```", path.read_text(), re.M | re.S)


@pytest.mark.parametrize("path", [p for p in (*DOCS, ROOT / "README.md") if p.name not in UNRUN and blocks(p)], ids=lambda p: p.name)
@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
def test_programs_on_pages_run(path, capsys):
    space = {"__name__": "page", "model": torch.nn.Linear(2, 2)}
    for i, block in enumerate(blocks(path)):
        exec(compile(block, f"{path.name} {i}", "exec"), space)
    kiln.reset()


def anchors(path):
    """The anchors of a page's headings, as the site has them."""
    heads = re.findall(r"^#+ (.*)$", path.read_text(), re.M)
    return {re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", head).strip().lower()) for head in heads}


@pytest.mark.parametrize("path", [*DOCS, ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=lambda p: p.name)
def test_links_lead_somewhere(path):
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        page = path.parent / file if file else path
        assert page.exists(), target
        assert not anchor or anchor in anchors(page), target


def test_every_page_is_in_the_navigation():
    listed = re.findall(r"(\w+\.md)", (ROOT / "mkdocs.yml").read_text())
    assert sorted(listed) == sorted(page.name for page in DOCS)


def test_the_site_builds(tmp_path):
    pytest.importorskip("material", reason="needs mkdocs-material")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "index.html").exists() and (tmp_path / "search" / "search_index.json").exists()
