"""The graph as a picture: where things stand, and what `qdq inspect regions --html` writes."""

import json
import re

import pytest
from typer.testing import CliRunner

from harness.base.errors import UserError
from harness.cli.main import app
from harness.graph.builder import GraphBuilder
from harness.graph.load import load_proto
from harness.graph.partition.patterns import find_patterns
from harness.graph.partition.regions import RegionType, discover_regions
from harness.graph.qdq.space import build_space
from harness.graph.rules.dialects import OPENVINO
from harness.report.page.graph_layout import build_scene, edge_marks, render_graph_page
from harness.zoo.transformer import encoder


def scene(builder: GraphBuilder):
    model = load_proto(builder.build(), source="m", sha256="0")
    root = discover_regions(model)
    patterns = find_patterns(model, root)
    space = build_space(model, OPENVINO, root=root)
    return model, root, patterns, space, build_scene(model, root, patterns, space.dimensions)


@pytest.fixture(scope="module")
def made():
    return scene(encoder(6, width=32, heads=2, tokens=8))


def test_nodes_and_regions_are_nested_without_overlap(made):
    picture = made[-1]
    high = picture["node_height"]
    regions = picture["regions"]

    def inside(box, frame):
        x, y, width, height = box
        left, top, wide, tall = frame
        return left <= x and top <= y and x + width <= left + wide and y + height <= top + tall

    for node in picture["nodes"]:
        assert inside((*node[:3], high), regions[node[4]][:4])
    for number, region in enumerate(regions):
        if region[5] >= 0:
            assert inside(region[:4], regions[region[5]][:4])
        siblings = [other for other in regions[:number] if other[5] == region[5]]
        for other in siblings:
            apart = region[0] >= other[0] + other[2] or other[0] >= region[0] + region[2]
            assert apart or region[1] >= other[1] + other[3] or other[1] >= region[1] + region[3]


def test_every_leaf_has_a_colour_of_its_pattern_and_its_points(made):
    _, root, patterns, space, picture = made
    leaves = [pattern for pattern in picture["patterns"] if pattern["type"] == "LEAF"]
    assert len({pattern["colour"] for pattern in leaves}) == len(leaves)
    assert sum(len(pattern["points"]) for pattern in picture["patterns"]) == len(space)
    assert len(picture["regions"]) == sum(region.type is not RegionType.ROOT for region in root.walk())
    assert len(picture["patterns"]) == sum(pattern.type is not RegionType.ROOT for pattern in patterns)
    json.dumps(picture)


def test_quantized_edges_are_found_by_node_and_slot(made):
    model, _, _, space, picture = made
    edges = dict(space.resolve(space.quantize_all()))
    marks = edge_marks(model, edges)
    assert len(marks) == len(edges)
    assert all(slot < picture["nodes"][node][5] and precision == "int8" for node, slot, precision in marks)
    assert edge_marks(model, {}) == []


def test_hostile_name_is_escaped():
    g = GraphBuilder("m")
    name = "</script><script>alert(1)</script>"
    g.output(g.op("Relu", g.conv(g.input("x", (1, 3, 8, 8)), 4, 3, name=name), name=name))
    text = render_graph_page(scene(g)[-1], "<script>.onnx & <b>")
    assert "<script>alert" not in text
    assert "<title>&lt;script&gt;.onnx &amp; &lt;b&gt;: regions</title>" in text
    data = re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1]
    assert name in [node[6] for node in json.loads(data)["nodes"]]
    assert "default-src 'none'" in text
    assert not re.search(r"(src|href)=\"?https?:", text)


@pytest.fixture
def net(tmp_path):
    """A file with a residual block and a sequence of 24 operators."""
    g = GraphBuilder("net")
    x = g.op("Relu", g.conv(g.input("x", (1, 3, 8, 8)), 4, 3))
    x = g.op("Add", g.conv(x, 4, 3), x)
    for op in ("Relu", "Sigmoid") * 12:
        x = g.op(op, x)
    g.output(x)
    return str(g.save(tmp_path / "net.onnx"))


def test_regions_command_writes_html_and_prints_path(net, tmp_path):
    path = tmp_path / "out.html"
    found = CliRunner().invoke(app, ["inspect", "regions", net, "--html", str(path)])
    assert found.exit_code == 0
    assert str(path) in found.stderr
    assert path.read_text().startswith("<!doctype html>")
    wrong = CliRunner().invoke(app, ["inspect", "regions", net, "--html", str(tmp_path / "no" / "x.html")])
    assert isinstance(wrong.exception, UserError)
    assert "cannot be written (No such file or directory)" in str(wrong.exception)


def test_regions_command_prints_phases_hierarchy_and_coverage(net):
    def regions(*options: str) -> str:
        return CliRunner().invoke(app, ["inspect", "regions", net, *options]).stdout

    text = regions()
    for line in (
        "Loaded graph: ",
        "Phase 1 complete: ",
        "Phase 2 complete: ",
        "├─ Region 0 ",
        "(100.0%)",
        "Size distr",
    ):
        assert line in text
    assert "- Node 0: Conv" not in text
    assert "- Node 0: Conv (Conv)" in regions("--verbose")
    assert "max=10," in text
    assert "max=24," in regions("--max-sequence-size", "24")
    assert json.loads(regions("--json"))["summary"]["covered"] == 28
    assert "--include-all-regions" not in regions("--include-all-regions")


def test_a_click_shows_a_region_with_its_insertion_points(browser, tmp_path, made):
    page, picture = tmp_path / "regions.html", made[-1]
    page.write_text(render_graph_page(picture, "six layers"))
    browser.open(page)
    box = browser.run(
        "(b => [b.left, b.top, b.width, b.height])(document.querySelector('canvas').getBoundingClientRect())"
    )
    width, height = picture["size"]
    scale = min(1.5, (box[2] - 20) / width, (box[3] - 20) / height)
    node = picture["nodes"][0]
    x = box[0] + (box[2] - width * scale) / 2 + (node[0] + 5) * scale
    y = box[1] + (box[3] - height * scale) / 2 + (node[1] + 5) * scale
    for kind in ("mousePressed", "mouseReleased"):
        browser.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
    facts = browser.run("document.getElementById('facts').textContent")
    pattern = picture["patterns"][picture["regions"][node[4]][4]]
    assert f"Region {node[4]} (LEAF)" in facts
    assert all(point["name"].partition("/")[2] in facts for point in pattern["points"])
    assert browser.errors == []
