// What happens now: the steps as buffers, what the open step waits for, and every instance.

import { duration, el, facts, lifeLink, number, percent } from "./util.js";

const STATES = [["trained", "at the trainer"], ["complete", "complete"], ["scoring", "being scored"], ["played", "played by environments"], ["decoding", "decoding (filled: scored)"], ["waiting", "waiting for an instance"], ["free", "free place"]];
// Of a step: what the protocol calls it, in other words.
const STEPS = { training: "in training", open: "has room", stuck: "waits", ready: "ready" };
let parts = null, run = 0, chosen = "";

export function show(place, wanted) {
  run = wanted;
  parts = { head: el("section", { class: "card", "aria-label": "Progress" }), waits: el("div", { "aria-live": "polite" }), buffers: el("div"), fleet: el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Instances" }), notes: el("div") };
  place.append(
    parts.head,
    el("section", { class: "card" }, el("h2", {}, "Step buffers"), parts.waits, parts.buffers,
      el("div", { class: "legend" }, STATES.map(([name, text]) => el("span", {}, el("i", { class: `swatch cell ${name}` }), text)))),
    el("section", { class: "card" }, el("h2", {}, "Instances"), parts.fleet),
    parts.notes,
  );
}

export function hide() { parts = null; }

export function news(now) {
  if (!parts) return;
  head(now);
  waits(now);
  const held = document.activeElement?.closest?.(".buffer")?.dataset.step;
  parts.buffers.replaceChildren(...(now.buffers.length ? now.buffers.map(buffer) : [el("p", { class: "empty" }, now.doing || "No group has been admitted yet.")]));
  if (held !== undefined) parts.buffers.querySelector(`[data-step="${held}"] .cells`)?.focus({ preventScroll: true });
  parts.fleet.replaceChildren(fleet(now));
  const notes = [...(now.info.trouble ? [now.info.trouble] : []), ...now.notes];
  parts.notes.replaceChildren(...(notes.length ? [el("section", { class: "card" }, el("h2", {}, "Notes"), notes.map((each) => el("p", { class: "note" }, each)))] : []));
}

function head(now) {
  const { info } = now, made = now.tokens_trained + now.tokens_wasted;
  const rate = now.instances.reduce((sum, each) => sum + each.tokens_per_s, 0);
  parts.head.replaceChildren(
    facts([
      ["steps", `${info.step}`, `of ${info.steps}`], ["time", duration(now.time)], ["reward", number(now.reward)],
      ["held-out", number(now.accuracy)], ["bound", `${info.bound}`, info.bound === 1 ? "step" : "steps"],
      ["decoding", number(rate), "tokens/s"], ["trained", number(now.tokens_trained), "tokens"], ["wasted", made ? percent(now.tokens_wasted / made) : "–"],
    ]),
    el("progress", { max: info.steps, value: info.step, "aria-label": `${info.step} of ${info.steps} steps` }),
  );
}

function waits(now) {
  const lines = [];
  if (now.info.heads.behind) lines.push(el("p", { class: "muted" }, `Reading the journal: ${number(now.info.heads.behind)} events to go.`));
  if (now.info.state === "running") {
    const since = now.blocked_since === null ? "" : `, for ${duration(Math.max(0, now.time - now.blocked_since))}`;
    if (now.doing) lines.push(el("p", {}, `The run ${now.doing}.`));
    else if (now.waiting_for) lines.push(el("p", {}, `Step ${now.info.step} waits for ${now.waiting_for}${since}.`));
  }
  else if (now.buffers.length) lines.push(el("p", { class: "muted" }, "As they were when the run ended."));
  if (now.blockers.length) {
    lines.push(el("p", { class: "muted" }, "Its longest responses so far: ", now.blockers.slice(0, 6).flatMap((each, at) => [at ? ", " : "", lifeLink(run, each.name), ` (${each.state}${each.instance ? ` on ${each.instance}` : ""}, ${each.tokens.toLocaleString("en")} tokens)`])));
  }
  parts.waits.replaceChildren(...lines);
}

function buffer(each) {
  const counts = {};
  for (const [, state] of each.cells) counts[state] = (counts[state] ?? 0) + 1;
  const free = Math.max(0, each.places - each.cells.length - each.more);
  const text = [...Object.entries(counts).map(([name, count]) => `${count} ${name === "trained" ? "at the trainer" : name}`), free ? `${free} free` : ""].filter(Boolean).join(", ");
  const cells = each.cells.map(([name, state, version, scored, needed, tokens]) => {
    const said = `${name}: ${state}, version ${version}, ${scored} of ${needed} scored, ${tokens} tokens`;
    return el("span", { class: `cell ${state}`, id: `cell-${name}`, role: "option", title: said, "aria-label": said, onclick: () => go(name) },
      state === "decoding" || state === "waiting" ? el("i", { style: { height: `${(100 * scored) / needed}%` } }) : null);
  });
  const empty = Array.from({ length: Math.min(free, 512) }, () => el("i", { class: "cell free", "aria-hidden": "true" }));
  const choose = cells.length ? { role: "listbox", tabindex: "0", onkeydown: key, onfocus: (event) => mark(event.target, 0) } : { role: "img" };
  return el("div", { class: `buffer${each.places > 96 ? " many" : ""}`, "data-step": each.step },
    el("div", {}, el("b", {}, `step ${each.step}`), " ", el("span", { class: "muted" }, STEPS[each.state])),
    el("div", {}, el("div", { class: "cells", ...choose, "aria-label": `step ${each.step}, ${STEPS[each.state]}: ${text}` }, cells, empty),
      el("div", { class: "muted" }, text, each.more ? `, ${each.more} more` : "")));
}

const go = (name) => { location.hash = `#trajectory/${run}/${name}%2F0`; };

/** Arrow keys choose a group of the buffer, Enter opens it. */
function key(event) {
  const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 8, ArrowUp: -8 }[event.key];
  if (event.key === "Enter" && chosen) go(chosen);
  else if (by) mark(event.currentTarget, by);
  else return;
  event.preventDefault();
}

function mark(list, by) {
  const cells = [...list.querySelectorAll("[role=option]")], at = cells.findIndex((each) => each.id === `cell-${chosen}`);
  const next = cells[Math.max(0, Math.min(cells.length - 1, at < 0 ? 0 : at + by))];
  for (const each of cells) each.setAttribute("aria-selected", each === next);
  list.setAttribute("aria-activedescendant", next.id);
  chosen = next.id.slice(5);
}

function fleet(now) {
  const heads = ["instance", "version", "running", "waiting", "KV memory", "tokens/s", ""];
  const rows = now.instances.map((each) => {
    const load = each.kv_total ? each.kv_used / each.kv_total : 0;
    return el("tr", {},
      el("td", {}, each.name), el("td", { class: "n" }, each.version ?? "–"), el("td", { class: "n" }, each.running), el("td", { class: "n" }, each.waiting),
      el("td", { class: "after" }, el("span", { class: `meter${load > 0.9 ? " full" : ""}` }, el("i", { style: { width: `${100 * load}%` } })), ` ${percent(load)}`),
      el("td", { class: "n" }, number(Math.round(each.tokens_per_s))), el("td", {}, each.doing));
  });
  if (!rows.length) return el("p", { class: "empty" }, now.info.state === "running" ? "No instance has reported yet." : "What instances did was not recorded.");
  const more = now.more_instances ? el("caption", { class: "muted" }, `and ${now.more_instances} more: see the timeline`) : null;
  return el("table", {}, more, el("thead", {}, el("tr", {}, heads.map((name, at) => el("th", { class: at === 4 ? "after" : at && at !== 6 ? "n" : "", scope: "col" }, name || el("span", { class: "visually-hidden" }, "doing"))))), el("tbody", {}, rows));
}
