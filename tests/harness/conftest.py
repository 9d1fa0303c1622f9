from cheap_runs import cheap_runs
from warm_python import warm_python, warm_tools

__all__ = ["cheap_runs", "warm_python", "warm_tools"]
