/** Several models: the error of each against its size. */

import { ApiError, ask } from "./api.js";
import { el, isolated, modelLink } from "./dom.js";
import { commandLine, fill } from "./loading.js";
import { showPlot } from "./plot.js";
import { table } from "./table.js";
import { typed } from "./types.js";
import { counted, percent, size } from "./units.js";

const NOT_FOUND = 404;

const MOST_DRAWN = 60; // models that the server takes at once (web/api.py)
const MOST_COMMANDS = 5; // the number of the others is said
const HEADS = [
  { title: "Name" },
  { title: "Type" },
  { title: "Size", number: true },
  { title: "Error", number: true },
  { title: "" },
];

/** Show the error against the size of models whose error was measured; commands for the others. */
export function showFrontier(place, names, models) {
  fill(
    place,
    () => Promise.all(names.map((name) => measured(name, models))),
    async (found) => {
      const known = found.filter((one) => one.isMeasured);
      const drawn = known.slice(0, MOST_DRAWN);
      if (drawn.length > 1) {
        const spec = await ask("plots/frontier", { model: drawn.map((one) => one.model.name) });
        await showPlot(place, spec, { hasText: true });
      }
      if (drawn.length < known.length) {
        const text = `The first ${drawn.length} of ${counted(known.length, "model")} are drawn.`;
        place.append(el("p", { class: "soft" }, text));
      }
      place.append(table("Error against size", HEADS, rows(found)));
      const others = found.filter((one) => one.isThere && !one.isMeasured);
      if (others.length) place.append(el("p", { class: "waiting" }, "Measure the error of the others:"));
      const named = others.slice(0, MOST_COMMANDS);
      place.append(...named.map((one) => commandLine(`blobstore quality ${one.model.name} --against SOURCE`)));
      const more = others.length - named.length;
      if (more) place.append(el("p", { class: "waiting" }, `and ${counted(more, "more model")}`));
    },
  );
}

async function measured(name, models) {
  const model = models.find((one) => one.name === name) ?? {
    ...{ name, id: null, size: null, modified: null, quant_type: null, parameters: null },
  };
  try {
    const { result } = await ask("quality", { model: name });
    const error = result?.model.relative_rmse ?? null;
    return { model, error, isMeasured: Boolean(result), isThere: true };
  } catch (error) {
    // A link may name a model that was removed: the others are shown.
    if (!(error instanceof ApiError) || error.status !== NOT_FOUND) throw error;
    return { model, error: null, isMeasured: false, isThere: false };
  }
}

function rows(found) {
  const sorted = [...found].sort((a, b) => (a.model.size ?? 0) - (b.model.size ?? 0));
  return sorted.map(({ model, error, isMeasured, isThere }) => [
    isThere ? modelLink(model.name) : isolated(model.name),
    model.quant_type ? typed(model.quant_type) : "",
    model.size === null ? "" : size(model.size),
    !isThere ? "not found" : isMeasured ? percent(error) : "not measured",
    isFront(model, error, found) ? el("span", { class: "badge" }, "Pareto front") : "",
  ]);
}

/** Return whether no other model is smaller and better. */
function isFront(model, error, found) {
  const isBetter = (other) =>
    other.error !== null &&
    other.model.size <= model.size &&
    other.error <= error &&
    (other.model.size < model.size || other.error < error);
  return error !== null && !found.some(isBetter);
}
