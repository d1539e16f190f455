"""Entry of the stand-in's process, as a file to run: the package need not be installed for it. Decides nothing."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # As a file, the first entry of the path is this folder, whose names would hide others of the same name.
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    from pytest_gpuguard.sim.start import main

    main(sys.argv[1:])
