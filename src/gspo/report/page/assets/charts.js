// Charts: uPlot draws; this says what, in which colours, and shows values under the pointer.
"use strict";

const charts = new Map(); // place + title → {plot, spec, box}
const SYNC = uPlot.sync("steps");

// An exponential average that starts without bias; gaps stay gaps.
function smoothed(values, weight) {
  if (!weight) return values;
  let sum = 0, total = 0;
  return values.map((value) => {
    if (value == null) return null;
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}

// A canvas knows no color-mix in old browsers and no CSS variable in any: mix here.
function alpha(hex, opacity) {
  const n = parseInt(hex.slice(1), 16);
  return `rgba(${n >> 16}, ${(n >> 8) & 255}, ${n & 255}, ${opacity})`;
}

function tooltip(spec) {
  const tip = $("tip");
  return {
    hooks: {
      setCursor: (u) => {
        if (!u.root.matches(":hover")) return;
        const index = u.cursor.idx;
        if (index == null || u.cursor.left < 0) { tip.hidden = true; return; }
        const lines = spec.tips(index).filter((line) => line.value != null);
        tip.replaceChildren(el("b", {}, spec.tipTitle ? spec.tipTitle(index) : "step " + u.data[0][index]));
        for (const line of lines) {
          const mark = el("i");
          mark.style.background = line.color;
          tip.append(el("div", {}, mark, line.label, el("span", {}, line.text)));
        }
        tip.hidden = false;
        const box = u.over.getBoundingClientRect();
        const x = box.left + u.cursor.left, y = box.top + u.cursor.top;
        const flip = x + tip.offsetWidth + 24 > innerWidth;
        tip.style.left = (flip ? Math.max(4, x - tip.offsetWidth - 14) : x + 14) + "px";
        tip.style.top = Math.min(y + 12, innerHeight - tip.offsetHeight - 6) + "px";
      },
      ready: (u) => u.over.addEventListener("mouseleave", () => { tip.hidden = true; }),
    },
  };
}

function verticals(lines) {
  return {
    hooks: {
      draw: (u) => {
        const { ctx, bbox } = u;
        ctx.save();
        for (const line of lines) {
          const x = Math.round(u.valToPos(line.x, "x", true));
          if (x < bbox.left || x > bbox.left + bbox.width) continue;
          ctx.strokeStyle = line.color;
          ctx.lineWidth = 2 * devicePixelRatio;
          ctx.setLineDash([6 * devicePixelRatio, 4 * devicePixelRatio]);
          ctx.beginPath();
          ctx.moveTo(x, bbox.top);
          ctx.lineTo(x, bbox.top + bbox.height);
          ctx.stroke();
        }
        ctx.restore();
      },
    },
  };
}

/* A chart of `lines` over x. A line: {label, values, color, dash, width, raw (hidden measured twin), fill, points, quiet}.
   options: {title, note, y: {log, format, min, max}, bands: [[upper, lower, color]], bars, big, height, verticals, x: {format}, sync} */
function draw(place, x, lines, options) {
  lines = lines.filter((line) => line.values.some((value) => value != null));
  const key = place.id + "/" + options.title;
  if (!lines.length || !x.length) { drop(key); return; }
  const y = options.y || {};
  const format = y.format || ((value) => num(value));
  const data = [x, ...lines.map((line) => line.values)];
  const spec = {
    data,
    tipTitle: options.tipTitle,
    tips: (index) => lines.filter((line) => !line.quiet).map((line) => {
      const value = (line.raw || line.values)[index];
      return { label: line.label, color: line.color, value, text: line.text ? line.text(index) : format(value) };
    }),
  };
  const shape = JSON.stringify([lines.map((l) => [l.label, l.color, l.quiet]), options.note, options.verticals, options.bands, options.stamp]);
  const old = charts.get(key);
  if (old && old.shape === shape) {
    old.spec.tips = spec.tips;
    old.spec.tipTitle = spec.tipTitle;
    old.plot.setData(data, !old.zoomed);
    if (old.zoomed) old.plot.redraw();
    return;
  }
  drop(key, true);
  const first = lines.find((line) => !line.quiet) || lines[0];
  const seen = (first.raw || first.values).filter((value) => value != null);
  const figure = old ? old.figure : el("figure", { class: "chart" + (options.big ? " big" : "") });
  const box = el("div", { class: "plot" });
  figure.replaceChildren(el("figcaption", {}, el("b", {}, options.title), el("span", {}, options.note || "")), box);
  figure.setAttribute("role", "group");
  figure.setAttribute("aria-label", `${options.title}: ${first.label} from ${format(seen[0])} to ${format(seen[seen.length - 1])}`);
  if (!old) place.append(figure);
  const ink = cssColor("soft"), grid = cssColor("grid");
  const axis = { stroke: ink, grid: { stroke: grid, width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
  const bars = options.bars && uPlot.paths.bars({ size: [options.bars, 90] });
  const opts = {
    width: Math.max(box.clientWidth, 200),
    height: options.height || 200,
    legend: { live: false, show: lines.filter((line) => !line.quiet && !line.unlisted).length > 1 },
    cursor: { sync: options.sync === false ? undefined : { key: SYNC.key, setSeries: false }, focus: { prox: 16 }, points: { size: 6 }, drag: { x: options.sync !== false, y: false, setScale: true } },
    focus: { alpha: 0.35 },
    plugins: [tooltip(spec), ...(options.verticals ? [verticals(options.verticals)] : [])],
    scales: {
      x: { time: false, range: options.bars ? (u, low, high) => [low - options.pad, high + options.pad] : undefined },
      y: { distr: y.log ? 3 : 1, range: y.log ? undefined : (u, low, high) => range(y, low, high) },
    },
    axes: [
      { ...axis, size: 30, values: options.x && options.x.format ? (u, at) => at.map(options.x.format) : undefined, incrs: options.x ? options.x.incrs : [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 50000] },
      { ...axis, size: 58, grid: y.log ? { ...axis.grid, filter: (u, at) => at.map((v) => (isPower(v) ? v : null)) } : axis.grid, values: y.log ? (u, at) => at.map((v) => (isPower(v) ? v.toExponential(0) : "")) : (u, at) => at.map(format) },
    ],
    series: [
      { label: "step" },
      ...lines.map((line) => ({
        label: line.label, stroke: line.stroke || line.color, width: line.width ?? 2, dash: line.dash, fill: line.fill, paths: line.bars === false ? undefined : bars, spanGaps: line.spanGaps ?? !!line.points,
        points: { show: line.points ? true : seen.length < 3, size: 6, fill: line.color }, class: line.quiet ? "quiet" : undefined,
      })),
    ],
    bands: (options.bands || []).map(([upper, lower, fill]) => ({ series: [at(lines, upper), at(lines, lower)], fill })).filter((band) => band.series[0] > 0 && band.series[1] > 0),
    hooks: { setSelect: [(u) => { const chart = charts.get(key); if (chart && u.select.width > 4) chart.zoomed = true; }] },
  };
  const plot = new uPlot(opts, data, box);
  const entries = [...plot.root.querySelectorAll(".u-legend .u-series")];
  const skip = entries.length - lines.length; // an entry for x, or none
  entries.forEach((entry, index) => { if (index < skip || lines[index - skip].quiet || lines[index - skip].unlisted) entry.remove(); });
  const watcher = new ResizeObserver(() => { if (box.clientWidth && box.clientWidth !== plot.width) plot.setSize({ width: box.clientWidth, height: opts.height }); });
  watcher.observe(box);
  const chart = { plot, spec, shape, figure, watcher, zoomed: false };
  plot.over.addEventListener("dblclick", () => { chart.zoomed = false; });
  charts.set(key, chart);
}

const isPower = (v) => v != null && Math.abs(Math.log10(v) - Math.round(Math.log10(v))) < 1e-9;
const at = (lines, label) => lines.findIndex((line) => line.label === label) + 1;

function range(y, low, high) {
  if (low == null) return [0, 1];
  if (low === high) { const room = Math.abs(low) || 1; low -= room / 2; high += room / 2; }
  const room = 0.08 * (high - low);
  let bottom = low - room, top = high + room;
  if (low >= 0 && bottom < 0) bottom = 0;
  if (y.min != null) bottom = Math.min(y.min, low);
  if (y.max != null) top = Math.max(y.max, high);
  return [bottom, top];
}

function drop(key, keep) {
  const chart = charts.get(key);
  if (!chart) return;
  chart.watcher.disconnect();
  chart.plot.destroy();
  if (!keep) chart.figure.remove();
  charts.delete(key);
}

// Colours live in the canvas: a change of theme draws all anew.
function forgetCharts() {
  for (const key of [...charts.keys()]) drop(key);
}

// A curve as two lines: what was measured, faintly, and its average.
function curve(label, values, color, weight, more) {
  const hex = cssColor(color);
  if (!weight) return [{ label, values, color: hex, ...more }];
  return [
    { label: label + " (measured)", values, color: hex, stroke: alpha(hex, 0.28), width: 1, quiet: true },
    { label, values: smoothed(values, weight), raw: values, color: hex, ...more },
  ];
}
