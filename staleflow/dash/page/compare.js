// Several runs in one picture.

import { COLOURS, ask, el, number, percent } from "./util.js";
import { chart, restyle } from "./charts.js";

export { restyle };
const CHARTS = [["Reward", "reward"], ["Loss", "loss"], ["Entropy of the policy", "policy_entropy"], ["Response length", "response_tokens"], ["Seconds of waiting in a step", "idle_s"]];
let place = null, x_name = "step", seen = -1, known = [];

export function show(where, _run, _rest, runs) {
  known = runs;
  place = el("div");
  const choose = el("select", { id: "x", onchange: () => { x_name = choose.value; load(); } }, ["step", "time"].map((name) => el("option", { value: name, selected: x_name === name }, name === "time" ? "time in seconds" : name)));
  where.append(el("div", { class: "row gap" }, el("label", { for: "x" }, "Horizontal axis"), choose), place);
  return load();
}

export function hide() { place = null; }

export function news(now) { if (place && now.info.heads.steps !== seen) { seen = now.info.heads.steps; load(); } }

async function load() {
  const runs = await ask("runs");
  const found = await Promise.all(runs.map(async ({ id }) => [await ask("learning", { run: id, points: 300 }), await ask("staleness", { run: id, points: 1 })]));
  if (!place) return;
  const rows = runs.map((run, at) => {
    const [learning, staleness] = found[at], time = learning.series.time?.at(-1), tokens = staleness.ages.tokens[0] ?? [];
    const all = tokens.reduce((a, b) => a + b, 0), wasted = Object.values(staleness.wasted).reduce((a, b) => a + b, 0);
    return [run.name, run.state, `${run.step}/${run.steps}`, run.bound, number(time), number(all / time), number(tokens.reduce((sum, count, age) => sum + count * age, 0) / all), percent(wasted / (all + wasted)), number(learning.series.reward?.at(-1)), number(learning.accuracy.at(-1)?.[1])];
  });
  const heads = ["run", "state", "steps", "bound", "seconds", "tokens/s", "mean staleness", "wasted", "reward", "held-out"];
  place.replaceChildren(
    el("section", { class: "card scroll", tabindex: "0", role: "region", "aria-label": "Runs" }, el("table", {}, el("thead", {}, el("tr", {}, heads.map((head, at) => el("th", { scope: "col", class: at > 1 ? "n" : "" }, head)))), el("tbody", {}, rows.map((row) => el("tr", {}, row.map((cell, at) => el("td", { class: at > 1 ? "n" : "" }, cell))))))),
    el("div", { class: "grid" }, CHARTS.map(([title, name]) => together(title, runs, found.map(([learning]) => [learning.series[x_name] ?? [], learning.series[name] ?? []]))),
      x_name === "step" ? together("Held-out accuracy", runs, found.map(([learning]) => [learning.accuracy.map(([version]) => version), learning.accuracy.map(([, value]) => value)])) : null));
}

/** Runs have steps at different times: on the union of them, each line has gaps, which are bridged. */
function together(title, runs, lines) {
  const x = [...new Set(lines.flatMap(([at]) => at))].sort((a, b) => a - b);
  const values = lines.map(([at, of]) => { const known_at = new Map(at.map((each, index) => [each, of[index]])); return x.map((each) => known_at.get(each) ?? null); });
  return chart(title, x, runs.map((run, at) => ({ name: run.name, values: values[at], colour: COLOURS[at % COLOURS.length] })), { x_name });
}
