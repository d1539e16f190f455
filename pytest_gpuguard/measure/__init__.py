"""Numbers: what a server does per second. The meter stays the same while the stack changes."""
