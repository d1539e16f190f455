"""What is there: the GPUs of a machine, and the software under test, as frozen values with their source.

Never opens a CUDA context, and never imports torch, an engine or NVML: those are asked in child processes.
"""
