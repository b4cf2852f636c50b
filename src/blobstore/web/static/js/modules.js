/** Modules of a model: the tree that the names of its tensors make, with sums. */

import { visible } from "./dom.js";
import { kind } from "./types.js";

/** @typedef {import("./tensors.js").Tensor} Tensor */

/**
 * @typedef {object} Module
 * @property {string} name the last part of its path, or a run of alike ones: `0-2 (3 alike)`
 * @property {string} part the last part of its place, as place.js has them
 * @property {number} tensors
 * @property {number} parameters
 * @property {number} size bytes
 * @property {Set<string>} types
 * @property {Module[]} parts
 * @property {string} form the same for modules whose tensors differ in nothing but their names' start
 */

/**
 * Return the tree of modules; numbered ones that are alike and follow each other are one.
 *
 * @param {Tensor[]} tensors
 * @returns {Module}
 */
export function treeOf(tensors) {
  return summed("", tensors, tensors.map((tensor) => tensor.name.split(".")), 0);
}

/**
 * @param {string} name
 * @param {Tensor[]} tensors
 * @param {string[][]} names their parts
 * @param {number} depth how many parts of the names lead here
 * @returns {Module}
 */
function summed(name, tensors, names, depth) {
  /** @type {Map<string, number[]>} */
  const groups = new Map();
  names.forEach((parts, i) => {
    const part = parts[depth];
    if (part === undefined) return;
    const group = groups.get(part);
    if (group) group.push(i);
    else groups.set(part, [i]);
  });
  const parts = [...groups].map(([part, places]) =>
    summed(
      part,
      places.map((i) => tensors[i]),
      places.map((i) => names[i]),
      depth + 1,
    ),
  );
  return {
    name,
    part: visible(name),
    ...sums(tensors),
    parts: runs(parts),
    form: parts.length
      ? parts.map((part) => `${part.name}(${part.form})`).join()
      : tensors.map((tensor) => `${tensor.type} ${tensor.shape}`).join(),
  };
}

/** @param {Tensor[]} tensors */
function sums(tensors) {
  let parameters = 0;
  let size = 0;
  const types = /** @type {Set<string>} */ (new Set());
  for (const tensor of tensors) {
    parameters += tensor.parameters;
    size += tensor.size;
    types.add(kind(tensor.type));
  }
  return { tensors: tensors.length, parameters, size, types };
}

/**
 * Return modules with runs of alike numbered ones as one each.
 *
 * @param {Module[]} parts
 */
function runs(parts) {
  /** @type {Module[][]} */
  const found = [];
  for (const part of parts) {
    const run = found.at(-1);
    const isAlike = run && isNumber(part.name) && isNumber(run[0].name) && run[0].form === part.form;
    if (isAlike) run.push(part);
    else found.push([part]);
  }
  return found.map((run) => (run.length > 1 ? together(run) : run[0]));
}

/** @param {string} name */
const isNumber = (name) => /^\d+$/.test(name);

/**
 * @param {Module[]} run
 * @returns {Module}
 */
function together(run) {
  const first = run[0];
  return {
    ...first,
    name: `${first.name}-${run[run.length - 1].name} (${run.length} alike)`,
    part: `${first.name}-${run[run.length - 1].name}`,
    tensors: first.tensors * run.length,
    parameters: first.parameters * run.length,
    size: run.reduce((sum, part) => sum + part.size, 0),
  };
}
