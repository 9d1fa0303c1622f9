"""Graph of each task: layout of regions and nodes, and the quantized edges of its rows.

The layout is layered by region: consumers are below producers, a region is a box around its parts, and a stack that
would be far taller than wide continues in the next column. `assets/graph.js` draws it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.base.errors import UserError
from harness.config.experiment import quantized_precisions
from harness.graph.io.files import model_files
from harness.graph.load import load
from harness.graph.model import Model
from harness.graph.partition.patterns import Pattern, find_patterns
from harness.graph.partition.regions import Region, RegionType, discover_regions
from harness.graph.qdq.import_placement import import_placement
from harness.graph.qdq.space import build_space
from harness.graph.rules.dialects import BUILTIN_DIALECTS, load_dialect
from harness.report.page.html_document import render_html
from harness.results.artifacts import FLOAT_ROW
from harness.results.folder import TaskResults
from harness.results.task_files import exported, read_graph
from search.space import Dimension, Edge

NODE_HEIGHT_PX = 20
BOX_GAP_PX = 14
BOX_PADDING_PX = 8
BOX_HEADER_PX = 14
LETTER_WIDTH_PX = 6.6
MAX_COLUMN_HEIGHT_PX = 1400  # a taller stack continues in the next column
TARGET_ASPECT_RATIO = 1.7  # width over height, that of a screen
#: "Light" scheme of Paul Tol, colour-blind safe with legible black text.
PATTERN_COLOURS = ("#77AADD", "#EE8866", "#EEDD88", "#FFAABB", "#99DDFF", "#44BB99", "#BBCC33", "#AAAA00")
SHADE_MIX_SHARES = (0.0, 0.45, -0.22)  # share of white (positive) or black (negative) on each repetition of the colours


@dataclass(slots=True)
class _Box:
    """Region or node in the layout; `x` and `y` are relative to its parent."""

    number: int
    width: float
    height: float
    parts: list[_Box] = field(default_factory=list)
    leaf: bool = False
    x: float = 0.0
    y: float = 0.0


def build_scene(
    model: Model, root: Region, patterns: Sequence[Pattern], dimensions: Iterable[Dimension]
) -> dict[str, Any]:
    """Return the layout of a model's graph as JSON data with integer coordinates in pixels.

    Args:
        dimensions: Insertion points, which the page lists for the pattern of a clicked region.
    """
    descendants = [region for region in root.walk() if region is not root]
    number = {region.id: place for place, region in enumerate(descendants)}
    layout = _layout_boxes(model, root, number)
    nodes: list[list[Any]] = [[] for _ in model.nodes]
    boxes: list[list[Any]] = [[] for _ in number]
    _place_boxes(layout, nodes, boxes)
    drawn_patterns = [pattern for pattern in patterns if pattern.type is not RegionType.ROOT]
    pattern_of = {region.id: place for place, pattern in enumerate(drawn_patterns) for region in pattern.regions}
    operators = sorted({node.op for node in model.nodes})
    code = {name: place for place, name in enumerate(operators)}
    parent = {child.id: region.id for region in descendants for child in region.children}
    for region in descendants:
        facts = (pattern_of[region.id], number.get(parent.get(region.id, -1), -1), region.type is RegionType.LEAF)
        boxes[number[region.id]] += [*facts, list(region.inputs), list(region.outputs)]
        for index in region.nodes:
            node = model.nodes[index]
            nodes[index] += [code[node.op], number[region.id], len(node.inputs), node.name]
    node_index = {node.name: node.index for node in model.nodes}
    points: list[list[dict[str, Any]]] = [[] for _ in drawn_patterns]
    for dimension in dimensions:
        prefix = dimension.group.partition(".")[0]
        owner = next(i for i, pattern in enumerate(drawn_patterns) if pattern.signature.startswith(prefix))
        places = [_edge_position(edge, model, node_index) for edge in dimension.edges]
        point = {"name": dimension.name, "kind": dimension.kind, "role": dimension.role}
        at = [list(place) for place in places if place is not None]
        points[owner].append({**point, "choices": list(dimension.choices), "at": at})
    return {
        "size": [round(layout.width), round(layout.height)],
        "node_height": NODE_HEIGHT_PX,
        "operators": operators,
        "nodes": nodes,
        "regions": boxes,
        "edges": [
            [model.producer[name], node.index, slot]
            for node in model.nodes
            for slot, name in enumerate(node.inputs)
            if name in model.producer
        ],
        "patterns": [
            {
                "signature": pattern.signature[:8],
                "type": pattern.type.value,
                "operators": list(pattern.operators),
                "regions": len(pattern.regions),
                "colour": colour,
                "points": found,
            }
            for pattern, colour, found in zip(drawn_patterns, _pattern_colours(drawn_patterns), points, strict=True)
        ],
    }


def render_graph_page(scene: Mapping[str, Any], title: str) -> str:
    """Return the layout that `build_scene` made as one self-contained HTML document."""
    return render_html("regions.html.j2", ("graph.js", "regions.js"), scene, {"title": title})


def edge_marks(model: Model, edges: Mapping[Edge, str]) -> list[list[Any]]:
    """Return quantized edges as [node, input slot, precision]; the slot of a model's output is -1."""
    index = {node.name: node.index for node in model.nodes}
    return [[*place, precision] for edge, precision in edges.items() if (place := _edge_position(edge, model, index))]


def _edge_position(edge: Edge, model: Model, index: Mapping[str, int]) -> tuple[int, int] | None:
    if edge.consumer in index:
        return index[edge.consumer], edge.slot
    maker = model.producer.get(edge.tensor)
    return None if edge.consumer or maker is None else (maker, -1)


def _pattern_colours(patterns: Sequence[Pattern]) -> list[str]:
    """Return a colour per pattern, the first of the scheme for those with most nodes; "" for composites."""
    leaves = [p for p in patterns if p.type is RegionType.LEAF]
    ranked = sorted(leaves, key=lambda p: -len(p.operators) * len(p.regions))
    colours = {}
    for place, pattern in enumerate(ranked):
        turn, place_in_turn = divmod(place, len(PATTERN_COLOURS))
        colour, paler = PATTERN_COLOURS[place_in_turn], SHADE_MIX_SHARES[turn % len(SHADE_MIX_SHARES)]
        target = 255 if paler > 0 else 0
        parts = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
        mixed = (round(part + (target - part) * abs(paler)) for part in parts)
        colours[id(pattern)] = "#" + "".join(f"{part:02X}" for part in mixed)
    return [colours.get(id(pattern), "#F4F4F2") for pattern in patterns]


def _layout_boxes(model: Model, root: Region, number: Mapping[int, int]) -> _Box:
    """Return the boxes of the tree with sizes, each part placed in its parent."""
    built: dict[int, _Box] = {}
    for region in reversed(list(root.walk())):
        if region.children:
            parts = [built.pop(child.id) for child in region.children]
            owner = {node: part for part, child in enumerate(region.children) for node in child.node_indices()}
        else:
            widths = [max(40.0, LETTER_WIDTH_PX * len(model.nodes[i].op) + 14) for i in region.nodes]
            parts = [_Box(i, width, NODE_HEIGHT_PX) for i, width in zip(region.nodes, widths, strict=True)]
            owner = {node: part for part, node in enumerate(region.nodes)}
        before: dict[int, set[int]] = {}  # the parts that compute the inputs of each part
        for node, part in owner.items():
            for name in model.nodes[node].inputs:
                feeder = owner.get(model.producer.get(name, -1))
                if feeder is not None and feeder < part:
                    before.setdefault(part, set()).add(feeder)
        box = _Box(number.get(region.id, -1), 0.0, 0.0, parts, leaf=not region.children)
        _stack_rows(box, _layer_boxes(parts, before))
        built[region.id] = box
    return built[root.id]


def _layer_boxes(parts: Sequence[_Box], before: Mapping[int, set[int]]) -> list[list[_Box]]:
    """Return rows from top to bottom, with each part below its predecessors and near the middle of them."""
    depth: list[int] = []
    rows: list[list[int]] = []
    middle: list[float] = []
    for part in range(len(parts)):
        feeders = before.get(part, set())
        depth.append(1 + max((depth[feeder] for feeder in feeders), default=-1))
        middle.append(sum(middle[feeder] for feeder in feeders) / len(feeders) if feeders else 0.0)
        if depth[part] == len(rows):
            rows.append([])
        middle[part] += 0.5 * len(rows[depth[part]])
        rows[depth[part]].append(part)
    return [[parts[part] for part in sorted(row, key=lambda p: middle[p])] for row in rows]


def _stack_rows(box: _Box, rows: Sequence[Sequence[_Box]]) -> None:
    """Stack the rows in columns and set the size of the box around them."""
    widths = [sum(part.width for part in row) + BOX_GAP_PX * (len(row) - 1) for row in rows]
    heights = [max(part.height for part in row) for row in rows]
    total, cuts, used = sum(heights) + BOX_GAP_PX * len(heights), [0], 0.0
    if total > MAX_COLUMN_HEIGHT_PX:
        limit = max(MAX_COLUMN_HEIGHT_PX / 2, math.sqrt(total * max(widths) / TARGET_ASPECT_RATIO))
        for place, height in enumerate(heights):
            if used and used + height > limit:
                cuts.append(place)
                used = 0.0
            used += height + BOX_GAP_PX
    x, right, bottom = float(BOX_PADDING_PX), 0.0, 0.0
    for first, last in zip(cuts, [*cuts[1:], len(heights)], strict=True):
        width = max(widths[first:last])
        y = float(BOX_PADDING_PX + BOX_HEADER_PX)
        for row, wide, high in zip(rows[first:last], widths[first:last], heights[first:last], strict=True):
            left = x + (width - wide) / 2
            for part in row:
                part.x, part.y = left, y
                left += part.width + BOX_GAP_PX
            y += high + BOX_GAP_PX
        right, bottom = x + width, max(bottom, y - BOX_GAP_PX)
        x = right + 3 * BOX_GAP_PX
    box.width, box.height = right + BOX_PADDING_PX, bottom + BOX_PADDING_PX


def _place_boxes(box: _Box, nodes: list[list[Any]], boxes: list[list[Any]]) -> None:
    """Store absolute positions of all nodes and boxes."""
    todo = [(box, 0.0, 0.0)]
    while todo:
        current, x, y = todo.pop()
        if current.number >= 0:
            boxes[current.number] = [round(v) for v in (x, y, current.width, current.height)]
        for part in current.parts:
            if current.leaf:
                nodes[part.number] = [round(v) for v in (x + part.x, y + part.y, part.width)]
            else:
                todo.append((part, x + part.x, y + part.y))


logger = logging.getLogger(__name__)


def load_task_graph(task: TaskResults) -> dict[str, Any] | None:
    """Return `scene` (see `build_scene`), and by row id the quantized edges (`marks`) and file sizes (`bytes`).

    They come from the exported files, else from `graph.json` without rows whose file changed; None without either. The
    insertion points are those of the task's dialect, if it is built in: a report imports no plug-in.
    """
    stored = read_graph(task)
    row = task.rows.get(FLOAT_ROW)
    path = None if row is None else exported(task, row)
    if path is None or not path.exists():
        return stored
    model = load(path, source=str(task.facts.get("source", task.facts["model"])))
    root, name = discover_regions(model), str(task.facts.get("dialect_use"))
    dimensions: tuple[Dimension, ...] = ()
    if name in BUILTIN_DIALECTS:
        precisions = quantized_precisions(str(task.facts["precision"]))
        dialect = load_dialect(name, task.facts["backend"])
        dimensions = build_space(model, dialect, precisions=precisions, root=root).dimensions
    else:
        logger.warning("%s: no insertion points on the page: %s is not a dialect of qdq-bench", task.name, name)
    scene = build_scene(model, root, find_patterns(model, root), dimensions)
    same = stored is not None and stored["scene"].get("nodes") == scene["nodes"]
    before = stored if stored is not None and same else {"marks": {}, "bytes": {}}
    marks, sizes = dict(before["marks"]), dict(before["bytes"])
    for row in task.rows.values():
        path = exported(task, row)
        if path.exists():
            sizes[row.id] = sum(part.stat().st_size for part in model_files(path))
        if not row.pairs:
            marks[row.id] = []
        elif path.exists():
            try:
                marks[row.id] = edge_marks(model, import_placement(path, model))
            except UserError as error:
                logger.warning("%s: the Q/DQ edges of %s are not drawn: %s", task.name, row.id, error)
    return {"scene": scene, "marks": marks, "bytes": sizes}
