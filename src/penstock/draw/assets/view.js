// What is seen: which layers, which stretch of time, where rows lie, and one frame of it.

const $ = id => document.getElementById(id);
const state = {
  show: layers.length > 1 ? "all" : 0,
  from: 0,
  to: 1,
  microbatch: -1,
  until: Infinity, // of the way that is followed, what has begun by then
  cursor: null,
  pointer: null,
  strips: true,
};
const MARGIN = 0.012; // of the makespan, left free on both sides of the whole step
const WHOLE = [-MARGIN * makespan, (1 + MARGIN) * makespan];
[state.from, state.to] = WHOLE;
const rows = { height: 0, crowded: false, bars: [], strip: null };

const shownLayers = () => (state.show === "all" ? layers : [layers[state.show]]);

function scaleOf(width, from = state.from, to = state.to) {
  const ratio = window.devicePixelRatio || 1,
    perTime = width / (to - from);
  const x = time => (time - from) * perTime;
  return { from, to, width, x, t: at => from + at / perTime, snap: time => Math.round(x(time) * ratio) / ratio };
}

const bodyScale = () => scaleOf($("body").clientWidth);

// Of the whole step every rank is seen. The closer one looks, the nearer rows come to a height that can be read, and one
// scrolls; what was under the pointer, or else in the middle, stays there.
function layOut() {
  const scroller = $("scroller"), anchor = state.pointer ? state.pointer.y : scroller.clientHeight / 2;
  const under = rows.height ? (scroller.scrollTop + anchor) / rows.height : 0;
  const chart = $("chart"),
    num = shownLayers().length;
  chart.style.flex = "1";
  const room = chart.clientHeight - document.querySelector(".head").offsetHeight;
  chart.style.flex = "0 1 auto";
  const least = 9 * num + (state.strips ? 8 : 3),
    most = 40 + 52 * num + (state.strips ? 30 : 0);
  const share = room / numRanks, fitted = share < 4 ? share : Math.min(most, Math.floor(share));
  rows.crowded = fitted < least;
  rows.height = Math.max(fitted, Math.min(least, (fitted * (WHOLE[1] - WHOLE[0])) / (state.to - state.from)));
  const gap = Math.min(Math.max(2, rows.height * 0.16), 16, rows.height / 5);
  const inner = rows.height - gap;
  const strip = state.strips && inner >= 10 ? Math.max(4, Math.min(30, inner * (num > 1 ? 0.2 : 0.3))) : 0;
  const between = Math.min(3, inner * 0.05),
    bar = (inner - strip - between * num) / num;
  rows.bars = shownLayers().map((layer, i) => ({ layer, top: gap / 2 + i * (bar + between), height: bar }));
  rows.strip = strip ? { top: rows.height - gap / 2 - strip, height: strip } : null;
  $("sheet").style.height = `${rows.height * numRanks}px`;
  $("body").style.height = `${Math.min(rows.height * numRanks, room)}px`;
  // The axis is as wide as the rows, which a scroll bar may make narrower.
  $("overview").style.marginRight = `${scroller.offsetWidth - scroller.clientWidth}px`;
  scroller.scrollTop = under * rows.height - anchor;
  labelRows();
  redraw();
}

function labelRows() {
  const shown = shownLayers(),
    low = rows.height < 34 + 15 * (shown.length - 1),
    tiny = rows.height < 17,
    each = Math.ceil(9 / rows.height); // of so many rows only the first is named
  $("labels").replaceChildren(
    ...layers[0].ranks.map((_, rank) => {
      const idle = shown.map(layer => {
        if (!layer.hang) return `${share(layer.idle[rank] / (layer.makespan || 1))} idle`;
        const wait = waitOf(layer, rank);
        return wait ? `\u2192 rank ${wait.awaited}` : "ends";
      });
      const item = element("li", { className: tiny ? "low tiny" : low ? "low" : "" });
      item.style.top = `${rank * rows.height}px`;
      item.style.height = `${Math.min(each, numRanks - rank) * rows.height}px`;
      item.style.visibility = rank % each ? "hidden" : "";
      const name = element("span", { className: "name" }, element("b", {}, `rank ${rank}`));
      if (shown.length === 1 || low)
        name.append(element("span", { className: "idle" }, idle[shown.length - 1]));
      item.append(name);
      for (const [i, layer] of shown.entries()) {
        if (low || layer.hang) break;
        if (shown.length > 1) {
          item.append(element("span", { className: "name idle" }, element("span", {}, layer.name), idle[i]));
        }
        const fill = element("i");
        fill.style.width = share(layer.idle[rank] / (layer.makespan || 1));
        item.append(element("span", { className: "meter" }, fill));
      }
      const peaks = [...new Set(shown.map(layer => amount(layer.ranks[rank].peak)))].join(" / ");
      if (state.strips && rows.height > 60 + 20 * (shown.length - 1)) {
        item.append(element("span", { className: "live" }, `peak ${peaks} live`));
      }
      return item;
    }),
  );
}

function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

// ---- frames

let due = false;
function redraw() {
  if (due) return;
  due = true;
  requestAnimationFrame(() => {
    due = false;
    // In a hidden frame there is nothing to paint on; once it is shown, it is laid out again.
    if (!$("body").clientWidth) return;
    paintOverview();
    paintBody();
  });
}

function paintBody() {
  const canvas = $("body"),
    width = canvas.clientWidth,
    height = canvas.clientHeight;
  const pen = prepare(canvas, width, height),
    scale = scaleOf(width),
    top = $("scroller").scrollTop;
  const ways = new Map(
    shownLayers().map(layer => [layer, state.microbatch >= 0 ? wayOf(layer, state.microbatch) : null]),
  );
  pen.fillStyle = css(colours.line, 0.7);
  for (const tick of ticksOf(scale, 90).ticks) pen.fillRect(scale.snap(tick), 0, 1, height);
  for (let rank = Math.floor(top / rows.height); rank < numRanks && rank * rows.height - top < height; rank++) {
    const y = rank * rows.height - top;
    for (const bar of rows.bars) {
      const way = ways.get(bar.layer);
      const actions = way && way.places.filter(place => place.rank === rank).map(place => place.action);
      const own = way && { microbatch: state.microbatch, actions, until: state.until };
      paintBar(pen, bar.layer.ranks[rank], barBox(bar, rank, top), scale, own);
    }
    if (rows.strip) {
      rows.bars.forEach(({ layer }, i) => {
        const box = { y: y + rows.strip.top, height: rows.strip.height, makespan: layer.makespan };
        paintStrip(pen, layer.ranks[rank].live, box, scale, i === rows.bars.length - 1);
      });
    }
  }
  for (const [layer, way] of ways) if (way) paintWay(pen, layer, way, scale, top);
  if (state.until < Infinity) {
    pen.fillStyle = css(colours.accent);
    pen.fillRect(Math.round(scale.x(state.until)), 0, 1.5, height);
  }
  for (const layer of shownLayers()) if (layer.hang) paintHang(pen, layer, scale, top);
  if (state.cursor) paintCursor(pen, scale, top);
  if (state.pointer) paintPointer(pen, height);
}

function barBox(bar, rank, top) {
  return { y: rank * rows.height - top + bar.top, height: bar.height, makespan: bar.layer.makespan };
}

function paintWay(pen, layer, way, scale, top) {
  const bar = rows.bars.find(candidate => candidate.layer === layer);
  // From the corner of the box that made the message to the corner of the one that needed it.
  const corner = ({ rank, action }, other, time, inwards) => {
    const box = barBox(bar, rank, top), width = scale.x(action.end) - scale.x(action.start);
    const x = scale.x(action[time]) + inwards * Math.min(5, width / 2);
    return { x, y: other.rank > rank ? box.y + box.height : box.y };
  };
  if (way.messages.length > 4000) return;
  for (const { flow, from, to } of way.messages) {
    const a = corner(from, to, "end", -1), b = corner(to, from, "start", 1);
    if (from.action.end > state.until) continue;
    if (Math.max(a.x, b.x) < -80 || Math.min(a.x, b.x) > scale.width + 80) continue;
    paintArrow(pen, a, b, flow === FORWARD ? colours.kinds[F] : mix(colours.kinds[B], colours.ink, 0.25));
  }
}

function paintCursor(pen, scale, top) {
  const { layer, rank, index } = state.cursor, bar = rows.bars.find(candidate => candidate.layer === layer);
  if (!bar) return;
  const { start, end } = layer.ranks[rank].compute[index], box = barBox(bar, rank, top), x = scale.x(start);
  pen.lineWidth = 2;
  pen.strokeStyle = css(colours.ink);
  pen.beginPath();
  pen.roundRect(x - 1, box.y - 1.5, Math.max(3, scale.x(end) - x + 1), box.height + 3, 3.5);
  pen.stroke();
}

function paintPointer(pen, height) {
  const { x, from } = state.pointer;
  if (from !== undefined) {
    pen.fillStyle = css(colours.accent, 0.18);
    pen.fillRect(Math.min(x, from), 0, Math.abs(x - from), height);
  }
  pen.fillStyle = css(colours.ink, 0.35);
  pen.fillRect(Math.round(x), 0, 1, height);
}

// ---- the whole step above the rows, with the stretch that is seen, and the axis

let overview = null; // drawn once for each size, colours and choice of layers

function paintOverview() {
  const canvas = $("overview"),
    width = canvas.clientWidth,
    height = canvas.clientHeight;
  const axis = 24,
    top = 8,
    deep = height - axis - top;
  const key = [width, height, colours.version, state.show, window.devicePixelRatio].join();
  const whole = scaleOf(width, ...WHOLE);
  if (!overview || overview.key !== key) {
    overview = { key, canvas: document.createElement("canvas") };
    const pen = prepare(overview.canvas, width, height),
      shown = shownLayers();
    const apart = shown.length > 1 ? 3 : 0,
      room = (deep - apart * (shown.length - 1)) / shown.length;
    shown.forEach((layer, i) => {
      // Too many ranks for a line each are shown as one.
      const groups = room / numRanks >= 3 ? layer.ranks.map(rank => [rank]) : [layer.ranks],
        each = room / groups.length;
      groups.forEach((ranks, number) => {
        const box = {
          y: top + i * (room + apart) + number * each,
          height: each * (groups.length > 1 ? 0.88 : 1),
          makespan: layer.makespan,
        };
        paintShares(pen, ranks, box, whole, 1);
      });
    });
  }
  const pen = prepare(canvas, width, height);
  pen.drawImage(overview.canvas, 0, 0, width, height);
  const left = whole.x(state.from),
    right = whole.x(state.to);
  if (state.to - state.from < 0.999 * (WHOLE[1] - WHOLE[0])) {
    pen.fillStyle = css(colours.surface, 0.68);
    pen.fillRect(0, 0, left, height - axis);
    pen.fillRect(right, 0, width - right, height - axis);
    pen.strokeStyle = css(colours.accent);
    pen.lineWidth = 1.5;
    pen.beginPath();
    pen.roundRect(left, top - 4, Math.max(3, right - left), deep + 8, 3);
    pen.stroke();
  }
  paintAxis(pen, height, scaleOf(width));
}

function paintAxis(pen, height, scale) {
  const { ticks, decimals } = ticksOf(scale, 90);
  pen.font = '11.5px system-ui, "Liberation Sans", sans-serif';
  pen.textBaseline = "alphabetic";
  pen.textAlign = "center";
  for (const tick of ticks) {
    pen.fillStyle = css(colours.line);
    pen.fillRect(scale.snap(tick), height - 5, 1, 5);
    pen.fillStyle = css(colours.muted);
    const label = tick.toFixed(Math.min(12, decimals)), half = pen.measureText(label).width / 2 + 2;
    pen.fillText(label, Math.max(half, Math.min(scale.width - half, scale.x(tick))), height - 8);
  }
  if (!state.pointer) return;
  const text = scale.t(state.pointer.x).toFixed(Math.min(12, decimals + 2));
  const half = pen.measureText(text).width / 2 + 6,
    x = Math.max(half, Math.min(scale.width - half, state.pointer.x));
  pen.fillStyle = css(colours.ink);
  pen.beginPath();
  pen.roundRect(x - half, height - 21, 2 * half, 18, 4);
  pen.fill();
  pen.fillStyle = css(colours.surface);
  pen.fillText(text, x, height - 8);
}

// ---- moving

function look(from, to) {
  const whole = WHOLE[1] - WHOLE[0];
  const length = Math.min(whole, Math.max(makespan * 1e-7, to - from));
  const middle = (from + to) / 2, before = state.to - state.from;
  state.from = Math.max(WHOLE[0], Math.min(WHOLE[1] - length, middle - length / 2));
  state.to = state.from + length;
  rememberSoon();
  if (rows.crowded && length !== before) layOut();
  else redraw();
}

function zoom(factor, at = (state.from + state.to) / 2) {
  look(at - (at - state.from) / factor, at + (state.to - at) / factor);
}

let moving = 0;
function glideTo(from, to) {
  cancelAnimationFrame(moving);
  const start = performance.now(),
    [a, b] = [state.from, state.to];
  const took = matchMedia("(prefers-reduced-motion: reduce)").matches ? 0 : 180;
  const step = now => {
    const done = took ? Math.min(1, (now - start) / took) : 1,
      eased = 1 - (1 - done) ** 3;
    look(a + (from - a) * eased, b + (to - b) * eased);
    if (done < 1) moving = requestAnimationFrame(step);
  };
  moving = requestAnimationFrame(step);
}

// What lies at a place of the canvas: its rank, and the layer's bar or the strip.
function whatIsAt(x, y) {
  const down = y + $("scroller").scrollTop,
    rank = Math.floor(down / rows.height),
    inside = down - rank * rows.height;
  if (rank < 0 || rank >= numRanks) return null;
  const at = bodyScale().t(x);
  const bar = rows.bars.find(({ top, height }) => inside >= top && inside < top + height);
  if (!bar) {
    const strip = rows.strip && inside >= rows.strip.top && inside < rows.strip.top + rows.strip.height;
    return { rank, time: at, layer: null, strip };
  }
  const part = (inside - bar.top) / bar.height,
    { compute, beside } = bar.layer.ranks[rank];
  return {
    rank,
    time: at,
    layer: bar.layer,
    lower: part > 0.5,
    index: under(compute, at),
    beside: part > 1 - BESIDE ? under(beside, at) : -1,
  };
}
