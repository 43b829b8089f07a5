"use strict";
(() => {
  const { report, detail } = JSON.parse(document.getElementById("facts").textContent);
  const el = (id) => document.getElementById(id);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const figure = (x) => (x === null ? "none" : x === 0 ? "0" : x >= 0.1 ? x.toFixed(2) : x.toExponential(1));
  const depthName = (d) => (d === null ? "?" : d === "final" ? "final norm" : d === 0 ? "0 (embedding)" : `${d} (layer ${d - 1})`);
  // A log axis has no zero: what is exactly equal is drawn at the bottom.
  const FLOOR = 1e-9;
  const log = (x) => (x === null ? null : Math.log10(Math.max(x, FLOOR)));
  const COLOURS = ["#3b82f6", "#e07b00", "#10a37f", "#c2417c", "#8b6fe8", "#8a8f98"];
  const DASHES = ["solid", "dot", "dash", "dashdot", "longdash"];

  function layout(extra) {
    const css = getComputedStyle(document.documentElement);
    const text = css.getPropertyValue("--text").trim(), line = css.getPropertyValue("--line").trim();
    const base = { paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: text, size: 13 },
      margin: { l: 70, r: 20, t: 20, b: 60 }, legend: { orientation: "h", y: 1.12 }, hovermode: "closest" };
    const axis = { gridcolor: line, zerolinecolor: line, linecolor: line, automargin: true };
    return { ...base, ...extra, xaxis: { ...axis, ...extra.xaxis }, yaxis: { ...axis, ...extra.yaxis } };
  }
  const draw = (id, traces, shape) => Plotly.react(id, traces, layout(shape), { responsive: true, displayModeBar: false });
  const logAxis = (title) => ({ type: "log", title: { text: title }, exponentformat: "power" });

  // Which depth is which
  let cell = null;
  // What is within the noise is equal, however small: it all gets the strongest colour.
  const noises = [...report.chunks, ...report.layers].map((line) => line.noise).filter((x) => x > 0);
  const LEAST = Math.max(log(noises.length ? Math.min(...noises) : FLOOR) - 0.5, log(FLOOR));
  const heatRows = () => detail.heatmap.filter((row) => !el("heat-group").value || row.group === el("heat-group").value);
  function heat() {
    const rows = heatRows();
    const names = rows.map((row) => row.name), depths = detail.depths.map(depthName);
    const ring = { x: [], y: [] };
    rows.forEach((row) => { if (row.expected !== null && detail.depths.includes(row.expected)) {
      ring.x.push(depthName(row.expected)); ring.y.push(row.name); } });
    const shown = rows.map((row) => row.errors.map((e) => `error ${figure(e)}`));
    el("heat-chart").style.height = `${Math.max(18, 8 + 1.8 * rows.length)}rem`;
    const shapes = cell ? [{ type: "rect", x0: cell.x - 0.5, x1: cell.x + 0.5, y0: cell.y - 0.5, y1: cell.y + 0.5,
      line: { width: 4, color: "#ff2d95" } }] : [];
    draw("heat-chart", [
      { type: "heatmap", x: depths, y: names, z: rows.map((row) => row.errors.map(log)), text: shown, xgap: 1, ygap: 1,
        colorscale: dark.matches ? [[0, "#ffe082"], [0.5, "#7a5cc7"], [1, "#1c2230"]] : [[0, "#2b0a57"], [0.5, "#b05cc4"], [1, "#f1eef6"]],
        zmin: LEAST, zmax: 0.2, hovertemplate: "%{y}<br>depth %{x}<br>%{text}<extra></extra>",
        colorbar: { title: { text: "error, log10" } } },
      { type: "scatter", mode: "markers", x: ring.x, y: ring.y, hoverinfo: "skip", showlegend: false,
        marker: { symbol: "circle-open", size: 18, line: { width: 3 }, color: dark.matches ? "#56d364" : "#1a7f37" } },
    ], { shapes, xaxis: { title: { text: "depth of the model" }, type: "category" },
      yaxis: { autorange: "reversed", type: "category" }, margin: { l: 130, r: 20, t: 20, b: 80 } });
  }
  function choose(x, y) {
    const rows = heatRows();
    cell = { x: Math.min(Math.max(x, 0), detail.depths.length - 1), y: Math.min(Math.max(y, 0), rows.length - 1) };
    const row = rows[cell.y], known = row.errors.filter((e) => e !== null);
    const error = row.errors[cell.x], best = error !== null && error === Math.min(...known);
    const want = row.expected === detail.depths[cell.x] ? "; the depth it should be" : "";
    el("heat-cell").textContent = `${row.name} against depth ${depthName(detail.depths[cell.x])}: error ${figure(error)}` +
      `${best ? ", the best of its row" : ""}${want}.`;
    heat();
  }
  function heatEvents() {
    el("heat-group").addEventListener("change", () => { cell = null; heat(); });
    el("heat-chart").on("plotly_click", (event) => {
      const point = event.points[0];
      choose(detail.depths.map(depthName).indexOf(String(point.x)), heatRows().findIndex((row) => row.name === point.y));
    });
    el("heat-chart").addEventListener("keydown", (event) => {
      const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
      if (!step) return;
      event.preventDefault();
      if (cell) choose(cell.x + step[0], cell.y + step[1]); else choose(0, 0);
    });
  }

  // Error by depth
  function growth() {
    const lines = report.layers, x = lines.map((line) => depthName(line.depth));
    const phases = [...new Set(lines.flatMap((line) => line.phases.map((p) => p.phase)))];
    const traces = phases.map((phase, n) => ({ type: "scatter", mode: "lines+markers", name: phase, x,
      line: { color: COLOURS[n % 6], dash: DASHES[n % 5] },
      y: lines.map((line) => { const p = line.phases.find((q) => q.phase === phase); return p && p.error !== null ? Math.max(p.error, FLOOR) : null; }) }));
    traces.push({ type: "scatter", mode: "lines", name: "expected noise", x, y: lines.map((line) => line.noise),
      line: { color: "#8a8f98", width: 4 }, opacity: 0.5 });
    draw("growth-chart", traces, { xaxis: { title: { text: "depth" }, type: "category" }, yaxis: logAxis("median row error") });
  }

  // Error by position and phase
  const picked = (name) => (item) => ["chunk", "phase"].every((key) => {
    const value = el(`${name}-${key}`).value; return !value || String(item[key]) === value; });
  function fill(name, items) {
    ["chunk", "phase"].forEach((key) => [...new Set(items.map((item) => item[key]))].forEach((value) =>
      el(`${name}-${key}`).add(new Option(value, value))));
  }
  function positions() {
    const bins = detail.positions.filter(picked("position"));
    const groups = [...new Set(bins.map((bin) => `chunk ${bin.chunk}, ${bin.phase}`))];
    const phases = [...new Set(detail.positions.map((bin) => bin.phase))];
    draw("position-chart", groups.map((name) => {
      const mine = bins.filter((bin) => `chunk ${bin.chunk}, ${bin.phase}` === name), n = phases.indexOf(mine[0].phase);
      return { type: "scatter", mode: "lines+markers", name, x: mine.map((b) => b.position), y: mine.map((b) => Math.max(b.error, FLOOR)),
        text: mine.map((b) => `${b.rows} rows, worst ${figure(b.worst)}`), marker: { symbol: n, size: 7 },
        line: { color: COLOURS[mine[0].chunk % 6], dash: DASHES[n % 5] },
        hovertemplate: `${name}<br>position %{x}<br>error %{y:.2e}<br>%{text}<extra></extra>` };
    }), { xaxis: { title: { text: "position in the request" } }, yaxis: logAxis("median row error") });
    const table = document.createElement("table");
    table.createCaption().textContent = "Median and largest row error by position";
    const cells = (row, values, tag) => values.forEach((v) => { const c = document.createElement(tag); c.textContent = v; row.append(c); });
    cells(table.createTHead().insertRow(), ["chunk", "phase", "from position", "rows", "error", "worst"], "th");
    const body = table.createTBody();
    bins.forEach((b) => cells(body.insertRow(), [b.chunk, b.phase, b.position, b.rows, figure(b.error), figure(b.worst)], "td"));
    el("position-table").replaceChildren(table);
  }

  // Tables
  function worst() {
    const rows = [...el("worst-table").tBodies[0].rows], shown = detail.worst.map(picked("worst"));
    rows.forEach((row, n) => { row.hidden = !shown[n]; });
    el("worst-count").textContent = `${shown.filter(Boolean).length} of ${rows.length} rows shown`;
  }
  function origins() {
    const only = el("origin-differs").checked;
    [...el("origin-table").tBodies[0].rows].forEach((row, n) => { row.hidden = only && !detail.origins[n].differs; });
  }

  async function unpack() {
    const packed = Uint8Array.from(atob(el("plotly").textContent), (c) => c.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
  }
  function drawAll() {
    if (el("heat-chart")) heat();
    if (el("growth-chart")) growth();
    if (el("position-chart")) positions();
  }
  async function start() {
    if (el("worst-table")) {
      fill("worst", detail.worst);
      ["worst-chunk", "worst-phase"].forEach((id) => el(id).addEventListener("change", worst));
      worst();
    }
    el("origin-differs").addEventListener("change", origins);
    await unpack();
    if (el("position-chart")) {
      fill("position", detail.positions);
      ["position-chunk", "position-phase"].forEach((id) => el(id).addEventListener("change", positions));
    }
    drawAll();
    if (el("heat-chart")) heatEvents();
    dark.addEventListener("change", drawAll);
    document.body.dataset.ready = "yes";
  }
  start().catch((error) => {
    document.querySelectorAll(".chart").forEach((chart) => { chart.textContent = `The chart could not be drawn: ${error}`; });
    document.body.dataset.ready = "failed";
  });
})();
