/** The head of a model's page. */

import { el, fileLink, isolated, visible } from "./dom.js";
import { facts, table, twin } from "./table.js";
import { bits, count, percent, size, whole } from "./units.js";
import { shares, typeClass, typed } from "./tensors.js";

/** Return what `/api/model` says of a model. */
export function summary(model) {
  const lead = [
    model.architecture,
    `${count(model.parameters)} parameters`,
    model.quant_type,
    size(model.size),
  ];
  return el(
    "div",
    {},
    el("p", { class: "lead" }, isolated(lead.filter(Boolean).join(" · "))),
    el(
      "div",
      { class: "summary" },
      el("div", {}, ...described(model)),
      el("div", { class: "weights", id: "weights" }),
    ),
  );
}

function described(model) {
  const numbers = facts([
    ["Parameters", whole(model.parameters)],
    ["Bits per weight", bits(model.bits_per_weight)],
    ["Context length", model.context_length && whole(model.context_length)],
    ["Embedding length", model.embedding_length && whole(model.embedding_length)],
    ["Manifest layers", whole(model.layers)],
    ["Tensors", whole(model.tensors)],
    ["Capabilities", badges(model.capabilities)],
    ["State", model.packed ? "packed" : null],
  ]);
  const id = facts([["ID", el("code", {}, visible(model.id))]]);
  const layers = twin(`Layers without tensors: ${whole(model.documents.length)}`, () => layersTable(model));
  return [numbers, id, el("ul", { class: "runs" }, model.runs_in.map(verdict)), layers];
}

function layersTable({ name: model, documents }) {
  const heads = [{ title: "Name" }, { title: "Kind" }, { title: "Size", number: true }];
  const rows = documents.map(({ kind, name, size: nbytes }) => [
    fileLink(model, name ?? kind),
    visible(kind),
    size(nbytes),
  ]);
  return table("Layers without tensors", heads, rows);
}

function badges(words) {
  if (!words.length) return null;
  return el("span", { class: "chips" }, words.map((word) => el("span", { class: "badge" }, visible(word))));
}

/** Return where a model runs: `runs in mlx-lm 0.32.2: qwen3, int4, int8`. */
function verdict({ runtime, version, runs, reason }) {
  const words = { yes: ["yes", "✓ runs in"], no: ["no", "✗ does not run in"] };
  const [className, said] = words[runs] ?? ["unknown", "? unknown in"];
  return el(
    "li",
    {},
    el("span", { class: className }, said),
    ` ${visible(runtime)} ${visible(version)}`,
    reason ? el("span", { class: "soft" }, ": ", isolated(reason)) : null,
  );
}

/** Return how many bytes and parameters each kind of type has: a bar, and its numbers. */
export function weights(tensors) {
  const found = shares(tensors);
  const all = found.reduce((sum, share) => sum + share.size, 0);
  const bar = el("div", { class: "bar", "aria-hidden": "true" });
  for (const share of found) {
    const part = el("span", { class: typeClass(share.type) });
    part.style.flexGrow = String(share.size);
    bar.append(part);
  }
  const rows = found.map((share) => [
    typed(share.type),
    count(share.parameters),
    size(share.size),
    percent(all ? share.size / all : 0),
  ]);
  const heads = [
    { title: "Type" },
    { title: "Parameters", number: true },
    { title: "Size", number: true },
    { title: "Share", number: true },
  ];
  const numbers = table("Weights by type", heads, rows);
  return el("div", {}, el("h2", {}, "Weights by type"), bar, numbers);
}
