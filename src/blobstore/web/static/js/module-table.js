/** The treemap as text: the modules of a model, indented, with their sums. */

import { changed } from "./address.js";
import { choiceLink, isolated, visible } from "./dom.js";
import { table } from "./table.js";
import { kind } from "./types.js";
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

/** Return the tree of modules; numbered ones that are alike and follow each other are one. */
function treeOf(tensors) {
  return summed("", tensors, tensors.map((tensor) => tensor.name.split(".")), 0);
}

function summed(name, tensors, names, depth) {
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

function sums(tensors) {
  let parameters = 0;
  let size = 0;
  const types = new Set();
  for (const tensor of tensors) {
    parameters += tensor.parameters;
    size += tensor.size;
    types.add(kind(tensor.type));
  }
  return { tensors: tensors.length, parameters, size, types };
}

/** Return modules with runs of alike numbered ones as one each. */
function runs(parts) {
  const found = [];
  for (const part of parts) {
    const run = found.at(-1);
    const isAlike = run && isNumber(part.name) && isNumber(run[0].name) && run[0].form === part.form;
    if (isAlike) run.push(part);
    else found.push([part]);
  }
  return found.map((run) => (run.length > 1 ? together(run) : run[0]));
}

const isNumber = (name) => /^\d+$/.test(name);

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
