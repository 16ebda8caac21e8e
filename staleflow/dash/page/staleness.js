// How old the data is, which lengths are trained of those that were made, and what was thrown away.

import { AGES, aged, ask, el, number, percent } from "./util.js";
import { chart, restyle } from "./charts.js";

export { restyle };
let place = null, run = 0, seen = -1, asking = false;

export function show(where, chosen) {
  run = chosen; seen = -1;
  place = el("div");
  where.append(place);
  return load();
}

export function hide() { place = null; }

export function news(now) { if (place && now.info.heads.steps !== seen) load(now.info.heads.steps); }

async function load(steps = -1) {
  if (asking) return;
  asking = true;
  try {
    const found = await ask("staleness", { run, points: 300 });
    if (!place) return;
    seen = steps < 0 ? seen : steps;
    const { ages } = found;
    const lines = (rows) => (rows[0] ?? []).map((_, age) => ({ name: aged(age), values: rows.map((row) => row[age]), colour: AGES[age % AGES.length] }));
    const most = found.lengths.map(([tokens]) => Math.max(1, tokens));
    place.replaceChildren(
      el("section", { class: "card" }, el("h2", {}, `Staleness: no token older than ${found.bound} ${found.bound === 1 ? "step" : "steps"}`), summary(ages, found.bound)),
      el("div", { class: "grid gap" },
        chart("Tokens by age", ages.step, lines(ages.tokens), { stacked: true, height: 220 }),
        chart("Trajectories by their oldest token", ages.step, lines(ages.trajectories), { stacked: true, height: 220 }),
        chart("Lengths: offered against trained", most, [{ name: "offered", values: found.lengths.map((each) => each[1]) }, { name: "trained", values: found.lengths.map((each) => each[2]) }], { bars: true, x_name: "tokens", log: true, height: 220 })),
      el("section", { class: "card" }, el("h2", {}, "Thrown away, by cause"), waste(found)));
  } finally {
    asking = false;
  }
}

function summary(ages, bound) {
  const sums = (ages.tokens[0] ?? []).map((_, age) => ages.tokens.reduce((sum, row) => sum + row[age], 0));
  const all = sums.reduce((a, b) => a + b, 0);
  if (!all) return el("p", { class: "empty" }, "No step has been trained yet.");
  const mean = sums.reduce((sum, count, age) => sum + age * count, 0) / all;
  const bar = el("div", { style: { display: "flex", height: "1rem", borderRadius: "4px", overflow: "hidden" }, role: "img", "aria-label": sums.map((count, age) => `${percent(count / all)} of tokens ${age} steps old`).join(", ") },
    sums.map((count, age) => el("i", { style: { width: `${(100 * count) / all}%`, background: AGES[age % AGES.length] }, title: `${age}: ${percent(count / all)}` })));
  return el("div", {}, bar, el("p", { class: "muted" },
    `Of the tokens trained on: ${sums.map((count, age) => `${aged(age)} ${percent(count / all)}`).join(" · ")} · mean age ${number(mean)} · oldest ${sums.findLastIndex((count) => count > 0)}, the bound is ${bound}`));
}

function waste(found) {
  const causes = Object.entries(found.wasted).sort((a, b) => b[1] - a[1]);
  const groups = Object.entries(found.released).map(([reason, count]) => `${count} groups: ${reason}`);
  if (!causes.length) return el("p", { class: "empty" }, groups.length ? groups.join(", ") : "Nothing: every token was trained on or is still in use.");
  const most = causes[0][1];
  return el("div", {}, causes.map(([reason, tokens]) =>
    el("div", { class: "hbar" }, el("span", {}, el("a", { href: `#trajectories/${run}/dropped:${encodeURIComponent(reason)}` }, reason)), el("i", { style: { width: `${(100 * tokens) / most}%` } }), el("span", {}, `${number(tokens)} tokens`))),
  groups.length ? el("p", { class: "muted" }, groups.join(", ")) : null);
}
