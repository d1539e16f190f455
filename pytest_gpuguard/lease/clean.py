"""Whether leased GPUs are clean: drivers give memory back some time after the process that had it is gone.

It never asks NVML itself: the reader is passed in, so that a reading can hang, fail or be simulated elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

GIB: Final = 1 << 30


def wait_until_clean(
    read_memory: Callable[[], Mapping[str, int | None]],
    uuids: Sequence[str],
    baseline_bytes: int | Mapping[str, int] = GIB,
    timeout_s: float = 180.0,
    poll_s: float = 0.5,
    *,
    unknown_is_clean: bool = False,
) -> list[tuple[str, int | None]]:
    """Wait until every GPU uses at most its baseline; return the ones that still do not, as (uuid, used bytes).

    ``read_memory()`` gives used bytes (NVML v2) per UUID. A UUID that is missing, or whose reading is None, is not
    clean, and its bytes are None; with ``unknown_is_clean`` a None passes (unified memory has no such reading). At
    least one reading is taken, also with ``timeout_s=0``. What ``read_memory`` raises is passed on.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        used = read_memory()
        dirty: list[tuple[str, int | None]] = []
        for uuid in uuids:
            size = used.get(uuid)
            baseline = baseline_bytes if isinstance(baseline_bytes, int) else baseline_bytes.get(uuid, GIB)
            if size is None:
                if uuid in used and unknown_is_clean:
                    continue
                dirty.append((uuid, None))
            elif size > baseline:
                dirty.append((uuid, size))
        left = deadline - time.monotonic()
        if not dirty or left <= 0:
            return dirty
        time.sleep(min(poll_s, left))
