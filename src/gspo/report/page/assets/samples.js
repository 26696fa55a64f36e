// The sample browser: a list that only draws what is in view, and the chosen sample's group side by side.
"use strict";

const ROW = 46; // px, as in page.css
const blocks = new Map(); // "samples 12", "evals 12" → columns of that step
const browser = { kind: "samples", opened: false, items: [], shown: [], chosen: null, lead: null, preset: "all", sort: null, query: "", step: "", colour: "none" };

const get = (item, name) => item.block[name][item.index];
const blocksOf = (kind) => [...blocks.values()].filter((block) => block.kind === kind).sort((a, b) => a.step - b.step);
// The question where a chat template made the prompt: its end is the same for all.
const questionOf = (item) => get(item, "question") ?? promptOf(item);
const promptOf = (item) => item.block.prompts[get(item, "prompt")];
const distance = (item) => { const value = get(item, "log_s"); return value == null ? null : Math.abs(value); };
const hasTokens = (item) => item.block.tokens[get(item, "sequence")];

const COLUMNS = [
  { name: "step", label: "step", key: (i) => i.block.step, num: true },
  { name: "sequence", label: "no.", key: (i) => get(i, "sequence"), num: true, opt: true, hint: "number of the sample in its batch" },
  { name: "completion", label: "prompt and completion", key: (i) => get(i, "completion") || "" },
  { name: "reward", label: "reward", key: (i) => get(i, "reward"), num: true },
  { name: "advantage", label: "A", key: (i) => get(i, "advantage"), num: true, train: true, hint: "advantage" },
  { name: "length", label: "tokens", key: (i) => get(i, "length"), num: true, opt: true },
  { name: "log_s", label: "log s", key: (i) => get(i, "log_s"), num: true, train: true, hint: "log of the sequence ratio" },
  { name: "clipped", label: "clipped", key: (i) => (get(i, "clipped") ? 1 : 0), opt: true, train: true },
];

const PRESETS = {
  all: { label: "All" },
  clipped: { label: "Clipped", test: (i) => get(i, "clipped") === true },
  negative: { label: "A < 0", test: (i) => get(i, "advantage") < 0 },
  farthest: { label: "Farthest", test: (i) => get(i, "log_s") != null, keys: [[distance, -1]] },
  longest: { label: "Longest", keys: [[(i) => get(i, "length"), -1]] },
  best: { label: "Best", test: (i) => get(i, "reward") != null, keys: [[(i) => get(i, "reward"), -1], [(i) => get(i, "advantage"), -1]] },
  worst: { label: "Worst", test: (i) => get(i, "reward") != null, keys: [[(i) => get(i, "reward"), 1], [(i) => get(i, "advantage"), 1]] },
  truncated: { label: "Truncated", test: (i) => get(i, "finish") === "length" },
  failed: { label: "Reward failed", test: (i) => get(i, "failure") != null },
  tokens: { label: "With tokens", test: (i) => hasTokens(i) },
};

function takeBlock(block) { blocks.set(`${block.kind} ${block.step}`, block); }

// After blocks came or went: the list anew, the choice kept.
function indexSamples() {
  browser.items = [];
  $("sample-kind").parentElement.hidden = !blocksOf("evals").length;
  for (const block of blocksOf(browser.kind)) {
    for (let index = 0; index < block.prompt.length; index++) browser.items.push({ block, index });
  }
  const select = $("sample-step"), steps = blocksOf(browser.kind).map((block) => block.step);
  if (select.options.length !== steps.length + 1 || (steps.length && select.options[steps.length].value !== String(steps[steps.length - 1]))) {
    select.replaceChildren(el("option", { value: "" }, "all"), ...steps.map((step) => el("option", { value: step }, step)));
    select.value = browser.step;
  }
  if (browser.chosen) {
    const { step, sequence } = browser.chosen;
    const block = blocks.get(`${browser.kind} ${step}`), index = block ? block.sequence.indexOf(sequence) : -1;
    browser.chosen = index < 0 ? null : { step, sequence, item: { block, index } };
  }
  for (const [name, preset] of Object.entries(PRESETS)) {
    const training = ["clipped", "negative", "farthest"].includes(name);
    const always = browser.kind === "evals" ? !training && (!preset.test || ["best", "worst"].includes(name)) : !preset.test || ["clipped", "negative", "best", "worst", "farthest"].includes(name);
    preset.button.hidden = !always && !browser.items.some(preset.test);
  }
  chooseSamples();
  if (!browser.opened && browser.items.length) openMixed();
}

// The first group shown is one whose rewards differ: a group of equal rewards teaches nothing.
function openMixed() {
  browser.opened = true;
  const first = new Map(); // group → place and reward of its first sample
  for (let place = 0; place < browser.shown.length; place++) {
    const item = browser.shown[place], group = `${item.block.step} ${get(item, "submission")}`, reward = get(item, "reward");
    if (reward == null) continue;
    if (!first.has(group)) first.set(group, [place, reward]);
    else if (first.get(group)[1] !== reward) return pick(first.get(group)[0]);
  }
  pick(0);
}

// Lower-case text to search in, made once per sample.
function haystack(item) {
  const cache = item.block.haystack || (item.block.haystack = []);
  return cache[item.index] || (cache[item.index] = [promptOf(item), get(item, "completion"), get(item, "answer")].join("\n").toLowerCase());
}

function compareBy(keys) {
  return (a, b) => {
    for (const [key, direction] of keys) {
      const x = key(a), y = key(b);
      if (x === y) continue;
      if (x == null) return 1; // what was not measured comes last, whatever the direction
      if (y == null) return -1;
      return (x < y ? -1 : 1) * direction;
    }
    return 0;
  };
}

function chooseSamples() {
  const preset = PRESETS[browser.preset], query = browser.query.toLowerCase();
  let shown = browser.items;
  if (browser.step !== "") shown = shown.filter((item) => String(item.block.step) === browser.step);
  if (preset.test) shown = shown.filter(preset.test);
  if (query) shown = shown.filter((item) => haystack(item).includes(query));
  const keys = browser.sort ? [[browser.sort.column.key, browser.sort.direction]] : preset.keys;
  browser.shown = keys ? [...shown].sort(compareBy(keys)) : shown;
  $("sample-count").textContent = `${browser.shown.length.toLocaleString("en")} of ${browser.items.length.toLocaleString("en")}`;
  $("list").setAttribute("aria-rowcount", browser.shown.length + 1);
  $("spacer").style.height = browser.shown.length * ROW + "px";
  for (const [name, one] of Object.entries(PRESETS)) one.button.setAttribute("aria-pressed", String(name === browser.preset));
  for (const column of COLUMNS) {
    const active = browser.sort && browser.sort.column === column;
    if (active) column.head.setAttribute("aria-sort", browser.sort.direction > 0 ? "ascending" : "descending");
    else column.head.removeAttribute("aria-sort");
  }
  showDistribution();
  renderRows();
}

// Graded rewards as bars: of the chosen step, or of the first and the last one with samples, on one scale.
const BINS = 24;
function showDistribution() {
  const steps = blocksOf(browser.kind).map((block) => block.step);
  const chosen = browser.step === "" ? [...new Set([steps[0], steps[steps.length - 1]])] : [Number(browser.step)];
  const rewards = chosen.map((step) => browser.items.filter((item) => item.block.step === step).map((item) => get(item, "reward")).filter((value) => value != null).sort((a, b) => a - b));
  const all = rewards.flat(), place = $("distribution");
  place.hidden = !all.some((value) => value !== 0 && value !== 1);
  if (place.hidden) return;
  const low = all.reduce((a, b) => Math.min(a, b), 0), high = all.reduce((a, b) => Math.max(a, b), 1);
  place.replaceChildren(...chosen.map((step, index) => {
    const values = rewards[index], bins = new Array(BINS).fill(0);
    for (const value of values) bins[Math.min(BINS - 1, Math.floor(((value - low) / (high - low)) * BINS))]++;
    const most = Math.max(...bins, 1), at = (q) => num(values[Math.round(q * (values.length - 1))], 2), end = (bin) => num(low + ((high - low) * bin) / BINS, 2);
    const bars = bins.map((count, bin) => { const bar = el("i", { title: `${end(bin)} to ${end(bin + 1)}: ${count}` }); bar.style.height = (100 * count) / most + "%"; return bar; });
    const words = values.length ? `reward ${browser.kind === "evals" ? "after" : "of"} step ${step}: lowest ${at(0)}, median ${at(0.5)}, highest ${at(1)}` : `step ${step}: no reward`;
    return el("figure", {}, el("div", { class: "bins", role: "img", "aria-label": `distribution of the ${words}, from ${num(low, 2)} to ${num(high, 2)}` }, bars), el("figcaption", {}, words));
  }));
}

let frame = 0;
function renderRows() {
  const scroll = $("scroll"), spacer = $("spacer");
  const from = Math.max(0, Math.floor(scroll.scrollTop / ROW) - 6);
  const to = Math.min(browser.shown.length, from + Math.ceil((scroll.clientHeight || 600) / ROW) + 12);
  const rows = [];
  for (let place = from; place < to; place++) rows.push(rowOf(browser.shown[place], place));
  spacer.replaceChildren(...rows);
}

function rowOf(item, place) {
  const picked = isChosen(item);
  const completion = get(item, "completion") || "";
  const row = el("div", { class: "row item", role: "row", "aria-rowindex": place + 2, "aria-selected": String(picked), on: { click: () => pick(place, true) } },
    el("div", { role: "gridcell", class: "num" }, item.block.step),
    el("div", { role: "gridcell", class: "num opt" }, get(item, "sequence") ?? "–"),
    el("div", { role: "gridcell", class: "text" },
      el("div", { class: "prompt", dir: "auto" }, inertLine(questionOf(item).slice(-160))),
      el("div", { dir: "auto" }, inertLine(completion.slice(0, 240)) || "(empty)")),
    el("div", { role: "gridcell", class: "num" }, get(item, "failure") != null ? el("span", { class: "tag fail" }, "failed") : num(get(item, "reward"))),
    el("div", { role: "gridcell", class: "num train" }, signed(get(item, "advantage"))),
    el("div", { role: "gridcell", class: "num opt" }, get(item, "length") ?? "–"),
    el("div", { role: "gridcell", class: "num train" }, signed(get(item, "log_s"))),
    el("div", { role: "gridcell", class: "opt train" }, clipTag(item)));
  row.style.top = place * ROW + "px";
  return row;
}

function clipTag(item) {
  if (get(item, "clipped") !== true) return "";
  return get(item, "advantage") > 0 ? el("span", { class: "tag high" }, "▲ high") : el("span", { class: "tag low" }, "▼ low");
}

const isChosen = (item) => browser.chosen && browser.chosen.step === item.block.step && browser.chosen.sequence === get(item, "sequence");

function pick(place, stay) {
  const item = browser.shown[place];
  if (!item) return;
  browser.chosen = { step: item.block.step, sequence: get(item, "sequence"), item };
  browser.lead = browser.chosen.sequence;
  const scroll = $("scroll");
  if (!stay) {
    if (place * ROW < scroll.scrollTop) scroll.scrollTop = place * ROW;
    else if ((place + 1) * ROW > scroll.scrollTop + scroll.clientHeight) scroll.scrollTop = (place + 1) * ROW - scroll.clientHeight;
  }
  renderRows();
  renderDetail();
  $("detail").scrollTop = 0;
}

function move(by) {
  const now = browser.shown.findIndex(isChosen);
  pick(now < 0 ? 0 : Math.min(Math.max(now + by, 0), browser.shown.length - 1));
}

function renderDetail() {
  const detail = $("detail");
  if (!browser.chosen) {
    detail.replaceChildren(el("p", { class: "note" }, "Choose a sample to see its group side by side."));
    return;
  }
  const { item } = browser.chosen, block = item.block, submission = get(item, "submission");
  const group = block.prompt.map((_, index) => ({ block, index }))
    .filter((other) => (submission == null ? other.index === item.index : get(other, "submission") === submission));
  const answer = get(item, "answer"), heldOut = block.kind === "evals";
  const rewards = group.map((one) => get(one, "reward")).filter((value) => value != null);
  const mean = rewards.length ? rewards.reduce((a, b) => a + b, 0) / rewards.length : null;
  const coloured = group.some(hasTokens);
  const choices = [["none", "plain"], ["ratio", "log-ratio"], ["entropy", "entropy"]].map(([name, label]) =>
    el("button", { type: "button", "aria-pressed": String(browser.colour === name), "data-colour": name, on: { click: () => { browser.colour = name; renderDetail(); } } }, label));
  // The one that was picked in the list comes first; choosing another of the group moves nothing.
  const lead = group.findIndex((one) => get(one, "sequence") === browser.lead);
  if (lead > 0) group.unshift(...group.splice(lead, 1));
  const cards = group.map((one) => cardOf(one));
  detail.replaceChildren(
    ...[el("h3", {}, heldOut ? `After step ${block.step}, held-out problem ${submission ?? "–"}` : `Step ${block.step}, prompt ${submission ?? "–"}`, el("span", { class: "note" }, `${group.length} sample${group.length > 1 ? "s" : ""}, mean reward ${num(mean)}`)),
    el("div", { class: "promptbox" }, pictureOf(item), el("p", { class: "said", dir: "auto" }, inert(promptOf(item)))),
    el("div", { class: "bar2" }, "answer", answer == null ? el("span", { class: "note" }, "the data set has none") : el("span", { class: "said", dir: "auto" }, inert(answer))),
    heldOut ? null : el("div", { class: "bar2", role: "group", "aria-label": "Colour tokens by" }, "tokens", ...(coloured ? choices : [el("span", { class: "note" }, "this group has no per-token values")]), scaleOf(group)),
    el("div", { class: "group" }, cards)].filter(Boolean));
}

// What the prompt shows: a small picture, if there is one, with names, sizes and digest.
const pictures = new Map(); // sha256 → address
function pictureOf(item) {
  const image = item.block.images[get(item, "shown")];
  if (!image) return null;
  const words = inertLine(image.words);
  const img = el("img", { alt: words, hidden: true });
  const show = (address) => { if (address) { img.src = address; img.hidden = false; } };
  if (pictures.has(image.sha256)) show(pictures.get(image.sha256));
  else if (boot.kind === "live") ask(`image?run=${encodeURIComponent(boot.run)}&sha256=${image.sha256}`).then((found) => {
    pictures.set(image.sha256, found[image.sha256]);
    show(found[image.sha256]);
  }).catch(() => {}); // the server is gone: the page says so elsewhere
  return el("figure", { class: "shown" }, img, el("figcaption", {}, `${words} · sha256 ${image.sha256.slice(0, 16)}`));
}

function cardOf(item) {
  const named = Object.entries(item.block.parts);
  const parts = named.length < 2 ? "" : named.map(([name, values]) => `${inertLine(name)} ${num(values[item.index])}`).join(", ");
  const logS = get(item, "log_s"), heldOut = item.block.kind === "evals";
  const facts = el("div", { class: "facts" },
    el("b", {}, `${get(item, "sample") ?? "–"} · reward ${num(get(item, "reward"))}${heldOut ? "" : ` · A ${signed(get(item, "advantage"))}`}`), " ", clipTag(item), el("br"),
    parts ? el("span", {}, parts, el("br")) : null,
    `${get(item, "length") ?? "–"} tokens, ${inertLine(get(item, "finish") ?? "–")}${heldOut ? "" : `; mini-batch ${get(item, "minibatch") == null ? "–" : get(item, "minibatch") + 1}, weights ${get(item, "version") ?? "–"}`}`, el("br"),
    heldOut ? null : logS == null ? "not trained: A = 0" : `s = ${Math.exp(logS).toFixed(5)}, log s ${signed(logS, 3)}`,
    get(item, "failure") == null ? null : el("div", { class: "tag fail" }, inertLine(get(item, "failure"))));
  const choose = () => { browser.chosen = { step: item.block.step, sequence: get(item, "sequence"), item }; renderRows(); renderDetail(); };
  return el("article", { class: "one", "aria-current": String(!!isChosen(item)), "data-sequence": get(item, "sequence"), on: { click: choose } }, facts,
    el("p", { class: "said", dir: "auto" }, completionNodes(item)));
}

// A token's own text may lack the space before it, or be a part of a character: walk along the completion.
function alignTokens(texts, completion) {
  const out = [];
  let from = 0;
  for (const text of texts) {
    const found = text && !text.includes("\ufffd") ? completion.indexOf(text, from) : -1;
    if (found >= 0 && completion.slice(from, found).trim() === "") {
      out.push(completion.slice(from, found + text.length));
      from = found + text.length;
    } else out.push(null);
  }
  return completion.slice(from).trim() === "" ? out : null;
}

function completionNodes(item) {
  const completion = get(item, "completion") || "", tokens = hasTokens(item);
  if (browser.colour === "none" || !tokens) {
    const turns = get(item, "turns");
    if (!turns) return inert(completion);
    return turns.map(([environment, text]) => el("span", environment ? { class: "environment", title: "text of the environment: not trained" } : {}, inert(text)));
  }
  const texts = tokens.text ? alignTokens(tokens.text, completion) || tokens.text : tokens.id.map((id) => `⟨${id}⟩`);
  const values = tokens[browser.colour], limit = scaleLimit(tokens);
  return tokens.id.map((id, index) => {
    const text = texts[index];
    const value = values[index];
    const node = el("span", { class: text ? "tok" : "tok empty", title: `token ${id}: log-ratio ${signed(tokens.ratio[index], 3)}, log-prob ${num(tokens.logp[index])}, entropy ${num(tokens.entropy[index])} nats` },
      text ? inert(text) : "▪");
    const color = cssColor(browser.colour === "entropy" ? "purple" : value < 0 ? "orange" : "blue");
    const strength = Math.min(1, Math.abs(value || 0) / (limit || 1));
    node.style.backgroundColor = alpha(color, 0.62 * strength);
    return node;
  });
}

const scaleLimit = (tokens) => {
  const sizes = tokens[browser.colour].map((value) => Math.abs(value || 0)).sort((a, b) => a - b);
  return sizes[Math.floor(0.98 * (sizes.length - 1))] || sizes[sizes.length - 1];
};

function scaleOf(group) {
  const tokens = group.map(hasTokens).find(Boolean);
  if (browser.colour === "none" || !tokens) return null;
  const swatch = (name) => { const node = el("span", { class: "tok" }, "\u00a0\u00a0\u00a0"); node.style.backgroundColor = alpha(cssColor(name), 0.62); return node; };
  return browser.colour === "entropy"
    ? el("span", { class: "scale" }, swatch("purple"), "high entropy")
    : el("span", { class: "scale" }, swatch("orange"), "less likely than when sampled", swatch("blue"), "more likely");
}

function showSamples(preset, step) {
  setKind("samples");
  Object.assign(browser, { preset, sort: null, query: "", step: step == null ? "" : String(step) });
  $("search").value = "";
  $("sample-step").value = browser.step;
  $("scroll").scrollTop = 0;
  chooseSamples();
}

// Training samples, or held-out answers.
function setKind(kind) {
  if (kind === browser.kind) return;
  Object.assign(browser, { kind, opened: false, chosen: null, step: "", preset: "all", sort: null });
  $("sample-kind").value = kind;
  $("list").classList.toggle("held", kind === "evals");
  $("scroll").scrollTop = 0;
  indexSamples();
  showSamplesNote();
}

function startBrowser() {
  $("sample-kind").addEventListener("change", () => setKind($("sample-kind").value));
  for (const [name, preset] of Object.entries(PRESETS)) {
    preset.button = el("button", { type: "button", "data-preset": name, "aria-pressed": "false", on: { click: () => { browser.preset = name; browser.sort = null; $("scroll").scrollTop = 0; chooseSamples(); } } }, preset.label);
    $("presets").append(preset.button);
  }
  for (const column of COLUMNS) {
    const sort = () => {
      const again = browser.sort && browser.sort.column === column;
      browser.sort = { column, direction: again ? -browser.sort.direction : column.num && column.name !== "step" ? -1 : 1 };
      chooseSamples();
    };
    column.head = el("div", { role: "columnheader", class: [column.num && "num", column.opt && "opt", column.train && "train"].filter(Boolean).join(" ") }, el("button", { type: "button", title: column.hint || "sort", "data-column": column.name, on: { click: sort } }, column.label));
    $("list-head").append(column.head);
  }
  $("scroll").addEventListener("scroll", () => { cancelAnimationFrame(frame); frame = requestAnimationFrame(renderRows); }, { passive: true });
  new ResizeObserver(() => {
    $("list-head").style.paddingRight = 10 + $("scroll").offsetWidth - $("scroll").clientWidth + "px"; // beside the scroll bar
    renderRows();
  }).observe($("scroll"));
  let wait = 0;
  $("search").addEventListener("input", () => { clearTimeout(wait); wait = setTimeout(() => { browser.query = $("search").value; $("scroll").scrollTop = 0; chooseSamples(); }, 80); });
  $("sample-step").addEventListener("change", () => { browser.step = $("sample-step").value; chooseSamples(); });
}
