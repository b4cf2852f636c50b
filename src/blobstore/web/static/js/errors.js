/** What quantization changed, by layer: the errors that `quality` kept. */

import { ask } from "./api.js";
import { byId, el, isolated, visible } from "./dom.js";
import { fill, missing } from "./loading.js";
import { showPlot } from "./plot.js";
import { table, twin } from "./table.js";
import { typed } from "./types.js";
import { age, counted, figure, percent, shape } from "./units.js";

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

/** Show the heat map of errors, or the command that measures them. */
export function showErrors(name) {
  const place = byId("errors");
  fill(place, () => ask("quality", { model: name }), async ({ result, measured, against }) => {
    if (!result) {
      const command = `blobstore quality ${name} --against SOURCE`;
      place.append(missing("The error of this model has not been measured yet.", command));
      return;
    }
    byId("errors-count").textContent = tally(result, measured, against);
    const picture = el("div");
    place.append(picture, twin("As a table", () => errorsTable(result.tensors)));
    await fill(picture, () => ask("plots/errors", { model: name }), (spec) =>
      showPlot(picture, spec, { hasText: true }),
    );
  });
}

function tally({ model, tensors }, measured, against) {
  const changed = tensors.filter((tensor) => !tensor.kept).length;
  const error = `${percent(model.relative_rmse)} relative error in ${counted(changed, "tensor")}`;
  return `${error}${against ? ` against ${visible(against)}` : ""}${measured ? `, measured ${age(measured)}` : ""}`;
}

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
