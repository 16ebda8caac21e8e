// How the training goes, step by step.

import { ask, el } from "./util.js";
import { chart, restyle } from "./charts.js";

export { restyle };

// Title, then name of the number in metrics.jsonl and what it is called.
const CHARTS = [
  ["Loss", ["loss", "loss"]],
  ["Entropy of the policy", ["policy_entropy", "entropy"]],
  ["KL divergence", ["approx_kl", "from the engine's policy"], ["reference_kl", "from the reference model"]],
  ["Clipped tokens", ["clip_fraction", "share"]],
  ["Log-probability, engine against trainer", ["logprob_difference", "mean difference"], ["logprob_kl", "KL"]],
  ["Response length", ["response_tokens", "mean"], ["longest", "longest"]],
  ["Gradient norm", ["gradient_norm", "norm"]],
  ["Seconds of a step", ["train_s", "training"], ["idle_s", "waiting"]],
];
let place = null, run = 0, seen = -1, x_name = "step", asking = false;

export function show(where, chosen) {
  run = chosen; seen = -1;
  place = el("div", { class: "grid" });
  const choose = el("select", { id: "x", onchange: () => { x_name = choose.value; seen = -1; load(); } },
    el("option", { value: "step", selected: x_name === "step" }, "step"), el("option", { value: "time", selected: x_name === "time" }, "time in seconds"));
  where.append(el("div", { class: "row gap" }, el("label", { for: "x" }, "Horizontal axis"), choose,
    el("span", { class: "muted" }, "Drag in a chart to zoom, double-click for all.")), place);
  return load();
}

export function hide() { place = null; }

export function news(now) { if (place && now.info.heads.steps !== seen) load(now.info.heads.steps); }

async function load(steps = -1) {
  if (asking) return;
  asking = true;
  try {
    const found = await ask("learning", { run, points: 400 });
    if (!place) return;
    seen = steps < 0 ? seen : steps;
    const { series } = found, x = series[x_name] ?? [];
    const of = (name) => series[name] ?? [];
    const options = { sync: "learning", x_name };
    const accuracy = held(found, series);
    const rewards = Object.keys(series).filter((name) => name.startsWith("reward/"));
    place.replaceChildren(
      chart("Reward", x, [{ name: "mean", values: of("reward") }, ...rewards.map((name) => ({ name: name.slice(7), values: of(name) }))], options),
      chart("Held-out accuracy", accuracy.x, [{ name: "accuracy", values: accuracy.y, points: true }], { x_name }),
      ...CHARTS.map(([title, ...lines]) => [title, lines.filter(([name]) => of(name).length)]).filter(([, lines]) => lines.length)
        .map(([title, lines]) => chart(title, x, lines.map(([name, text]) => ({ name: text, values: of(name) })), options)),
    );
  } finally {
    asking = false;
  }
}

/** Version v was made when step v - 1 ended. */
function held(found, series) {
  if (x_name === "step") return { x: found.accuracy.map(([version]) => version), y: found.accuracy.map(([, value]) => value) };
  const at = (version) => (version === 0 ? 0 : series.time?.[series.step.findIndex((step) => step >= version - 1)] ?? null);
  const known = found.accuracy.map(([version, value]) => [at(version), value]).filter(([time]) => time !== null);
  return { x: known.map(([time]) => time), y: known.map(([, value]) => value) };
}
