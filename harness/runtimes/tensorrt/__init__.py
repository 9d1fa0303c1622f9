"""What the benchmarkers of TensorRT share: the library, model files as it wants them, builds, engines, inspection."""
