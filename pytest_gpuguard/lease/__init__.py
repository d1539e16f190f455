"""Who may use what: locks on GPUs, ports and slots of one host, and the warden that ends what was booted.

Importing it loads nothing but the standard library and needs no Linux; using it does.
"""
