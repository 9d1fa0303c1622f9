// Small charts in SVG: axes, a tooltip on every mark, and a legend that switches series on and off.
const SVG = "http://www.w3.org/2000/svg";
const DASHES = ["", "7 3", "7 3 2 3", "2 3"];
// How the n-th series looks: where the colours are used up they come again with another dash and a dark rim.
const lookOf = (index, colours) => {
  const turn = Math.floor(index / colours.length);
  return { colour: colours[index % colours.length], dash: DASHES[(index + turn) % DASHES.length], rim: turn ? "#000" : "#fff" };
};

function shape(tag, attributes, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function ticks(low, high, count) {
  const raw = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((f) => f * power).find((s) => s >= raw);
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k += 1) found.push(k * step);
  return found;
}

const short = (value) => Math.abs(value) >= 1000 ? value.toFixed(0) : String(Number(value.toPrecision(4)));

// A plane with axes; `left` is the room for labels. Gives coordinates and the group to draw into.
function plane(host, { title, x, y, height = 260, left = 52, labels = null }) {
  const width = 520, right = 12, top = 10, bottom = 38;
  const figure = element("figure", { class: "chart" }, element("figcaption", {}, title));
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title });
  const tip = element("div", { class: "tip", hidden: "" });
  const stage = element("div", { class: "plot" }, svg, tip);
  figure.append(stage);
  host.append(figure);
  const px = (value) => left + (value - x.low) / (x.high - x.low || 1) * (width - left - right);
  const py = (value) => height - bottom - (value - y.low) / (y.high - y.low || 1) * (height - top - bottom);
  for (const tick of ticks(x.low, x.high, 6)) {
    svg.append(shape("line", { x1: px(tick), x2: px(tick), y1: top, y2: height - bottom, class: "grid" }),
      shape("text", { x: px(tick), y: height - bottom + 14, "text-anchor": "middle" }, short(tick)));
  }
  (labels || ticks(y.low, y.high, 5).map((tick) => [tick, short(tick)])).forEach(([tick, text]) => {
    const most = Math.floor(left / 6.8), shown = text.length > most ? text.slice(0, most - 1) + "\u2026" : text;
    const label = shape("text", { x: left - 6, y: py(tick) + 4, "text-anchor": "end" }, shown);
    label.append(shape("title", {}, text));
    svg.append(shape("line", { x1: left, x2: width - right, y1: py(tick), y2: py(tick), class: "grid" }), label);
  });
  svg.append(shape("text", { x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle" }, x.name));
  if (!labels) svg.append(shape("text", { transform: `translate(12 ${height / 2}) rotate(-90)`, "text-anchor": "middle" }, y.name));
  const say = (mark, text) => {
    mark.addEventListener("pointermove", (event) => {
      const box = stage.getBoundingClientRect();
      tip.textContent = text;
      tip.hidden = false;
      tip.style.left = Math.min(event.clientX - box.left + 12, box.width - 190) + "px";
      tip.style.top = (event.clientY - box.top + 12) + "px";
    });
    mark.addEventListener("pointerleave", () => { tip.hidden = true; });
    return mark;
  };
  return { svg, px, py, say, figure };
}

function legendOf(figure, entries) {
  const legend = element("div", { class: "keys" });
  for (const [name, { colour, rim }, group] of entries) {
    const chip = element("span", { class: "chip" });
    chip.style.background = colour;
    if (rim === "#000") chip.style.border = "2px solid #000";
    const key = element("button", { type: "button", "aria-pressed": "true" }, chip, " " + name);
    key.addEventListener("click", () => {
      const hidden = group.style.display !== "none";
      group.style.display = hidden ? "none" : "";
      key.setAttribute("aria-pressed", String(!hidden));
    });
    legend.append(key);
  }
  figure.append(legend);
}

const anytimeChart = (host, charts, over, colours) => stepsChart(host, {
  title: "Speedup of the incumbent over " + over, over, name: "speedup over float", level: 1, digits: 2,
  series: charts.anytime[over], marks: over === "evaluations" ? charts.confirmed : [],
}, colours);

const volumeChart = (host, charts, colours) => stepsChart(host, {
  title: "Hypervolume of latency and accuracy", over: "evaluations", name: "hypervolume", level: 0, digits: 3,
  series: charts.volume, marks: [],
}, colours);

function stepsChart(host, { title, over, name, level, digits, series, marks }, colours) {
  if (!series.length) return;
  const all = [level, ...series.flatMap((s) => [...s.low, ...s.high]), ...marks.flatMap((m) => [m.low, m.high])];
  const low = Math.min(...all), high = Math.max(...all), room = 0.05 * (high - low || 1);
  const last = Math.max(...series.flatMap((s) => s.x), ...marks.map((m) => m.x));
  const first = Math.min(...series.flatMap((s) => s.x));
  const { svg, px, py, say, figure } = plane(host, {
    title,
    x: { name: over, low: over === "evaluations" ? Math.min(1, first) : 0, high: last * 1.02 },
    y: { name, low: low - room, high: high + room },
  });
  svg.append(shape("line", { x1: px(first), x2: px(last), y1: py(level), y2: py(level), stroke: "#888" }));
  legendOf(figure, series.map((one, index) => {
    const look = lookOf(index, colours), { colour, dash, rim } = look, group = shape("g", {});
    const xs = [...one.x, last];
    const at = (values, i) => py(values[Math.min(i, values.length - 1)]);
    const steps = (values) => xs.map((x, i) => (i ? `H${px(x)}V${at(values, i)}` : `M${px(x)} ${at(values, 0)}`)).join("");
    const back = xs.map((x, i) => [px(x), at(one.low, i), at(one.low, Math.max(0, i - 1))]).reverse();
    const band = steps(one.high) + back.map(([x, here, before]) => `L${x} ${here}L${x} ${before}`).join("") + "Z";
    group.append(shape("path", { d: band, fill: colour, opacity: 0.12, stroke: "none" }),
      shape("path", { d: steps(one.value), fill: "none", stroke: colour, "stroke-width": 2, "stroke-dasharray": dash }));
    one.x.forEach((x, i) => group.append(say(shape("circle", { cx: px(x), cy: py(one.value[i]), r: 4, fill: colour, opacity: 0.0 }),
      `${one.name}, ${short(x)} ${over}: ${one.value[i].toFixed(digits)} [${one.low[i].toFixed(digits)}, ${one.high[i].toFixed(digits)}]`)));
    for (const mark of marks.filter((m) => m.name === one.name)) {
      const x = px(mark.x) + (index - (series.length - 1) / 2) * 5;
      group.append(shape("line", { x1: x, x2: x, y1: py(mark.low), y2: py(mark.high), stroke: colour, "stroke-width": 1.5 }),
        say(shape("circle", { cx: x, cy: py(mark.speedup), r: 4, fill: colour, stroke: rim }),
          `${one.name}, confirmed at ${mark.x}: ${mark.speedup.toFixed(2)} [${mark.low.toFixed(2)}, ${mark.high.toFixed(2)}]`));
    }
    svg.append(group);
    return [one.name, look, group];
  }));
}

function latencyChart(host, charts, colours) {
  const rows = charts.latency;
  if (!rows.length) return;
  const values = rows.flatMap((row) => [...row.quantiles, ...row.builds]);
  const low = Math.min(...values), high = Math.max(...values), room = 0.04 * (high - low || 1);
  const { svg, px, py, say } = plane(host, {
    title: "Latency of the confirmation" + (charts.floor === null ? "" : "; grey: A/A floor " + (100 * charts.floor).toFixed(1) + " %"),
    x: { name: "ms; bar: middle half, line: 5 to 95 %, dots: builds", low: low - room, high: high + room },
    y: { low: rows.length - 0.4, high: -0.7 }, left: 170, height: 60 + 30 * rows.length,
    labels: rows.map((row, index) => [index, row.name]),
  });
  const base = rows[0].quantiles[2];
  if (charts.floor !== null) {
    const [from, to] = [px(base / (1 + charts.floor)), px(base * (1 + charts.floor))];
    svg.append(shape("rect", { x: from, y: 10, width: to - from, height: py(rows.length - 0.4) - 10, fill: "#bbb", opacity: 0.4 }));
  }
  rows.forEach((row, index) => {
    const [a, b, c, d, e] = row.quantiles.map(px), y = py(index);
    svg.append(shape("line", { x1: a, x2: e, y1: y, y2: y, stroke: colours[0] }),
      say(shape("rect", { x: b, y: y - 5, width: Math.max(1, d - b), height: 10, fill: colours[0] }),
        `${row.name}: median ${short(row.quantiles[2])} ms, middle half ${short(row.quantiles[1])} to ${short(row.quantiles[3])} ms`),
      shape("line", { x1: c, x2: c, y1: y - 5, y2: y + 5, stroke: "#fff", "stroke-width": 2 }));
    row.builds.forEach((value) => svg.append(say(shape("circle", { cx: px(value), cy: y - 9, r: 2.6, fill: colours[1] }),
      `${row.name}: a build at ${short(value)} ms`)));
  });
}

function paretoChart(host, charts, colours) {
  const found = charts.pareto;
  if (!found) return;
  const xs = [...found.rows.flatMap((r) => [r.low, r.high]), ...found.tried.map((t) => t[0])];
  const ys = [...found.rows.map((r) => r.y), ...found.tried.map((t) => t[1])];
  const room = (values) => 0.06 * (Math.max(...values) - Math.min(...values) || 1);
  const range = (values) => ({ low: Math.min(...values) - room(values), high: Math.max(...values) + room(values) });
  const { svg, px, py, say, figure } = plane(host, {
    title: "Latency against " + found.metric + "; grey: scored in the searches",
    x: { name: "latency, ms", ...range(xs) }, y: { name: found.metric, ...range(ys) },
  });
  for (const [x, y] of found.tried) svg.append(shape("circle", { cx: px(x), cy: py(y), r: 2, fill: "#999", opacity: 0.6 }));
  const [fx, fy] = found.front;
  const steps = fx.map((x, i) => (i ? `H${px(x)}V${py(fy[i])}` : `M${px(x)} ${py(fy[i])}`)).join("");
  svg.append(shape("path", { d: steps, fill: "none", stroke: "#555" }));
  legendOf(figure, found.rows.map((row, index) => {
    const look = lookOf(index, colours), { colour, rim } = look;
    const group = shape("g", {}, shape("line", { x1: px(row.low), x2: px(row.high), y1: py(row.y), y2: py(row.y), stroke: colour }),
      say(shape("circle", { cx: px(row.x), cy: py(row.y), r: 5, fill: colour, stroke: rim, "stroke-width": 1.5 }),
        `${row.name}: ${short(row.x)} ms [${short(row.low)}, ${short(row.high)}], ${found.metric} ${row.y.toFixed(4)}`));
    svg.append(group);
    return [row.name, look, group];
  }));
}
