"""How Q/DQ pairs are written: scales, quantized weights, the constants and nodes of a pair."""
