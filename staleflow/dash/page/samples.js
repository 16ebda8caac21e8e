// Prompts and responses of the run, to search and to read.

import { AGES, aged, ask, colouredText, el, highlighted, labelled, legend, lifeLink, number, promptText } from "./util.js";

let run = 0, list = null, fields = null, timer = 0, last = null, shown = 0;

export function show(place, chosen, _, runs) {
  run = chosen; shown = -1;
  const later = () => { clearTimeout(timer); timer = setTimeout(search, 150); };
  fields = {
    q: el("input", { type: "search", id: "q", class: "long", placeholder: "words in prompts and responses", oninput: later }),
    step: el("input", { type: "number", id: "step", min: 0, placeholder: "all", style: { width: "6rem" }, oninput: later }),
    newer: el("button", { type: "button", hidden: true, onclick: () => search() }, "Show newer ones"),
    said: el("span", { class: "muted", role: "status" }),
  };
  list = el("div");
  place.append(el("section", { class: "card" },
    el("div", { class: "row gap" }, labelled("Search", fields.q), labelled("Step", fields.step), fields.said, fields.newer),
    legend(AGES.slice(0, (runs[run]?.bound ?? 0) + 1).map((colour, age) => [colour, `${aged(age)} when trained`])), el("div", { class: "gap" }), list));
  return search();
}

export function hide() { list = null; }

export function news(now) {
  if (!list || now.info.heads.samples === shown) return;
  if (!list.querySelector(".sample")) search();
  else fields.newer.hidden = shown < 0;
  shown = now.info.heads.samples;
}

async function search(before = 0) {
  last?.abort();
  last = new AbortController();
  const more = typeof before === "number" ? before : 0, q = fields.q.value;
  let found;
  try {
    found = await ask("samples", { run, q, step: fields.step.value, before: more || "", limit: 20 }, last.signal);
  } catch (error) {
    if (error.name === "AbortError") return;
    throw error;
  }
  if (!list) return;
  if (!more) { list.replaceChildren(); fields.newer.hidden = true; }
  list.querySelector(".more")?.remove();
  list.append(...found.samples.map((each) => sample(each, q)));
  if (found.before) list.append(el("button", { class: "more", type: "button", onclick: () => search(found.before) }, "Show older ones"));
  const count = list.querySelectorAll(".sample").length;
  fields.said.textContent = `${count}${found.before ? "+" : ""} found`;
  if (!count) list.append(el("p", { class: "empty" }, q ? "No sample has these words." : "There are no samples: simulated runs have none, others after their first step."));
}

function sample(each, q) {
  const rewards = Object.entries(each.rewards).map(([name, value]) => `${name} ${number(value)}`);
  return el("article", { class: "sample" },
    el("div", { class: "row" }, el("b", {}, lifeLink(run, each.name)), el("span", { class: "muted" }, `step ${each.step}`), el("span", {}, `reward ${number(each.reward)}`),
      rewards.length ? el("span", { class: "muted" }, rewards.join(", ")) : null, el("span", { class: "muted" }, `${each.tokens} tokens${each.cut ? ", cut" : ""}`)),
    el("div", { class: "text" }, highlighted(promptText(each.prompt), q)),
    colouredText(each, each.step, q));
}
