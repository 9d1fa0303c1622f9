"""`python -m harness.compat.modelopt_autotune`."""

from __future__ import annotations

import sys

from harness.compat.modelopt_autotune.command import autotune
from harness.errors import UserError
from harness.terminal_progress import TerminalProgress

__all__ = ["main"]


def main() -> int:
    """Run the command line of this process; the exit code is 2 after a mistake and 130 after Ctrl-C."""
    try:
        with TerminalProgress() as terminal:
            autotune(sys.argv[1:], "python -m harness.compat.modelopt_autotune", terminal)
    except UserError as error:
        print(f"autotune: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
