"""A stand-in for libnvidia-ml.so.1 whose GPUs live in a file that tests change while it is in use."""
