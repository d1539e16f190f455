"""The stand-in engine of a simulated rig: what a boot would do by the arithmetic and the gates of a release.

It gets argv, config.json, rig and release, and never learns what is claimed; it has no speed, and no answers.
"""
