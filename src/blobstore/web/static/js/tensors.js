/** The tensors of a model: the columns that the server sends, as items. */

import { counting } from "./ordering.js";
import { kind } from "./types.js";
import { shape } from "./units.js";

/**
 * @typedef {object} Tensor
 * @property {string} name
 * @property {string} type such as `int4/64`
 * @property {string} shape before packing
 * @property {number} parameters
 * @property {number} size bytes
 * @property {string} searched
 */

/**
 * @typedef {object} Columns
 * @property {string[]} names
 * @property {string[]} types
 * @property {number[][]} shapes
 * @property {number[]} sizes bytes
 */

/**
 * Return the tensors of `/api/tensors`.
 *
 * @param {Columns} columns
 * @returns {Tensor[]}
 */
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

/** @type {import("./ordering.js").Orders<Tensor>} */
export const ORDERS = {
  name: (tensor) => counting(tensor.name),
  type: (tensor) => tensor.type,
  parameters: (tensor) => tensor.parameters,
  size: (tensor) => tensor.size,
};

/** @typedef {{type: string, tensors: number, parameters: number, size: number}} Share */

/**
 * Return how much there is of each kind of type, the largest first.
 *
 * @param {Tensor[]} tensors
 * @returns {Share[]}
 */
export function shares(tensors) {
  /** @type {Map<string, Share>} */
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
