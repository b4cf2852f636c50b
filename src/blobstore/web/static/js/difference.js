/** How one model differs from another: `diff`. */

import { el, isolated, modelLink, visible } from "./dom.js";
import { counting } from "./search.js";
import { facts, number, table, twin } from "./table.js";
import { typed } from "./tensors.js";
import { counted, shape, size, whole } from "./units.js";

const MOST = 1000; // rows of a list: the rest is counted

/** Return what `/api/diff` says. */
export function difference(found) {
  const isSame = !found.added.length && !found.removed.length && !found.changed.length;
  return [
    facts([
      ["A", side(found.a, found.bytes.a)],
      ["B", side(found.b, found.bytes.b)],
      ["Shared", size(found.shared_bytes)],
      ["Equal tensors", whole(found.equal)],
      ["Changed", whole(found.changed.length)],
      ["Only in A", whole(found.removed.length)],
      ["Only in B", whole(found.added.length)],
    ]),
    isSame ? el("p", { class: "waiting" }, "All tensors are equal.") : el("div", { class: "lists" }, ...lists(found)),
  ];
}

const side = (name, nbytes) => el("span", {}, modelLink(name), ` ${size(nbytes)}`);

function lists(found) {
  const sides = [["Only in A", found.removed], ["Only in B", found.added]];
  const changed = found.changed.length
    ? [open(`Changed: ${counted(found.changed.length, "tensor")}`, () => changedTable(found.changed))]
    : [];
  const only = sides
    .filter(([, tensors]) => tensors.length)
    .map(([title, tensors]) => twin(`${title}: ${counted(tensors.length, "tensor")}`, () => onlyTable(title, tensors)));
  return [...changed, ...only, documents(found.documents)].filter((part) => part !== null);
}

function open(summary, make) {
  const details = twin(summary, make);
  details.open = true;
  return details;
}

function changedTable(changes) {
  const heads = ["Tensor", "A", "B", "Shape", number("Size in A"), number("Size in B")];
  const rows = ordered(changes).map(({ name, before, after }) => [
    tensor(name),
    typed(before.type),
    typed(after.type),
    shape(before.shape) === shape(after.shape)
      ? shape(before.shape)
      : `${shape(before.shape)} → ${shape(after.shape)}`,
    size(before.bytes),
    size(after.bytes),
  ]);
  return cut(table("Changed tensors", heads, rows), changes.length);
}

function onlyTable(title, tensors) {
  const heads = ["Tensor", "Type", "Shape", number("Size")];
  const rows = ordered(tensors)
    .map((one) => [tensor(one.name), typed(one.type), shape(one.shape), size(one.bytes)]);
  return cut(table(title, heads, rows), tensors.length);
}

/** Return the first rows in the order of their names, with layer 2 before layer 10. */
const ordered = (tensors) =>
  [...tensors].sort((a, b) => (counting(a.name) < counting(b.name) ? -1 : 1)).slice(0, MOST);

function cut(shown, number) {
  if (number > MOST) shown.append(el("p", { class: "nothing" }, `and ${whole(number - MOST)} more`));
  return shown;
}

const tensor = (name) => el("span", { class: "module" }, isolated(name));

function documents({ added, removed, changed }) {
  const said = [
    ...changed.map((name) => `${visible(name)} differs`),
    ...removed.map((name) => `${visible(name)} is only in A`),
    ...added.map((name) => `${visible(name)} is only in B`),
  ];
  return said.length ? el("p", {}, el("span", { class: "soft" }, "Documents: "), said.join(", ")) : null;
}
