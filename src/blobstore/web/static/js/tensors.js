/** The tensors of a model: the columns that the server sends, as items. */

import { counting } from "./ordering.js";
import { kind } from "./types.js";
import { shape } from "./units.js";

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
