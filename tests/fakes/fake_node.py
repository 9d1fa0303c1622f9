#!/usr/bin/env python3
"""Node.js with onnxruntime-web as far as the requests of `child.mjs` go: what the program does not know fails.

FAKE_NODE says what goes wrong: "missing" package, "refuses" a model, "dies" or "hangs" in sampling.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

FIELDS = {
    "start": {"folder", "chromium", "profile", "program"},
    "load": {"model", "options"},
    "bind": {"inputs"},
    "sample": {"n"},
    "infer": {"inputs"},
    "profile": set(),
}
NODE = {"cat": "Node", "name": "conv_kernel_time", "dur": 1500, "args": {"op_name": "QLinearConv", "provider": "CPU",
        "input_type_shape": [{"uint8": [1]}]}}  # fmt: skip


def answer(fault: str, op: str, request: dict[str, Any]) -> dict[str, Any]:
    if request.keys() != FIELDS[op]:
        return {"error": f"{op} takes {FIELDS[op]}"}
    if op == "start":
        if fault == "missing":
            return {"error": f"Cannot find module 'onnxruntime-web'\nRequire stack:\n- {request['folder']}/noop.js"}
        return {"version": "1.30.0", "engine": "Chromium 156.0" if request["chromium"] else "Node.js 20.1.0"}
    if op == "load":
        if fault == "refuses":
            return {"error": "Can't create a session. ERROR_CODE: 9, ERROR_MESSAGE: no kernel of Frobnicate"}
        kind = "string" if fault == "string" else "float32"
        return {"inputs": [{"name": "x", "type": kind, "shape": [1, "N"] if fault == "dynamic" else [1, 2]}]}
    if op == "sample":
        if fault == "dies":
            sys.stderr.write("RangeError: WebAssembly.Memory(): could not allocate memory\n")
            sys.exit(7)
        if fault == "hangs":
            time.sleep(600)
        return {"times": [2.5] * request["n"]}
    if op == "infer":
        return {"outputs": {"y": request["inputs"]["x"]}, "time": 2.25}
    return {"trace": json.dumps([NODE]) if op == "profile" else ""}


def main() -> None:
    if sys.argv[1:3] != ["--input-type=module", "--eval"] or "onnxruntime-web" not in sys.argv[3]:
        sys.exit(9)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(answer(os.environ.get("FAKE_NODE", ""), request.pop("op"), request)), flush=True)


if __name__ == "__main__":
    main()
