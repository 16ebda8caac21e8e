// Every trajectory that ended, the latest first.

import { ask, duration, el, labelled, lifeLink, number } from "./util.js";

let run = 0, body = null, fields = null, timer = 0, next = 0, shown = 0;

export function show(place, chosen, rest) {
  run = chosen; shown = -1;
  const [state, reason] = rest.split(":");
  const later = () => { clearTimeout(timer); timer = setTimeout(() => load(0), 150); };
  fields = {
    name: el("input", { type: "search", id: "name", class: "long", placeholder: "p17, or p17/3", oninput: later }),
    state: el("select", { id: "what", onchange: () => load(0) }, [["", "all"], ["trained", "trained on"], ["dropped", "given up"]].map(([value, text]) => el("option", { value, selected: value === (state ?? "") }, text))),
    reason: reason ?? "",
    step: el("input", { type: "number", id: "step", min: 0, placeholder: "all", style: { width: "6rem" }, oninput: later }),
    newer: el("button", { type: "button", hidden: true, onclick: () => load(0) }, "Show newer ones"),
    more: el("button", { type: "button", onclick: () => load(next) }, "Show older ones"),
  };
  body = el("tbody");
  const heads = ["trajectory", "state", "step", "reward", "tokens", "versions", "last on", "moves", "took"];
  place.append(el("section", { class: "card" },
    el("form", { class: "row gap", onsubmit: (event) => { event.preventDefault(); if (fields.name.value.includes("/")) location.hash = `#trajectory/${run}/${encodeURIComponent(fields.name.value.trim())}`; } },
      labelled("Name", fields.name), labelled("State", fields.state), labelled("Step", fields.step),
      fields.reason ? el("span", { class: "muted" }, `because: ${fields.reason}`) : null, fields.newer),
    el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Trajectories" }, el("table", {}, el("thead", {}, el("tr", {}, heads.map((name, at) => el("th", { scope: "col", class: at === 6 ? "after" : at > 1 ? "n" : "" }, name)))), body)),
    fields.more));
  return load(0);
}

export function hide() { body = null; }

/** What comes while somebody reads does not move the table away: it waits behind a button. */
export function news(now) {
  if (!body || now.info.heads.trajectories === shown) return;
  if (!body.querySelector("a")) load(0);
  else fields.newer.hidden = shown < 0;
  shown = now.info.heads.trajectories;
}

async function load(before) {
  const found = await ask("trajectories", { run, name: fields.name.value.trim(), state: fields.state.value, reason: fields.reason, step: fields.step.value, before: before || "", limit: 50 });
  if (!body) return;
  if (!before) { body.replaceChildren(); fields.newer.hidden = true; }
  body.append(...found.trajectories.map(row));
  if (!body.children.length) body.append(el("tr", {}, el("td", { colspan: 9, class: "muted" }, "None has ended yet that fits.")));
  next = found.before;
  fields.more.hidden = !next;
}

function row(each) {
  const versions = each.oldest === null ? "–" : each.oldest === each.newest ? `${each.oldest}` : `${each.oldest}–${each.newest}`;
  return el("tr", {}, el("td", {}, lifeLink(run, each.name)), el("td", {}, each.state === "trained" ? "trained" : `given up: ${each.reason}`), el("td", { class: "n" }, each.step ?? "–"), el("td", { class: "n" }, number(each.reward)),
    el("td", { class: "n" }, each.tokens), el("td", { class: "n" }, versions), el("td", { class: "after" }, each.instance || "–"), el("td", { class: "n" }, each.moves), el("td", { class: "n" }, duration(each.ended - each.admitted)));
}
