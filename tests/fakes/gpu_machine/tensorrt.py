"""TensorRT 11 on the simulated device of this process, for programs that are started with this folder on their path."""

import sys

from cuda.bindings import runtime
from fake_trt import FakeTensorRT

sys.modules[__name__] = FakeTensorRT(11, runtime)  # type: ignore[assignment]
