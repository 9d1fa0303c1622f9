#!/usr/bin/env python3
"""trtexec of both majors as far as its command line goes: unknown options fail, files have its format.

The major stands in the environment variable FAKE_TRTEXEC; the formats are those of samples/common/sampleReporting.cpp.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path

BOTH = """
--help --onnx --saveEngine --loadEngine --skipInference --exportTimes --exportOutput --exportLayerInfo --exportProfile
--profilingVerbosity --iterations --duration --warmUp --loadInputs --timingCacheFile --builderOptimizationLevel
--memPoolSize --noTF32 --minShapes --optShapes --maxShapes --shapes --stronglyTyped --noDataTransfers --useSpinWait
--useCudaGraph --separateProfileRun --safe --remoteAutoTuningConfig --device --maxAuxStreams --avgRuns --verbose
--staticPlugins --dynamicPlugins --plugins
"""
REPEATED = ("--staticPlugins", "--dynamicPlugins", "--plugins")
ONLY = {10: "--fp16 --bf16 --int8 --fp8 --int4 --best", 11: "--includeDataTransfers --noSpinWait --noCudaGraph"}
BANNER = {
    10: "&&&& RUNNING TensorRT.trtexec [TensorRT v101601] [b11]",
    11: "&&&& RUNNING TensorRT.trtexec [TensorRT v110100] [b106]",
}


def install(folder: Path, setenv: Callable[[str, str], None], major: int) -> Path:
    """Put the program on PATH, with scratch folders of its own, and return the path of its log."""
    program = folder / "bin" / "trtexec"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(__file__)} "$@"\n')
    program.chmod(0o755)
    log = folder / "log"
    names = {"PATH": f"{program.parent}:/usr/bin:/bin", "FAKE_TRTEXEC": major, "FAKE_TRTEXEC_LOG": log}
    for name, value in {**names, "XDG_CACHE_HOME": folder / "cache"}.items():
        setenv(name, str(value))
    return log


def main() -> int:
    major = int(os.environ["FAKE_TRTEXEC"])
    print(BANNER[major], "#", *sys.argv)
    options = dict((argument.partition("=")[0], argument.partition("=")[2]) for argument in sys.argv[1:])
    with open(os.environ["FAKE_TRTEXEC_LOG"], "a", encoding="utf-8") as log:
        log.write(json.dumps(sys.argv[1:]) + "\n")
    given = [argument.partition("=")[0] for argument in sys.argv[1:]]
    twice = [name for name in given if given.count(name) > 1 and name not in REPEATED]
    for name in [*twice, *options]:
        if name in twice or name not in {*BOTH.split(), *ONLY[major].split()}:
            print(f"[11/21/2026-15:00:00] [E] Unknown option: {name} {options[name]}")
            return 1
    if "--remoteAutoTuningConfig" in options and "--safe" not in options:
        print("[E] --remoteAutoTuningConfig needs --safe")
        return 1
    if os.environ.get("FAKE_TRTEXEC_HANGS"):
        time.sleep(60)
    if "--onnx" in options:
        if b"Frobnicate" in Path(options["--onnx"]).read_bytes() and "--staticPlugins" not in options:
            print("[E] [TRT] ModelImporter.cpp:949: ERROR: Plugin not found: Frobnicate")
            return 1
        Path(options["--saveEngine"]).write_bytes(b"plan")
        if "--timingCacheFile" in options:
            with open(options["--timingCacheFile"], "ab") as cache:
                cache.write(b"+")
    if "--exportTimes" in options:
        write_times(major, options)
    if "--exportOutput" in options:
        row = {"name": "y", "dimensions": "1x2x2", "values": [0.5, -1.25, 3, 4.75]}
        Path(options["--exportOutput"]).write_text(json.dumps([row]))
    if "--exportLayerInfo" in options:
        layer = {"Name": "conv", "LayerType": "CaskConvolution", "Inputs": [], "Outputs": []}
        Path(options["--exportLayerInfo"]).write_text(json.dumps({"Layers": [layer], "Bindings": ["x", "y"]}))
        rows = [{"count": 50}, {"name": "conv", "timeMs": 5.0, "averageMs": 0.1, "medianMs": 0.1, "percentage": 100}]
        Path(options["--exportProfile"]).write_text(json.dumps(rows))
    return 0


def write_times(major: int, options: dict[str, str]) -> None:
    """Traces; as before 10 the warm-up is among them. Latency has transfers where they are on."""
    transfers = "--noDataTransfers" not in options if major == 10 else "--includeDataTransfers" in options
    rows = []
    for index in range(5 + int(options["--iterations"])):
        start = 40.0 * index if index < 5 else float(options["--warmUp"]) + index
        compute, copies = 0.75 + 0.001 * index, 2.0 if transfers else 0.0
        rows.append(
            {
                "startEnqMs": start, "endEnqMs": start + 0.01, "startH2dMs": start, "endH2dMs": start,
                "startComputeMs": start, "endComputeMs": start + compute, "startD2hMs": start, "endD2hMs": start,
                "h2dMs": copies / 2, "computeMs": compute, "d2hMs": copies / 2, "latencyMs": compute + copies,
            }
        )  # fmt: skip
    Path(options["--exportTimes"]).write_text(json.dumps(rows))


if __name__ == "__main__":
    sys.exit(main())
