/** The tensors of a model: the columns that the server sends, as items; their types and colours. */

import { el, isolated, visible } from "./dom.js";
import { counting } from "./search.js";
import { number, table } from "./table.js";
import { count, shape, size, whole } from "./units.js";

/** Return the tensors of `/api/tensors`. */
export function tensorsOf({ names, types, shapes, sizes }) {
  return names.map((name, i) => {
    const type = types[i];
    const dims = shape(shapes[i]);
    return {
      name,
      type,
      shape: dims,
      parameters: shapes[i].reduce((product, dim) => product * dim, 1),
      size: sizes[i],
      searched: `${name} ${type} ${dims}`.toLowerCase(),
    };
  });
}

export const ORDERS = {
  name: (tensor) => counting(tensor.name),
  type: (tensor) => tensor.type,
  parameters: (tensor) => tensor.parameters,
  size: (tensor) => tensor.size,
};

/** Return how much there is of each kind of type, the largest first. */
export function shares(tensors) {
  const found = new Map();
  for (const tensor of tensors) {
    const type = kind(tensor.type);
    const share = found.get(type) ?? { type, tensors: 0, parameters: 0, size: 0 };
    share.tensors += 1;
    share.parameters += tensor.parameters;
    share.size += tensor.size;
    found.set(type, share);
  }
  return [...found.values()].sort((a, b) => b.size - a.size);
}

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

const TREE = ["Module", "Type", "Shape", number("Parameters"), number("Size")];

/** Return the rows of `/api/tree`: modules, those that are alike on one line. */
export const treeTable = (rows) => table("Modules", TREE, rows.map(branch));

function branch({ depth, name, alike, types, shape: dims, parameters, size: nbytes }) {
  const said = el("span", { class: "module" }, isolated(name), alike > 1 ? ` (${whole(alike)} alike)` : "");
  said.style.paddingInlineStart = `${depth * 1.25}rem`;
  return [said, el("span", { class: "chips" }, types.map(typed)), dims ? shape(dims) : "", count(parameters), size(nbytes)];
}
