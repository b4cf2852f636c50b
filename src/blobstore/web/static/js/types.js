/** Types of tensors: their names as the command line prints them, and their colours. */

import { el, visible } from "./dom.js";

const COLOURED = ["int4", "int8", "nvfp4", "mxfp4", "mxfp8", "BF16", "F16", "F32"];

/** Return the kind of a type: its name without the size of groups. */
export const kind = (type) => type.split("/")[0];

/** Return the class that gives an element the colour that a type has in plots. */
export function typeClass(type) {
  const name = kind(type);
  if (COLOURED.includes(name)) return `type-${name.toLowerCase()}`;
  if (name.startsWith("F8")) return "type-f8";
  return /^(BOOL|I|U)/.test(name) ? "type-integers" : "type-other";
}

/** Return why tensors of a type have no histogram; null if they have one. */
export function withoutHistogram(type) {
  if (type === "C64") return "Complex values have no histogram.";
  return /^F[46](_|$)/.test(type) ? `Values of ${type} are not read, so there is no histogram.` : null;
}

/** Return a type with its colour beside it. */
export function typed(type) {
  return el("span", { class: `typed ${typeClass(type)}` }, visible(type));
}
