/** The head of a model's page. */

import { el, fileLink, isolated, visible, when } from "./dom.js";
import { commandLine } from "./loading.js";
import { facts, number, table, twin } from "./table.js";
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
    ["Modified", model.modified && when(model.modified)],
  ]);
  const id = facts([["ID", el("code", {}, visible(model.id))]]);
  const layers = twin(`Layers without tensors: ${whole(model.documents.length)}`, () => layersTable(model));
  return [numbers, id, el("ul", { class: "runs" }, model.runs_in.map(verdict)), layers];
}

function layersTable({ name: model, documents }) {
  const heads = ["Name", "Kind", number("Size")];
  const rows = documents.map(({ kind, name, size: nbytes }) => [
    fileLink(model, name ?? kind),
    visible(kind),
    size(nbytes),
  ]);
  return table("Layers without tensors", heads, rows);
}

/** Return how the model is used: a command or a line of Python each, to be copied. */
export function uses({ name, runs_in: runsIn }) {
  const isRunBy = (runtime) => runsIn.some((one) => one.runtime === runtime && one.runs !== "no");
  const parts = name.split("/");
  const folder = parts.at(-1).replace(":", "-");
  const insecure = location.protocol === "http:" ? " --insecure" : "";
  const repository = { 1: `library/${name}`, 2: name }[parts.length];
  const lines = {
    Run: isRunBy("mlx-lm") && `blobstore run ${name}`,
    Python: `import blobstore; model = blobstore.open_model("${name}")`,
    "mlx-lm": isRunBy("mlx-lm") && `blobstore export ${name} ${folder} --format mlx && mlx_lm.chat --model ${folder}`,
    Ollama: isRunBy("Ollama") && `ollama run ${name}`,
    "From another machine": repository && `blobstore pull ${location.host}/${repository} --as ${name}${insecure}`,
  };
  return facts(Object.entries(lines).map(([title, line]) => [title, line && commandLine(line)]));
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
  const heads = ["Type", number("Parameters"), number("Size"), number("Share")];
  return el("div", {}, el("h2", {}, "Weights by type"), bar, table("Weights by type", heads, rows));
}
