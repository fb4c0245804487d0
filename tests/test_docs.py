"""The documentation names what the code does."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_every_kind_of_break_is_documented():
    source = "\n".join(path.read_text() for path in (ROOT / "kiln").rglob("*.py"))
    kinds = set(re.findall(r"Break\(\s*\"([a-z-]+)\"", source)) - {"raises"}
    documented = set(re.findall(r"`([a-z-]+)`", (ROOT / "docs" / "breaks.md").read_text()))
    assert len(kinds) > 30 and kinds <= documented, kinds - documented
