"""The page: in a browser where there is one, and as text."""

import json
import re
import shlex
import shutil

import pytest
from small_results import TASK, edit_json, read_page_data, write_task
from stored import read_records, replace_text, write_records

from harness.base.paths import hide_paths
from harness.base.statistics import Interval
from harness.report.frames import main_frame
from harness.report.next_steps import describe_next_steps
from harness.report.page.graph_layout import load_task_graph
from harness.report.page.index_page import render_index
from harness.report.render import write_report
from harness.report.tables.catalog import build_tables
from harness.results.folder import load
from harness.results.task_files import AttributionReport, PartEffect, write_attribution

DRAWN = True

CHARTS = "[...document.querySelectorAll('#curves .js-plotly-plot')]"


def page_of(folder):
    """Write the page alone."""
    results = load(folder)
    path = folder / "index.html"
    path.write_text(render_index(results, list(build_tables(results)), load_task_graph), encoding="utf-8")
    return path


def test_page_is_one_file_without_external_resources(with_models, outside_addresses):
    text = page_of(with_models).read_text()
    assert outside_addresses(text) == []
    assert "default-src 'none'" in text
    assert len(text) < 5_000_000


def test_charts_are_drawn_when_they_come_into_view(with_models, browser):
    for number in range(12):
        write_task(with_models, f"other{number}-openvino-int8", model=f"other{number}")
    browser.open(page_of(with_models), all_drawn=False)
    last = "[...document.querySelectorAll('[data-charts]')].at(-1)"
    assert browser.run(f"{last}.childElementCount") == 0
    browser.run(f"{last}.scrollIntoView()")
    while browser.run(f"{last}.childElementCount") < 5:
        pass
    assert browser.run("document.querySelectorAll('[data-charts].waiting').length") > 0
    assert browser.errors == []


def test_summary_precedes_tables_with_interval_and_verdict_counts(folder):
    text = re.sub(r"<[^>]+>", " ", page_of(folder).read_text().partition("<main")[0])
    assert re.search(r"random: 2.00 \[2.00, 2.00\] times as fast as the float model, 4.000 \[4.000, 4.000\] ms", text)
    assert "top-1 0.7900 (drop +0.0100, allowed 0.02), 5 Q/DQ pairs." in text
    assert "6 methods: 1 faster, 1 faster but beyond the bound, 1 slower, 3 without a speed." in text


@pytest.mark.parametrize("gone", ["rows.json", "confirmation.jsonl", "accuracy.json", "runs", "env.json", "task.json"])
def test_incomplete_results_are_marked_partial(with_models, gone):
    path = with_models / TASK / gone
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    text = page_of(with_models).read_text()
    assert ('class="badge partial"' in text) == (gone in ("rows.json", "confirmation.jsonl", "task.json"))
    assert "NaN" not in json.dumps(read_page_data(text))


def test_single_build_has_no_infinite_interval_in_chart_data(folder):
    path = folder / TASK / "confirmation.jsonl"
    write_records(path, (line for line in read_records(path) if line.get("build", 0) == 0))
    data = read_page_data(page_of(folder).read_text())
    pareto = next(chart for chart in data[0]["charts"] if chart["title"].startswith("Latency against"))
    assert pareto["data"][2]["customdata"][0][1] == pytest.approx(8.0)
    write_report(folder)


def test_hostile_names_are_escaped(folder, browser):
    evil = "<script>document.title='owned'</script>"
    edit_json(folder / TASK / "task.json", model=evil)
    rows = folder / TASK / "rows.json"
    replace_text(rows, '"tpe"', json.dumps(f"{evil}<img src=x onerror=alert(1)>"))
    (folder / "experiment.yaml").write_text(
        f'experiment: "{evil}"\ndescription: "</pre>{evil}"\nmodels: ["{evil}.onnx"]\n'
    )
    page = page_of(folder)
    assert evil not in page.read_text()
    browser.open(page)
    assert browser.run("document.title") == f"{evil}: report"
    assert browser.run("document.querySelectorAll('script').length") == 5
    assert browser.run("document.querySelectorAll('img').length") == 0
    assert browser.errors == []


def test_the_first_screen_has_remedies_without_a_file(folder):
    text = page_of(folder).read_text().partition('<section id="answer">')[2].partition("</section>")[0]
    steps = list(describe_next_steps(load(folder), main_frame(load(folder))))
    assert (len(steps) > 0) == ("<li>" in text)


def test_the_first_screen_has_file_commands_and_picture(with_models, browser):
    (with_models / "ship" / TASK).mkdir(parents=True)
    browser.open(page_of(with_models))
    commands = browser.run("document.querySelector('#answer pre').innerText").splitlines()
    place = f"{hide_paths(str(with_models))}/ship/{TASK}"
    deploy, verify = map(shlex.split, commands)
    assert deploy[:3] == ["python", f"{place}/deploy.py", "--input"]
    assert verify == ["qdq", "verify", place]
    assert browser.run("document.querySelector('#answer .js-plotly-plot').getBoundingClientRect().bottom") < 900
    names = browser.run("task(0).then(found => found.answer.data.flatMap(trace => trace.text))")
    assert {"all", "float f32"} <= {re.sub("<.?b>", "", name) for name in names}
    assert browser.run("[...document.querySelectorAll('details.notes')].some(notes => notes.open)") is False


def test_sorting_puts_figures_in_order_and_missing_ones_last(folder, browser):
    browser.open(page_of(folder))
    heads = browser.run("[...document.querySelectorAll('#table-main th')].map(head => head.textContent)")
    method, speedup = heads.index("method"), heads.index("speedup [CI]")
    column = "[...document.querySelectorAll('#table-main tbody tr')].map(r => r.cells[{}].textContent)"
    before = browser.run(column.format(method))
    head = "document.querySelectorAll('#table-main th button')[{}].click()"
    browser.run(head.format(speedup))
    up = browser.run(column.format(speedup))
    assert [text.split(" ")[0] for text in up] == ["0.80", "1.00", "2.00", "4.00", "-", "-", "-"]
    browser.run(head.format(speedup))
    assert browser.run(column.format(speedup))[0].startswith("4.00")
    assert browser.run(column.format(speedup))[-1] == "-"
    browser.run(head.format(method))
    assert browser.run(column.format(method)) == sorted(before)
    browser.run("document.querySelector('#table-main th button').focus()")
    for kind in ("rawKeyDown", "char", "keyUp"):
        browser.call(
            "Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", windowsVirtualKeyCode=13, text="\r"
        )
    assert browser.run("document.querySelector('#table-main th').getAttribute('aria-sort')") == "ascending"
    assert browser.errors == []


def test_shared_values_are_shown_once_above_table(folder):
    text = page_of(folder).read_text()
    assert "All rows: model: net, device: A CPU, 2 threads" in text
    table = text.partition('id="table-main"')[2].partition("</table>")[0]
    assert "A CPU" not in table
    write_task(folder, "other-openvino-int8", model="other")
    text = page_of(folder).read_text()
    assert "All rows: device: A CPU, 2 threads" in text
    assert ">other<" in text.partition('id="table-main"')[2].partition("</table>")[0]


@pytest.mark.parametrize("width", [1300, 400])
def test_two_rows_are_compared_and_the_page_fits_its_width(with_models, browser, width):
    browser.open(page_of(with_models), width=width)
    assert browser.run("document.documentElement.scrollWidth") <= width
    assert browser.run(f"{CHARTS}.length") == 5
    assert "</script><script>" in json.dumps(
        browser.run("task(0).then(found => found.graph.scene.nodes.map(n => n[6]))")
    )
    choose = (
        "(s => {{ s.value = '{}'; s.dispatchEvent(new Event('change')); }})(document.querySelectorAll('select')[{}])"
    )
    browser.run(choose.format("all", 0))
    alone = browser.run("document.querySelector('.diff').textContent")
    marks = browser.run("task(0).then(found => found.graph.marks)")
    assert f"{len(marks['all'])} inputs at int8" in alone
    browser.run(choose.format("aa", 1))
    text = browser.run("document.querySelector('.diff').textContent")
    assert f"{len(marks['aa'])} in both" in text
    assert f"{len(marks['all']) - len(marks['aa'])} in the first alone" in text
    assert "0 in the second alone" in text
    browser.run("document.querySelector('.pattern-key').click()")
    assert "Insertion points of the pattern" in browser.run("document.querySelector('.facts').textContent")
    assert browser.errors == []


def test_a_click_in_the_legend_switches_its_series_off(folder, browser):
    browser.open(page_of(folder))
    browser.run("document.querySelector('#curves .js-plotly-plot').scrollIntoView({block: 'center'})")
    settled(browser)
    key = "document.querySelector('#curves .js-plotly-plot .legendtoggle')"
    place = middle_of(browser, key)
    hidden = f"{CHARTS}[0].data.filter(trace => trace.visible === 'legendonly').map(trace => trace.legendgroup)"
    assert browser.run(hidden) == []
    mouse(browser, "mousePressed", place, button="left", clickCount=1)
    mouse(browser, "mouseReleased", place, button="left", clickCount=1)
    browser.run("new Promise(done => setTimeout(() => done(true), 600))")  # Plotly waits for a second click
    assert set(browser.run(hidden)) == {"random"}, "the line, its band and what was confirmed"
    assert len(browser.run(hidden)) > 2
    assert browser.errors == []


def test_hover_shows_values_of_point(folder, browser):
    browser.open(page_of(folder))
    last = "[...document.querySelectorAll('#curves .js-plotly-plot')].at(-1)"
    browser.run(f"{last}.scrollIntoView({{block: 'center'}})")
    settled(browser)
    mouse(browser, "mouseMoved", middle_of(browser, f"[...{last}.querySelectorAll('.scatterlayer .point')].at(-1)"))
    browser.run("new Promise(done => setTimeout(() => done(true), 300))")
    assert re.search(r"ms \[.*\], top-1 0\.\d{4}", browser.run(f"{last}.querySelector('.hoverlayer').textContent"))
    assert browser.errors == []


def test_no_button_uploads_a_chart(folder, browser):
    browser.open(page_of(folder))
    titles = browser.run("[...document.querySelectorAll('.modebar-btn')].map(b => b.dataset.title)")
    assert set(titles) == {"Download plot", "Zoom", "Pan", "Zoom in", "Zoom out", "Reset axes"}
    assert "form-action 'none'" in page_of(folder).read_text()


def test_names_in_charts_are_escaped(folder):
    rows = folder / TASK / "rows.json"
    replace_text(rows, '"random"', '"<a href=x>random</a>"')
    charts = json.dumps(read_page_data(page_of(folder).read_text())[0]["charts"])
    assert "&lt;a href=x&gt;random&lt;/a&gt;" in charts
    assert "<a href" not in charts.replace('"legendgroup": "<a href', "")


def test_click_shows_effect_of_explained_pattern(with_models, browser):
    scene = load_task_graph(load(with_models).tasks[0])["scene"]
    place, pattern = next((i, p) for i, p in enumerate(scene["patterns"]) if p["points"])
    known = {"pattern": pattern["signature"], "operators": "Conv", "pairs": 2}
    ratio = Interval(value=1.25, low=1.2, high=1.3)
    found = AttributionReport(
        row="aa", sha256="sha of aa", method="random", pairs=5, speedup=ratio, noise_floor=0.01, minimal=None,
        patterns=(PartEffect(part=pattern["signature"], ratio=ratio, **known),),
        points=(PartEffect(part=pattern["points"][0]["name"], ratio=None, reason="<b>gone</b>", **known),),
    )  # fmt: skip
    write_attribution(found, with_models / TASK)
    browser.open(page_of(with_models))
    region = next(i for i, region in enumerate(scene["regions"]) if region[4] == place)

    def facts(row: str) -> str:
        called = f"regionFacts(found.graph.scene, {region}, found.graph.marks.{row}, found.effects.{row})"
        return str(browser.run(f"task(0).then(found => {called}.map(e => e.textContent).join(' | '))"))

    said = facts("aa")
    assert "Effect: without it +25.0 % [+20.0, +30.0] time" in said
    assert "not measured: <b>gone</b>" in said
    assert "not measured for this row" in facts("all")
    assert browser.errors == []


def settled(browser) -> None:
    """Wait until what was asked for is drawn."""
    browser.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))")


def mouse(browser, kind: str, place: tuple[float, float], **facts) -> None:
    browser.call("Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], **facts)


def middle_of(browser, found: str) -> tuple[float, float]:
    box = browser.run(f"(({{x, y, width, height}}) => [x, y, width, height])({found}.getBoundingClientRect())")
    return box[0] + box[2] / 2, box[1] + box[3] / 2


def test_the_graph_is_zoomed_dragged_and_clicked_with_a_mouse(with_models, browser):
    browser.open(page_of(with_models))
    browser.run("document.querySelector('.stage').scrollIntoView({block: 'center'})")
    settled(browser)
    canvas = "document.querySelector('canvas.graph')"
    box = browser.run(f"(({{x, y, width, height}}) => [x, y, width, height])({canvas}.getBoundingClientRect())")
    middle = (box[0] + box[2] / 2, box[1] + box[3] / 2)
    drawn = [browser.run(f"{canvas}.toDataURL()")]
    mouse(browser, "mouseWheel", middle, deltaX=0, deltaY=-400)
    settled(browser)
    drawn.append(browser.run(f"{canvas}.toDataURL()"))
    mouse(browser, "mousePressed", middle, button="left", clickCount=1)
    mouse(browser, "mouseMoved", (middle[0] + 60, middle[1] + 30), button="left", buttons=1)
    mouse(browser, "mouseReleased", (middle[0] + 60, middle[1] + 30), button="left", clickCount=1)
    settled(browser)
    drawn.append(browser.run(f"{canvas}.toDataURL()"))
    assert len(set(drawn)) == 3, "zooming and dragging change the picture"
    assert "Click a region" in browser.run("document.querySelector('.facts').textContent"), "dragging is no click"
    browser.run("[...document.querySelectorAll('.tools button')].at(-1).click()")
    settled(browser)
    assert browser.run(f"{canvas}.toDataURL()") == drawn[0], "the whole graph again"
    scene = browser.run("task(0).then(found => found.graph.scene)")
    width, height = scene["size"]
    scale = min(1.5, (box[2] - 20) / width, (box[3] - 20) / height)
    node = scene["nodes"][0]
    place = (
        middle[0] + (node[0] + node[2] / 2 - width / 2) * scale,
        middle[1] + (node[1] + scene["node_height"] / 2 - height / 2) * scale,
    )
    mouse(browser, "mousePressed", place, button="left", clickCount=1)
    mouse(browser, "mouseReleased", place, button="left", clickCount=1)
    said = browser.run("document.querySelector('.facts').textContent")
    assert said.startswith(f"Region {node[4]} ")
    assert "Effect: not measured for this row" in said
    assert browser.errors == []
