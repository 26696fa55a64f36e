// The figure of gspo.md: token ratios beside sequence ratios, and the tokens that still have a gradient. No library.
(() => {
  const root = document.querySelector('[data-figure="ratios"]');
  if (!root) return;
  const BLUE = "#0072B2", ORANGE = "#D55E00", ANSWERS = 8, SHOWN = 60, PPO = 0.2;
  const GOOD = [true, false, false, true, true, false, true, false]; // the sign of each answer's advantage
  const SPREAD = [0.35, 0.6, 1, 1.5, 0.5, 1.3, 0.8, 1.8]; // how far each answer has moved, relative to the drift

  // Numbers of a normal distribution that are the same at each visit (mulberry32, Box–Muller).
  function normals(seed, count) {
    const uniform = () => {
      seed = (seed + 0x6d2b79f5) | 0;
      let t = Math.imul(seed ^ (seed >>> 15), 1 | seed);
      t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
      return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
    };
    return Float64Array.from({ length: count }, () => Math.sqrt(-2 * Math.log(1 - uniform())) * Math.cos(2 * Math.PI * uniform()));
  }
  const MOST = 4000, noise = GOOD.map((_, i) => normals(i + 1, MOST)), jitter = normals(99, SHOWN);

  const make = (name, attributes = {}, ...children) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    node.append(...children);
    return node;
  };
  const html = (name, properties = {}, ...children) => {
    const node = Object.assign(document.createElement(name), properties);
    node.append(...children);
    return node;
  };

  // Each slider is logarithmic: value = low · (high / low)^position.
  const sliders = [
    { id: "drift", label: "drift per token", low: 0.003, high: 0.5, start: 0.05, show: (v) => v.toPrecision(2) },
    { id: "length", label: "tokens per answer", low: 1, high: MOST, start: 300, show: (v) => Math.round(v).toLocaleString("en") },
    { id: "eps", label: "ε of GSPO", low: 1e-4, high: 0.2, start: 2e-3, show: (v) => v.toExponential(1) },
  ];
  const controls = html("div", { className: "ratios-controls" });
  for (const s of sliders) {
    s.output = html("output", {});
    s.input = html("input", { type: "range", min: 0, max: 1, step: 0.005, value: Math.log(s.start / s.low) / Math.log(s.high / s.low), id: `ratios-${s.id}` });
    s.value = () => s.low * (s.high / s.low) ** s.input.value;
    s.input.addEventListener("input", draw);
    controls.append(html("label", { htmlFor: s.input.id }, s.label, " ", s.output, s.input));
  }
  const panels = html("div", { className: "ratios-panels" });
  const shares = html("div", { className: "ratios-shares", role: "status" });
  root.replaceChildren(controls, panels, shares);

  // log w of each token: noise, and a small move in the direction of the advantage, as an earlier update makes it.
  function state() {
    const [drift, length, eps] = sliders.map((s) => s.value()), tokens = Math.max(1, Math.round(length));
    const answers = GOOD.map((good, i) => {
      const log = noise[i].subarray(0, tokens).map((z) => drift * SPREAD[i] * (z + (good ? 0.05 : -0.05)));
      const s = Math.exp(log.reduce((a, b) => a + b, 0) / tokens);
      const out = (w, range) => (good ? w > 1 + range : w < 1 - range);
      return { good, log, s, clipped: out(s, eps), lost: log.reduce((n, l) => n + out(Math.exp(l), PPO), 0), out };
    });
    return { answers, tokens, eps };
  }

  const WIDTH = 340, HEIGHT = 300, LEFT = 10, TOP = 34, ROW = 28;
  const y = (i) => TOP + ROW * (i + 0.5);

  function panel(title, range, reach, marks) {
    const x = (w) => LEFT + (WIDTH - 2 * LEFT) * Math.min(1, Math.max(0, 0.5 + (w - 1) / (2 * reach)));
    const bottom = TOP + ROW * ANSWERS;
    const svg = make("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": title },
      make("text", { x: LEFT, y: 18, class: "ratios-title" }, title),
      make("rect", { x: x(1 - range), y: TOP, width: Math.max(1, x(1 + range) - x(1 - range)), height: bottom - TOP, class: "ratios-band" }),
      make("line", { x1: x(1), x2: x(1), y1: TOP, y2: bottom, class: "ratios-one" }));
    for (const [w, row, good, clipped, size] of marks) {
      const colour = clipped ? ORANGE : BLUE, at = x(w), opacity = size > 4 ? 1 : 0.55;
      svg.append(good ? make("circle", { cx: at, cy: row, r: size, fill: colour, "fill-opacity": opacity })
        : make("rect", { x: at - size, y: row - size, width: 2 * size, height: 2 * size, fill: colour, "fill-opacity": opacity }));
    }
    const digits = Math.max(1, Math.ceil(-Math.log10(reach)) + 1);
    for (const w of [1 - reach, 1, 1 + reach]) {
      const anchor = w < 1 ? "start" : w > 1 ? "end" : "middle";
      svg.append(make("text", { x: x(w), y: bottom + 18, "text-anchor": anchor, class: "ratios-tick" }, w === 1 ? "1" : w.toFixed(digits)));
    }
    svg.append(make("text", { x: WIDTH / 2, y: bottom + 36, "text-anchor": "middle", class: "ratios-tick" }, `band 1 ± ${Number(range.toPrecision(2))}`));
    return svg;
  }

  function draw() {
    for (const s of sliders) s.output.textContent = s.show(s.value());
    const { answers, tokens, eps } = state();
    const tokenMarks = answers.flatMap((a, i) => {
      const step = Math.max(1, Math.floor(tokens / SHOWN)), marks = [];
      for (let k = 0; k * step < tokens && k < SHOWN; k++) {
        const w = Math.exp(a.log[k * step]);
        marks.push([w, y(i) + Math.max(-9, Math.min(9, 4.5 * jitter[k])), a.good, a.out(w, PPO), 1.8]);
      }
      return marks;
    });
    const sequenceMarks = answers.map((a, i) => [a.s, y(i), a.good, a.clipped, 6]);
    const far = Math.max(2 * eps, ...answers.map((a) => 1.15 * Math.abs(a.s - 1)));
    panels.replaceChildren(
      panel("GRPO: a ratio for each token", PPO, Math.max(0.4, Math.min(2, 3.2 * sliders[0].value())), tokenMarks),
      panel("GSPO: a ratio for each answer", eps, far, sequenceMarks));
    const kept = { GRPO: 1 - answers.reduce((n, a) => n + a.lost, 0) / (tokens * ANSWERS), GSPO: answers.filter((a) => !a.clipped).length / ANSWERS };
    shares.replaceChildren(html("p", {}, "Tokens that still have a gradient"), ...Object.entries(kept).map(([name, share]) => {
      const bar = html("span", { className: "ratios-bar" }, html("i", {}));
      bar.firstChild.style.width = `${100 * share}%`;
      const text = share === 1 || share === 0 ? `${100 * share} %` : `${(100 * share).toFixed(1)} %`;
      return html("div", {}, html("b", {}, name), bar, html("span", { className: "ratios-share" }, text));
    }));
  }
  draw();
})();
