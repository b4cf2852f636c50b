/** A report: the page of a model with the server's answers in the file, and what only it shows. */

import { inlined } from "./api.js";
import { difference } from "./difference.js";
import { byId, el, isolated, section, visible } from "./dom.js";
import { name } from "./model.js";
import { titled } from "./page.js";
import { showPlot } from "./plot.js";
import { facts } from "./table.js";

/** Draw a plot, described below it. */
function drawn(place, plot) {
  showPlot(place, plot);
  place.append(el("p", { class: "soft" }, visible(plot.description)));
}

function part(title, ...children) {
  const made = section(title);
  byId("more").append(made.section);
  made.body.append(...children);
  return made.body;
}

titled(`${name}: report`);
const { answers, diff, scatter, made } = inlined;
if (diff) {
  byId("errors").closest("section").hidden = true; // errors against the other model are shown here
  const place = part(`Differences from ${diff.a}`, ...difference(diff));
  drawn(place, answers["plots/errors"]);
}
if (scatter) drawn(part("Error against the number of weights"), scatter);
const distributions = Object.keys(answers).filter((key) => key.startsWith("plots/distribution "));
if (distributions.length) {
  const place = part("Distributions", el("p", { class: "soft" }, "The tensor with the largest error, and the largest of each type."));
  for (const key of distributions) {
    const body = el("div", { class: "listed" }, el("h3", {}, isolated(key.slice(key.indexOf(" ") + 1))));
    place.append(body);
    drawn(body, answers[key]);
  }
}
part(
  "How this page was made",
  facts(Object.entries(made)),
  el("p", { class: "soft" }, "The page asks no server for anything. Its plots need JavaScript; tables of their values do not."),
);
