/** Light and dark: the system's choice, or the one of the switch, which is kept. */

const SYSTEM = matchMedia("(prefers-color-scheme: dark)");
const CHANGES = new EventTarget();

/** Return the theme that is shown. @returns {"light" | "dark"} */
export function theme() {
  const chosen = document.documentElement.dataset.theme;
  if (chosen === "light" || chosen === "dark") return chosen;
  return SYSTEM.matches ? "dark" : "light";
}

/**
 * Call a function whenever another theme is shown; return what stops that.
 *
 * @param {() => void} listener
 */
export function onTheme(listener) {
  CHANGES.addEventListener("change", listener);
  return () => CHANGES.removeEventListener("change", listener);
}

/**
 * Make a button the switch of the theme.
 *
 * @param {HTMLElement} button
 */
export function themeSwitch(button) {
  const tell = () => button.setAttribute("aria-pressed", String(theme() === "dark"));
  button.addEventListener("click", () => {
    const next = theme() === "dark" ? "light" : "dark";
    document.documentElement.dataset.theme = next;
    try {
      localStorage.setItem("theme", next);
    } catch {
      // Storage is blocked: the choice lasts as long as the page.
    }
    CHANGES.dispatchEvent(new Event("change"));
  });
  SYSTEM.addEventListener("change", () => CHANGES.dispatchEvent(new Event("change")));
  onTheme(tell);
  tell();
}
