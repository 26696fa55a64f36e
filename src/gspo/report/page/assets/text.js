// Small things the page is made of: elements, numbers, and text that can do nothing but be read.
"use strict";

const $ = (id) => document.getElementById(id);

// Attributes go through setAttribute and text through textContent: nothing here parses markup.
function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "on") for (const [event, handler] of Object.entries(value)) node.addEventListener(event, handler);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  for (const child of children.flat()) if (child != null) node.append(child);
  return node;
}

// Control, format (bidi among them), surrogate and separator characters are shown as escapes. Tab, line feed and the two
// joiners stay: scripts and emoji need them, and they move nothing.
const UNSEEN = /[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Zl}\p{Zp}]/gu;
const HARMLESS = new Set(["\n", "\t", "\u200c", "\u200d"]);

function escapeOf(c) {
  const code = c.codePointAt(0);
  if (code < 256) return "\\x" + code.toString(16).padStart(2, "0");
  return code < 65536 ? "\\u" + code.toString(16).padStart(4, "0") : "\\u{" + code.toString(16) + "}";
}

// Nodes for a text: readable characters as they are, the others marked.
function inert(text) {
  const out = [];
  let from = 0;
  for (const found of String(text).matchAll(UNSEEN)) {
    if (HARMLESS.has(found[0])) continue;
    if (found.index > from) out.push(text.slice(from, found.index));
    out.push(el("span", { class: "ctl", title: "a character that cannot be seen" }, escapeOf(found[0])));
    from = found.index + found[0].length;
  }
  if (from < text.length) out.push(text.slice(from));
  return out;
}

// The same as one string, for attributes and one-line previews.
const inertLine = (text) => String(text).replace(UNSEEN, (c) => (c === "\n" ? "⏎" : HARMLESS.has(c) ? c : escapeOf(c)));

function num(value, digits = 3) {
  if (value == null || typeof value === "string") return value == null ? "–" : value;
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e5 || size < 1e-3) return value.toExponential(Math.max(digits - 2, 1)).replace("e+", "e");
  return size >= 100 ? value.toLocaleString("en", { maximumFractionDigits: 1 }) : String(+value.toPrecision(digits));
}
const share = (value) => (value == null ? "–" : (100 * value).toFixed(value < 0.0995 ? 1 : 0) + "\u00a0%");
const signed = (value, digits = 2) => (value == null ? "–" : (value > 0 ? "+" : value < 0 ? "−" : "") + num(Math.abs(value), digits));
const cssColor = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
