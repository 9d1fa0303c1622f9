"use strict";
// Draws the figures of charts.py by Plotly, which lies in the page too (plotly-basic.min.js, MIT licence).
const LAYOUT = {
  autosize: true, height: 340, margin: { l: 50, r: 14, t: 28, b: 40 }, font: { family: "system-ui, sans-serif", size: 11 },
  legend: { orientation: "h", yref: "container", y: 0, yanchor: "bottom" }, hovermode: "closest", paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
  modebar: { bgcolor: "rgba(0,0,0,0)", color: "#999", activecolor: "#0072B2" },
};
// The buttons are named one by one, because Plotly's defaults include one that uploads the chart to its makers.
const CONFIG = {
  responsive: true, displaylogo: false, plotlyServerURL: "",
  modeBarButtons: [["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]],
  toImageButtonOptions: { format: "svg", filename: "qdq-chart" },
};

function chart(host, { title, data, layout }) {
  const stage = element("div", { class: "drawn", role: "img", "aria-label": title });
  host.append(element("figure", { class: "chart" }, element("figcaption", {}, title), stage));
  Plotly.newPlot(stage, data, { ...LAYOUT, ...layout }, CONFIG);
}
