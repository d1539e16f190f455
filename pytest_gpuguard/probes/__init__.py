"""Small scripts that find out what is true of a stack, run in its own python; and what starts them.

``kit`` is what a script may import, ``launch`` builds the command. Nothing here is imported at the plugin's load.
"""
