/** Plots: specifications of Vega that the server makes, drawn here. */

import { ask } from "./api.js";
import { el } from "./dom.js";
import { onTheme, theme } from "./theme.js";
import { tooltip } from "./tooltip.js";

const VENDOR = ["/static/vendor/vega.min.js", "/static/vendor/vega-interpreter.min.js"];
const NARROWEST = 280; // pixels; below it a plot scrolls

/** @type {Promise<any> | null} */
let loaded = null;

/** Return Vega, which the browser loads when the first plot is drawn. */
function vega() {
  loaded ??= VENDOR.reduce((before, source) => before.then(() => script(source)), Promise.resolve())
    .then(() => /** @type {any} */ (window).vega);
  return loaded;
}

/**
 * @param {string} source
 * @returns {Promise<void>}
 */
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
 * Draw a plot, as wide as its place, in the colours of the theme; it follows both.
 *
 * @param {HTMLElement} place
 * @param {any} spec of Vega
 * @param {object} options
 * @param {string} options.label says what the picture shows
 * @param {(datum: any) => void} [options.onPick] called with what is clicked
 */
export async function showPlot(place, spec, { label, onPick }) {
  const library = await vega();
  const picture = el("div", { role: "img", "aria-label": label });
  place.append(el("div", { class: "plot" }, picture));
  /** @type {any} */
  let view = null;
  let width = 0;
  const draw = async () => {
    view?.finalize();
    const runtime = library.parse(spec, configs[theme()], { ast: true });
    view = new library.View(runtime, {
      expr: library.expressionInterpreter,
      renderer: "canvas",
      container: picture,
      hover: true,
      loader: NO_LOADER,
      tooltip,
    });
    view.width(width);
    if (onPick) view.addEventListener("click", (_, item) => item?.datum && onPick(item.datum));
    await view.runAsync();
  };
}
