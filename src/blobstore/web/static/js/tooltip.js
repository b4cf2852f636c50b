/** What a plot says of the mark under the pointer, as text. */

import { el, visible, visibleLines } from "./dom.js";

const tip = el("div", { class: "tip", hidden: true, "aria-hidden": "true" });
const AWAY = 14; // pixels from the pointer

/** Show what belongs to a mark: Vega's tooltip handler. */
export function tooltip(_handler, event, _item, value) {
  if (!tip.isConnected) document.body.append(tip);
  tip.hidden = value === null || value === undefined || value === "";
  if (tip.hidden) return;
  tip.replaceChildren(content(value));
  const { offsetWidth: width, offsetHeight: height } = tip;
  const left = Math.min(event.clientX + AWAY, innerWidth - width - 4);
  const under = event.clientY + AWAY;
  const top = under + height > innerHeight ? event.clientY - AWAY - height : under;
  tip.style.transform = `translate(${Math.max(4, left)}px, ${Math.max(4, top)}px)`;
}

function content(value) {
  if (typeof value !== "object") return document.createTextNode(visibleLines(String(value)));
  const rows = Object.entries(value).map(([name, one]) =>
    el("div", {}, el("dt", {}, visible(name)), el("dd", {}, visible(String(one)))),
  );
  return el("dl", {}, rows);
}

addEventListener("scroll", () => (tip.hidden = true), { passive: true, capture: true });
addEventListener("keydown", (event) => {
  if (event.key === "Escape") tip.hidden = true;
});
