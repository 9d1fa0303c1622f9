"""What all NVIDIA runtimes have in common: the device, its memory, its clocks, and time by CUDA events."""
