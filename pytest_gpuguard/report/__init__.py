"""Telling people: terminal, JUnit. Rendering only; policy is elsewhere."""
