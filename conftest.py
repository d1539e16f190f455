"""Makes ``pytest suites/`` work from a checkout, also where the plugin is not installed as an entry point."""

from __future__ import annotations

from importlib import import_module

import pytest


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Register the plugin unless it is there already, or is blocked by ``-p no:gpuguard``."""
    if not pluginmanager.has_plugin("gpuguard") and not pluginmanager.is_blocked("gpuguard"):
        pluginmanager.register(import_module("pytest_gpuguard.plugin"), "gpuguard")
