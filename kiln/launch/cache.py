"""The disk cache: bytes by content key, kept between processes. Knows nothing of what they are.

A file holds a checksum of its key and its bytes: one that is damaged, cut short or of another key is a
miss, and is removed. Files are written under another name and renamed, so that processes at the same time
see whole files only. The folder belongs to the user alone. Nothing in it is ever unpickled.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from kiln.base import log, records
from kiln.base.dataclass import dataclass
from kiln.base.errors import KilnError
from kiln.base.folders import folder as folder

MAGIC = b"kiln cache 1\n"
SUFFIX = ".kiln"
PARTIAL = ".part"
#: Seconds between two looks at what all files take: with many of them a look takes long.
PAUSE = 60
MARK = "looked"
#: Seconds after which a file that was never finished is taken away.
ABANDONED = 3600
OFF = ("0", "false", "no", "off")


class CacheRefused(KilnError):
    """The folder is not one that machine code may be loaded from."""


def is_on() -> bool:
    """Whether KILN_CACHE leaves the cache on."""
    return os.environ.get("KILN_CACHE", "1").lower() not in OFF


def disk(limit: int) -> Cache | None:
    """The cache in force; None where it is switched off or its folder cannot be used, which is said once."""
    if not is_on() or limit <= 0:
        return None
    place = folder()
    try:
        return Cache(place, limit, create=True)
    except (CacheRefused, OSError) as error:
        log.warn_once(("cache", str(place)), f"the disk cache is not used: {error}")
        return None


@dataclass(frozen=True, slots=True)
class Entry:
    """One file of the cache."""

    key: str
    path: Path
    size: int
    used: float
    """When it was written or read last, in seconds since 1970."""


class Cache:
    """The files of one folder; when they take more than `limit` bytes, the least lately used ones go."""

    def __init__(self, place: Path, limit: int, create: bool = False) -> None:
        self.folder, self.limit = place, limit
        if create:
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
        refuse_unsafe(place)

    def get(self, key: str) -> bytes | None:
        """The bytes of a key, where they are there and whole."""
        path = self.path(key)
        try:
            held = read(path)
        except OSError:
            records.emit(records.CacheRecord("miss", key))
            return None
        data = unsealed(key, held)
        with suppress(OSError):
            os.unlink(path) if data is None else os.utime(path)
        records.emit(records.CacheRecord("miss" if data is None else "hit", key, len(held)))
        return data

    def put(self, key: str, data: bytes) -> None:
        """Keep bytes under a key; where the disk refuses, it is said once and nothing is kept."""
        held = sealed(key, data)
        if len(held) > self.limit:
            return
        partial = None
        try:
            handle, partial = tempfile.mkstemp(PARTIAL, dir=self.folder)
            with os.fdopen(handle, "wb") as file:
                file.write(held)
            os.replace(partial, self.path(key))
            records.emit(records.CacheRecord("written", key, len(held)))
            if self.is_due():
                self.evict()
        except OSError as error:
            log.warn_once(("cache", "write"), f"the disk cache is not written: {error}")
            if partial is not None:
                with suppress(OSError):
                    os.unlink(partial)

    def path(self, key: str) -> Path:
        return self.folder / f"{key}{SUFFIX}"

    def entries(self) -> list[Entry]:
        """The files there are, the least lately used first."""
        found = [
            Entry(file.name.removesuffix(SUFFIX), Path(file.path), state.st_size, state.st_mtime)
            for file, state in self.files()
            if file.name.endswith(SUFFIX)
        ]
        return sorted(found, key=lambda entry: entry.used)

    def files(self) -> Iterator[tuple[os.DirEntry[str], os.stat_result]]:
        """The files of the cache, finished or not; other processes may remove them meanwhile."""
        with os.scandir(self.folder) as listed:
            for file in listed:
                with suppress(OSError):
                    if file.name.endswith((SUFFIX, PARTIAL)) and file.is_file(follow_symlinks=False):
                        yield file, file.stat(follow_symlinks=False)

    def is_due(self) -> bool:
        """Whether nobody has looked for a while at what the files take; now somebody does."""
        mark = self.folder / MARK
        with suppress(OSError):
            if time.time() - mark.stat().st_mtime < PAUSE:
                return False
        mark.touch(mode=0o600)
        return True

    def evict(self) -> None:
        """Remove what is over the limit, and what was left unfinished long ago."""
        entries = self.entries()
        over = sum(entry.size for entry in entries) - self.limit
        for entry in entries:
            if over <= 0:
                break
            over -= entry.size
            with suppress(OSError):
                os.unlink(entry.path)
        for file, state in self.files():
            if file.name.endswith(PARTIAL) and state.st_mtime < time.time() - ABANDONED:
                with suppress(OSError):
                    os.unlink(file.path)

    def faults(self) -> list[Entry]:
        """The files that are not whole: each would be a miss."""
        found = []
        for entry in self.entries():
            try:
                if unsealed(entry.key, read(entry.path)) is None:
                    found.append(entry)
            except FileNotFoundError:
                continue
            except OSError:
                found.append(entry)
        return found

    def clear(self) -> int:
        """Remove all files of the cache; how many there were."""
        count = 0
        for file, _ in list(self.files()):
            with suppress(FileNotFoundError):
                os.unlink(file.path)
                count += 1
        return count


def sealed(key: str, data: bytes) -> bytes:
    """The contents of a file."""
    return MAGIC + checksum(key, data) + data


def unsealed(key: str, held: bytes) -> bytes | None:
    """The bytes in a file; None where they are not what was written under this key."""
    start = len(MAGIC) + hashlib.sha256().digest_size
    data = held[start:]
    return data if held[:start] == MAGIC + checksum(key, data) else None


def checksum(key: str, data: bytes) -> bytes:
    return hashlib.sha256(key.encode() + b"\n" + data).digest()


def read(path: Path) -> bytes:
    """The contents of a plain file; a link is refused."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
        return file.read()


def refuse_unsafe(place: Path) -> None:
    """Raise CacheRefused where others than this user could have put files into the folder."""
    state = place.stat()
    if not stat.S_ISDIR(state.st_mode):
        raise CacheRefused(f"{place} is no folder; remove it, or set KILN_CACHE_DIR")
    if state.st_uid != os.geteuid():
        raise CacheRefused(f"{place} belongs to another user; set KILN_CACHE_DIR to a folder of yours")
    if stat.S_IMODE(state.st_mode) & 0o077:
        raise CacheRefused(f"{place} is open to other users; run `chmod 700 {place}`, or set KILN_CACHE_DIR")
