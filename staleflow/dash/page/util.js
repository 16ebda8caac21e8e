// Elements, requests and numbers: what every view needs.

export const COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8B6C42", "#7F7F7F"];
// By age in steps: 0 is fresh.
export const AGES = ["#009E73", "#56B4E9", "#E69F00", "#D55E00", "#CC79A7", "#0072B2", "#8B6C42", "#7F7F7F"];

export const aged = (age) => (age === 0 ? "fresh" : age === 1 ? "1 step old" : `${age} steps old`);

/** el("p", {class: "muted"}, "text", child): attributes, properties that begin with on, style as an object. */
export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) made[name] = value;
    else if (name === "style") Object.assign(made.style, value);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat().filter((each) => each !== null && each !== undefined && each !== false));
  return made;
}

export async function ask(path, parameters = {}, signal) {
  const given = Object.entries(parameters).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  const answer = await fetch(`api/${path}?${new URLSearchParams(given)}`, { signal });
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.error ?? answer.statusText);
  return body;
}

export function number(value, digits = 3) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e4) {
    for (const [unit, name] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) if (size >= unit) return `${trim(value / unit, 3)}${name}`;
  }
  if (size !== 0 && size < 1e-3) return value.toExponential(1);
  return Number.isInteger(value) ? `${value}` : trim(value, digits);
}
const trim = (value, digits) => `${Number(value.toPrecision(digits))}`;

export const percent = (share) => (Number.isFinite(share) ? `${trim(100 * share, 3)} %` : "–");

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 100) return `${trim(seconds, 3)} s`;
  const all = Math.round(seconds), hours = Math.floor(all / 3600), minutes = Math.floor(all / 60) % 60;
  const two = (part) => `${part}`.padStart(2, "0");
  return hours ? `${hours}:${two(minutes)}:${two(all % 60)}` : `${minutes}:${two(all % 60)}`;
}

export const lifeLink = (run, name, text = name) =>
  el("a", { href: `#trajectory/${run}/${encodeURIComponent(name)}` }, text);

/** A field and what it is called, which stay together on a narrow screen. */
export const labelled = (text, field) => el("span", { class: `pair ${field.className}` }, el("label", { for: field.id }, text), field);

export const facts = (pairs) =>
  el("dl", { class: "facts" }, pairs.map(([name, value, more]) =>
    el("div", {}, el("dt", {}, name), el("dd", {}, value, more ? el("small", {}, ` ${more}`) : null))));

export const legend = (pairs) =>
  el("div", { class: "legend" }, pairs.map(([colour, text]) =>
    el("span", {}, el("i", { class: "swatch", style: { background: colour } }), text)));

/** The response with each run of tokens underlined in the colour of its age. */
export function colouredText(sample, step, found = "") {
  const ends = sample.ends.length === sample.versions.length ? sample.ends : null;
  const parts = sample.versions.map(([version, count], at) => ({
    version, count, text: ends ? sample.response.slice(at ? ends[at - 1] : 0, at === ends.length - 1 ? undefined : ends[at]) : null,
  }));
  if (!ends || !parts.length) return el("div", { class: "text" }, highlighted(sample.response, found));
  return el("div", { class: "text" }, parts.map(({ version, count, text }) => version < 0
    ? el("span", { class: "given", title: `given by the environment, ${count} tokens` }, highlighted(text, found))
    : el("span", {
      class: "span", title: `version ${version}, ${step - version} steps old when trained, ${count} tokens`,
      style: { borderColor: AGES[Math.min(Math.max(0, step - version), AGES.length - 1)] },
    }, el("sup", {}, `v${version}`), highlighted(text, found))));
}

export function highlighted(text, found) {
  if (!found) return [text];
  const parts = [], low = text.toLowerCase(), wanted = found.toLowerCase();
  let at = 0;
  for (let hit = low.indexOf(wanted); hit >= 0 && parts.length < 200; hit = low.indexOf(wanted, at)) {
    parts.push(text.slice(at, hit), el("mark", {}, text.slice(hit, hit + wanted.length)));
    at = hit + wanted.length;
  }
  return [...parts, text.slice(at)];
}

export const promptText = (prompt) =>
  typeof prompt === "string" ? prompt : prompt.map((each) => `${each.role}: ${each.content}`).join("\n");

export const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
