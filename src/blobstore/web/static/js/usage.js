/** The page of a store's disk space, and of the damage that the last `verify` found. */

import { ask } from "./api.js";
import { byId, el, isolated, modelLink, visible, when } from "./dom.js";
import { commandLine, fill, missing } from "./loading.js";
import "./page.js";
import { showPlot } from "./plot.js";
import { facts, number, table } from "./table.js";
import { counted, short, size, whole } from "./units.js";

const HEADS = ["Name", number("Size"), number("Unique"), number("Shared")];

function show(usage) {
  byId("totals").append(totals(usage));
  if (!usage.models.length) {
    byId("models").append(missing("This store has no models yet. Import one:", "blobstore import FOLDER"));
    return;
  }
  const place = byId("shared");
  fill(place, () => ask("plots/shared"), (spec) => showPlot(place, spec, { hasText: true }));
  byId("models").append(table("Disk space by model", HEADS, usage.models.map(row)));
}

function totals(usage) {
  const found = facts([
    ["Disk space", size(usage.bytes)],
    ["Blobs", whole(usage.blobs)],
    ["Models", whole(usage.models.length)],
    ["Not needed by any model", size(usage.reclaimable)],
    ["Trash", size(usage.trash)],
    ["Packed files", usage.packed && size(usage.packed)],
  ]);
  return el("div", { class: "totals" }, found, el("p", { class: "soft" }, "counted ", when(new Date().toISOString())));
}

function row(model) {
  const link = modelLink(model.name);
  const packed = model.packed ? el("span", { class: "badge" }, "packed") : null;
  const broken = model.error ? el("span", { class: "badge bad" }, "broken") : null;
  const name = el("span", { class: "name-cell" }, link, packed, broken);
  const known = [model.bytes, model.unique, model.shared];
  return [name, ...known.map((nbytes) => (nbytes === null ? "" : size(nbytes)))];
}

const SHOWN = 3; // names of a damaged blob; the number of the others is said

/** Show the last result of `verify`, or the command that makes one. */
function showDamage(place) {
  fill(place, () => ask("damage"), (found) => {
    if (found.result) place.append(...report(found));
    else place.append(missing("This store has not been verified yet.", "blobstore verify"));
  });
}

function report({ verified, quick, sample, blobs, damaged, broken, odd, result }) {
  const extent = quick ? " (--quick)" : sample ? ` (--sample ${visible(sample)})` : "";
  const checked = `${counted(result.checked, "blob")} checked, ${size(result.bytes)} hashed${extent}`;
  const isWhole = blobs === result.checked;
  const bad = damaged + broken;
  const verdict = bad
    ? el("strong", { class: "badge bad" }, counted(bad, "fault"))
    : el("strong", { class: "sound" }, isWhole ? "✓ All sound" : "✓ Sound");
  return [
    el("p", { class: "verdict" }, verdict, " ", checked, ", ", when(verified), isWhole ? "" : `; the store has ${whole(blobs)} now`),
    listed("Damaged blobs", damaged, BLOBS, result.damaged.map(blobRow)),
    listed("Broken manifests", broken, MANIFESTS, result.broken.map(manifestRow)),
    listed("Odd files", odd, FILES, result.odd.map(fileRow)),
    bad ? commandLine("blobstore repair NAME") : null,
  ].filter((part) => part !== null);
}

function listed(title, number, heads, rows) {
  if (!rows.length) return null;
  const more = number - rows.length;
  return el(
    "div",
    { class: "listed" },
    el("h3", {}, `${title}: ${whole(number)}`),
    table(title, heads, rows),
    more ? el("p", { class: "nothing" }, `and ${whole(more)} more`) : null,
  );
}

const BLOBS = ["Blob", "Reason", "Models", "Tensors"];
const MANIFESTS = ["Model", "Reason"];
const FILES = ["File", "Reason"];

const blobRow = (blob) => [
  el("code", { title: blob.digest }, short(blob.digest)),
  visible(blob.reason),
  names(blob.models, blob.model_count),
  names(blob.tensors, blob.tensor_count),
];

const manifestRow = (model) => [modelLink(model.name), visible(model.reason)];

const fileRow = (file) => [isolated(file.path), visible(file.reason)];

function names(found, number) {
  const more = number > SHOWN ? ` and ${whole(number - SHOWN)} more` : "";
  return isolated(found.slice(0, SHOWN).join(", ") + more);
}

fill(byId("totals"), () => ask("usage"), show);
showDamage(byId("damage"));
