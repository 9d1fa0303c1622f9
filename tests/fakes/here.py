"""OpenVINO in the process of the tests: workers take longer to start than small models to be measured."""

from dataclasses import replace

from harness.runtimes.openvino import OpenVINOBenchmarker

__all__ = ["OpenVINO"]


class OpenVINO(OpenVINOBenchmarker):
    """The benchmarker as it is, but for the worker."""

    capabilities = replace(OpenVINOBenchmarker.capabilities, in_process=True)
