from cheap_runs import cheap_runs

__all__ = ["cheap_runs"]
