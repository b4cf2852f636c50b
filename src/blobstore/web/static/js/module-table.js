/** The treemap as text: the modules of a model, indented, with their sums. */

import { el, isolated } from "./dom.js";
import { treeOf } from "./modules.js";
import { table } from "./table.js";
import { count, size, whole } from "./units.js";

const DEPTH = 4;
const MOST = 400; // rows: a model with more modules shows fewer levels

const HEADS = [
  { title: "Module" },
  { title: "Type" },
  { title: "Tensors", number: true },
  { title: "Parameters", number: true },
  { title: "Size", number: true },
];

/**
 * Return the table of modules.
 *
 * @param {import("./tensors.js").Tensor[]} tensors
 */
export function modulesTable(tensors) {
  const tree = treeOf(tensors);
  let depth = DEPTH;
  let rows = rowsOf(tree.parts, depth);
  while (rows.length > MOST && depth > 1) {
    depth -= 1;
    rows = rowsOf(tree.parts, depth);
  }
  return table("Bytes by module", HEADS, rows.slice(0, MOST));
}

/**
 * @param {import("./modules.js").Module[]} modules
 * @param {number} depth
 * @param {number} [level]
 * @returns {(Node | string)[][]}
 */
function rowsOf(modules, depth, level = 0) {
  return modules.flatMap((module) => {
    const name = el("span", { class: "module" }, isolated(module.name));
    name.style.paddingInlineStart = `${level * 1.25}rem`;
    const row = [
      name,
      [...module.types].join(", "),
      whole(module.tensors),
      count(module.parameters),
      size(module.size),
    ];
    return [row, ...(depth > 1 ? rowsOf(module.parts, depth - 1, level + 1) : [])];
  });
}
