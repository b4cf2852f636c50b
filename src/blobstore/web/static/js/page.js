/** What every page has. */

import { byId } from "./dom.js";
import { themeSwitch } from "./theme.js";

themeSwitch(byId("theme"));

/** Call a function when the back button, or the forward button, changes the address. */
export const onBack = (listener) => addEventListener("popstate", listener);

/** Name the page in the title of the window. */
export function titled(text) {
  document.title = `${text} · blobstore`;
}
