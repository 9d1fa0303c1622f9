"""What a runtime made of a Q/DQ model: which operators run quantized, what was left over, and why."""
