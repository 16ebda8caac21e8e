// One trajectory: where each span ran, under which version, when it was scored and trained.

import { AGES, ask, colouredText, duration, el, facts, legend, lifeLink, number, promptText } from "./util.js";

let place = null, run = 0, name = "", live = false, asking = false;

export function show(where, chosen, rest) {
  run = chosen; name = rest; live = false;
  place = el("div");
  where.append(place);
  return load();
}

export function hide() { place = null; }

export function news() { if (place && live) load(); }

async function load() {
  if (asking) return;
  asking = true;
  try {
    const life = await ask("trajectory", { run, name });
    if (!place) return;
    live = life.ended === null;
    draw(life);
  } finally {
    asking = false;
  }
}

function draw(life) {
  const end = life.ended ?? Math.max(...life.events.map(([time]) => time), life.admitted);
  const step = life.step ?? Math.max(0, ...life.stays.flatMap((stay) => stay.spans.map(([version]) => version)));
  const state = life.state === "dropped" ? `given up: ${life.reason}` : life.state;
  place.replaceChildren(
    el("section", { class: "card" }, el("h2", {}, `Trajectory ${life.name}`),
      facts([["state", state], ["trained at step", life.step ?? "–"], ["reward", number(life.reward)], ["tokens", life.tokens], ["took", duration(end - life.admitted)], ["placements", life.stays.length]])),
    el("section", { class: "card" }, el("h2", {}, "Where it ran, and under which version"), gantt(life, end, step),
      legend([...new Set(life.stays.flatMap((stay) => stay.spans.map(([version]) => version)))].sort((a, b) => a - b).map((version) => [colour(version, step), `version ${version}`]).concat([["var(--pink)", "scored"], ["var(--blue)", life.state === "dropped" ? "given up" : "trained"]]))),
    el("div", { class: "grid two gap" },
      el("section", { class: "card" }, el("h2", {}, "What happened"), el("ol", { class: "events" }, life.events.map(([time, , text]) => el("li", {}, el("span", { class: "muted" }, duration(time)), el("span", {}, text))),
        life.state === "trained" ? el("li", {}, el("span", { class: "muted" }, duration(life.ended)), el("span", {}, `trained at step ${life.step}`)) : null)),
      el("section", { class: "card" }, el("h2", {}, `Its group ${life.group}`), el("table", {}, el("thead", {}, el("tr", {}, ["member", "state", "tokens", "reward"].map((head, at) => el("th", { scope: "col", class: at > 1 ? "n" : "" }, head)))),
        el("tbody", {}, life.members.map(([each, what, tokens, reward]) => el("tr", {}, el("td", {}, each === life.name ? el("b", {}, each) : lifeLink(run, each)), el("td", {}, what === "dropped" ? "given up" : what), el("td", { class: "n" }, tokens), el("td", { class: "n" }, number(reward)))))))),
    life.sample ? el("section", { class: "card" }, el("h2", {}, "Its text"), el("div", { class: "text" }, promptText(life.sample.prompt)), colouredText(life.sample, step)) : null ?? "");
}

const colour = (version, step) => AGES[Math.min(Math.max(0, step - version), AGES.length - 1)];

function gantt(life, end, step) {
  if (!life.stays.length) return el("p", { class: "empty" }, "It has not been sent to an instance yet.");
  const length = Math.max(1e-6, end - life.admitted), at = (time) => `${(100 * (time - life.admitted)) / length}%`;
  const rows = life.stays.map((stay) => {
    const until = stay.end ?? end, all = stay.spans.reduce((sum, [, count]) => sum + count, 0);
    let done = 0;
    const bars = all ? stay.spans.map(([version, count]) => {
      const begin = stay.begin + ((until - stay.begin) * done) / all;
      done += count;
      return el("i", { style: { left: at(begin), width: `${(100 * (until - stay.begin) * count) / all / length}%`, background: colour(version, step) }, title: `version ${version}: ${count} tokens` });
    }) : [el("i", { style: { left: at(stay.begin), width: `${(100 * (until - stay.begin)) / length}%`, background: "var(--line)" }, title: "no token yet" })];
    return el("div", { class: "stay", role: "img", "aria-label": `on ${stay.instance} from ${duration(stay.begin)} to ${duration(until)}: ${stay.spans.map(([version, count]) => `${count} tokens of version ${version}`).join(", ") || "no tokens"}` }, el("b", {}, stay.instance), bars);
  });
  const moments = [["scored", life.scored, "var(--pink)"], ["ended", life.ended, "var(--blue)"]].filter(([, time]) => time !== null);
  rows.push(el("div", { class: "stay", role: "img", "aria-label": moments.map(([text, time]) => `${text} at ${duration(time)}`).join(", ") || "not scored yet" }, el("b", {}, "then"),
    moments.map(([text, time, fill]) => el("i", { style: { left: `min(${at(time)}, calc(100% - 3px))`, width: "3px", background: fill }, title: `${text} at ${duration(time)}` }))));
  return el("div", {}, el("div", { class: "gantt" }, rows), el("div", { class: "ticks" }, el("span", {}, duration(life.admitted)), el("span", {}, duration(end))));
}
