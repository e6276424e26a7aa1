"use strict";
// Draws the figures of the page, in the colours of the light or the dark theme.
const figures = JSON.parse(document.getElementById("figures").textContent);
const BUTTONS = [["toImage"], ["zoom2d", "pan2d"], ["zoomIn2d", "zoomOut2d", "resetScale2d"]];
const root = document.documentElement;

function color(name) {
  return getComputedStyle(root).getPropertyValue(name).trim();
}

// Separates the pieces of bars by the colour behind them.
function edged(trace) {
  const line = (trace.marker || {}).line;
  return line ? { ...trace, marker: { ...trace.marker, line: { ...line, color: color("--card") } } } : trace;
}

function themed(layout) {
  const axis = { gridcolor: color("--line"), linecolor: color("--line"), tickcolor: color("--line") };
  const found = {
    ...layout,
    uirevision: "kept", // zoom and hidden traces outlive a change of theme
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: color("--text"), family: "system-ui, 'Segoe UI', Roboto, sans-serif", size: 12 },
    hoverlabel: { bgcolor: color("--card"), bordercolor: color("--line"), font: { color: color("--text") }, align: "left" },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: color("--faint"), activecolor: color("--text") },
  };
  for (const name of ["xaxis", "yaxis"]) found[name] = { ...layout[name], ...axis };
  return found;
}

function draw() {
  for (const [id, figure] of Object.entries(figures)) {
    const config = { responsive: true, displaylogo: false, scrollZoom: id.startsWith("timeline"), modeBarButtons: BUTTONS };
    const div = document.getElementById(id);
    Plotly.react(div, figure.data.map(edged), themed(figure.layout), config);
  }
}

function show(theme) {
  root.dataset.theme = theme;
  draw();
}

const prefersDark = window.matchMedia("(prefers-color-scheme: dark)");
prefersDark.addEventListener("change", (event) => show(event.matches ? "dark" : "light"));
document.getElementById("theme").addEventListener("click", () => show(root.dataset.theme === "dark" ? "light" : "dark"));
show(prefersDark.matches ? "dark" : "light");
