/** The treemap as text: the modules of a model, indented, with their sums. */

import { changed } from "./address.js";
import { choiceLink, isolated } from "./dom.js";
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

/** Return the table of modules. */
export function modulesTable(tensors, onChoose) {
  const tree = treeOf(tensors);
  let depth = DEPTH;
  let rows = modulesOf(tree.parts, depth);
  while (rows.length > MOST && depth > 1) {
    depth -= 1;
    rows = modulesOf(tree.parts, depth);
  }
  return table(
    "Bytes by module",
    HEADS,
    rows.slice(0, MOST).map((one) => row(one, onChoose)),
  );
}

function modulesOf(modules, depth, parent) {
  return modules.flatMap((module) => {
    const place = parent ? `${parent.place}.${module.part}` : module.part;
    const placed = { module, place, level: parent ? parent.level + 1 : 0 };
    return [placed, ...(depth > 1 ? modulesOf(module.parts, depth - 1, placed) : [])];
  });
}

function row({ module, place, level }, onChoose) {
  const name = choiceLink(
    changed({ place }),
    () => onChoose(place),
    { class: "module", title: `Show the tensors of ${place}` },
    isolated(module.name),
  );
  name.style.marginInlineStart = `${level * 1.25}rem`;
  const types = [...module.types].join(", ");
  return [name, types, whole(module.tensors), count(module.parameters), size(module.size)];
}
