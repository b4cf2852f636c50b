/** The damage of a store, as the last `verify` found it. */

import { ask } from "./api.js";
import { el, isolated, modelLink, visible } from "./dom.js";
import { commandLine, fill, missing } from "./loading.js";
import { table } from "./table.js";
import { age, counted, short, size, whole } from "./units.js";

const SHOWN = 3; // names of a damaged blob; the number of the others is said

/** Show the last result of `verify`, or the command that makes one. */
export function showDamage(place) {
  fill(place, () => ask("damage"), (found) => {
    if (found.result) place.append(...report(found));
    else place.append(missing("This store has not been verified yet.", "blobstore verify"));
  });
}

function report({ verified, quick, sample, blobs, damaged, broken, odd, result }) {
  const when = el("time", { datetime: verified, title: verified }, age(verified));
  const extent = quick ? " (--quick)" : sample ? ` (--sample ${visible(sample)})` : "";
  const checked = `${counted(result.checked, "blob")} checked, ${size(result.bytes)} hashed${extent}`;
  const isWhole = blobs === result.checked;
  const bad = damaged + broken;
  const verdict = bad
    ? el("strong", { class: "badge bad" }, counted(bad, "fault"))
    : el("strong", { class: "sound" }, isWhole ? "✓ All sound" : "✓ Sound");
  return [
    el("p", { class: "verdict" }, verdict, " ", checked, ", ", when, isWhole ? "" : `; the store has ${whole(blobs)} now`),
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

const BLOBS = [{ title: "Blob" }, { title: "Reason" }, { title: "Models" }, { title: "Tensors" }];
const MANIFESTS = [{ title: "Model" }, { title: "Reason" }];
const FILES = [{ title: "File" }, { title: "Reason" }];

const blobRow = (blob) => [
  el("code", { title: blob.digest }, short(blob.digest)),
  visible(blob.reason),
  names(blob.models, blob.model_count),
  names(blob.tensors, blob.tensor_count),
];

const manifestRow = (model) => [
  modelLink(model.name),
  visible(model.reason),
];

const fileRow = (file) => [isolated(file.path), visible(file.reason)];

function names(found, number) {
  const more = number > SHOWN ? ` and ${whole(number - SHOWN)} more` : "";
  return isolated(found.slice(0, SHOWN).join(", ") + more);
}
