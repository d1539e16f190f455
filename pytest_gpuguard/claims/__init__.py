"""What is claimed and how it is judged: values and pure functions. Never does I/O and imports nothing else of ours."""
