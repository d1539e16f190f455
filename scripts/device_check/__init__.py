"""The parts of ``scripts/device-check``: what only a real GPU can show, each part a function that tests can call.

Nothing of a serving engine is used, and no module of ours that needs more than a machine with torch usually has.
"""
