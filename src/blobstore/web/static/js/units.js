/** Numbers as the command line prints them (`cli/output.py`). */

const UNITS = ["B", "KB", "MB", "GB", "TB"];
const NUMBERS = new Intl.NumberFormat("en");

/**
 * Return a number below 1000 with at most three digits, as Python's `.3g`: ties go to the even one.
 */
function threeDigits(value) {
  if (value === 0) return "0";
  const unit = 10 ** (2 - Math.floor(Math.log10(value)));
  const scaled = value * unit;
  const isTie = scaled % 1 === 0.5 && Number.isInteger(value * 8);
  return String(isTie ? (2 * Math.round(scaled / 2)) / unit : Number(value.toPrecision(3)));
}

/** Return a size: `5.9 MB` (powers of 1000, as Ollama). */
export function size(nbytes) {
  let value = nbytes;
  let unit = 0;
  while (value >= 999.5 && unit < UNITS.length - 1) {
    value /= 1000;
    unit += 1;
  }
  const digits = value >= 999.5 ? String(Math.round(value)) : threeDigits(value);
  return `${digits} ${UNITS[unit]}`;
}

/** Return a number of parameters: `5.25M`. */
export function count(number) {
  const limits = [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "K"]];
  for (const [limit, suffix] of limits) {
    if (number >= 0.9995 * limit) return `${threeDigits(number / limit)}${suffix}`;
  }
  return String(number);
}

/** Return bits per weight: `8.60`; nothing for null. */
export const bits = (number) => (number === null ? "" : number.toFixed(2));

/** Return the first 12 digits of a digest. */
export const short = (digest) => digest.replace(/^sha256:/, "").slice(0, 12);

/** Return a whole number with separators: `1,000`. */
export const whole = (number) => NUMBERS.format(number);

/** Return a number of things: `1 blob`, `1,000 blobs`. */
export const counted = (number, noun) => `${whole(number)} ${noun}${number === 1 ? "" : "s"}`;

/** Return a shape: `768x256`. */
export const shape = (dims) => dims.join("x") || "scalar";

/** Return a share in percent, with three digits: `4.99%`. */
export function percent(part) {
  if (part === null) return "not finite";
  const value = part * 100;
  return value !== 0 && value < 0.001 ? "<0.001%" : `${Number(value.toPrecision(3))}%`;
}

/** Return a figure with four digits. */
export const figure = (value) => (value === null ? "not finite" : String(Number(value.toPrecision(4))));

/** Return how long ago a moment was: `2 hours ago`. */
export function age(moment, now = Date.now()) {
  if (moment === null) return "unknown";
  const seconds = (now - Date.parse(moment)) / 1000;
  const units = [[86400, "day"], [3600, "hour"], [60, "minute"]];
  for (const [length, unit] of units) {
    if (seconds >= length) return `${counted(Math.floor(seconds / length), unit)} ago`;
  }
  return "just now";
}
