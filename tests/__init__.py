"""The tests of pytest-gpuguard."""
