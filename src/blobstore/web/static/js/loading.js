/** Parts of a page that wait for the server: waiting, loaded, and failed. */

import { ApiError } from "./api.js";
import { el, isolated, visible } from "./dom.js";

let waiting = 0; // places

/**
 * Fill a place with what a promise gives; an error is shown there, with a button to try again. The
 * window gets an event `filled` when no place waits any longer.
 */
export async function fill(place, get, draw) {
  place.setAttribute("aria-busy", "true");
  waiting += 1;
  if (!place.hasChildNodes()) place.append(el("p", { class: "waiting" }, "Loading …"));
  try {
    const found = await get();
    place.replaceChildren();
    await draw(found);
  } catch (error) {
    if (error instanceof DOMException && error.name === "AbortError") return;
    if (!(error instanceof ApiError)) reportError(error);
    place.replaceChildren(failure(error, () => fill(place, get, draw)));
  } finally {
    place.removeAttribute("aria-busy");
    waiting -= 1;
    if (!waiting) dispatchEvent(new Event("filled"));
  }
}

/** Return a function that gives one promise each time; after a failure it asks again. */
export function once(get) {
  let asked = null;
  return () => {
    asked ??= get().catch((error) => {
      asked = null;
      throw error;
    });
    return asked;
  };
}

/** Return an error with its hint. */
export function failure(error, again) {
  const message = error instanceof Error ? error.message : String(error);
  const hint = error instanceof ApiError ? error.hint : "";
  return el(
    "div",
    { class: "failure", role: "alert" },
    el("p", {}, el("strong", {}, "This could not be shown: "), isolated(message)),
    hint ? hinted(hint) : null,
    again ? el("button", { type: "button", onclick: again }, "Try again") : null,
  );
}

/** Return a hint whose `commands` are set as code. */
function hinted(hint) {
  const parts = visible(hint).split(/`([^`]+)`/);
  return el("p", { class: "hint" }, parts.map((part, i) => (i % 2 ? el("code", {}, part) : part)));
}

/** Return a state without content: what is missing, and the command that makes it. */
export function missing(text, command, ...more) {
  return el("div", { class: "missing" }, el("p", {}, text), commandLine(command), ...more);
}

/** Return a command with a button that copies it. */
export function commandLine(command) {
  const said = el("span", { class: "visually-hidden", role: "status" });
  const button = el("button", { type: "button", class: "quiet" }, "Copy");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(command);
      button.textContent = "Copied";
      said.textContent = "The command was copied";
    } catch {
      getSelection()?.selectAllChildren(code);
      said.textContent = "The command is selected";
    }
  });
  const code = el("code", { dir: "ltr" }, visible(command));
  return el("div", { class: "command" }, code, button, said);
}
