/** Elements of the page. Text of a store becomes text nodes and attributes, never markup. */

import { address } from "./address.js";
import { inlined } from "./api.js";
import { age } from "./units.js";

/**
 * Return a new element.
 *
 * Attributes that are functions are listeners of events (`onclick`); those that are false, null or
 * undefined are left out.
 */
export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, String(value));
  }
  element.append(...nodes(children));
  return element;
}

/**
 * Return a link that calls a function instead of being followed, unless it is opened in another tab
 * or window.
 */
export function choiceLink(href, onFollow, attributes, ...children) {
  const onclick = (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    onFollow();
  };
  return el("a", { href, onclick, ...attributes }, ...children);
}

/** Return the children that are there: numbers as text, without absent ones. */
function nodes(children) {
  const found = children.flat();
  return found
    .filter((child) => child !== null && child !== undefined && child !== false)
    .map((child) => (child instanceof Node ? child : String(child)));
}

/** Return the element with an id, which the page's HTML has. */
export function byId(id) {
  const found = document.getElementById(id);
  if (!found) throw new Error(`this page has no #${id}`);
  return found;
}

/** Return text of a store, set apart from the direction of the text around it. */
export function isolated(text, className) {
  return el("bdi", { class: className }, visible(text));
}

/** Return a link to a model's page, or the name alone in a file, which has no other pages. */
export const modelLink = (name) =>
  inlined ? isolated(name) : el("a", { href: address("/model", { name }) }, isolated(name));

/** Return a link to a file of a model as text, or the name alone in a file. */
export const fileLink = (model, file, text = file) =>
  inlined ? isolated(text) : el("a", { href: address("/api/file", { model, file }) }, isolated(text));

/** Return how long ago a moment was, with the moment itself. */
export const when = (moment) => el("time", { datetime: moment, title: moment }, age(moment));

/** Return a section with a heading, and the place of its content. */
export function section(title) {
  const body = el("div");
  return { section: el("section", { "aria-label": title }, el("h2", {}, title), body), body };
}

/** Characters that would not be seen, or would change the order of others. */
const HIDDEN = /[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/gu;

const SHORT = { "\n": "\\n", "\r": "\\r", "\t": "\\t" };

/** Return lines of text, each as `visible` does. */
export const visibleLines = (text) => text.split("\n").map(visible).join("\n");

/** Return a text in which invisible characters are escapes, as the command line prints them. */
export function visible(text) {
  return text.replace(HIDDEN, (character) => {
    const code = (character.codePointAt(0) ?? 0).toString(16);
    if (code.length > 4) return `\\U${code.padStart(8, "0")}`;
    const long = code.length > 2 ? `\\u${code.padStart(4, "0")}` : `\\x${code.padStart(2, "0")}`;
    return SHORT[character] ?? long;
  });
}
