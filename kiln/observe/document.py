"""The page: data about one run as one HTML file that needs nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from math import isfinite
from pathlib import Path
from string import Template
from typing import Any

PARTS = Path(__file__).parent / "page"
SCRIPTS = ("dom", "layout", "graph", "paint", "views", "charts", "inspect", "main")
"""The scripts of the page, in the order in which they run."""

ESCAPED = {ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&\u2028\u2029"}
"""What could end the script that holds the data, or be read as markup; JSON has these in strings only."""


def page(data: Mapping[str, Any]) -> str:
    """The text of the HTML file that shows `data`; sources and names in it may hold any text."""
    text = Template((PARTS / "page.html").read_text(encoding="utf-8"))
    return text.substitute(
        title=escape(str(data.get("title", "Kiln"))),
        style=(PARTS / "page.css").read_text(encoding="utf-8"),
        script="\n".join((PARTS / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS),
        data=written(data).translate(ESCAPED),
    )


def written(data: Any) -> str:
    """Data as JSON that a browser reads: it knows neither infinities nor objects of Python's."""
    try:
        return json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError):
        return json.dumps(plain(data), separators=(",", ":"), ensure_ascii=False)


def plain(value: Any) -> Any:
    """A value of dicts, lists, texts and finite numbers; what is none of these as text."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, str)) or isinstance(value, float) and isfinite(value):
        return value
    return str(value)
