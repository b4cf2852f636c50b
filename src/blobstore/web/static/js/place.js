/** Places of a model: modules and their parts, as the treemap and the table of modules name them. */

import { visible } from "./dom.js";

/**
 * Return a function that says which items are in a place: each place is looked up once.
 *
 * A place is the beginning of a name, as pages show it: whole parts of it, of which `*` is any number
 * and `2-5` the numbers from 2 to 5. Everything is in no place.
 */
export function namesIn(items) {
  let last = null;
  let found = new Set();
  return (place) => {
    if (!place) return () => true;
    if (place !== last) {
      const isIn = matches(place);
      found = new Set(items.filter((item) => isIn(visible(item.name).split("."))));
      last = place;
    }
    return (item) => found.has(item);
  };
}

function matches(place) {
  const tests = place.split(".").map(test);
  return (parts) => tests.length <= parts.length && tests.every((is, i) => is(parts[i]));
}

function test(wanted) {
  const range = /^(\d{1,9})-(\d{1,9})$/.exec(wanted);
  const isNumber = (part) => /^\d{1,9}$/.test(part);
  if (wanted === "*") return (part) => part === wanted || isNumber(part);
  if (!range) return (part) => part === wanted;
  const [first, end] = [Number(range[1]), Number(range[2])];
  return (part) => part === wanted || (isNumber(part) && first <= Number(part) && Number(part) <= end);
}
