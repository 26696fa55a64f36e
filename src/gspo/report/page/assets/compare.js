// The comparison's page: arms side by side, seeds as bands. Texts come from run directories and stay texts.
"use strict";

const boot = JSON.parse(document.querySelector("script.boot").textContent);
const COLORS = ["blue", "orange", "green", "red", "purple", "sky", "gray"];
const colorOf = (index) => cssColor(COLORS[index % COLORS.length]);
const dashOf = (index) => [undefined, [8, 4], [3, 3]][Math.floor(index / COLORS.length) % 3];
const several = boot.arms.some((arm) => arm.runs.length > 1);

function mark(index) {
  const dot = el("i", { class: "mark", "aria-hidden": "true" }, "●");
  dot.style.color = colorOf(index);
  return [dot, " "];
}

function showTable(id, corner, rows, mono) {
  const head = el("tr", {}, el("th", { scope: "col" }, corner), boot.arms.map((arm, i) => el("th", { scope: "col" }, mark(i), inert(arm.name))));
  const body = rows.map(([name, cells]) => el("tr", {}, el("th", { scope: "row", class: mono ? "mono" : "" }, inert(name)), cells.map((cell) => el("td", {}, inert(cell)))));
  $(id).replaceChildren(el("thead", {}, head), el("tbody", {}, body));
}

function showCurves(weight) {
  const place = $("curve-charts");
  for (const curve of boot.curves) {
    const lines = [], bands = [];
    const sparse = curve.x.length < 15;
    const format = curve.share ? share : (value) => num(value);
    curve.arms.forEach((arm, i) => {
      const color = colorOf(i), name = inertLine(boot.arms[i].name), n = boot.arms[i].runs.length;
      const ends = { low: smoothed(arm.low, weight), high: smoothed(arm.high, weight) };
      if (n > 1) {
        const hidden = { color, stroke: "transparent", width: 0, quiet: true, spanGaps: true };
        lines.push({ label: `${i} low`, values: ends.low, ...hidden }, { label: `${i} high`, values: ends.high, ...hidden });
        bands.push([`${i} high`, `${i} low`, alpha(color, 0.16)]);
        arm.runs.forEach((values, r) => lines.push({ label: `${i} run ${r}`, values: smoothed(values, weight), color, stroke: alpha(color, 0.3), width: 1, quiet: true, spanGaps: true }));
      }
      lines.push({
        label: name, values: smoothed(arm.mean, weight), raw: arm.mean, color, dash: dashOf(i), points: sparse, spanGaps: true,
        text: (at) => format(arm.mean[at]) + (n > 1 && arm.mean[at] != null ? ` (${format(arm.low[at])} – ${format(arm.high[at])})` : ""),
      });
    });
    draw(place, curve.x, lines, { title: inertLine(curve.metric), note: inertLine(curve.note), bands, big: curve.big, height: curve.big ? 280 : 220, y: { format }, stamp: weight });
  }
}

function showAll() {
  $("name").textContent = inertLine(boot.title);
  $("outcome-note").textContent = several ? "Mean over the runs of an arm ± half of its 95 % t interval." : "Every arm has one run: there is no interval over seeds.";
  showTable("outcome-table", "", boot.outcome, false);
  $("notes").replaceChildren(...boot.notes.map((note) => el("li", {}, inert(note))));
  $("curves-note").textContent = (several ? "Bands are 95 % t intervals over seeds; faint lines are single runs. " : "") + "Move the pointer over a curve to see its values; drag to zoom in, double-click to zoom out.";
  $("config-note").textContent = boot.config.length ? "All other keys are equal in all runs, except seed, names and keys that do not change training." : "The configs differ only in seed, names and keys that do not change training.";
  showTable("config-table", "key", boot.config, true);
  const rows = boot.arms.flatMap((arm, i) => arm.runs.map((run) => el("tr", {}, el("td", {}, mark(i), inert(arm.name)), el("td", {}, inert(run.name)), el("td", { class: "num" }, run.seed), el("td", { class: "num" }, run.steps), el("td", { class: "mono" }, inert(run.path)))));
  const names = [["arm"], ["run"], ["seed", "num"], ["steps", "num"], ["folder"]];
  $("runs-table").replaceChildren(el("thead", {}, el("tr", {}, names.map(([name, kind]) => el("th", { scope: "col", class: kind }, name)))), el("tbody", {}, rows));
  showCurves(+$("smooth").value);
}

function setTheme(dark) {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  $("theme").textContent = dark ? "Light" : "Dark";
  forgetCharts(); // colours live in the canvas
  showAll();
}

$("smooth").addEventListener("input", () => { $("smooth-value").textContent = (+$("smooth").value).toFixed(2); showCurves(+$("smooth").value); });
$("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme !== "dark"));
setTheme(matchMedia("(prefers-color-scheme: dark)").matches);
