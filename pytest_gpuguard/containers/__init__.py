"""Stacks that are images: what a container is given, how one is started and watched, and how it is ended.

Imports ``facts`` and ``diagnose`` only. Never ends a container that does not carry a label of ours.
"""
