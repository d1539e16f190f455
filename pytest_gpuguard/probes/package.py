"""Whether a Python package is there and can be imported: some features are taken by a flag and need one to be on.

The import runs in a process of its own, because a package built for another stack may crash.
"""

from __future__ import annotations

import importlib
from typing import Any

from pytest_gpuguard.probes import kit

IMPORT_S = 60.0


def run() -> None:
    """``args``: {"name": "mscclpp"}, with {"module": …} when the module has another name."""
    name = str(kit.args["name"])
    kit.stage(f"look for {name}")
    version = version_of(name)
    kit.stage(f"import {module()}")
    done = kit.child("load", float(kit.args.get("limit_s", IMPORT_S)))
    if done.ok:
        kit.answer(version=version, file=done.data.get("file"), said=f"{name} {version or 'of no version'} is there")
        return
    if done.absent is not None:
        extra = "" if version is None else f" (its metadata of {version} is there)"
        kit.defect("unsupported.config", f"{name} is not installed: {done.absent[1]}{extra}")
    print(done.text, flush=True)
    if done.hung:
        kit.defect("hang.timeout", f"importing {module()} did not return")
    raise RuntimeError(f"{name} {version or 'of no version'} is installed, but cannot be imported: {done.told}")


def module() -> str:
    """The module's name."""
    return str(kit.args.get("module") or str(kit.args["name"]).replace("-", "_"))


def load() -> None:
    """The import, and whether it was this module that is missing, or one that it needs."""
    try:
        found: Any = importlib.import_module(module())
    except ModuleNotFoundError as error:
        if error.name is None or not (module() + ".").startswith(error.name + "."):
            raise
        kit.absent("package", f"there is no module {error.name!r}")
    if getattr(found, "__file__", None) is None:
        kit.absent("package", f"{module()!r} is an empty folder")  # what an uninstalled package leaves behind
    kit.answer(file=found.__file__)


def version_of(name: str) -> str | None:
    """The version in the package's metadata; None without any."""
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    kit.main(run)
