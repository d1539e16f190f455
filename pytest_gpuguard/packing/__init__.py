"""Packing: which tests start when, so that boots are shared and GPUs are full. See docs/packing.md."""
