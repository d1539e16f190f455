"""How servers boot, are watched and are read. An engine sees a lease as a value and never takes one."""
