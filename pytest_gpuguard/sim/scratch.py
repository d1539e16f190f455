"""The folder that a rehearsal keeps its simulated memory and locks in; what killed ones left is removed.

Never touches a folder of another user, or of a process that lives.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Final

_PREFIX: Final = "gpuguard-sim-"
_NAME: Final = re.compile(rf"{_PREFIX}(\d+)-.+")


def scratch_folder() -> Path:
    """A new folder of this process's own."""
    _sweep(Path(tempfile.gettempdir()))
    return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))


def _sweep(folder: Path) -> None:
    """Remove what runs left that were killed before they could."""
    for one in folder.glob(f"{_PREFIX}*"):
        match = _NAME.fullmatch(one.name)
        try:
            mine = one.lstat().st_uid == os.getuid() and one.is_dir() and not one.is_symlink()
        except OSError:
            continue  # another rehearsal was faster
        if match is not None and mine and not Path("/proc", match[1]).exists():
            shutil.rmtree(one, ignore_errors=True)
