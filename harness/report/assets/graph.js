"use strict";
// Draws a scene (see picture.py) on a canvas: wheel or pinch zooms, dragging pans, a click selects a region.
// Names from the model are shown as text, never as markup.

function element(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "onclick") made.addEventListener("click", value);
    else if (value !== null && value !== undefined) made.setAttribute(name, value);
  }
  for (const child of children) made.append(child);
  return made;
}

const PRECISION_COLOURS = { int8: "#0072B2", fp8: "#D55E00" };
const ONLY_FIRST = "#D55E00", ONLY_SECOND = "#0072B2", IN_BOTH = "#444444";

function graphView(host, scene, onSelect) {
  const canvas = element("canvas", { class: "graph", tabindex: "0", role: "img", "aria-label": "graph of the model" });
  const tip = element("div", { class: "tip", hidden: "" });
  const zoomBy = (factor) => () => { zoom(canvas.clientWidth / 2, canvas.clientHeight / 2, factor); };
  const tools = element("div", { class: "tools" },
    element("button", { type: "button", title: "zoom in", onclick: zoomBy(1.5) }, "+"),
    element("button", { type: "button", title: "zoom out", onclick: zoomBy(1 / 1.5) }, "\u2212"),
    element("button", { type: "button", title: "whole graph", onclick: () => fit() }, "fit"));
  host.replaceChildren(canvas, tools, tip);
  const pen = canvas.getContext("2d");
  const [width, height] = scene.size, high = scene.node_height;
  const view = { scale: 1, x: 0, y: 0 };
  let marks = new Map(), selected = -1, pending = false, touched = false;

  const headOf = (node, slot) => [node[0] + node[2] * (slot + 1) / (Math.max(1, node[5]) + 1), node[1]];
  const tailOf = (node) => [node[0] + node[2] / 2, node[1] + high];

  function draw() {
    pending = false;
    const ratio = window.devicePixelRatio || 1;
    const wide = canvas.clientWidth, tall = canvas.clientHeight;
    if (canvas.width !== Math.round(wide * ratio) || canvas.height !== Math.round(tall * ratio)) {
      canvas.width = Math.round(wide * ratio);
      canvas.height = Math.round(tall * ratio);
    }
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, wide, tall);
    pen.setTransform(ratio * view.scale, 0, 0, ratio * view.scale, ratio * view.x, ratio * view.y);
    const box = [-view.x / view.scale, -view.y / view.scale, (wide - view.x) / view.scale, (tall - view.y) / view.scale];
    const seen = (x, y, w, h) => x < box[2] && y < box[3] && x + w > box[0] && y + h > box[1];
    drawRegions(seen);
    drawEdges(seen);
    drawNodes(seen);
    drawMarks(seen);
  }

  function drawRegions(seen) {
    const chosen = selected < 0 ? -1 : scene.regions[selected][4];
    scene.regions.forEach((region, index) => {
      const [x, y, w, h, pattern] = region;
      if (!seen(x, y, w, h)) return;
      pen.globalAlpha = chosen < 0 || chosen === pattern || !region[6] ? 1 : 0.3;
      pen.fillStyle = region[6] ? scene.patterns[pattern].colour : "#F4F4F2";
      pen.fillRect(x, y, w, h);
      pen.globalAlpha = 1;
      pen.lineWidth = (index === selected ? 3 : chosen === pattern ? 2 : 1) / Math.min(1, Math.max(view.scale, 0.12));
      pen.strokeStyle = chosen === pattern ? "#000000" : "#8A8A86";
      if (chosen === pattern || view.scale > 0.12) pen.strokeRect(x, y, w, h);
      if (view.scale > 0.5) {
        pen.fillStyle = "#333333";
        pen.font = "10px sans-serif";
        pen.fillText(clip(index + " \u00b7 " + scene.patterns[pattern].signature, w - 8), x + 4, y + 11);
      }
    });
  }

  const clip = (text, room) => {
    const most = Math.floor(room / 5.6);
    return text.length <= most ? text : text.slice(0, Math.max(1, most - 1)) + "\u2026";
  };

  function curve(from, to) {
    const bend = Math.max(10, Math.abs(to[1] - from[1]) / 2);
    pen.moveTo(from[0], from[1]);
    pen.bezierCurveTo(from[0], from[1] + bend, to[0], to[1] - bend, to[0], to[1]);
  }

  function drawEdges(seen) {
    const coloured = [];
    pen.beginPath();
    for (const [source, target, slot] of scene.edges) {
      const from = tailOf(scene.nodes[source]), to = headOf(scene.nodes[target], slot);
      const left = Math.min(from[0], to[0]), top = Math.min(from[1], to[1]) - 20;
      if (!seen(left, top, Math.abs(from[0] - to[0]) + 1, Math.abs(from[1] - to[1]) + 40)) continue;
      const colour = marks.get(target + ":" + slot);
      if (colour) coloured.push([from, to, colour]);
      else curve(from, to);
    }
    pen.lineWidth = Math.max(1, 0.5 / view.scale);
    pen.strokeStyle = "rgba(60,60,60,0.45)";
    pen.stroke();
    pen.lineWidth = Math.max(2.2, 1.2 / view.scale);
    for (const [from, to, colour] of coloured) {
      pen.strokeStyle = colour;
      pen.beginPath();
      curve(from, to);
      pen.stroke();
    }
  }

  function drawNodes(seen) {
    if (view.scale < 0.1) return;
    pen.font = "11px sans-serif";
    pen.textAlign = "center";
    for (const [x, y, w, operator] of scene.nodes) {
      if (!seen(x, y, w, high)) continue;
      pen.fillStyle = "rgba(255,255,255,0.82)";
      pen.fillRect(x, y, w, high);
      if (view.scale < 0.3) continue;
      pen.strokeStyle = "#555555";
      pen.lineWidth = 0.7;
      pen.strokeRect(x, y, w, high);
      pen.fillStyle = "#111111";
      pen.fillText(scene.operators[operator], x + w / 2, y + 14);
    }
    pen.textAlign = "start";
  }

  function drawMarks(seen) {
    const size = Math.max(6, 3 / view.scale);
    for (const [key, colour] of marks) {
      const [index, slot] = key.split(":").map(Number);
      const node = scene.nodes[index];
      const [x, y] = slot < 0 ? tailOf(node) : headOf(node, slot);
      if (!seen(x - size, y - size, 2 * size, 2 * size)) continue;
      pen.fillStyle = colour;
      pen.fillRect(x - size / 2, y - size / 2, size, size);
    }
  }

  const redraw = () => { if (!pending) { pending = true; requestAnimationFrame(draw); } };

  function zoom(x, y, factor) {
    touched = true;
    const scale = Math.min(4, Math.max(0.01, view.scale * factor));
    view.x = x - (x - view.x) * scale / view.scale;
    view.y = y - (y - view.y) * scale / view.scale;
    view.scale = scale;
    redraw();
  }

  function frame(x, y, w, h, most) {
    view.scale = Math.min(most, (canvas.clientWidth - 20) / w, (canvas.clientHeight - 20) / h);
    view.x = (canvas.clientWidth - w * view.scale) / 2 - x * view.scale;
    view.y = (canvas.clientHeight - h * view.scale) / 2 - y * view.scale;
    redraw();
  }
  const fit = () => { touched = false; frame(0, 0, width, height, 1.5); };

  const place = (event) => {
    const box = canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  function under(x, y) {
    const px = (x - view.x) / view.scale, py = (y - view.y) / view.scale;
    let region = -1;
    scene.regions.forEach(([left, top, w, h], index) => {
      if (px >= left && px <= left + w && py >= top && py <= top + h) region = index;
    });
    const inside = ([left, top, w]) => px >= left && px <= left + w && py >= top && py <= top + high;
    return [region, region < 0 ? -1 : scene.nodes.findIndex(inside)];
  }

  function select(index) {
    selected = index;
    redraw();
    if (onSelect) onSelect(index);
  }

  const pointers = new Map();
  let moved = 0;
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    pointers.set(event.pointerId, place(event));
    moved = 0;
  });
  canvas.addEventListener("pointermove", (event) => {
    const now = place(event), before = pointers.get(event.pointerId);
    if (!before) return hover(now);
    tip.hidden = true;
    const others = [...pointers].filter(([id]) => id !== event.pointerId).map(([, at]) => at);
    if (others.length) {
      const span = (at) => Math.hypot(at[0] - others[0][0], at[1] - others[0][1]) || 1;
      zoom(others[0][0], others[0][1], span(now) / span(before));
    } else {
      touched = true;
      view.x += now[0] - before[0];
      view.y += now[1] - before[1];
      redraw();
    }
    moved += Math.hypot(now[0] - before[0], now[1] - before[1]);
    pointers.set(event.pointerId, now);
  });
  canvas.addEventListener("pointerup", (event) => {
    if (pointers.delete(event.pointerId) && moved < 5) select(under(...place(event))[0]);
  });
  canvas.addEventListener("pointercancel", (event) => pointers.delete(event.pointerId));
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    zoom(...place(event), Math.exp(-event.deltaY * 0.0015));
  }, { passive: false });
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: [60, 0], ArrowRight: [-60, 0], ArrowUp: [0, 60], ArrowDown: [0, -60] }[event.key];
    if (step) { touched = true; view.x += step[0]; view.y += step[1]; redraw(); }
    else if (event.key === "+") zoomBy(1.3)();
    else if (event.key === "-") zoomBy(1 / 1.3)();
    else if (event.key === "0") fit();
    else if (event.key === "Escape") select(-1);
    else return;
    event.preventDefault();
  });

  function hover([x, y]) {
    const [region, node] = under(x, y);
    if (region < 0) { tip.hidden = true; return; }
    const facts = scene.regions[region];
    tip.textContent = (node < 0 ? "" : scene.operators[scene.nodes[node][3]] + "  " + scene.nodes[node][6] + "\n") +
      "region " + region + ", pattern " + scene.patterns[facts[4]].signature;
    tip.hidden = false;
    tip.style.left = Math.min(x + 14, canvas.clientWidth - 240) + "px";
    tip.style.top = (y + 14) + "px";
  }

  new ResizeObserver(() => (touched ? redraw() : fit())).observe(canvas);
  fit();
  return {
    fit, select,
    selected: () => selected,
    // One row: colours by precision. Two rows: the pairs that only one of them has.
    show(first, second) {
      const key = ([node, slot]) => node + ":" + slot;
      marks = new Map((first || []).map((mark) => [key(mark), PRECISION_COLOURS[mark[2]] || "#009E73"]));
      if (second) {
        const others = new Map(second.map((mark) => [key(mark), mark[2]]));
        const own = new Map(first.map((mark) => [key(mark), mark[2]]));
        marks = new Map();
        for (const [at, precision] of own) marks.set(at, others.get(at) === precision ? IN_BOTH : ONLY_FIRST);
        for (const at of others.keys()) if (!own.has(at)) marks.set(at, ONLY_SECOND);
      }
      redraw();
    },
  };
}

// Facts of a region, next to the picture: `marks` of the row that is shown, if there is one, and the measured gain of
// its patterns and points, if it was measured.
function regionFacts(scene, index, marks, effects) {
  if (index < 0) return [element("p", { class: "quiet" }, "Click a region: its pattern and its insertion points.")];
  const region = scene.regions[index], pattern = scene.patterns[region[4]];
  const have = new Map((marks || []).map(([node, slot, precision]) => [node + ":" + slot, precision]));
  const list = (names) => names.length ? names.join(", ") : "none";
  const facts = [
    element("h4", {}, "Region " + index + " (" + (region[6] ? "LEAF" : "COMPOSITE") + ")"),
    element("p", {}, element("span", { class: "chip" }), " pattern ", element("code", {}, pattern.signature), ", in " +
      pattern.regions + (pattern.regions === 1 ? " region" : " regions")),
    element("p", {}, pattern.operators.join(", ")),
    element("p", { class: "quiet" }, "inputs: " + list(region[7])),
    element("p", { class: "quiet" }, "outputs: " + list(region[8])),
    element("h4", {}, pattern.points.length ? "Insertion points of the pattern" : "No insertion points of its own"),
  ];
  facts[1].firstChild.style.background = pattern.colour;
  const alike = ([name]) => name.startsWith(pattern.signature) || pattern.signature.startsWith(name);
  const worth = effects ? Object.entries(effects.patterns).filter(alike).map(([, text]) => text) : [];
  if (worth.length) facts.splice(3, 0, element("p", {}, "Effect: " + worth.join("; ")));
  else if (marks && marks.length) facts.splice(3, 0, element("p", { class: "quiet" }, "Effect: not measured for this row; see qdq explain."));
  if (!pattern.points.length) return facts;
  const table = element("table", { class: "points" },
    element("tr", {}, ...["point", "role", "edges", ...(marks ? ["quantized"] : []), ...(effects ? ["effect"] : [])].map((t) => element("th", {}, t))));
  for (const point of pattern.points) {
    const hit = point.at.map(([node, slot]) => have.get(node + ":" + slot)).filter(Boolean);
    const said = hit.length ? hit.length + " (" + [...new Set(hit)].join(", ") + ")" : "none";
    const cells = [point.name.slice(point.name.indexOf("/") + 1), point.role, String(point.at.length)];
    table.append(element("tr", {}, ...[...cells, ...(marks ? [said] : []), ...(effects ? [effects.points[point.name] || ""] : [])].map((t) => element("td", {}, t))));
  }
  return [...facts, table];
}

// The patterns as a legend; a click selects the pattern's first region.
function patternLegend(scene, view) {
  const order = scene.patterns.map((pattern, index) => [pattern, index]).filter(([p]) => p.type === "LEAF");
  order.sort(([a], [b]) => b.regions * b.operators.length - a.regions * a.operators.length);
  return order.map(([pattern, index]) => {
    const chip = element("span", { class: "chip" });
    chip.style.background = pattern.colour;
    const go = () => { view.select(scene.regions.findIndex((r) => r[4] === index)); };
    return element("button", { type: "button", class: "pattern-key", onclick: go }, chip,
      element("span", {}, pattern.regions + " \u00d7 " + pattern.operators.join(", ")));
  });
}
