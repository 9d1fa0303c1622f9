"""Kernels of a compiled model, read from the list that TensorRT-RTX logs at its detailed verbosity.

Nothing documents the format, and the engine inspector needs a GPU. So every line must match the form that versions 1.7
write; any other is an error, never a guess.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from harness.errors import BuildFailed

LIST_HEAD = "Layers:"
"""Beginning of the log message that holds the list."""
SYNCHRONIZATION_KINDS = frozenset({"signal", "wait"})
"""Entries that let one stream wait for another; they are no kernels."""
_TYPE_NAMES: Mapping[str, str] = {"Float": "f32", "Half": "f16", "BFloat16": "bf16", "BF16": "bf16"}
_KERNEL = re.compile(
    r"Name: (?P<name>.+?), LayerType: (?P<kind>\w+), Inputs: \[(?P<inputs>.*?)\], Constants: \[(?P<constants>.*?)\], "
    r"Outputs: \[(?P<outputs>.*?)\], TacticName: (?P<tactic>.*?), "
    r"StreamId: \d+, (?:EventId: \d+, )?Metadata: ?(?P<metadata>.*)"
)
_TENSOR = re.compile(
    r"\s*\{ Name: (?P<name>(?:(?!, Dimensions: \[).)+), Dimensions: \[(?P<shape>[\d,-]*)\], "
    r"(?:Strides: \[[\d,-]*\], StrideOrder: \[[\d,]*\], )?Datatype: (?P<type>\w+), Format: [^{}]*?\},?\s*"
)
_ORIGIN = re.compile(r"\[ONNX Layer: (.+)\](?:__\w+)?")
_ORIGIN_SEPARATOR = "\x1f"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTensor:
    """Input, constant or output of a kernel; the type is "f32", "f16", "bf16", "int8", "fp8" and the like."""

    name: str
    shape: tuple[int, ...]
    type: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A kernel of a compiled model.

    Attributes:
        kind: Kind in the compiler's terms: "correlation" (a convolution), "gemm", "kgen" (generated code).
        constants: Weights, scales and biases.
        tactic: Implementation that the compiler chose.
        origin: Nodes of the file that became it; empty if the compiler added it.
    """

    name: str
    kind: str
    inputs: tuple[KernelTensor, ...]
    constants: tuple[KernelTensor, ...]
    outputs: tuple[KernelTensor, ...]
    tactic: str
    origin: tuple[str, ...]


def read_kernels(message: str) -> tuple[Kernel, ...]:
    """Return the kernels that a log message lists.

    Args:
        message: The message that begins with `LIST_HEAD`.

    Raises:
        BuildFailed: It has another form than that of versions 1.7.
    """
    head, _, rest = message.partition("\n")
    if head.strip() != LIST_HEAD:
        raise BuildFailed(f"the compiler's list of kernels begins with {head[:40]!r} instead of {LIST_HEAD!r}")
    listed = rest.partition("\n\n")[0].split("\n")
    found = (_read_kernel(line) for line in listed if line.strip())
    return tuple(kernel for kernel in found if kernel.kind not in SYNCHRONIZATION_KINDS)


def _read_kernel(line: str) -> Kernel:
    found = _KERNEL.fullmatch(line.strip())
    if found is None:
        raise BuildFailed(f"the compiler's list of kernels has a line of an unknown form: {line[:80]!r}")
    named = [_ORIGIN.fullmatch(part) for part in found["metadata"].split(_ORIGIN_SEPARATOR) if part]
    if None in named:
        raise BuildFailed(f"the compiler's list of kernels has metadata of an unknown form: {found['metadata'][:80]!r}")
    return Kernel(
        name=found["name"],
        kind=found["kind"],
        inputs=tuple(_read_tensors(found["inputs"])),
        constants=tuple(_read_tensors(found["constants"])),
        outputs=tuple(_read_tensors(found["outputs"])),
        tactic=found["tactic"],
        origin=tuple(part[1] for part in named if part is not None),
    )


def _read_tensors(text: str) -> Iterator[KernelTensor]:
    place = 0
    while text[place:].strip():
        found = _TENSOR.match(text, place)
        if found is None:
            raise BuildFailed(f"the compiler's list of kernels has a tensor of an unknown form: {text[place:][:80]!r}")
        shape = tuple(int(size) for size in found["shape"].split(",") if size)
        kind = found["type"]
        yield KernelTensor(name=found["name"], shape=shape, type=_TYPE_NAMES.get(kind, kind.lower()))
        place = found.end()
