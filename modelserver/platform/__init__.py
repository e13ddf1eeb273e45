"""Services of the machine and the process: memory, garbage collection, GPUs."""
