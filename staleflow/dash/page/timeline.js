// Trainer, evaluator and instances over time. Drag to pan, wheel or pinch to zoom, or the keys: arrows, + and -, 0 for all.

import { ask, css, duration, el, legend, number } from "./util.js";

const LEFT = 76, TOP = 24, LANE = 16, GAP = 3, TRAINER = 26, SHOWN = 32;
let parts = null, run = 0, data = null, view = null, lane = 0, pending = false, again = false, dragging = null;

export function show(place, chosen) {
  run = chosen; data = null; lane = 0; view = { begin: 0, end: null };
  const button = (text, label, act) => el("button", { type: "button", "aria-label": label, onclick: act }, text);
  parts = {
    canvas: el("canvas", { id: "lanes", tabindex: "0", role: "application", "aria-label": "Timeline: arrow keys pan, plus and minus zoom, 0 shows all" }),
    readout: el("p", { class: "readout", role: "status" }, "Point at something to read it."),
    name: el("input", { type: "search", id: "lane", placeholder: "all", style: { width: "8rem" }, oninput: () => { lane = 0; load(); } }),
    pages: el("span", { class: "row" }),
    window: el("span", { class: "muted" }),
  };
  const { canvas } = parts;
  place.append(el("section", { class: "card" },
    el("div", { class: "row gap" }, button("−", "Zoom out", () => zoom(1.6)), button("+", "Zoom in", () => zoom(1 / 1.6)), button("◀", "Earlier", () => pan(-0.4)), button("▶", "Later", () => pan(0.4)), button("All", "Show all", all), parts.window,
      el("span", { class: "row end" }, el("label", { for: "lane" }, "Instance"), parts.name, parts.pages)),
    canvas, parts.readout,
    legend([["var(--green)", "trainer works"], ["var(--soft)", "trainer waits"], ["var(--pink)", "evaluation"], ["rgb(var(--heat))", "sequences running (stronger: more)"], ["var(--orange)", "new weights"], ["var(--yellow)", "trajectories moved"], ["var(--red)", "down, lost or restarted"]])));
  canvas.onkeydown = key;
  canvas.onwheel = (event) => { event.preventDefault(); zoom(event.deltaY > 0 ? 1.25 : 0.8, at(event)); };
  canvas.ondblclick = all;
  canvas.onpointerdown = grab;
  canvas.onpointermove = move;
  canvas.onpointerup = canvas.onpointercancel = (event) => { dragging?.delete(event.pointerId); if (!dragging?.size) { dragging = null; canvas.classList.remove("grabbing"); } };
  parts.sizes = new ResizeObserver(draw);
  parts.sizes.observe(canvas);
  return load();
}

export function hide() { parts?.sizes.disconnect(); parts = null; }
export const restyle = () => draw();
export function news() { if (parts && (view.end === null || !data || view.end >= data.last)) load(); }

// The window

const begin = () => view.begin, end = () => view.end ?? data?.last ?? 1;
const all = () => { view = { begin: 0, end: null }; load(); };

function set(low, high) {
  const last = data?.last ?? 1, length = Math.min(Math.max(high - low, 0.2), last);
  low = Math.max(0, Math.min(low, last - length));
  view = { begin: low, end: low + length >= last - 1e-6 ? null : low + length };
  if (view.end === null && length < last * 0.999) view.begin = last - length;
  draw();
  load();
}
function zoom(factor, around = (begin() + end()) / 2) { set(around - (around - begin()) * factor, around + (end() - around) * factor); }
function pan(share) { const by = share * (end() - begin()); set(begin() + by, end() + by); }
const width = () => Math.max(1, parts.canvas.clientWidth - LEFT);
const at = (event) => begin() + ((event.offsetX - LEFT) / width()) * (end() - begin());

function key(event) {
  const acts = { ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2), "+": () => zoom(1 / 1.6), "=": () => zoom(1 / 1.6), "-": () => zoom(1.6), 0: all, Home: all };
  if (acts[event.key]) { event.preventDefault(); acts[event.key](); }
}

function grab(event) {
  parts.canvas.setPointerCapture(event.pointerId);
  parts.canvas.classList.add("grabbing");
  dragging ??= new Map();
  dragging.set(event.pointerId, event.offsetX);
}

function move(event) {
  if (!dragging?.has(event.pointerId)) { read(event); return; }
  const before = [...dragging.values()];
  dragging.set(event.pointerId, event.offsetX);
  const after = [...dragging.values()], scale = (end() - begin()) / width();
  if (after.length > 1) {
    const apart = (xs) => Math.max(20, Math.abs(xs[0] - xs[1]));
    zoom(apart(before) / apart(after), begin() + ((after[0] + after[1]) / 2 - LEFT) * scale);
  } else set(begin() - (after[0] - before[0]) * scale, end() - (after[0] - before[0]) * scale);
}

async function load() {
  if (pending) { again = true; return; }
  pending = true;
  try {
    const columns = Math.max(50, Math.min(1000, Math.floor(width() / 2)));
    const found = await ask("timeline", { run, from: view.begin, to: view.end ?? "", columns, lane, lanes: SHOWN, name: parts.name.value.trim() });
    if (!parts) return;
    data = found;
    draw();
    pages();
  } finally {
    pending = false;
    if (again && parts) { again = false; load(); }
  }
}

function pages() {
  const last = Math.min(lane + SHOWN, data.instances), turn = (by) => () => { lane = Math.max(0, lane + by); load(); };
  if (data.instances <= SHOWN) { parts.pages.replaceChildren(); return; }
  parts.pages.replaceChildren(el("span", { class: "muted" }, `${lane + 1}–${last} of ${data.instances}`),
    el("button", { type: "button", "aria-label": "Instances before", disabled: lane === 0, onclick: turn(-SHOWN) }, "▲"), el("button", { type: "button", "aria-label": "Instances after", disabled: last >= data.instances, onclick: turn(SHOWN) }, "▼"));
}

// The picture

function draw() {
  if (!parts || !data) return;
  const { canvas } = parts, shown = canvas.clientWidth, height = TOP + TRAINER + 2 * (LANE + GAP) + data.lanes.length * (LANE + GAP) + 8, dense = devicePixelRatio || 1;
  if (canvas.width !== Math.round(shown * dense) || canvas.height !== Math.round(height * dense)) {
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(shown * dense);
    canvas.height = Math.round(height * dense);
  }
  parts.window.textContent = `${duration(begin())} to ${duration(end())}`;
  const pen = canvas.getContext("2d");
  pen.setTransform(dense, 0, 0, dense, 0, 0);
  pen.clearRect(0, 0, shown, height);
  pen.font = "12px system-ui, sans-serif";
  pen.textBaseline = "middle";
  const x = (time) => LEFT + ((time - begin()) / (end() - begin() || 1)) * (shown - LEFT);
  const box = (from, to, y, tall, fill) => { const left = Math.max(LEFT, from), right = Math.min(shown, to); if (right > left) { pen.fillStyle = fill; pen.fillRect(left, y, Math.max(1, right - left), tall); } };
  axis(pen, x, height);
  const name = (text, y, tall) => { pen.fillStyle = css("--muted"); pen.textAlign = "right"; pen.fillText(text.slice(0, 11), LEFT - 8, y + tall / 2); };
  let y = TOP;
  name("trainer", y, TRAINER);
  for (const [from, to, step, busy, idle] of data.trainer) {
    box(x(from), x(to) - 1, y, TRAINER, css("--soft"));
    const share = busy / Math.max(busy + idle, 1e-9);
    box(x(from), x(to) - 1, y + TRAINER * (1 - share), TRAINER * share, css("--green"));
    if (x(to) - x(from) > 26) { pen.fillStyle = css("--text"); pen.textAlign = "center"; const middle = (Math.max(x(from), LEFT) + Math.min(x(to), shown)) / 2; if (middle > LEFT + 8 && middle < shown - 8) pen.fillText(step, middle, y + TRAINER / 2 + 1); }
  }
  y += TRAINER + GAP;
  name("evaluator", y, LANE);
  for (const [from, to] of data.evaluations) box(x(from), Math.max(x(to), x(from) + 3), y + 2, LANE - 4, css("--pink"));
  y += LANE + GAP;
  name("run", y, LANE);
  for (const [time] of data.events) box(x(time) - 2, x(time) + 2, y + 2, LANE - 4, css("--red"));
  y += LANE + GAP;
  for (const each of data.lanes) { name(each.name, y, LANE); instance(each, y, x, box); y += LANE + GAP; }
}

function instance(each, y, x, box) {
  const count = each.cells.length, part = (data.end - data.begin) / count, heat = css("--heat");
  for (let first = 0, last = 0; first < count; first = last) {
    const cell = each.cells[first], kind = cell && `${cell[0]} ${cell[2]}`;
    for (last = first + 1; last < count && (each.cells[last] ? `${each.cells[last][0]} ${each.cells[last][2]}` : null) === kind; last++);
    if (!cell) continue;
    const fill = cell[2] === "down" ? css("--red") : `rgba(${heat}, ${cell[0] ? 0.15 + (0.85 * cell[0]) / Math.max(1, data.most) : 0.05})`;
    box(x(data.begin + first * part), x(data.begin + last * part), y, LANE, fill);
  }
  for (const [time, kind] of each.marks) {
    if (kind === "pull") box(x(time) - 1, x(time) + 1, y, LANE, css("--orange"));
    else if (kind === "moved here" || kind === "interrupt") box(x(time) - 1, x(time) + 1, y + LANE - 5, 5, css("--yellow"));
    else if (kind === "lost") box(x(time) - 1.5, x(time) + 1.5, y - 1, LANE + 2, css("--red"));
  }
}

function axis(pen, x, height) {
  const length = end() - begin(), rough = length / Math.max(2, width() / 110), power = 10 ** Math.floor(Math.log10(rough || 1));
  const round = rough > 10 ? [20, 30, 60, 120, 300, 600, 1200, 1800, 3600] : [1, 2, 5, 10].map((factor) => factor * power);
  const step = round.find((each) => each >= rough) ?? 3600 * Math.ceil(rough / 3600);
  pen.textAlign = "center";
  for (let time = Math.ceil(begin() / step) * step; time <= end(); time += step) {
    pen.fillStyle = css("--soft");
    pen.fillRect(x(time), TOP - 4, 1, height);
    pen.fillStyle = css("--muted");
    if (x(time) < parts.canvas.clientWidth - 16) pen.fillText(duration(Number(time.toPrecision(12))), Math.max(LEFT + 12, x(time)), 10);
  }
}

// What is under the pointer, in words

function read(event) {
  if (!data) return;
  const time = at(event), y = event.offsetY - TOP, near = (3 * (end() - begin())) / width(), close = ([when]) => Math.abs(when - time) < near;
  let text = "";
  if (y < TRAINER) {
    const found = data.trainer.find(([from, to]) => time >= from && time <= to);
    if (found) text = `step ${found[2]}: ${duration(found[3])} of work, ${duration(found[4])} of waiting`;
  } else if (y < TRAINER + LANE + 2 * GAP) {
    const found = data.evaluations.find(([from, to]) => time >= from - near && time <= to + near);
    if (found) text = `version ${found[2]}: held-out ${number(found[3])}`;
  } else if (y < TRAINER + 2 * (LANE + GAP) + GAP) text = data.events.filter(close).map(([, kind, value]) => `${kind}: ${value}`).join("; ");
  else {
    const each = data.lanes[Math.floor((y - TRAINER - GAP - 2 * (LANE + GAP)) / (LANE + GAP))];
    const cell = each?.cells[Math.floor(((time - data.begin) / (data.end - data.begin)) * each.cells.length)];
    if (each) {
      const marks = each.marks.filter(close).map(([, kind, value, count]) => (kind === "pull" ? `pulled version ${value}` : count > 1 ? `${count} × ${kind}` : `${kind} ${value}`));
      text = [`${each.name}: ${cell ? cell[2] || `${cell[0]} running, version ${cell[1]}` : "not there"}`, ...marks].join("; ");
    }
  }
  if (time >= begin()) parts.readout.textContent = `${duration(time)}${text ? ` · ${text}` : ""}`;
}
