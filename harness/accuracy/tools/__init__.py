"""Post-training quantization by other tools: what each supports, its child program, and an environment of its own.

May import `graph`, `timing` and the contracts.
Must not import a tool: each runs in a child process.
"""
