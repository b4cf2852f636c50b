/** Plots: specifications of Vega that the server makes, drawn here, and the same values as text. */

import { changed } from "./address.js";
import { inlined } from "./api.js";
import { choiceLink, el, isolated, visible, visibleLines } from "./dom.js";
import { table, twin } from "./table.js";
import { onTheme, theme } from "./page.js";

const VENDOR = "/static/vendor";

let loaded = null;

/** Return Vega, its interpreter and themes, which are loaded when the first plot is drawn. */
const library = () => (loaded ??= load());

async function load() {
  if (inlined) return { vega: window.vega, expr: window.expressionInterpreter, themes: inlined.themes };
  const themes = fetch("/static/themes.json").then((answer) => answer.json());
  await script(`${VENDOR}/vega.min.js`);
  const { expressionInterpreter } = await import(`${VENDOR}/vega-interpreter.js`);
  return { vega: window.vega, expr: expressionInterpreter, themes: await themes };
}

function script(source) {
  return new Promise((resolve, reject) => {
    const element = el("script", { src: source });
    element.addEventListener("load", () => resolve());
    element.addEventListener("error", () => reject(new Error(`${source} could not be loaded`)));
    document.head.append(element);
  });
}

/** A specification contains its data: nothing is loaded for it, from anywhere. */
const NO_LOADER = {
  load: () => Promise.reject(new Error("a plot loads nothing")),
  sanitize: () => Promise.reject(new Error("a plot links to nothing")),
};

/**
 * Return a document in whose texts invisible characters are escapes, as everywhere on the page;
 * lines stay lines.
 */
function printable(document) {
  const text = JSON.stringify(document);
  return JSON.parse(text, (_, value) => (typeof value === "string" ? visibleLines(value) : value));
}

/**
 * Draw a plot, as wide as its place, in the colours of the theme; it follows both. Its values are
 * as a table. `focus` makes what is drawn of the specification; the function that is returned draws
 * it again.
 */
export async function showPlot(place, made, { hasText = false, onPick, focus = (spec) => spec } = {}) {
  const spec = printable(made);
  const canvas = el("div", { "aria-hidden": "true" });
  const picture = el("div", { role: "img", "aria-label": spec.description }, canvas);
  place.append(el("div", { class: "plot" }, picture));
  if (!hasText) place.append(twin("As a table", () => valuesTable(spec, onPick)));
  const { vega, expr, themes } = await library();
  let view = null;
  const draw = () => {
    view?.finalize();
    const runtime = vega.parse(focus(spec), themes[theme()], { ast: true });
    const options = { expr, renderer: "svg", container: canvas, hover: true, loader: NO_LOADER };
    view = new vega.View(runtime, { ...options, tooltip });
    if (onPick) view.addEventListener("click", (_, item) => item?.datum && onPick(item.datum));
    return view.width(canvas.clientWidth).runAsync();
  };
  if (canvas.isConnected) await draw();
  const stopThemes = onTheme(draw);
  const sizes = new ResizeObserver(() => {
    if (!canvas.isConnected) stop();
    else if (canvas.clientWidth) view?.width(canvas.clientWidth).runAsync();
  });
  const stop = () => {
    sizes.disconnect();
    stopThemes();
    view?.finalize();
  };
  sizes.observe(canvas);
  return draw;
}

function valuesTable(spec, onPick) {
  const { columns, rows } = spec.usermeta.table;
  return table(spec.description, columns, onPick ? rows.map((row) => linked(row, onPick)) : rows);
}

/** Return a row whose first cell picks a module, as a click in the plot does, but for all of them. */
function linked([place, ...cells], onPick) {
  if (place === "all modules") return [place, ...cells];
  const pick = () => onPick({ place });
  return [choiceLink(changed({ place }), pick, { class: "module" }, isolated(place)), ...cells];
}

const tip = el("div", { class: "tip", hidden: true, "aria-hidden": "true" });
const AWAY = 14; // pixels from the pointer

/** Show what belongs to a mark: Vega's tooltip handler. */
function tooltip(_handler, event, _item, value) {
  if (!tip.isConnected) document.body.append(tip);
  tip.hidden = value === null || value === undefined || value === "";
  if (tip.hidden) return;
  tip.replaceChildren(content(value));
  const { offsetWidth: width, offsetHeight: height } = tip;
  const left = Math.min(event.clientX + AWAY, innerWidth - width - 4);
  const under = event.clientY + AWAY;
  const top = under + height > innerHeight ? event.clientY - AWAY - height : under;
  tip.style.transform = `translate(${Math.max(4, left)}px, ${Math.max(4, top)}px)`;
}

function content(value) {
  if (typeof value !== "object") return document.createTextNode(visibleLines(String(value)));
  const rows = Object.entries(value).map(([name, one]) =>
    el("div", {}, el("dt", {}, visible(name)), el("dd", {}, visible(String(one)))),
  );
  return el("dl", {}, rows);
}

addEventListener("scroll", () => (tip.hidden = true), { passive: true, capture: true });
addEventListener("keydown", (event) => {
  if (event.key === "Escape") tip.hidden = true;
});
