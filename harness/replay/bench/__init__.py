"""QDQ-Bench: recorded tables as tasks, submissions of searchers, the leaderboard, and exports for other tools.

May import `studies`. Must not import `cli` or `compat`.

Example::

    from harness.replay.bench import load

    task = load("resnet18-openvino-f32", seed=0)
    reading = task.evaluate(task.space.quantize_all())
    print(reading.latency_ms, reading.cost_s, task.latency_curve_ms())
"""

from harness.replay.bench.tasks import BenchReading, BenchTask, load, read_catalogue

__all__ = ["BenchReading", "BenchTask", "load", "read_catalogue"]
