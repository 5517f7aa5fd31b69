// The page's controls: mouse, keys, buttons, and the address that remembers the view.

// ---- choosing

function follow(microbatch) {
  pause();
  aim(microbatch);
}

function aim(microbatch) {
  const known = Number.isInteger(microbatch) && microbatch >= 0 && microbatch < numMicrobatches;
  state.microbatch = known ? microbatch : -1;
  $("microbatch").value = state.microbatch >= 0 ? String(state.microbatch) : "";
  $("clear").disabled = state.microbatch < 0;
  tellWay();
  remember();
  redraw();
}

// ---- following by itself: the way of one microbatch after another is drawn as it comes about

const WAY_MS = 5000, REST_MS = 1500;
const playing = { frame: 0, since: 0 };

function play() {
  if (state.microbatch < 0) aim(0);
  $("play").textContent = "Pause";
  $("status").setAttribute("aria-live", "off"); // it changes without end
  playing.since = performance.now();
  advance(playing.since);
  remember();
}

// From when to when the microbatch that is followed is on its way.
function spanOfWay() {
  const ways = shownLayers().map(layer => wayOf(layer, state.microbatch));
  return [Math.min(...ways.map(way => way.start)), Math.max(...ways.map(way => way.end))];
}

function advance(now) {
  const [start, end] = spanOfWay(), took = now - playing.since;
  state.until = took < WAY_MS ? start + (end - start) * (took / WAY_MS) : Infinity;
  playing.frame = requestAnimationFrame(advance);
  if (took < WAY_MS + REST_MS) return redraw();
  playing.since = now;
  return aim((state.microbatch + 1) % numMicrobatches);
}

function pause() {
  cancelAnimationFrame(playing.frame);
  playing.frame = 0;
  state.until = Infinity;
  redraw();
  $("play").textContent = "Play";
  $("status").setAttribute("aria-live", "polite");
  rememberSoon();
}

// Follow a microbatch and, where nothing of it is seen, go where it is.
function goAlong(microbatch) {
  follow(microbatch);
  if (state.microbatch < 0) return;
  const [start, end] = spanOfWay();
  if (end >= state.from && start <= state.to) return;
  const half = Math.max(state.to - state.from, end - start) / 2;
  glideTo((start + end) / 2 - half, (start + end) / 2 + half);
}

function show(what) {
  state.show = what;
  if (state.cursor && !shownLayers().includes(state.cursor.layer)) state.cursor = null;
  for (const input of $("show").querySelectorAll("input")) input.checked = input.value === String(what);
  tellWay();
  layOut();
  remember();
}

function paintTheme(theme) {
  document.documentElement.dataset.theme = theme;
  $("theme").textContent = theme === "dark" ? "Light" : "Dark";
  makeColours();
  makeLegend();
  redraw();
}

function makeLegend() {
  const found = new Set();
  for (const { start, end, parts } of allRanks.flatMap(rank => [...rank.compute, ...rank.beside])) {
    if (end > start) for (const part of parts) found.add(part.kind);
  }
  const swatch = (background, word) => {
    const mark = element("i");
    mark.style.background = background;
    return element("li", {}, mark, word);
  };
  const kinds = [...LETTERS].map((_, kind) => kind).filter(kind => found.has(kind));
  const entries = kinds.map(kind => swatch(css(colours.kinds[kind]), `${LETTERS[kind]}  ${WORDS[kind]}`));
  entries.push(swatch(css(colours.idle), "idle"));
  const most = mostOf(allRanks, rank => rank.stages.length);
  if (most > 1) {
    const which = most > 2 ? "later stages" : "second stage";
    entries.push(swatch(css(colourOf({ kind: kinds[0], local: 1 })), `another shade: the rank's ${which}`));
  }
  if (anyKept) entries.push(element("li", {}, "K  keeps all activations, recomputes none"));
  const stripes = colour => `repeating-linear-gradient(135deg, ${css(colour, 0.6)} 0 1px, transparent 1px 4px)`;
  if (layers.some(layer => layer.hang)) {
    entries.push(swatch(`${stripes(colours.alarm)}, ${css(colours.wait)}`, "waits for ever"));
  }
  if (layers.some(layer => layer.recorded && !layer.hang)) {
    entries.push(swatch(`${stripes(colours.muted)}, ${css(colours.idle)}`, "waiting for a message"));
  }
  const half = `linear-gradient(transparent 45%, ${css(colours.muted, 0.42)} 45%)`;
  entries.push(swatch(half, $("stripsName").textContent.toLowerCase()));
  $("legend").replaceChildren(...entries);
}

// ---- the address remembers what is seen, so that a view can be sent as a link

function remember() {
  const parts = [];
  if (state.microbatch >= 0) parts.push(`microbatch=${state.microbatch}`);
  if (playing.frame) parts.push("play=on");
  if (layers.length > 1) parts.push(`show=${state.show === "all" ? "all" : layers[state.show].name}`);
  if (state.to - state.from < 0.999 * (WHOLE[1] - WHOLE[0])) {
    parts.push(`from=${figure(state.from, 9)}`, `to=${figure(state.to, 9)}`);
  }
  try {
    history.replaceState(null, "", parts.length ? `#${parts.join("&")}` : location.href.split("#")[0]);
  } catch {
    /* some viewers forbid it */
  }
}

// Each move is remembered, once it has come to rest.
let soon = 0;
function rememberSoon() {
  clearTimeout(soon);
  soon = setTimeout(remember, 200);
}

function recall(hash = location.hash) {
  const asked = new URLSearchParams(hash.slice(1));
  const named = layers.findIndex(layer => layer.name === asked.get("show"));
  const [from, to] = [asked.get("from"), asked.get("to")].map(text => (text === null ? NaN : Number(text)));
  if (["light", "dark"].includes(asked.get("theme"))) paintTheme(asked.get("theme"));
  show(named >= 0 ? named : layers.length > 1 ? "all" : 0);
  look(...(from < to ? [from, to] : WHOLE));
  follow(asked.has("microbatch") ? Number(asked.get("microbatch")) : -1);
  const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
  if (asked.has("play") && numMicrobatches) still ? aim(0) : play();
}

// ---- mouse

const body = $("body"),
  scroller = $("scroller");
let drag = null;

body.addEventListener("pointerdown", event => {
  if (event.button) return;
  body.setPointerCapture(event.pointerId);
  const [x, y, { from, to }] = [event.offsetX, event.offsetY, state];
  drag = { x, y, from, to, top: scroller.scrollTop, moved: false, range: event.shiftKey };
  cancelAnimationFrame(moving);
});

body.addEventListener("pointermove", event => {
  state.pointer = { x: event.offsetX, y: event.offsetY, from: drag && drag.range ? drag.x : undefined };
  if (drag) {
    const [dx, dy] = [event.offsetX - drag.x, event.offsetY - drag.y];
    drag.moved ||= Math.hypot(dx, dy) > 4;
    if (drag.moved && !drag.range) {
      const by = (dx * (drag.to - drag.from)) / body.clientWidth;
      body.classList.add("moving");
      look(drag.from - by, drag.to - by);
      scroller.scrollTop = drag.top - dy;
    }
  }
  const at = whatIsAt(event.offsetX, event.offsetY);
  const described = at && !(drag && drag.moved) && (at.layer ? describe(at) : at.strip ? describeStrip(at) : null);
  tip(described, event.clientX, event.clientY);
  redraw();
});

body.addEventListener("pointerup", event => {
  const was = drag;
  drag = null;
  body.classList.remove("moving");
  if (!was) return;
  if (!was.moved) choose(event);
  else if (was.range) {
    const scale = bodyScale(),
      [a, b] = [scale.t(was.x), scale.t(event.offsetX)];
    state.pointer = null;
    glideTo(Math.min(a, b), Math.max(a, b));
  }
});

body.addEventListener("pointercancel", () => {
  drag = null;
  body.classList.remove("moving");
});
body.addEventListener("pointerleave", () => {
  if (!drag) {
    state.pointer = null;
    tip(null);
    redraw();
  }
});

function choose(event) {
  const at = whatIsAt(event.offsetX, event.offsetY);
  if (!at || !at.layer || at.index < 0) {
    state.cursor = null;
    follow(-1);
    return;
  }
  const { parts } = at.layer.ranks[at.rank].compute[at.index];
  const { microbatch } = (at.lower && parts[1]) || parts[0];
  state.cursor = null;
  follow(microbatch === state.microbatch && event.detail < 2 ? -1 : microbatch);
}

body.addEventListener("dblclick", event => {
  const at = whatIsAt(event.offsetX, event.offsetY);
  if (!at || !at.layer || at.index < 0) return;
  const { start, end } = at.layer.ranks[at.rank].compute[at.index], around = 4 * (end - start);
  glideTo(start - around, end + around);
});

body.addEventListener(
  "wheel",
  event => {
    event.preventDefault();
    const lines = event.deltaMode === 1 ? 16 : 1, [dx, dy] = [event.deltaX * lines, event.deltaY * lines];
    const along = event.shiftKey && !dx ? dy : dx;
    if (Math.abs(along) > Math.abs(dy) || event.shiftKey) {
      const by = (along * (state.to - state.from)) / body.clientWidth;
      look(state.from + by, state.to + by);
    } else {
      zoom(Math.exp(-dy * (event.ctrlKey ? 0.01 : 0.0018)), bodyScale().t(event.offsetX));
    }
  },
  { passive: false },
);

scroller.addEventListener("scroll", redraw);

const overviewCanvas = $("overview");
function goTo(event) {
  const middle = scaleOf(overviewCanvas.clientWidth, ...WHOLE).t(event.offsetX),
    half = (state.to - state.from) / 2;
  look(middle - half, middle + half);
}
overviewCanvas.addEventListener("pointerdown", event => {
  overviewCanvas.setPointerCapture(event.pointerId);
  overviewCanvas.classList.add("moving");
  goTo(event);
});
overviewCanvas.addEventListener("pointermove", event => {
  if (event.buttons) goTo(event);
});
overviewCanvas.addEventListener("pointerup", () => overviewCanvas.classList.remove("moving"));

// ---- keys

const KEYS = {
  "+": () => zoom(1.5),
  "=": () => zoom(1.5),
  "-": () => zoom(1 / 1.5),
  0: () => glideTo(...WHOLE),
  Home: () => glideTo(...WHOLE),
  a: () => pan(-0.2),
  d: () => pan(0.2),
  w: () => zoom(1.5),
  s: () => zoom(1 / 1.5),
  ArrowLeft: () => step(-1),
  ArrowRight: () => step(1),
  ArrowUp: () => leap(-1),
  ArrowDown: () => leap(1),
  "[": () => neighbour(-1),
  "]": () => neighbour(1),
  p: () => (playing.frame ? pause() : play()),
  Escape: () => {
    state.cursor = null;
    follow(-1);
  },
  Enter: () => {
    const at = state.cursor;
    if (at) follow(at.layer.ranks[at.rank].compute[at.index].parts[0].microbatch);
  },
  "?": () => $("keys").showModal(),
};

document.addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  // A field keeps its keys, a button those that press it or go on to the next.
  const control = event.target.closest("input, button");
  const typed = control?.id === "microbatch";
  if (control && event.key !== "Escape" && (typed || /^(Enter|Home|Arrow)/.test(event.key))) return;
  const act = KEYS[event.key.length === 1 ? event.key.toLowerCase() : event.key];
  if (!act) return;
  event.preventDefault();
  act();
});

const pan = part => look(state.from + part * (state.to - state.from), state.to + part * (state.to - state.from));
const neighbour = by => {
  if (!numMicrobatches) return;
  const from = state.microbatch < 0 ? (by > 0 ? -1 : 0) : state.microbatch;
  goAlong((from + by + numMicrobatches) % numMicrobatches);
};

function step(by) {
  const at = state.cursor || { layer: shownLayers()[0], rank: 0, index: -1 };
  const lane = at.layer.ranks[at.rank].compute;
  const index = at.index < 0 ? Math.max(0, lastStarted(lane, state.from)) : at.index + by;
  if (lane[index]) putCursor({ ...at, index });
}

function leap(by) {
  if (!state.cursor) {
    step(1);
    return;
  }
  const shown = shownLayers(), { layer, rank, index } = state.cursor, { start, end } = layer.ranks[rank].compute[index];
  const row = rank * shown.length + shown.indexOf(layer) + by;
  if (row < 0 || row >= numRanks * shown.length) return;
  const to = { layer: shown[row % shown.length], rank: Math.floor(row / shown.length) };
  const there = to.layer.ranks[to.rank].compute;
  if (there.length) putCursor({ ...to, index: Math.max(0, lastStarted(there, (start + end) / 2)) });
}

function putCursor(cursor) {
  state.cursor = cursor;
  const { layer, rank, index } = cursor, { start, end } = layer.ranks[rank].compute[index];
  const middle = (start + end) / 2, half = (state.to - state.from) / 2;
  if (start < state.from || end > state.to) look(middle - half, middle + half);
  const top = rank * rows.height;
  if (top < scroller.scrollTop) scroller.scrollTop = top;
  if (top + rows.height > scroller.scrollTop + scroller.clientHeight)
    scroller.scrollTop = top + rows.height - scroller.clientHeight;
  const [name, facts] = describe({ rank, layer, index, beside: -1 });
  $("status").textContent = `${name}: ${facts.map(fact => fact.join(" ")).join(", ")}`;
  redraw();
}

// ---- buttons

function makeSwitch() {
  const option = (value, text) => {
    const input = element("input", { type: "radio", name: "show", value: String(value), onchange: () => show(value) });
    return element("label", {}, input, text);
  };
  const each = layers.map((layer, i) => option(i, layer.name));
  $("show").replaceChildren(...each, option("all", layers.length > 2 ? "all" : "both"));
  $("show").hidden = layers.length < 2;
}

$("in").onclick = () => zoom(1.6);
$("out").onclick = () => zoom(1 / 1.6);
$("fit").onclick = () => glideTo(...WHOLE);
$("before").onclick = () => neighbour(-1);
$("after").onclick = () => neighbour(1);
$("play").onclick = KEYS.p;
$("play").disabled = !numMicrobatches;
$("clear").onclick = () => follow(-1);
$("microbatch").onchange = event => goAlong(event.target.value.trim() === "" ? -1 : Number(event.target.value));
$("strips").onchange = event => {
  state.strips = event.target.checked;
  layOut();
};
$("theme").onclick = () => paintTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
$("help").onclick = () => $("keys").showModal();
$("byRank").onclick = () => $("ranks").showModal();

$("unit").textContent = data.unit ? `time, ${data.unit}` : "time";
if (data.inBytes) $("stripsName").textContent = "Live bytes";
const shortly = layers.map(layer => `${layer.title}, ${layer.hang?.sentence ?? `makespan ${time4(layer.makespan)}`}; `);
$("chart").setAttribute("aria-label", `${shortly.join("")}${numRanks} rank${numRanks === 1 ? "" : "s"}`);
if (window !== window.top) document.documentElement.dataset.framed = "";
makeSwitch();
makeFigures();
makeRankTables();
tellHang();
const prefersDark = matchMedia("(prefers-color-scheme: dark)");
prefersDark.addEventListener("change", () => paintTheme(prefersDark.matches ? "dark" : "light"));
paintTheme(prefersDark.matches ? "dark" : "light");
recall();
addEventListener("resize", layOut);
const around = new ResizeObserver(layOut);
for (const name of ["header", "footer"]) around.observe(document.querySelector(name));
// By now what is seen may have been remembered over what was asked for.
addEventListener("hashchange", event => recall(new URL(event.newURL).hash));
document.documentElement.dataset.ready = "true";
