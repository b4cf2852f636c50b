/** What every page has: its title, the back button, where a person stands, light and dark. */

import { choose, query, settled } from "./address.js";
import { byId } from "./dom.js";

/** Call a function when the back button, or the forward button, changes the address. */
export const onBack = (listener) => addEventListener("popstate", listener);

/** Name the page in the title of the window. */
export function titled(text) {
  document.title = `${text} · blobstore`;
}

const headings = () => [...document.querySelectorAll("main, main h2")].filter((one) => one.offsetParent);
const topOf = (element) => element.getBoundingClientRect().top + scrollY;

/** Keep in the address how many headings a person has passed, and the last one by how many pixels. */
const keepPlace = settled(() => {
  const passed = headings().map(topOf).filter((top) => top <= scrollY);
  choose({ at: passed.length && `${passed.length}:${Math.round(scrollY - passed.at(-1))}` }, { replace: true });
});

addEventListener("scroll", keepPlace, { passive: true });
addEventListener("filled", () => {
  const [passed, beyond] = (query().get("at") ?? "").split(":").map(Number);
  const last = headings()[passed - 1];
  if (last && beyond >= 0) scrollTo(0, topOf(last) + beyond);
}, { once: true });

const SYSTEM = matchMedia("(prefers-color-scheme: dark)");
const CHANGES = new EventTarget();
const changed = () => CHANGES.dispatchEvent(new Event("change"));
let isPrinted = false; // paper is light

SYSTEM.addEventListener("change", changed);
for (const when of ["beforeprint", "afterprint"]) {
  addEventListener(when, () => {
    isPrinted = when === "beforeprint";
    changed();
  });
}

/** Return the theme that is shown. */
export function theme() {
  if (isPrinted) return "light";
  const chosen = document.documentElement.dataset.theme;
  if (chosen === "light" || chosen === "dark") return chosen;
  return SYSTEM.matches ? "dark" : "light";
}

/** Call a function whenever another theme is shown; return what stops that. */
export function onTheme(listener) {
  CHANGES.addEventListener("change", listener);
  return () => CHANGES.removeEventListener("change", listener);
}

const button = byId("theme");
const tell = () => button.setAttribute("aria-pressed", String(theme() === "dark"));
button.addEventListener("click", () => {
  const next = theme() === "dark" ? "light" : "dark";
  document.documentElement.dataset.theme = next;
  try {
    localStorage.setItem("theme", next);
  } catch {
    // Storage is blocked: the choice lasts as long as the page.
  }
  changed();
});
onTheme(tell);
tell();
