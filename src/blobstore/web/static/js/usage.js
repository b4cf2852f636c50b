/** The page of a store's disk space, and of the damage that the last `verify` found. */

import { ask } from "./api.js";
import { showDamage } from "./damage.js";
import { byId, el, modelLink } from "./dom.js";
import { fill, missing } from "./loading.js";
import "./page.js";
import { showPlot } from "./plot.js";
import { facts, table } from "./table.js";
import { size, whole } from "./units.js";

const HEADS = [
  { title: "Name" },
  { title: "Size", number: true },
  { title: "Unique", number: true },
  { title: "Shared", number: true },
];

function show(usage) {
  byId("totals").append(totals(usage));
  if (!usage.models.length) {
    byId("models").append(missing("This store has no models yet. Import one:", "blobstore import FOLDER"));
    return;
  }
  fill(byId("shared"), () => ask("plots/shared"), (spec) =>
    showPlot(byId("shared"), spec, { hasText: true }),
  );
  byId("models").append(table("Disk space by model", HEADS, usage.models.map(row)));
}

function totals(usage) {
  const found = facts([
    ["Disk space", size(usage.bytes)],
    ["Blobs", whole(usage.blobs)],
    ["Models", whole(usage.models.length)],
    ["Needed by no model", size(usage.reclaimable)],
    ["Trash", size(usage.trash)],
    ["Packed files", usage.packed && size(usage.packed)],
  ]);
  return el("div", { class: "totals" }, found);
}

function row(model) {
  const link = modelLink(model.name);
  const packed = model.packed ? el("span", { class: "badge" }, "packed") : null;
  const broken = model.error ? el("span", { class: "badge bad" }, "broken") : null;
  const name = el("span", { class: "name-cell" }, link, packed, broken);
  const known = [model.bytes, model.unique, model.shared];
  return [name, ...known.map((nbytes) => (nbytes === null ? "" : size(nbytes)))];
}

fill(byId("totals"), () => ask("usage"), show);
showDamage(byId("damage"));
