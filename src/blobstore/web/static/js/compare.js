/** The page that compares models: what differs between two, and what several cost and lose. */

import { choose, query } from "./address.js";
import { ask } from "./api.js";
import { showChooser } from "./chooser.js";
import { difference } from "./difference.js";
import { byId, el, section } from "./dom.js";
import { showFrontier } from "./frontier.js";
import { fill, missing } from "./loading.js";
import { onBack, titled } from "./page.js";
import { counted } from "./units.js";

const chosen = () => [...new Set(query().getAll("model"))];

function show(models) {
  const draw = () => {
    const names = chosen();
    showChooser(byId("chooser"), models, names, (next) => {
      choose({ model: next });
      draw();
    });
    byId("count").textContent = names.length ? counted(names.length, "model") : "";
    titled(names.length ? `Compare ${names.join(", ")}` : "Compare");
    showComparison(names, models);
  };
  onBack(draw);
  draw();
}

function showComparison(names, models) {
  const place = byId("comparison");
  place.replaceChildren();
  if (names.length < 2) {
    const text = models.length < 2 ? "Two models are needed to compare." : "Choose two models or more.";
    place.append(el("p", { class: "waiting" }, text));
    return;
  }
  if (names.length === 2) {
    const part = section("What differs");
    place.append(part.section);
    fill(part.body, () => ask("diff", { a: names[0], b: names[1] }), (found) =>
      part.body.append(...difference(found)),
    );
  }
  const part = section("Error against size");
  place.append(part.section);
  showFrontier(part.body, names, models);
}

fill(byId("comparison"), () => ask("models"), (models) => {
  if (models.length) show(models);
  else byId("comparison").append(missing("This store has no models yet. Import one:", "blobstore import FOLDER"));
});
