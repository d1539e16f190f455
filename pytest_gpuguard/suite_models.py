"""The models that a shipped suite is about: their numbers for a rehearsal, and where they are on a real rig.

Nothing is downloaded here: models are fetched beforehand with ``gpuguard fetch``.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from .facts.models import ModelsFileError, read_models

if TYPE_CHECKING:
    from .options import Config


class SuiteModels:
    """Those of a folder with ``architectures`` and ``models.toml``, which several suites may share."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, settings: Config, model: str) -> str | None:
        """A simulated rig reads the numbers in ``architectures``; a real one what ``models.toml`` names.

        A name that the ini option gpuguard_models has is the user's own, and wins on a real rig. Raises
        pytest.UsageError for a ``models.toml`` that cannot be read.
        """
        if settings.simulated:
            numbers = self._folder / "architectures" / model
            return str(numbers) if numbers.is_dir() else None
        return None if model in dict(settings.models) else self._named.get(model)

    @cached_property
    def _named(self) -> dict[str, str]:
        try:
            return read_models(self._folder / "models.toml")
        except ModelsFileError as error:
            raise pytest.UsageError(str(error)) from None
