// Formats numbers with units. Unknown (null) is an en dash, never 0.

export const UNKNOWN = "–";
const SPACE = "\u00a0";

const isUnknown = (value) => value === null || value === undefined || !Number.isFinite(value);

function scaled(value, base, prefixes, unit) {
  let power = 0;
  while (Math.abs(value) >= base * 0.9995 && power < prefixes.length - 1) {
    value /= base;
    power += 1;
  }
  const places = power === 0 ? (Number.isInteger(value) ? 0 : 1) : value < 10 ? 2 : value < 100 ? 1 : 0;
  const tail = prefixes[power] + unit;
  return value.toFixed(places) + (tail ? SPACE + tail : "");
}

export const count = (value, unit = "") =>
  isUnknown(value) ? UNKNOWN : scaled(value, 1000, ["", "k", "M", "B", "T", "Q"], unit);
export const bytes = (value) =>
  isUnknown(value) ? UNKNOWN : scaled(value, 1000, ["", "k", "M", "G", "T", "P"], "B");
export const loss = (value) => (isUnknown(value) ? UNKNOWN : value.toFixed(3));
export const percent = (value, places = 1) => (isUnknown(value) ? UNKNOWN : (100 * value).toFixed(places) + SPACE + "%");
export const whole = (value) => (isUnknown(value) ? UNKNOWN : Math.round(value).toLocaleString("en"));
export const mbit = (value) => (isUnknown(value) ? UNKNOWN : value >= 100 ? value.toFixed(0) : value.toPrecision(2));
export const ms = (value) =>
  isUnknown(value) ? "" : (value >= 10 ? Math.round(value) : Number(value.toPrecision(2))) + SPACE + "ms";

export function duration(seconds) {
  if (isUnknown(seconds)) return UNKNOWN;
  const s = Math.max(0, seconds);
  if (s > 0 && s < 0.0995) return Math.max(1, Math.round(s * 1000)) + SPACE + "ms";
  if (s < 9.95) return s.toFixed(1) + SPACE + "s";
  if (s < 90) return Math.round(s) + SPACE + "s";
  if (s < 90 * 60) return Math.round(s / 60) + SPACE + "min";
  if (s < 36 * 3600) {
    const minutes = Math.round(s / 60);
    return `${Math.floor(minutes / 60)}${SPACE}h${SPACE}${String(minutes % 60).padStart(2, "0")}${SPACE}min`;
  }
  const hours = Math.round(s / 3600);
  return `${Math.floor(hours / 24)}${SPACE}d${SPACE}${hours % 24}${SPACE}h`;
}

export const age = (seconds) =>
  isUnknown(seconds) ? "at an unknown time" : seconds < 1.5 ? "now" : duration(seconds).replace(/\.\d/, "") + " ago";

export function clock(at_s, withDay = false) {
  if (isUnknown(at_s)) return UNKNOWN;
  const at = new Date(at_s * 1000);
  const two = (value) => String(value).padStart(2, "0");
  const time = `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
  return withDay ? `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} ${time}` : time;
}

/** Time of day, with the date if it differs from the reference's. */
export function moment(at_s, reference_s) {
  const isFar = new Date(at_s * 1000).toDateString() !== new Date(reference_s * 1000).toDateString();
  return isFar ? clock(at_s, true).slice(5, 16) : clock(at_s);
}

/** A scaled number without trailing zeros, for an axis. */
export const tick = (text) => text.replace(/(\.\d*[1-9])0+|\.0+(?=\D|$)/, "$1");

export function money(value, currency) {
  if (isUnknown(value)) return UNKNOWN;
  try {
    return new Intl.NumberFormat("en", { style: "currency", currency }).format(value);
  } catch {
    return `${value.toFixed(2)}${SPACE}${currency}`;
  }
}

export const plural = (number, one, many = one + "s") => `${number} ${number === 1 ? one : many}`;
