/** Types of tensors: their names as the command line prints them, and their colours. */

import { el } from "./dom.js";

const KNOWN = [
  ...["int4", "int8", "nvfp4", "mxfp4", "mxfp8"],
  ...["BF16", "F16", "F32", "F64", "F8_E4M3", "F8_E5M2"],
];

/**
 * Return the kind of a type: its name without the size of groups.
 *
 * @param {string} type such as `int4/64` or `BF16`
 */
export const kind = (type) => type.split("/")[0];

/**
 * Return the class that gives an element the colour of a type.
 *
 * @param {string} type
 */
export function typeClass(type) {
  const found = kind(type);
  return `type-${KNOWN.includes(found) ? found.toLowerCase() : "other"}`;
}

/**
 * Return a type with its colour beside it.
 *
 * @param {string} type
 */
export function typed(type) {
  return el("span", { class: `typed ${typeClass(type)}` }, type);
}
