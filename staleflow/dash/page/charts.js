// Line charts, stacked areas and bars on uPlot, in the colours of the page.

import { COLOURS, css, el, number } from "./util.js";

const HEIGHT = 190;
const WHOLE = [1, 2, 5].flatMap((of) => Array.from({ length: 9 }, (_, at) => of * 10 ** at)).sort((a, b) => a - b); // between marks of steps

/** lines: [{name, values, colour?, points?}]; x: values they share. Returns the element. */
export function chart(title, x, lines, { x_name = "step", sync = "", height = HEIGHT, bars = false, stacked = false, log = false } = {}) {
  const place = el("div"), card = el("section", { class: "card" }, el("h2", {}, title), place);
  const known = lines.filter((line) => line.values.some((value) => value !== null && value !== undefined));
  if (!x.length || !known.length) {
    place.append(el("p", { class: "empty" }, "Nothing yet."));
    return card;
  }
  const said = known.map((line) => `${line.name} ${number(line.values.findLast((value) => value !== null && value !== undefined))}`).join(", ");
  place.setAttribute("role", "img");
  place.setAttribute("aria-label", `${title} by ${x_name}; latest: ${said}`);
  const data = stacked ? layers(known) : known.map((line) => line.values);
  const ticks = stacked ? [...x, 2 * x.at(-1) - (x.at(-2) ?? x.at(-1) - 1)] : x; // a step is as wide as the one before it, the last one too
  if (stacked) for (const layer of data) layer.push(layer.at(-1));
  const order = stacked ? [...known.keys()].reverse() : [...known.keys()];
  const draw = () => {
    place.replaceChildren();
    const axis = { stroke: css("--muted"), grid: { stroke: css("--soft"), width: 1 }, ticks: { stroke: css("--soft"), width: 1 }, font: "12px system-ui, sans-serif" };
    const width = Math.max(220, place.clientWidth || 320);
    const series = order.map((at, place_of) => {
      const line = known[at], colour = line.colour ?? COLOURS[at % COLOURS.length];
      const drawn = { label: line.name, stroke: colour, width: 2, spanGaps: true, points: { show: line.points ?? x.length < 2, size: 6, fill: colour } };
      if (stacked) Object.assign(drawn, { fill: colour, width: 0, paths: uPlot.paths.stepped({ align: 1 }), points: { show: false } });
      if (bars) Object.assign(drawn, { fill: `${colour}cc`, width: 0, points: { show: false }, paths: uPlot.paths.bars({ size: [0.42, 40], align: place_of ? 1 : -1 }) });
      drawn.value = (_, value, __, where) => number(stacked && where !== null ? line.values[Math.min(where, x.length - 1)] : value);
      return drawn;
    });
    const limits = (_, low, high) => { const room = (high - low || Math.abs(high) || 1) * 0.06; return [low >= 0 && low < 0.4 * high ? 0 : low - room, high + room]; };
    const made = new uPlot({
      width, height, series: [{ label: x_name, value: (_, value) => number(stacked && value > x.at(-1) ? x.at(-1) : value) }, ...series],
      scales: { x: { time: false, ...(log ? { distr: 3, log: 2 } : x.length > 1 || stacked ? {} : { range: () => [x[0], x[0] + 1] }) }, y: { range: stacked || bars ? (_, __, high) => [0, (high || 1) * 1.05] : limits } },
      axes: [{ ...axis, size: 32, ...(x_name === "step" ? { incrs: WHOLE } : {}), values: (_, marks) => marks.map((mark) => (mark === null ? "" : number(mark))) }, { ...axis, size: 64, values: (_, marks) => marks.map((mark) => number(mark)) }],
      cursor: { ...(sync ? { sync: { key: sync } } : {}), drag: { x: true, y: false }, points: { size: 6 } },
      hooks: { setLegend: [(plot) => { if (plot.legend.idx === null) plot.setLegend({ idx: x.length - 1 }, false); }] },
    }, [ticks, ...order.map((at) => data[at])], place);
    made.setLegend({ idx: x.length - 1 }, false);
    sizes.observe(place);
    drawn.set(place, { made, draw, height });
  };
  requestAnimationFrame(draw);
  return card;
}

const drawn = new Map();
const sizes = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    const found = drawn.get(target);
    if (!target.isConnected) { found?.made.destroy(); drawn.delete(target); sizes.unobserve(target); }
    else if (found && target.clientWidth && Math.abs(found.made.width - target.clientWidth) > 2) found.made.setSize({ width: target.clientWidth, height: found.height });
  }
});

/** In other colours: the theme has changed. */
export function restyle() {
  for (const [place, { made, draw }] of [...drawn]) {
    made.destroy();
    drawn.delete(place);
    if (place.isConnected) draw();
  }
}

/** Sums of the layers up to each. */
function layers(lines) {
  const sums = [];
  for (const line of lines) sums.push(line.values.map((value, at) => (value ?? 0) + (sums.at(-1)?.[at] ?? 0)));
  return sums;
}
