/** Search boxes: `/` goes to the page's box, Escape empties it. */

import { choose, query } from "./address.js";

const SETTLED_MS = 300; // browsers refuse addresses that change with every key stroke

/** Connect a search box with a parameter of the address. */
export function searchBox(box, parameter, onSearch) {
  let timer = 0;
  const settle = () => {
    clearTimeout(timer);
    if ((query().get(parameter) ?? "") !== box.value) {
      choose({ [parameter]: box.value }, { replace: true });
    }
  };
  box.value = query().get(parameter) ?? "";
  box.addEventListener("input", () => {
    onSearch(box.value);
    clearTimeout(timer);
    timer = setTimeout(settle, SETTLED_MS);
  });
  box.addEventListener("change", settle);
  box.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !box.value) return;
    event.preventDefault();
    box.value = "";
    onSearch("");
    settle();
  });
  addEventListener("pagehide", settle);
}

/** Let `/` go to a search box from anywhere but from other boxes. */
export function slashFocuses(box) {
  addEventListener("keydown", (event) => {
    const from = event.target;
    const types = from.closest("input:not([type=checkbox]), select, textarea");
    if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey || types) return;
    event.preventDefault();
    box.focus();
    box.select();
  });
}
