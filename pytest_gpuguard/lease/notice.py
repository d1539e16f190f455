"""Notices at once that a lock was let go: inotify tells of descriptors that are closed, of chosen files or of a folder.

A hint and nothing more: where inotify cannot be had, waiting is a short sleep, and callers look again in any case.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import struct
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, Final

_CLOSE_WRITE: Final = 0x8
_DELETE: Final = 0x200
_DELETE_SELF: Final = 0x400
_MOVE_SELF: Final = 0x800
_OVERFLOW: Final = 0x4000
_IGNORED: Final = 0x8000
_EVENT: Final = struct.Struct("iIII")
_QUIET: Final = _DELETE_SELF | _MOVE_SELF


class Notice:
    """Watches one folder for its removal, and in it what ``follow`` names."""

    def __init__(self, folder: Path, poll_s: float) -> None:
        self._folder = os.fspath(folder)
        self._poll_s = poll_s
        self._files: dict[str, int] = {}
        self._told: set[str] = set()
        self._concerns: Callable[[str], bool] | None = None
        self._inotify = _Inotify.get()
        self._root = self._watch(self._folder, _QUIET)

    def follow(self, files: Collection[str], concerns: Callable[[str], bool] | None = None) -> bool:
        """From now on the closing of these ``files`` matters, and that of every one of which ``concerns`` says so.

        True when the whole folder is watched that was not before: what happened until now is not told, so look again.
        """
        for file in [one for one in self._files if one not in files]:
            watch = self._files.pop(file)
            if self._inotify is not None:
                self._inotify.remove(watch)
        for file in files:
            if file not in self._files:
                self._files[file] = self._watch(f"{self._folder}/{file}", _CLOSE_WRITE | _DELETE_SELF)
        begins = concerns is not None and self._concerns is None
        if begins or (concerns is None and self._concerns is not None):
            self._watch(self._folder, _QUIET | _CLOSE_WRITE | _DELETE if begins else _QUIET)
        self._concerns = concerns
        return begins

    def wait(self, seconds: float) -> frozenset[str]:
        """Until something that matters has happened, at most ``seconds``: the files in question, "" for the folder."""
        until = time.monotonic() + seconds
        if self._inotify is None:
            time.sleep(max(0.0, min(seconds, self._poll_s)))
            return frozenset()
        waiter = select.poll()  # select() knows no descriptor above 1023
        waiter.register(self._inotify.fd, select.POLLIN)
        while True:
            left = until - time.monotonic()
            if left <= 0:
                return frozenset()
            if waiter.poll(left * 1000):
                self._read()
            if self._told:
                return frozenset(self._told)

    def drain(self) -> frozenset[str]:
        """What has happened since the last time, to be forgotten now as the caller looks."""
        self._read()
        told, self._told = frozenset(self._told), set()
        return told

    def close(self) -> None:
        """Stop watching."""
        if self._inotify is not None:
            self._inotify.put_back()
            self._inotify = None

    def _watch(self, path: str, mask: int) -> int:
        if self._inotify is None:
            return -1
        watch = self._inotify.add(path, mask)
        if watch < 0 and ctypes.get_errno() not in (errno.ENOENT, errno.ENOTDIR):
            self.close()  # this user may watch no more: waiting is a short sleep from now on
        return watch

    def _read(self) -> None:
        names = {watch: file for file, watch in self._files.items()}
        for watch, mask, name in self._inotify.read() if self._inotify is not None else ():
            if name:
                if self._concerns is not None and self._concerns(name):
                    self._told.add(name)
            elif mask & _OVERFLOW or (watch == self._root and not mask & _IGNORED):
                self._told.add("")
            elif watch in names and not mask & _IGNORED:
                self._told.add(names[watch])


class _Inotify:
    """A descriptor of inotify. One is kept for the next time: closing it takes the kernel some milliseconds."""

    _spare: list[_Inotify] = []  # noqa: RUF012 - shared by all on purpose

    def __init__(self, libc: Any, fd: int) -> None:
        self.fd = fd
        self._libc = libc
        self._pid = os.getpid()
        self._watches: set[int] = set()

    @classmethod
    def get(cls) -> _Inotify | None:
        """One that watches nothing; None when this user gets no more of them, or the kernel has none."""
        try:
            spare = cls._spare.pop()
        except IndexError:
            pass
        else:
            if spare._pid == os.getpid():
                return spare
            os.close(spare.fd)  # we were forked: what it tells is for our parent
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            fd = int(libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        except (OSError, AttributeError):
            return None
        return cls(libc, fd) if fd >= 0 else None

    def put_back(self) -> None:
        """Watch nothing any more."""
        if self._spare:
            os.close(self.fd)
            return
        for watch in self._watches:
            self._libc.inotify_rm_watch(self.fd, watch)
        self._watches.clear()
        for _ in self.read():
            pass
        self._spare.append(self)

    def add(self, path: str, mask: int) -> int:
        """Watch a file or folder, or change what is watched of it; −1 when that cannot be."""
        watch = int(self._libc.inotify_add_watch(self.fd, os.fsencode(path), mask))
        if watch >= 0:
            self._watches.add(watch)
        return watch

    def remove(self, watch: int) -> None:
        """Watch this no more. One whose file is gone is no error."""
        self._watches.discard(watch)
        self._libc.inotify_rm_watch(self.fd, watch)

    def read(self) -> Iterator[tuple[int, int, str]]:
        """What has happened: (watch, mask, name of the file in a watched folder)."""
        while True:
            try:
                data = os.read(self.fd, 65536)
            except BlockingIOError:
                return
            at = 0
            while at < len(data):
                watch, mask, _, length = _EVENT.unpack_from(data, at)
                at += _EVENT.size + length
                yield watch, mask, data[at - length : at].rstrip(b"\0").decode(errors="replace")
