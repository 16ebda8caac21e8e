// The page: which view is open, which run it is about, and the stream of news. A view is {show(place, run), news(now)}.

import { ask, el } from "./util.js";
import * as now from "./now.js";
import * as timeline from "./timeline.js";
import * as learning from "./learning.js";
import * as staleness from "./staleness.js";
import * as samples from "./samples.js";
import * as trajectories from "./trajectories.js";
import * as trajectory from "./trajectory.js";
import * as compare from "./compare.js";

const VIEWS = { now, timeline, learning, staleness, samples, trajectories, compare };
const place = document.getElementById("view"), chooser = document.getElementById("run"), pill = document.getElementById("state");
let runs = [], run = 0, stream = null, open = null, latest = null;

function theme(wanted) {
  document.documentElement.dataset.theme = wanted;
  open?.restyle?.();
}
const dark = matchMedia("(prefers-color-scheme: dark)");
const kept = () => { try { return localStorage.getItem("staleflow-theme"); } catch { return null; } };
theme(kept() ?? (dark.matches ? "dark" : "light"));
dark.addEventListener("change", () => kept() ?? theme(dark.matches ? "dark" : "light"));
document.getElementById("theme").onclick = () => {
  const wanted = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  try { localStorage.setItem("staleflow-theme", wanted); } catch { /* private windows */ }
  theme(wanted);
};

/** #view/run/rest */
function route() {
  const [name, number, ...rest] = location.hash.slice(1).split("/");
  return { name: name || "now", run: Number(number) || 0, rest: decodeURIComponent(rest.join("/")) };
}

function show() {
  const asked = route();
  const changed = asked.run !== run || stream === null;
  run = Math.min(asked.run, Math.max(0, runs.length - 1));
  chooser.value = run;
  for (const link of document.querySelectorAll("nav a")) {
    link.href = `#${link.dataset.view}/${run}`;
    const here = link.dataset.view === asked.name || (link.dataset.view === "trajectories" && asked.name === "trajectory");
    here ? link.setAttribute("aria-current", "page") : link.removeAttribute("aria-current");
    if (here) link.scrollIntoView({ block: "nearest", inline: "nearest" });
  }
  open?.hide?.();
  place.replaceChildren();
  open = asked.name === "trajectory" ? trajectory : VIEWS[asked.name] ?? now;
  document.title = `${asked.name} · ${runs[run]?.name ?? "StaleFlow"}`;
  if (changed) listen();
  Promise.resolve(open.show(place, run, asked.rest, runs)).catch(failed);
  if (latest && latest.info.id === run) open.news?.(latest);
}

function failed(error) {
  if (error.name !== "AbortError") place.replaceChildren(el("p", { class: "card", role: "alert" }, error.message));
}

function listen() {
  stream?.close();
  stream = new EventSource(`api/events?run=${run}`);
  stream.addEventListener("now", (event) => {
    latest = JSON.parse(event.data);
    state(latest.info.state, latest.info.heads.behind ? `${latest.info.state}, reading` : latest.info.simulated ? `${latest.info.state} (simulated)` : latest.info.state);
    runs[run] = latest.info;
    open?.news?.(latest);
  });
  stream.onerror = () => state("away", "server away, trying again");
}

function state(kind, text) {
  pill.className = `pill ${kind}`;
  if (pill.textContent !== text) pill.textContent = text;
}

async function begin() {
  try {
    runs = await ask("runs");
  } catch (error) {
    state("away", "server away, trying again");
    setTimeout(begin, 1000);
    return;
  }
  chooser.replaceChildren(...runs.map((each) => el("option", { value: each.id }, each.name)));
  chooser.onchange = () => { location.hash = `#${route().name === "trajectory" ? "now" : route().name}/${chooser.value}`; };
  const names = Object.keys(VIEWS).filter((name) => name !== "compare" || runs.length > 1);
  document.querySelector("nav").replaceChildren(...names.map((name) => el("a", { "data-view": name }, name[0].toUpperCase() + name.slice(1))));
  addEventListener("hashchange", () => { show(); place.focus({ preventScroll: true }); });
  show();
}

begin();
