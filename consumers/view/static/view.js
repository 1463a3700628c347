// Reads the panels that are seen, again and again while the page is looked at, and draws their rows.
"use strict";

const refreshMs = Number(document.body.dataset.refresh);
const live = document.getElementById("live");
const seen = new Set();
const plots = new Map();
const colours = ["--s0", "--s1", "--s2", "--s3", "--s4", "--s5"];

// A canvas does not know light-dark(): each colour's value is read once for each theme.
const dark = matchMedia("(prefers-color-scheme: dark)");
const theme = getComputedStyle(document.documentElement);
const known = new Map();
const colour = (name) => {
  if (!known.has(name)) known.set(name, theme.getPropertyValue(name).match(/#\w+/g)[Number(dark.matches)]);
  return known.get(name);
};

async function read(panel) {
  panel.setAttribute("aria-busy", "true");
  try {
    const headers = panel.dataset.tag ? { "If-None-Match": panel.dataset.tag } : {};
    const reply = await fetch(panel.dataset.panel, { headers });
    if (reply.status === 304) { aged(panel, reply.headers.get("Age")); return; }
    if (reply.redirected || reply.status === 401) { location.reload(); return; }
    const text = await reply.text();
    if (!reply.ok) throw new Error(text);
    await show(panel, text, reply.headers.get("ETag") ?? "");
    aged(panel, reply.headers.get("Age"));
    live.textContent = "";
  } catch (error) {
    live.textContent = `not up to date: ${error.message || "no answer"}`;
  } finally {
    panel.setAttribute("aria-busy", "false");
  }
}

// How old the numbers are, where that is not a matter of course.
function aged(panel, age) {
  const place = panel.querySelector(".from .age");
  if (place) place.textContent = age * 1000 > refreshMs ? `read ${age} s ago` : "";
}

// The answers that the next frame shows together: every width is read before the first change, since a width that is
// read after a change costs a layout.
const waiting = [];
const show = (panel, html, tag) => new Promise((shown, failed) => {
  if (waiting.push({ panel, html, tag, shown, failed }) > 1) return;
  requestAnimationFrame(() => {
    const answers = waiting.splice(0).map((one) => ({ ...one, width: one.panel.querySelector("h2")?.clientWidth }));
    for (const one of answers) {
      try { one.shown(fill(one)); } catch (error) { one.failed(error); }
    }
  });
});

function fill({ panel, html, tag, width }) {
  const open = panel.querySelector("details")?.open;
  const scrolled = panel.querySelector(".scroll")?.scrollTop ?? 0;
  const focused = panel.contains(document.activeElement);
  if (focused && panel.dataset.tag) return; // A reader's place in a table is not taken away; the next reading shows it.
  const inner = panel.querySelector("[data-panel]");
  if (typeof html === "string") panel.innerHTML = html; // The server has escaped every value.
  else panel.replaceChildren(html);
  panel.dataset.tag = tag;
  const slot = panel.querySelector("[data-panel]");
  if (slot && inner) slot.replaceWith(inner); // It is read again by itself.
  else if (slot) watcher.observe(slot);
  if (open) panel.querySelector("details").open = true;
  const scroll = panel.querySelector(".scroll");
  if (scroll && scrolled) scroll.scrollTop = scrolled; // To set it costs a layout.
  localTimes(panel);
  draw(panel, width);
}

// Times in the browser's zone. Its own formats (Intl) take tens of milliseconds to load.
const two = (value) => `${value}`.padStart(2, "0");
const localTime = (at) => `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} ${[at.getHours(), at.getMinutes(), at.getSeconds()].map(two).join(":")}`;

function localTimes(root) {
  for (const time of root.querySelectorAll("time[datetime]")) {
    const at = new Date(time.dateTime.replace(/(\.\d{3})\d*/, "$1"));
    if (Number.isNaN(at.valueOf())) continue;
    time.title = `${time.textContent} UTC`;
    time.textContent = localTime(at);
  }
}

function number(value) {
  if (value === null || value === undefined) return null;
  if (typeof value === "string" && /^\d{4}-\d\d-\d\d /.test(value)) {
    return Date.parse(`${value.replace(" ", "T").replace(/(\.\d{3})\d*/, "$1")}Z`) / 1000;
  }
  const read = Number(value);
  return Number.isNaN(read) ? null : read;
}

const names = (text) => (text ?? "").split(/, */).filter(Boolean);
const words = (text) => text.replaceAll("_", " ");

// The lines of some columns: one for each of them and each value of the columns `by`, and the ends of their intervals.
function series({ drawn, columns, rows }, ys) {
  const at = (name) => columns.indexOf(name);
  const runs = new Set(rows.map((row) => row[at("run_id")]));
  const by = [...(runs.size > 1 ? ["run_id"] : []), ...names(drawn.by).filter((name) => name !== "run_id")].map(at);
  const all = names(drawn.y);
  // Each column's series: of its values, and of the ends of their intervals.
  const parts = ys.flatMap((y) => [["", y], ...["low", "high"].map((end) => [end, names(drawn[end])[all.indexOf(y)]])]
    .map(([end, name]) => ({ end, column: at(name), word: by.length && ys.length === 1 ? [] : [words(y)] })))
    .filter(({ column }) => column >= 0);
  const along = rows.map((row) => number(row[at(drawn.x)]));
  const xs = [...new Set(along)].filter((x) => x !== null).sort((a, b) => a - b);
  const place = new Map(xs.map((x, n) => [x, n]));
  const found = new Map();
  rows.forEach((row, nth) => {
    const group = by.map((column) => row[column]), n = place.get(along[nth]);
    for (const { end, column, word } of parts) {
      const label = [...group, ...word].join(" "), key = `${label}\n${end}`;
      if (!found.has(key)) found.set(key, { label, end, values: new Array(xs.length).fill(null) });
      if (n !== undefined) found.get(key).values[n] = number(row[column]);
    }
  });
  return { xs, lines: [...found.values()].filter((line) => line.values.some((value) => value !== null)) };
}

function draw(panel, width = panel.querySelector(".plot")?.clientWidth) {
  const holder = panel.querySelector(".plot");
  const source = panel.querySelector("script.rows");
  for (const plot of plots.get(panel) ?? []) plot.destroy();
  plots.delete(panel);
  if (!holder || !source) return;
  const data = JSON.parse(source.textContent);
  if (data.drawn.plot === "heat") { heat(holder, data, width); return; }
  const ys = names(data.drawn.y), units = names(data.drawn.unit);
  // Columns of different units are plots of their own under one another: two scales in one plot mislead.
  const parts = units.length > 1 ? ys.map((y, n) => [[y], units[n]]) : [[ys, data.drawn.unit]];
  plots.set(panel, parts.map(([some, unit]) => plot(holder, data, some, unit ?? words(some.join(", ")), parts.length, width)));
}

function compact(value) {
  const thousands = Math.max(0, Math.min(4, Math.floor(Math.log10(Math.abs(value) || 1) / 3)));
  return `${Number((value / 1000 ** thousands).toPrecision(4))}${["", "K", "M", "B", "T"][thousands]}`;
}
const whole = Array.from({ length: 45 }, (_, n) => [1, 2, 5][n % 3] * 10 ** Math.floor(n / 3));

const MOST_POINTS = 60; // A longer line is drawn without its points: each costs as much as a piece of the line.

function plot(holder, data, ys, unit, plotted, width) {
  const { drawn } = data;
  const bars = drawn.plot === "bars";
  const { xs, lines } = series(data, ys);
  const timed = typeof data.rows[0]?.[data.columns.indexOf(drawn.x)] === "string";
  const grid = { stroke: colour("--line"), width: 1 };
  const axis = { stroke: colour("--quiet"), grid, ticks: grid, font: "12px system-ui", labelFont: "12px system-ui" };
  const integers = (values) => values.every((value) => value === null || Number.isInteger(value));
  const shown = (u, splits) => splits.map((value) => (value === null ? "" : compact(value)));
  const all = lines.flatMap((line) => line.values).filter((value) => value !== null);
  const bands = [], inked = [];
  let next = -1;
  const short = (value) => (value === null || value === undefined ? "" : Number.isInteger(value) ? `${value}` : `${Number(value.toPrecision(4))}`);
  lines.forEach(({ label, end, values }, n) => {
    if (!end) next++;
    const stroke = colour(colours[next % colours.length]);
    inked.push({
      label, stroke, width: end ? 0 : 2, spanGaps: true, class: end ? "end" : undefined,
      value: (u, value, _, place) => {
        const [low, high] = [1, 2].map((step) => (lines[n + step]?.end && lines[n + step].label === label ? lines[n + step].values[place] : null));
        return short(value) + (low == null || high == null ? "" : ` (${short(low)} to ${short(high)})`);
      },
      paths: bars ? uPlot.paths.bars({ size: [0.7, 40] }) : drawn.plot === "steps" ? uPlot.paths.stepped({ align: 1 }) : undefined,
      fill: bars ? stroke : undefined, points: { show: !end && !bars && values.filter((value) => value !== null).length < MOST_POINTS, size: 5 },
    });
    if (end === "high") bands.push({ series: [n + 1, n], fill: `${stroke}2e` });
  });
  const from = bars || (drawn.plot === "line" && Math.min(...all) >= 0) ? 0 : undefined;
  return new uPlot({
    width, height: plotted > 1 ? 190 : 240, bands,
    cursor: plotted > 1 ? { sync: { key: holder.getAttribute("aria-label") } } : {},
    scales: {
      x: { time: timed, ...(timed || (!bars && xs.length > 1) ? {} : { range: (u, low, high) => [low - 0.6, high + 0.6] }) },
      y: from === undefined ? {} : { range: (u, low, high) => [Math.min(0, low), high > 0 ? high * 1.05 : 1] },
    },
    axes: [
      { ...axis, label: words(drawn.x), ...(timed ? { space: 100 } : { values: shown, ...(integers(xs) ? { incrs: whole } : {}) }) },
      { ...axis, size: 64, space: 24, label: unit, values: shown, ...(integers(all) ? { incrs: whole } : {}) },
    ],
    series: [{ label: words(drawn.x), ...(timed ? {} : { value: (u, value) => value ?? "" }) }, ...inked],
  }, [xs, ...lines.map((line) => line.values)], holder);
}

const MOST_SHADES = 5;
const CELL_PX = 9;

// A cell for each place across and down; where there are more places across than can be seen, a column is their mean.
function heat(holder, { drawn, columns, rows }, whole) {
  const [x, y, value] = [drawn.x, drawn.by, drawn.y].map((name) => columns.indexOf(name));
  const places = [...new Set(rows.map((row) => row[x]))], down = [...new Set(rows.map((row) => row[y]))];
  const longest = Math.max(...down.map((place) => `${place}`.length));
  const left = Math.max(56, Math.min(0.45 * whole, 6.5 * longest + 10)), room = Math.max(60, whole - left - 4);
  const each = Math.max(1, Math.ceil((places.length * CELL_PX) / room));
  const across = Math.ceil(places.length / each);
  const width = Math.min(room / across, 60), height = Math.max(14, Math.min(28, 180 / down.length));
  const sums = new Map();
  const column = new Map(places.map((place, n) => [place, Math.floor(n / each)])), line = new Map(down.map((place, n) => [place, n]));
  for (const row of rows) {
    const key = line.get(row[y]) * across + column.get(row[x]);
    const [sum, count] = sums.get(key) ?? [0, 0];
    sums.set(key, [sum + Number(row[value]), count + 1]);
  }
  const most = Math.max(1e-9, ...[...sums.values()].map(([sum, count]) => sum / count));
  const svg = node("svg", { width: left + width * across + 4, height: height * down.length + 66 });
  const text = (at, high, words, anchor) => svg.append(node("text", { x: at, y: high, "text-anchor": anchor }, words));
  for (const [key, [sum, count]] of sums) {
    const row = Math.floor(key / across), first = (key % across) * each, last = Math.min(first + each, places.length) - 1;
    const mean = sum / count;
    const cell = node("rect", { x: left + (key % across) * width, y: row * height, width: Math.max(1, width - 1), height: height - 1,
      class: "cell", "fill-opacity": mean > 0 ? 0.1 + 0.9 * (mean / most) : 0 });
    const where = first === last ? places[first] : `${places[first]} to ${places[last]}`;
    cell.append(node("title", {}, `${words(drawn.x)} ${where}, ${words(drawn.by)} ${down[row]}: ${Number(mean.toPrecision(4))}`));
    svg.append(cell);
  }
  down.forEach((place, n) => text(left - 6, (n + 0.5) * height + 4, place, "end"));
  const every = Math.ceil(across / Math.max(2, Math.floor((width * across) / 48)));
  for (let n = 0; n < across; n += every) text(left + (n + 0.5) * width, height * down.length + 14, places[n * each], "middle");
  text(4, height * down.length + 32, `across: ${words(drawn.x)}${each > 1 ? `, ${each} to a column` : ""}; down: ${words(drawn.by)}`, "start");
  for (let n = 0; n < MOST_SHADES; n++) {
    svg.append(node("rect", { x: 4 + n * 18, y: height * down.length + 44, width: 17, height: 12, class: "cell", "fill-opacity": 0.1 + (0.9 * n) / (MOST_SHADES - 1) }));
  }
  text(MOST_SHADES * 18 + 10, height * down.length + 54, `0 to ${Number(most.toPrecision(3))}: ${drawn.unit ?? words(drawn.y)}`, "start");
  holder.replaceChildren(svg);
}

function node(name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

const watcher = new IntersectionObserver((entries) => {
  const ready = [];
  for (const { target, isIntersecting } of entries) {
    if (!isIntersecting) seen.delete(target);
    else if (!seen.has(target)) {
      seen.add(target);
      const template = target.querySelector(":scope > template"); // The page came with it.
      if (template) ready.push({ panel: target, template, width: target.querySelector("h2")?.clientWidth });
      else read(target);
    }
  }
  for (const { panel, template, width } of ready) {
    fill({ panel, html: template.content, tag: template.dataset.tag, width });
    aged(panel, template.dataset.age);
    panel.setAttribute("aria-busy", "false");
    if (template.dataset.age * 1000 > refreshMs) read(panel); // Old numbers are better than none, for a moment.
  }
}, { rootMargin: "200px" });
// A link to other rows of a table is followed within its panel.
document.addEventListener("click", (event) => {
  const turn = event.target.closest("a[data-turn]");
  const panel = turn?.closest("[data-panel]");
  if (!panel || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  panel.dataset.panel = turn.getAttribute("href");
  panel.dataset.tag = "";
  read(panel).then(() => panel.querySelector(".scroll")?.focus());
});
const panels = [...document.querySelectorAll("[data-panel]")];
panels.forEach((panel) => watcher.observe(panel));
localTimes(document);

async function again() {
  if (document.visibilityState === "visible") await Promise.all([...seen].filter((p) => p.isConnected && !p.dataset.still).map(read));
  setTimeout(again, refreshMs);
}
if (panels.length) setTimeout(again, refreshMs);
addEventListener("resize", () => panels.forEach((panel) => draw(panel)));
dark.addEventListener("change", () => { known.clear(); panels.forEach((panel) => draw(panel)); });
