"""Without the plugin a claim with an empty body would simply pass; so these suites refuse to run without it.

The mark ``premerge`` is theirs: it must stay on claims that take three minutes at most.
"""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Stop when the plugin is blocked or missing; name the mark."""
    if not config.pluginmanager.has_plugin("gpuguard"):
        raise pytest.UsageError(
            "the suites are claims that pytest-gpuguard evaluates; without the plugin they would pass unread: "
            "remove -p no:gpuguard, or install it (pip install pytest-gpuguard)"
        )
    config.addinivalue_line("markers", "premerge: cheap enough to be evaluated before every merge (docs/premerge.md)")
