// The page: boot data in, sections out; the live page asks its server for what is new and draws the same again.
"use strict";

const state = { run: null, columns: new Map(), count: 0, steps: [], weight: 0.6 };

function takeMetrics(table) {
  table.rows.forEach((row, offset) => {
    table.names.forEach((name, index) => {
      if (!state.columns.has(name)) state.columns.set(name, []);
      state.columns.get(name)[state.count + offset] = row[index];
    });
  });
  state.count += table.rows.length;
  for (const values of state.columns.values()) while (values.length < state.count) values.push(null);
  for (const values of state.columns.values()) for (let i = 0; i < values.length; i++) if (values[i] === undefined) values[i] = null;
  state.steps = state.columns.get("step") || [];
}

const values = (name) => (state.columns.get(name) || new Array(state.count).fill(null)).map((v) => (typeof v === "number" ? v : null));
const has = (name) => (state.columns.get(name) || []).some((v) => typeof v === "number");

/* -- sections -- */

function showHeadline() {
  const run = state.run;
  $("name").textContent = inertLine(run.name);
  $("figures").replaceChildren(...run.figures.map((f) => el("div", { class: "figure" }, el("div", { class: "name" }, f.name), el("div", { class: "value" }, f.value), el("div", { class: "more" }, f.note))));
  const words = { good: ["good", "✓ yes"], note: ["note-worthy", "! look"], bad: ["bad", "✗ no"] };
  const said = { "Was anything clipped, and why?": { good: "✓ some", bad: "✗ most", note: "! none" }, "What next?": { good: "✓ fine", note: "→ try", bad: "→ change" }, "Was sampling wasted?": { good: "✓ no", note: "! much" }, "Is my ε sensible?": { good: "✓ yes", note: "! look", bad: "✗ no" } };
  $("cards").replaceChildren(...run.answers.map((a) => {
    const [kind, word] = words[a.verdict] || ["", ""];
    const go = () => { if (a.section === "samples") showSamples("farthest"); };
    return el("a", { class: "card " + kind, href: "#" + a.section, on: { click: go } },
      el("h3", {}, a.question, el("span", { class: "verdict" }, (said[a.question] || {})[a.verdict] || word)), el("p", {}, inertLine(a.text)), a.more ? el("p", { class: "more" }, inertLine(a.more)) : null);
  }));
  showAudit(run);
  const alarms = run.log.filter((line) => /\balarm at step\b|\bwarning\b/i.test(line));
  $("alarms").hidden = !alarms.length;
  $("alarms").replaceChildren(el("h3", {}, "Warnings of the run"), el("ul", {}, alarms.slice(-6).map((line) => el("li", {}, inertLine(line)))));
}

// A run of another trainer: what its config means, what is wrong with it, and what its files do not tell.
function showAudit(run) {
  const audit = run.audit, doctor = run.doctor || {}, list = (lines) => el("ul", {}, lines.map((line) => el("li", {}, inertLine(line))));
  $("audit").hidden = !audit;
  if (!audit) return;
  $("findings-title").textContent = "Findings";
  const findings = findingsOf(doctor);
  $("audit").replaceChildren(...[
    el("h3", {}, `Audit of a ${inertLine(audit.system)} run`, el("span", { class: "more" }, inertLine([audit.version && "version " + audit.version, audit.source].filter(Boolean).join(" · ")))),
    doctor.unreadable ? el("p", {}, inertLine(doctor.unreadable)) : null,
    doctor.objective ? el("div", { class: "formula" }, doctor.objective.formula.split(",   ").map((part) => el("div", {}, inertLine(part)))) : null,
    ...(findings.length ? findings : doctor.objective ? [el("p", {}, "✓ No warning about this config.")] : []),
    ...(audit.notes.length ? [el("h4", {}, "Notes"), list(audit.notes)] : []),
    ...(audit.unknown.length ? [el("h4", {}, "What cannot be known"), list(audit.unknown)] : []),
  ].filter(Boolean));
}

const findingsOf = (doctor) => [...(doctor.errors || []), ...(doctor.warnings || [])].map((f) => el("div", { class: "finding " + inertLine(f.severity) }, el("b", {}, inertLine(f.key)), ` (${inertLine(f.where)}): ${inertLine(f.message)}. `, el("b", {}, "Remedy: "), inertLine(f.remedy) + "."));

function showCurves() {
  const x = state.steps, w = state.weight, place = $("curve-charts");
  const percent = { format: share };
  const learning = [...curve("reward", values("reward/mean"), "blue", w)];
  const graded = state.run.graded, what = graded ? "reward" : "accuracy";
  const held = scoreOf("eval/", graded);
  if (held) {
    const red = cssColor("red");
    learning.push(
      { label: "low end", values: held.ends.map((e) => e[0]), color: red, stroke: "transparent", width: 0, quiet: true, points: false, spanGaps: true },
      { label: "high end", values: held.ends.map((e) => e[1]), color: red, stroke: "transparent", width: 0, quiet: true, points: false, spanGaps: true },
      { label: "held-out " + what, values: held.score, color: red, points: true, text: (i) => scoreText(held, i, graded) });
  }
  const parts = [...state.columns.keys()].filter((name) => name.startsWith("reward/part_"));
  // Supervised fine-tuning has no reward; its loss is a likelihood and shows what is learnt.
  if (!has("reward/mean")) draw(place, x, [...curve("training", values("loss/mean"), "blue", w), { label: "held-out", values: values("eval/loss"), color: cssColor("red"), points: true, spanGaps: true }], { title: "Loss", note: "negative log-likelihood per token of the data set's completions", big: true, height: 260, y: { min: 0 } });
  if (held || has("reward/mean")) draw(place, x, learning, { title: "Does it learn?", note: `reward of the samples; ${what} on held-out problems with its 95 % interval`, big: true, height: 260, y: held && within(values("reward/mean"), 0, 1) && (!graded || within(held.score, 0, 1)) ? { min: 0, max: 1.02 } : {}, bands: [["high end", "low end", alpha(cssColor("red"), 0.16)]] });
  if (state.run.sources.length) {
    const lines = state.run.sources.map((name, i) => {
      const own = scoreOf(`eval/${name}/`, graded);
      return { label: inertLine(name), values: own.score, color: cssColor(PALETTE[i % PALETTE.length]), points: true, text: (at) => scoreText(own, at, graded) };
    });
    draw(place, x, lines, { title: `Held-out ${what} by source`, note: "sources of the mixture", y: graded ? {} : { ...percent, min: 0, max: 1.02 } });
  }
  const single = (title, note, lines, y) => draw(place, x, lines, { title, note, y });
  draw(place, x, curve("entropy", values("policy/entropy"), "blue", w), { title: "Entropy", note: "nats per token; near 0 the policy no longer explores", y: { min: 0 }, height: 276 });
  if (parts.length > 1) single("Parts of the reward", "each function before weights", parts.flatMap((name, i) => curve(inertLine(name.slice(12)), values(name), PALETTE[i % PALETTE.length], w)));
  single(has("policy/kl_reference") ? "KL to the sampler and to the reference" : "KL to the sampler", "between the policy and the policy that sampled the batch, nats per token; estimates of single batches can be negative", [...curve("to the sampler", values("policy/kl_behavior"), "blue", w), ...curve("to the reference", values("policy/kl_reference"), "orange", w)]);
  single("Length", "tokens per completion", [...curve("mean", values("length/mean"), "blue", w), { label: "of clipped ones", values: smoothed(values("length/clipped_mean"), w), raw: values("length/clipped_mean"), color: cssColor("orange"), width: 1.5 }, { label: "longest", values: values("length/max"), color: cssColor("gray"), dash: [3, 4], width: 1.2 }], { min: 0 });
  single("Gradient norm", "before clipping", [...curve("mean of the updates", values("grad/norm"), "blue", w), { label: "largest", values: values("grad/norm_max"), color: cssColor("gray"), dash: [3, 4], width: 1.2 }], { min: 0 });
  single("Groups without a gradient", "share of groups whose rewards are all equal; completions that hit max_new_tokens", [...curve("equal rewards", values("reward/zero_variance_groups"), "blue", w), ...curve("truncated", values("length/truncated"), "orange", w)], { ...percent, min: 0 });
  single("Staleness", "age of a sample's oldest token, in weight versions", [...curve("mean", values("staleness/mean"), "blue", w), { label: "worst", values: values("staleness/max"), color: cssColor("orange"), dash: [3, 4] }], { min: 0 });
  if (has("curriculum/pass_rate")) single("Pass rates of the training prompts", "estimates of all prompts seen so far; solved: above 90 %, unsolved: below 10 %", [...curve("mean", values("curriculum/pass_rate"), "blue", w), ...curve("solved", values("curriculum/solved"), "green", w), ...curve("unsolved", values("curriculum/unsolved"), "orange", w)], { ...percent, min: 0 });
  if (has("critic/loss")) single("Critic", "explained variance of the returns", curve("explained variance", values("critic/explained_variance"), "blue", w));
  showAny();
}

const PALETTE = ["blue", "orange", "green", "red", "purple", "sky", "gray"];
const within = (list, low, high) => list.every((v) => v == null || (v >= low && v <= high));

// The held-out score and the ends of its interval, by step; `prefix` is "eval/", or that of a source of a mixture.
function scoreOf(prefix, graded) {
  const name = prefix + (graded ? "reward" : "accuracy");
  if (!has(name)) return null;
  const score = values(name), k = values(prefix + "k"), n = values(prefix + "problems"), ci = values(name + "_ci");
  const ends = score.map((p, i) => (p == null ? [null, null] : graded ? [p - (ci[i] || 0), p + (ci[i] || 0)] : interval(p, n[i], k[i], ci[i])));
  return { score, ends };
}

const scoreText = (held, i, graded) => (graded ? `${held.score[i].toFixed(3)} (${held.ends[i].map((v) => v.toFixed(3)).join(" … ")})` : `${share(held.score[i])} (${held.ends[i].map((v) => (100 * v).toFixed(1)).join("–")})`);

function interval(p, n, k, ci) {
  if (k !== 1 || !n) return [Math.max(0, p - (ci || 0)), Math.min(1, p + (ci || 0))];
  const z = 1.96, middle = (p + (z * z) / (2 * n)) / (1 + (z * z) / n); // Wilson, as the terminal's summary
  const half = (z / (1 + (z * z) / n)) * Math.sqrt((p * (1 - p)) / n + (z * z) / (4 * n * n));
  return [Math.max(0, Math.min(middle - half, p)), Math.min(1, Math.max(middle + half, p))];
}

function showAny() {
  const select = $("any-metric"), names = [...state.columns.keys()].filter((name) => name !== "step" && has(name)).sort();
  if (select.options.length !== names.length) {
    const now = select.value;
    select.replaceChildren(...names.map((name) => el("option", { value: name }, inertLine(name))));
    select.value = names.includes(now) ? now : names[0];
  }
  if ($("any").open && select.value) {
    for (const key of [...charts.keys()]) if (key.startsWith("any-chart/") && key !== "any-chart/" + select.value) drop(key);
    draw($("any-chart"), state.steps, curve(select.value, values(select.value), "blue", state.weight), { title: select.value });
  }
}

function showClipping() {
  const run = state.run, x = state.steps, place = $("clip-charts");
  const color = cssColor, low = values("clip/eps_low"), high = values("clip/eps_high");
  const clips = has("clip/eps_low"), whole = run.by_sequence;
  $("clipping-note").textContent = !clips
    ? "This objective does not clip the ratio; the distance that sequences move still shows how far the policy is from π_old."
    : whole
      ? "A sequence gives no gradient if its ratio s has left the range 1 − ε_low … 1 + ε_high in the direction of its advantage. Mini-batch 1 has ratio 1 by construction, so the curves show the later mini-batches."
      : "This objective clips single tokens; the shares are of sequences with at least one clipped token.";
  // Quantiles of the samples where they are kept, else those of the metrics.
  const byStep = new Map(run.clip.map((s) => [s.step, s]));
  const quantile = (index, fallback) => x.map((step, i) => { const s = byStep.get(step); return s && s.quantiles ? s.quantiles[index] : fallback ? values0(fallback)[i] : null; });
  const cache = new Map();
  function values0(name) { if (!cache.has(name)) cache.set(name, values(name)); return cache.get(name); }
  const blue = color("blue"), green = color("green"), noise = values("noise/log_s_p95_abs");
  const edge = (list, sign) => list.map((v) => (v == null ? null : Math.log1p(sign * v)));
  const bandLine = (label, list, more) => ({ label, values: list, color: blue, stroke: "transparent", width: 0, points: false, unlisted: true, ...more });
  const movement = [
    bandLine("95 %", quantile(5, "ratio/log_s_p95")), bandLine("75 %", quantile(4)),
    { label: "median", values: quantile(3, "ratio/log_s_p50"), color: blue, width: 2 },
    bandLine("25 %", quantile(2)), bandLine("5 %", quantile(1, "ratio/log_s_p05")),
  ];
  if (whole && clips) movement.unshift({ label: "1 + ε_high", values: edge(high, 1), color: green, dash: [7, 4], width: 2 }, { label: "1 − ε_low", values: edge(low, -1), color: green, dash: [2, 3], width: 2 });
  movement.push({ label: "noise", values: noise, color: color("red"), width: 1.2 }, { label: "− noise", values: noise.map((v) => (v == null ? null : -v)), color: color("red"), width: 1.2, quiet: true });
  draw(place, x, movement, { title: "How far do sequences move?", note: "log s per step: median, half (dark) and 90 % (light) of the sequences" + (whole && clips ? ", against the clip range and the noise floor" : ""), big: true, height: 270,
    bands: [["95 %", "75 %", alpha(blue, 0.16)], ["75 %", "25 %", alpha(blue, 0.34)], ["25 %", "5 %", alpha(blue, 0.16)], ["95 %", "5 %", has0(movement, "75 %") ? "transparent" : alpha(blue, 0.2)], ["noise", "− noise", alpha(color("red"), 0.3)]] });

  if (clips) {
    const lows = values("clip/sequences_low"), highs = values("clip/sequences_high");
    const sum = lows.map((v, i) => (v == null || highs[i] == null ? null : v + highs[i]));
    draw(place, x, [
      { label: "A > 0, ratio too high", values: sum, raw: highs, color: color("sky"), width: 1, fill: alpha(color("sky"), 0.75) },
      { label: "A < 0, ratio too low", values: lows, color: color("orange"), width: 1, fill: color("orange") },
    ], { title: "Clipped share by sign", note: `of the sequences of mini-batches ≥ 2, stacked${whole ? "" : "; with a clipped token"}`, y: { format: share, min: 0 }, height: 210 });
  }
  const lines = [
    { label: "farthest", values: positive("ratio/log_s_max_abs"), color: color("gray"), width: 1.2 },
    { label: "std", values: positive("ratio/log_s_std"), color: blue },
  ];
  if (whole && clips) lines.push({ label: "ε_high", values: high, color: green, dash: [7, 4] }, { label: "ε_low", values: low, color: green, dash: [2, 3] });
  lines.push({ label: "noise floor", values: positive("noise/log_s_p95_abs"), color: color("red") });
  if (run.suggested && whole) lines.push({ label: "suggested ε_low", values: x.map(() => run.suggested[0]), color: color("purple"), dash: [10, 3, 2, 3], width: 1.6 });
  draw(place, x, lines, { title: whole && clips ? "Is ε sensible?" : "Is drift above the noise?", note: whole && clips ? "|log s| on a log scale: ε should be between the noise and the largest |log s|" + (run.suggested ? `; suggested ${num(run.suggested[0])} / ${num(run.suggested[1])}` : "") : "|log s| on a log scale", y: { log: true, format: (v) => (v == null ? "–" : v.toExponential(1)) }, height: 210 });
  showMinibatches(place);
  showHistogram(place);
}

const has0 = (lines, label) => lines.some((line) => line.label === label && line.values.some((v) => v != null));
const positive = (name) => values(name).map((v) => (v > 0 ? v : null));

function showMinibatches(place) {
  const stories = state.run.clip, parts = Math.max(0, ...stories.map((s) => s.minibatch.length));
  if (parts < 2) return;
  const totals = Array.from({ length: parts }, (_, k) => stories.reduce((sum, s) => (s.minibatch[k] || [0, 0, 0]).map((v, i) => v + sum[i]), [0, 0, 0]));
  const lows = totals.map(([n, low]) => (n ? low / n : 0)), highs = totals.map(([n, , high]) => (n ? high / n : 0));
  draw(place, totals.map((_, k) => k + 1), [
    { label: "A > 0, ratio too high", values: lows.map((v, i) => v + highs[i]), raw: highs, color: cssColor("sky"), width: 0, fill: alpha(cssColor("sky"), 0.85) },
    { label: "A < 0, ratio too low", values: lows, color: cssColor("orange"), width: 0, fill: cssColor("orange") },
  ], { title: "Clipped share by mini-batch", note: "all steps whose samples are kept, stacked; the policy moves with each update, so later ones clip more", bars: 0.6, pad: 0.6, sync: false, y: { format: share, min: 0 }, x: { incrs: [1, 2, 5, 10, 20], format: (v) => (Number.isInteger(v) && v >= 1 && v <= parts ? v : "") }, height: 210, tipTitle: (i) => `mini-batch ${i + 1}, ${totals[i][0].toLocaleString("en")} sequences` });
}

function showHistogram(place) {
  const run = state.run, recent = blocksOf("samples").slice(-10);
  const points = [];
  for (const b of recent) {
    const several = b.minibatch.some((m) => m > 0);
    b.log_s.forEach((v, i) => { if (v != null && (!several || b.minibatch[i] > 0)) points.push([v, b.clipped[i] === true]); });
  }
  if (points.length < 8) return;
  const sizes = points.map(([v]) => Math.abs(v)).sort((a, b) => a - b);
  const eps = run.by_sequence && run.eps ? Math.max(...run.eps) : 0;
  const reach = Math.max(sizes[Math.floor(0.985 * (sizes.length - 1))], 1.4 * eps, 1e-9), bins = 41, width = (2 * reach) / bins;
  const all = new Array(bins).fill(0), cut = new Array(bins).fill(0);
  let outside = 0;
  for (const [v, clipped] of points) {
    const bin = Math.floor((v + reach) / width);
    if (bin < 0 || bin >= bins) { outside++; continue; }
    all[bin]++;
    if (clipped) cut[bin]++;
  }
  const x = all.map((_, i) => -reach + (i + 0.5) * width);
  const lines = run.by_sequence && run.eps ? [{ x: Math.log1p(-run.eps[0]), color: cssColor("green") }, { x: Math.log1p(run.eps[1]), color: cssColor("green") }] : [];
  draw(place, x, [
    { label: "all", values: all, color: cssColor("blue"), width: 0, fill: alpha(cssColor("blue"), 0.7) },
    { label: "clipped", values: cut, color: cssColor("orange"), width: 0, fill: cssColor("orange") },
  ], { title: "log s in the last steps", note: `${points.length.toLocaleString("en")} sequences of ${recent.length} steps; dashes: the clip range${outside ? `; ${outside} lie outside the picture` : ""}`, bars: 0.95, pad: width, sync: false, verticals: lines, y: { min: 0, format: (v) => (v == null || !Number.isInteger(v) ? "" : String(v)) }, x: { format: (v) => num(v, 2) }, height: 210, tipTitle: (i) => `log s ${num(x[i] - width / 2, 2)} … ${num(x[i] + width / 2, 2)}` });
}

function showExperts() {
  const names = [...state.columns.keys()].filter((name) => name.startsWith("moe/") && has(name));
  $("moe").hidden = !names.length;
  if (!names.length) return;
  const layers = new Map(); // metric → [[layer, name]]
  for (const name of names) {
    const found = /^moe\/(.*?)[_/]?layer[_/]?(\d+)(.*)$/.exec(name);
    const kind = found ? found[1] + found[3] : "";
    if (!layers.has(kind)) layers.set(kind, []);
    layers.get(kind).push([found ? +found[2] : name.slice(4), name]);
  }
  for (const [kind, list] of layers) {
    if (kind) {
      list.sort((a, b) => a[0] - b[0]);
      const recent = list.map(([, name]) => { const seen = values(name).filter((v) => v != null).slice(-10); return seen.reduce((a, b) => a + b, 0) / seen.length; });
      const first = list.map(([, name]) => { const seen = values(name).filter((v) => v != null).slice(0, 10); return seen.reduce((a, b) => a + b, 0) / seen.length; });
      draw($("moe-charts"), list.map(([layer]) => layer), [
        { label: "last 10 steps", values: recent, color: cssColor("blue"), points: true },
        { label: "first 10 steps", values: first, color: cssColor("orange"), points: true, dash: [4, 4] },
      ], { title: inertLine(kind.replaceAll("_", " ")) + " by layer", sync: false, y: { min: 0 }, tipTitle: (i) => "layer " + list[i][0] });
    } else draw($("moe-charts"), state.steps, list.flatMap(([label, name], i) => curve(inertLine(label.replaceAll("_", " ")), values(name), PALETTE[i % PALETTE.length], state.weight)), { title: "Routing over steps" });
  }
}

function showTime() {
  const parts = state.run.time, outer = parts.filter((p) => !p.inside), total = outer.reduce((sum, p) => sum + p.seconds, 0);
  const colors = new Map(outer.map((p, i) => [p.name, PALETTE[i % PALETTE.length]]));
  $("time-bar").hidden = !total;
  $("time-bar").replaceChildren(...outer.filter((p) => p.seconds > 0).map((p) => {
    const part = el("div", { title: `${p.words}: ${num(p.seconds)} s, ${share(p.seconds / total)}` }, p.seconds / total > 0.08 ? `${p.words} ${share(p.seconds / total)}` : "");
    part.style.flexGrow = p.seconds / total;
    part.style.flexBasis = "0";
    part.style.backgroundColor = { blue: "#56b4e9", orange: "#e69f00", green: "#2cc295", red: "#ff8341", purple: "#e39ac5", sky: "#b5def5", gray: "#b3bac0" }[colors.get(p.name)];
    return part;
  }));
  $("time-bar").setAttribute("aria-label", outer.map((p) => `${p.words} ${share(p.seconds / total)}`).join(", "));
  const count = state.steps.filter((s) => s > 0).length || 1;
  const ordered = outer.flatMap((p) => [p, ...parts.filter((q) => q.inside === p.name)]);
  $("time-table").tBodies[0].replaceChildren(...ordered.map((p) => el("tr", { class: p.inside ? "inside" : "" }, el("td", {}, inertLine(p.words)), el("td", { class: "num" }, p.seconds.toFixed(1)), el("td", { class: "num" }, share(p.seconds / total)), el("td", { class: "num" }, (p.seconds / count).toFixed(3)))));
  const x = state.steps, step = values("time/step_s"), stacked = [];
  const sums = new Array(x.length).fill(0);
  for (const p of outer) {
    const own = p.name === "rest" ? step.map((v, i) => (v == null ? null : Math.max(0, v - sums[i]))) : values(`time/${p.name}_s`);
    const cumulated = own.map((v, i) => (step[i] == null ? null : (sums[i] += v || 0)));
    stacked.unshift({ label: p.words, values: cumulated, raw: own, color: cssColor(colors.get(p.name)), width: 1, fill: cssColor(colors.get(p.name)) });
  }
  const seconds = (v) => (v == null ? "–" : num(v) + " s");
  draw($("time-charts"), x, stacked, { title: "Seconds per step", note: "stacked by part", y: { min: 0, format: seconds } });
  draw($("time-charts"), x, [...curve("sampled", values("throughput/rollout_tokens_s"), "blue", state.weight), ...curve("trained", values("throughput/train_tokens_s"), "orange", state.weight)], { title: "Tokens per second", note: "prompt and completion tokens of every sequence count as trained, skipped ones too", y: { min: 0, format: (v) => (v == null ? "–" : v >= 1e4 ? Math.round(v / 1e3) + "k" : num(v)) } });
}

function showWords() {
  const doctor = state.run.doctor, body = $("objective-body"), says = $("doctor-body");
  if (!doctor || !doctor.objective) {
    body.replaceChildren(el("p", { class: "note" }, doctor && doctor.unreadable ? inertLine(doctor.unreadable) : "The config could not be read."));
    says.replaceChildren();
  } else {
    const o = doctor.objective, policies = doctor.policies || {}, batch = doctor.batch || {};
    const pairs = [...o.words.map((w) => { const [name, ...rest] = w.split(": "); return [name, rest.join(": ")]; }), ["π_old", policies.pi_old], ["correction", policies.correction_words], ["KL", policies.kl], ["sampler", policies.sampler], ["sampling", policies.sampling], ["trained", policies.trained], ["batch", batch.prompts && `${batch.prompts} prompts × ${batch.group_size} samples = ${batch.sequences} sequences, in ${batch.minibatches} mini-batches: an optimizer update each`], ["paper", o.paper]];
    body.replaceChildren(
      el("p", {}, el("b", {}, o.algorithm), ` · ${o.title}` + (o.as_published ? "" : `, with ratio level ${o.level} and aggregation ${o.aggregation}${o.same_as ? ": the objective of " + o.same_as : ""}`)),
      el("div", { class: "formula" }, o.formula.split(",   ").map((part) => el("div", {}, inertLine(part)))),
      el("dl", {}, pairs.filter(([, text]) => text).flatMap(([name, text]) => [el("dt", {}, name), el("dd", {}, inertLine(text))])));
    const findings = findingsOf(doctor);
    says.replaceChildren(...(findings.length ? findings : [el("p", {}, "✓ No warning about this config.")]),
      ...(doctor.without_effect || []).map((row) => el("p", { class: "note" }, el("code", {}, inertLine(row.key)), ` has no effect: ${inertLine(row.why)}`)));
  }
  $("log").replaceChildren(...inert(state.run.log.join("\n")));
}

// A key may be broken after a dot or an underscore, never inside a word.
const breakable = (key) => inertLine(key).split(/(?<=[._])/).flatMap((part) => [part, el("wbr")]);

function showConfig() {
  const wanted = $("config-filter").value.toLowerCase(), all = $("config-all").checked || wanted;
  const rows = state.run.config.filter((c) => (all || c.by === "user" || c.by === "derived" || c.by === "unknown") && c.key.toLowerCase().includes(wanted));
  const marks = { user: ["●", "you set it"], derived: ["○", "follows from another"], default: ["", "default"], unknown: ["", ""] };
  $("config-table").tBodies[0].replaceChildren(...rows.map((c) => el("tr", { class: c.by }, el("td", {}, el("b", { class: "mark " + c.by, title: marks[c.by][1] }, marks[c.by][0])), el("td", { class: "mono key" }, breakable(c.key)), el("td", { class: "mono" }, inertLine(c.value)), el("td", {}, inertLine(c.origin)))));
  $("environment").replaceChildren(...inert(JSON.stringify(state.run.environment, null, 1)));
}

function showSamplesNote() {
  const shown = blocksOf("samples").length, kept = state.run.kept_steps ?? boot.kept_steps ?? shown;
  const note = browser.items.length
    ? `${browser.items.length.toLocaleString("en")} ${browser.kind === "evals" ? "held-out answers after" : "samples of"} ${blocksOf(browser.kind).length.toLocaleString("en")} steps. Text in them was written by a model; nothing of it is executed, and characters that cannot be seen are shown as escapes.`
    : "No sample is kept (rollout.dump_to_file).";
  $("samples-note").textContent = note + (kept > shown ? ` The run keeps ${kept.toLocaleString("en")} steps; these are spread evenly over the run so that the page stays fast (--max-mb includes more).` : "");
}

function showAll() {
  showHeadline();
  showCurves();
  showClipping();
  showExperts();
  showTime();
  showWords();
  showConfig();
  showSamplesNote();
}

/* -- theme, keys -- */

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  $("theme").textContent = name === "dark" ? "Light" : "Dark";
  forgetCharts();
  if (state.run) { showCurves(); showClipping(); showExperts(); showTime(); renderDetail(); }
}
const theme = () => document.documentElement.dataset.theme;

function onKey(event) {
  const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName) && event.target.type !== "range" && event.target.type !== "checkbox";
  if (event.key === "Escape") {
    if (event.target === $("search") && $("search").value) { $("search").value = ""; browser.query = ""; chooseSamples(); }
    else if (document.activeElement) document.activeElement.blur();
    return;
  }
  if (typing || event.ctrlKey || event.metaKey || event.altKey || $("help").open) return;
  const list = () => $("scroll").focus({ preventScroll: true });
  const moving = { j: 1, k: -1, ...(document.activeElement === $("scroll") ? { ArrowDown: 1, ArrowUp: -1, PageDown: 12, PageUp: -12 } : {}) }[event.key];
  if (moving && state.run) { list(); move(moving); event.preventDefault(); $("samples").getBoundingClientRect().top > innerHeight && $("samples").scrollIntoView(); return; }
  const actions = {
    "/": () => { $("samples").scrollIntoView(); $("search").focus({ preventScroll: true }); $("search").select(); },
    "?": () => $("help").showModal(),
    t: () => setTheme(theme() === "dark" ? "light" : "dark"),
    g: () => { list(); pick(0); },
    G: () => { list(); pick(browser.shown.length - 1); },
    c: () => { browser.colour = { none: "ratio", ratio: "entropy", entropy: "none" }[browser.colour]; renderDetail(); },
    Enter: () => { if (document.activeElement === $("scroll")) $("detail").focus(); },
  };
  const sections = $("nav").querySelectorAll("a");
  if (/^[1-9]$/.test(event.key) && sections[event.key - 1]) { location.hash = sections[event.key - 1].getAttribute("href"); return; }
  if (actions[event.key] && state.run) { actions[event.key](); event.preventDefault(); }
}

function startPage() {
  setTheme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", (event) => setTheme(event.matches ? "dark" : "light"));
  $("theme").addEventListener("click", () => setTheme(theme() === "dark" ? "light" : "dark"));
  $("help-button").addEventListener("click", () => $("help").showModal());
  document.addEventListener("keydown", onKey);
  let before = null;
  addEventListener("beforeprint", () => { before = theme(); if (before === "dark") setTheme("light"); });
  addEventListener("afterprint", () => { if (before === "dark") setTheme("dark"); });
  $("smooth").addEventListener("input", () => { state.weight = +$("smooth").value; $("smooth-value").textContent = state.weight.toFixed(2); showCurves(); showExperts(); showTime(); });
  $("any").addEventListener("toggle", showAny);
  $("any-metric").addEventListener("change", showAny);
  $("config-all").addEventListener("change", showConfig);
  $("config-filter").addEventListener("input", showConfig);
  watchSections();
  startBrowser();
}

// The section in the middle of the window is marked in the navigation.
function watchSections() {
  const links = [...$("nav").querySelectorAll("a")], seen = new Map();
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) seen.set(entry.target.id, entry.isIntersecting);
    const current = links.find((link) => seen.get(link.getAttribute("href").slice(1)));
    for (const link of links) link === current ? link.setAttribute("aria-current", "true") : link.removeAttribute("aria-current");
  }, { rootMargin: "-25% 0px -60% 0px" });
  for (const link of links) watcher.observe($(link.getAttribute("href").slice(1)));
}

/* -- live -- */

const PERIOD = 1500; // ms between questions to the server
const known = { generation: null, rows: 0, mark: 0 };

async function ask(path) {
  const reply = await fetch(path, { cache: "no-store" });
  if (!reply.ok) throw new Error("the server said " + reply.status);
  return reply.json();
}

function takeNews(news) {
  if (news.generation !== known.generation) { // the run was cut back or started anew: all we know is void
    state.columns.clear();
    state.count = 0;
    blocks.clear();
    known.generation = news.generation;
  }
  takeMetrics(news.metrics);
  for (const [kind, step] of news.gone) blocks.delete(`${kind} ${step}`);
  for (const block of news.samples) takeBlock(block);
  known.rows = state.count;
  known.mark = news.mark;
  state.run = news.overview;
  document.title = inertLine(state.run.name) + " · gspo watch";
  if (news.samples.length || news.gone.length || !browser.items.length) indexSamples();
  showAll();
}

async function follow() {
  const badge = $("live");
  badge.hidden = false;
  for (;;) {
    let wait = PERIOD;
    try {
      if (!document.hidden) {
        const news = await ask(`data?run=${encodeURIComponent(boot.run)}&generation=${known.generation ?? ""}&rows=${known.rows}&mark=${known.mark}`);
        if (news.changed) takeNews(news);
        badge.className = "live on";
        badge.textContent = news.age == null ? "waiting for the first step" : `live, last step ${ago(news.age)}`;
        if (news.more) wait = 0;
      }
    } catch (problem) {
      badge.className = "live lost";
      badge.textContent = "no answer from gspo watch; what is shown stays";
    }
    await new Promise((done) => setTimeout(done, wait));
  }
}

const ago = (seconds) => (seconds < 90 ? `${Math.round(seconds)} s ago` : seconds < 5400 ? `${Math.round(seconds / 60)} min ago` : seconds < 172800 ? `${Math.round(seconds / 3600)} h ago` : `${Math.round(seconds / 86400)} days ago`);

async function followRuns() {
  for (;;) {
    try {
      if (!document.hidden) {
        const { runs } = await ask("runs");
        $("runs-note").textContent = runs.length ? `${runs.length} under ${inertLine(boot.path)}, the newest first.` : `No run under ${inertLine(boot.path)} yet.`;
        $("runs").tBodies[0].replaceChildren(...runs.map((r) => el("tr", {}, el("td", {}, el("a", { href: "page?run=" + encodeURIComponent(r.id) }, inertLine(r.id))), el("td", {}, el("span", { class: "status " + r.status }, r.status)), el("td", {}, inertLine(r.algorithm ?? "–")), el("td", { class: "num" }, r.steps), el("td", { class: "num" }, r.held_out ?? "–"), el("td", { class: "num" }, r.reward ?? "–"), el("td", { class: "num" }, r.clipped ?? "–"), el("td", {}, r.age == null ? "no step yet" : ago(r.age)))));
      }
    } catch (problem) {
      $("runs-note").textContent = "No answer from gspo watch; what is shown stays.";
    }
    await new Promise((done) => setTimeout(done, 2 * PERIOD));
  }
}

const boot = JSON.parse(document.querySelector("script.boot").textContent);
if (boot.kind === "runs") {
  setTheme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  $("theme").addEventListener("click", () => setTheme(theme() === "dark" ? "light" : "dark"));
  $("nav").hidden = $("help-button").hidden = true;
  $("name").textContent = "gspo watch";
  $("runs-view").hidden = false;
  followRuns();
} else {
  $("run-view").hidden = false;
  startPage();
  if (boot.kind === "report") {
    state.run = boot.overview;
    takeMetrics(boot.metrics);
    for (const node of document.querySelectorAll("script.pictures")) for (const [digest, address] of Object.entries(JSON.parse(node.textContent))) pictures.set(digest, address);
    for (const node of document.querySelectorAll("script.samples")) takeBlock(JSON.parse(node.textContent));
    indexSamples();
    showAll();
    $("foot").textContent = "Written by gspo report from " + inertLine(boot.overview.path);
  } else {
    if (boot.list) $("name").after(el("a", { href: "./" }, "all runs"));
    follow();
  }
}
