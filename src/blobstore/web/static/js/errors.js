/** What quantization changed, by layer: the errors that `quality` kept. */

import { ask } from "./api.js";
import { byId, el, isolated } from "./dom.js";
import { fill, missing } from "./loading.js";
import { showPlot } from "./plot.js";
import { table, twin } from "./table.js";
import { typed } from "./types.js";
import { counted, figure, percent, shape } from "./units.js";

const HEADS = [
  { title: "Tensor" },
  { title: "Type" },
  { title: "Shape", number: true },
  { title: "RMSE", number: true },
  { title: "Relative", number: true },
  { title: "Largest", number: true },
  { title: "Cosine", number: true },
  { title: "Saturated", number: true },
];

/**
 * Show the heat map of errors, or the command that measures them.
 *
 * @param {string} name of the model
 */
export function showErrors(name) {
  const place = byId("errors");
  fill(
    place,
    () => Promise.all([ask("plots/errors", { model: name }), ask("quality", { model: name })]),
    async ([spec, quality]) => {
      byId("errors-count").textContent =
        `${percent(quality.model.relative_rmse)} relative in ${counted(quality.tensors.length, "tensor")}`;
      await showPlot(place, spec, { label: `Error of each tensor of ${name}, by layer` });
      place.append(twin("As a table", () => errorsTable(quality.tensors)));
    },
    (error) =>
      error.status === 404
        ? missing("The error has not been measured yet.", `blobstore quality ${name} --against SOURCE`)
        : null,
  );
}

/** @param {any[]} tensors of QualityView */
function errorsTable(tensors) {
  const rows = tensors.map((tensor) => [
    el("span", { class: "module" }, isolated(tensor.name)),
    typed(tensor.quant_type ?? tensor.dtype),
    shape(tensor.shape),
    figure(tensor.rmse),
    percent(tensor.relative_rmse),
    figure(tensor.max_error),
    figure(tensor.cosine),
    percent(tensor.saturated),
  ]);
  return table("Error of each tensor", HEADS, rows);
}
