"use strict";
// A task is a string: JSON, compressed and in base 64. It is decompressed, and drawn, when it comes into view.
const packed = JSON.parse(document.getElementById("data").textContent), unpacked = new Map(), drawings = new Map();

function task(index) {
  if (!unpacked.has(index)) {
    const bytes = Uint8Array.from(atob(packed[index]), (letter) => letter.charCodeAt(0));
    unpacked.set(index, new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json());
  }
  return unpacked.get(index);
}

// Sorting: a click on a heading; cells without a figure go last either way.
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  heads.forEach((head, column) => head.firstChild.addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") === "ascending";
    heads.forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const key = (row) => {
      const text = row.cells[column].textContent;
      if (head.dataset.kind === "text") return text;
      const number = text.match(/(?<!\S)[-+]?\d+(\.\d+)?/);
      return number ? Number(number[0]) : null;
    };
    const order = (a, b) => {
      const [one, two] = [key(a), key(b)];
      if (one === null || two === null) return (one === null) - (two === null);
      const by = head.dataset.kind === "text" ? one.localeCompare(two) : one - two;
      return down ? -by : by;
    };
    body.append(...[...body.rows].sort(order));
  }));
}

function draw(host) {
  const { answer, charts: ofCharts, graph } = host.dataset;
  if (!drawings.has(host)) drawings.set(host, task(Number(answer || ofCharts || graph)).then((found) => {
    host.classList.remove("waiting");
    if (answer) found.answer && chart(host, found.answer);
    else if (ofCharts) charts(host, found);
    else placements(host, found);
  }));
  return drawings.get(host);
}

const near = new IntersectionObserver((entries) => entries.filter((entry) => entry.isIntersecting).forEach(({ target }) => {
  near.unobserve(target);
  draw(target);
}), { rootMargin: "800px" });
if (window.DecompressionStream) document.querySelectorAll(".waiting").forEach((host) => near.observe(host));
else document.querySelectorAll(".waiting").forEach((host) => host.replaceChildren("This browser cannot draw this: it has no DecompressionStream."));

function charts(host, found) {
  const pictures = [...host.children];
  found.charts.forEach((figure) => chart(host, figure));
  host.append(...pictures);
  if (!host.childElementCount) host.append(element("p", { class: "quiet" }, "Nothing to draw yet."));
}

function placements(host, { labels, effects, best, graph: { scene, marks } }) {
  const rows = Object.keys(labels).filter((row) => marks[row]);
  const option = (row) => element("option", { value: row }, labels[row] + (labels[row] === row ? "" : " \u2014 " + row));
  const first = element("select", { "aria-label": "row" }, ...rows.map(option));
  const second = element("select", { "aria-label": "compare with" }, element("option", { value: "" }, "nothing"), ...rows.map(option));
  const said = element("div", { class: "diff" }), stage = element("div", { class: "stage tall" });
  const facts = element("div", { class: "facts" }), legend = element("div", {});
  host.append(
    element("p", { class: "choose" }, "Q/DQ edges of ", first, " compared with ", second), said,
    element("div", { class: "split" }, stage, element("aside", {}, facts, element("h4", {}, "Patterns"), legend)));
  const view = graphView(stage, scene, tell);
  legend.replaceChildren(...patternLegend(scene, view));
  function tell() { facts.replaceChildren(...regionFacts(scene, view.selected(), marks[first.value], effects[first.value])); }
  function show() {
    const other = second.value ? marks[second.value] : null;
    view.show(marks[first.value], other);
    said.replaceChildren(...(other ? difference(scene, marks[first.value], other) : [keyOfColours(marks[first.value])]));
    tell();
  }
  const quantized = rows.includes(best) && marks[best].length ? best : rows.find((row) => marks[row].length);
  if (quantized) first.value = quantized;
  first.addEventListener("change", show);
  second.addEventListener("change", show);
  show();
}

function swatch(colour, text) {
  const chip = element("span", { class: "chip" });
  chip.style.background = colour;
  return element("span", { class: "swatch" }, chip, " " + text);
}

function keyOfColours(marks) {
  const found = [...new Set(marks.map((mark) => mark[2]))];
  const count = (precision) => marks.filter((mark) => mark[2] === precision).length;
  return element("p", {}, ...(found.length
    ? found.map((precision) => swatch(PRECISION_COLOURS[precision] || "#009E73", count(precision) + " inputs at " + precision))
    : ["no Q/DQ pair"]));
}

// Differences of two placements: counts, by pattern of the region.
function difference(scene, first, second) {
  const key = ([node, slot]) => node + ":" + slot;
  const own = new Map(first.map((mark) => [key(mark), mark])), other = new Map(second.map((mark) => [key(mark), mark]));
  const both = first.filter((mark) => other.has(key(mark)) && other.get(key(mark))[2] === mark[2]);
  const onlyFirst = first.filter((mark) => !both.includes(mark)), onlySecond = second.filter((mark) => !own.has(key(mark)));
  const head = element("p", {}, swatch(IN_BOTH, both.length + " in both"), swatch(ONLY_FIRST, onlyFirst.length + " in the first alone, or at another precision"),
    swatch(ONLY_SECOND, onlySecond.length + " in the second alone"));
  const patterns = new Map();
  const add = (list, side) => list.forEach(([node, slot]) => {
    const pattern = scene.patterns[scene.regions[scene.nodes[node][4]][4]];
    const entry = patterns.get(pattern) || [[], []];
    entry[side].push(scene.nodes[node][6] + (slot < 0 ? " output" : " input " + slot));
    patterns.set(pattern, entry);
  });
  add(onlyFirst, 0);
  add(onlySecond, 1);
  if (!patterns.size) return [head];
  const words = (list) => list.length + (list.length ? ": " + list.slice(0, 6).join(", ") + (list.length > 6 ? ", \u2026" : "") : "");
  const table = element("table", {}, element("tr", {}, ...["pattern", "first alone", "second alone"].map((t) => element("th", {}, t))));
  for (const [pattern, [a, b]] of patterns) {
    const name = element("td", {}, swatch(pattern.colour, pattern.signature + ", " + pattern.operators.slice(0, 4).join(" ")));
    table.append(element("tr", {}, name, element("td", {}, words(a)), element("td", {}, words(b))));
  }
  return [head, element("details", {}, element("summary", {}, "by pattern"), element("div", { class: "scroll" }, table))];
}
