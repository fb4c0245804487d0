"""Dumps: what each stage made of a graph, as text in the log and in files, and edited files in their place.

A graph has a folder; a stage's result is a file in it, `03_forward_prims.py`. Where a file of that name with
`.edited` before its ending stands beside it, the stage's result is made of that one. It counts only while the
stage's own result is still the one that was edited.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import field
from pathlib import Path

from kiln.base import log, records
from kiln.base.dataclass import dataclass

ASSEMBLY = "s"
"""The ending of a text that is shown in files alone: making it means to compile once more."""

_folders: Counter[str] = Counter()
"""How many graphs were dumped to each folder."""
_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Revision:
    """A text in place of a stage's own, and the file that it comes from."""

    text: str
    path: Path


@dataclass(frozen=True, slots=True)
class Dump:
    """Where the stages of one graph, or of one half of it, show what they made."""

    name: str = ""
    folder: Path | None = None
    half: str = ""
    _shown: list[str] = field(default_factory=list)
    """The half of each file so far: halves are compiled side by side, and each counts its own."""

    @property
    def title(self) -> str:
        """What the graph, or the half of it, is called."""
        return " ".join(filter(None, (self.name, self.half)))

    def of(self, half: str) -> Dump:
        """The dump of a half of the graph: forward, backward or inference."""
        return Dump(self.name, self.folder, half, self._shown)

    def show(self, topic: str, stage: str, ending: str, write: Callable[[], str]) -> Revision | None:
        """Log a result under a topic, write its file and leave a record, where asked for.

        Gives the edited one where there is one.
        """
        listened = ending != ASSEMBLY and bool(self.name) and records.listening()
        if self.folder is None and not listened and not log.wants(topic):
            return None
        text = write()
        if listened:
            records.emit(records.TextRecord(self.name, self.half, stage, ending, text))
        title = "_".join(filter(None, (self.half, stage)))
        if log.wants(topic):
            log.say(topic, f"{self.name} {title}\n{text}")
        if self.folder is None:
            return None
        text = text.rstrip("\n") + "\n"
        stem = f"{sum(half in ('', self.half) for half in self._shown):02}_{title}"
        self._shown.append(self.half)
        path, edited = self.folder / f"{stem}.{ending}", self.folder / f"{stem}.edited.{ending}"
        before = path.read_text() if path.exists() else None
        self.folder.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        if not edited.exists():
            return None
        if before != text:
            log.warn(f"{edited} is left out: the stage gives another result than the one that was edited")
            return None
        return Revision(edited.read_text(), edited)


NOWHERE = Dump()
"""The dump that writes no files."""


def dump_for(name: str, folder: str) -> Dump:
    """The dump of a new graph, in a folder of its own within `folder`; "" for none."""
    if not folder:
        return Dump(name)
    with _lock:
        number = _folders[folder]
        _folders[folder] += 1
    plain = re.sub(r"\W+", "_", name.partition("#")[0].rpartition("<locals>.")[2]).strip("_")
    return Dump(name, Path(folder).expanduser() / f"{number:03}_{plain or 'graph'}")


def forget() -> None:
    """Number graphs from the start again."""
    with _lock:
        _folders.clear()
