"""The CUDA runtime of a simulated device."""

import sys

from fake_cuda import FakeCuda

sys.modules[__name__] = FakeCuda()  # type: ignore[assignment]
