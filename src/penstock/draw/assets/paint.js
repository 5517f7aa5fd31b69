// How rows, strips, arrows and the axis are drawn on a canvas. What is shown is given, nothing here is decided.

const BESIDE = 0.28; // of a bar's height: what runs beside the compute, along the foot
const DIMMED = 0.15;
const NARROWEST = 9; // pixels of a box that still bears its number

// Colours as [red, green, blue], made anew when the scheme changes.
let colours = null;

function makeColours() {
  const style = getComputedStyle(document.documentElement);
  const dark = document.documentElement.dataset.theme === "dark";
  const own = name => parse(style.getPropertyValue(name).trim());
  const look = letter => parse((dark && data.looks[letter].dark) || data.looks[letter].colour);
  colours = {
    version: (colours ? colours.version : 0) + 1,
    surface: own("--surface"),
    ink: own("--ink"),
    muted: own("--muted"),
    line: own("--line"),
    accent: own("--accent"),
    kinds: [...LETTERS].map(look),
    idle: look("·"),
    hatch: hatching(own("--muted")),
    wait: look("/"),
    alarm: own("--alarm"),
    waitHatch: hatching(own("--alarm")),
  };
}

function parse(hex) {
  return [1, 3, 5].map(at => parseInt(hex.slice(at, at + 2), 16));
}

const css = ([r, g, b], alpha = 1) => `rgb(${Math.round(r)} ${Math.round(g)} ${Math.round(b)} / ${alpha})`;
const mix = (a, b, share) => a.map((channel, i) => channel + (b[i] - channel) * share);

function inkOn(colour) {
  const [r, g, b] = colour.map(channel => (channel / 255) ** 2.2);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.26 ? "#14181d" : "#ffffff";
}

// A rank's second local stage is paler than its first.
function colourOf({ kind, local }) {
  return mix(colours.kinds[kind], colours.surface, Math.min(0.66, 0.42 * local));
}

function hatching(colour) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const pen = tile.getContext("2d");
  pen.strokeStyle = css(colour, 0.45);
  pen.lineWidth = 1;
  pen.beginPath();
  for (const x of [-6, 0, 6]) {
    pen.moveTo(x, 6);
    pen.lineTo(x + 6, 0);
  }
  pen.stroke();
  return pen.createPattern(tile, "repeat");
}

// A canvas as large as its place on the page, sharp on any screen; gives its pen in CSS pixels.
function prepare(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  return pen;
}

// One layer of one rank: `box` says where (y, height), `scale` maps time to pixels, `way` is what is followed here: the
// microbatch, its actions, and the time until which it has come; null where none is.
function paintBar(pen, rank, box, scale, way) {
  const left = Math.max(0, scale.x(0)), right = Math.min(scale.width, scale.x(box.makespan));
  pen.fillStyle = css(colours.idle);
  pen.fillRect(left, box.y, Math.max(0, right - left), box.height);
  paintWaits(pen, rank.waits, box, scale, way ? 0.45 : 1);
  const seen = seenOf(rank.compute, scale);
  if (seen.length > scale.width / 3) {
    paintShares(pen, [rank], box, scale, way ? DIMMED : 1);
    if (way) for (const action of way.actions) paintAction(pen, action, box, scale, way, 2);
  } else {
    for (const action of seen) if (action.end >= scale.from) paintAction(pen, action, box, scale, way, 0);
  }
  const foot = box.height * BESIDE;
  for (const { start, end, parts } of seenOf(rank.beside, scale)) {
    if (end <= start) continue;
    const x = scale.x(start);
    pen.fillStyle = css(mix(colours.surface, colourOf(parts[0]), way ? DIMMED * 2 : 1));
    pen.fillRect(x, box.y + box.height - foot, Math.max(1, scale.x(end) - x), foot);
  }
}

function paintWaits(pen, waits, box, scale, alpha) {
  pen.globalAlpha = alpha;
  pen.fillStyle = colours.hatch;
  for (const { start, end } of seenOf(waits, scale)) {
    const x = scale.x(start), width = scale.x(end) - x;
    if (width > 2) pen.fillRect(x, box.y, width, box.height);
  }
  pen.globalAlpha = 1;
}

// An action, dimmed if another microbatch than its own is followed, or its own has not come here yet.
function paintAction(pen, { start, end, parts, kept }, box, scale, way, atLeast) {
  let x = scale.snap(start), width = scale.snap(end) - x;
  if (width < atLeast) {
    x -= (atLeast - width) / 2;
    width = atLeast;
  }
  if (width <= 0) return;
  const room = scale.x(end) - scale.x(start), gap = width > 9 ? 1 : width > 3.5 ? 0.5 : 0;
  const height = box.height / parts.length;
  parts.forEach((part, place) => {
    const y = box.y + place * height, colour = colourOf(part);
    const dimmed = way && (way.microbatch !== part.microbatch || start > way.until);
    pen.fillStyle = css(dimmed ? mix(colours.idle, colour, DIMMED) : colour);
    if (width > 9 && height > 9) {
      pen.beginPath();
      pen.roundRect(x, y, width - gap, height - (place < parts.length - 1 ? 0.75 : 0), 2.5);
      pen.fill();
    } else {
      pen.fillRect(x, y, width - gap, height);
    }
    const sign = kept && part.kind === F ? "K" : "", middle = y + height / 2;
    if (!dimmed && height >= 9) paintLabel(pen, part, sign, { x, y: middle, width: width - gap, height }, room);
  });
}

// The microbatch, with its letter where there is room; `room` is the box's width before it was fitted to pixels, so
// that boxes of one duration have labels of one kind and size, whatever their numbers.
function paintLabel(pen, part, sign, { x, y, width, height }, room) {
  const digits = part.microbatch >= 0 ? part.microbatch + sign : "";
  const most = String(numMicrobatches - 1).length + (anyKept ? 1 : 0);
  const withLetter = room >= (most + 1) * 7.5 + 4;
  const besides = Math.min(12, height - 1, Math.floor((2 * (room - 3)) / (0.62 * most)) / 2);
  // In a narrow box figures stand one over the other.
  const stacked = room >= NARROWEST ? Math.min(10, (height - 1) / most) : 0;
  const size = besides >= 8.5 ? besides : stacked;
  if (size < 8.5) return;
  const text = withLetter || !digits ? LETTERS[part.kind] + digits : digits;
  pen.fillStyle = inkOn(colourOf(part));
  pen.font = `${size}px system-ui, "Liberation Sans", sans-serif`;
  pen.textAlign = "center";
  pen.textBaseline = "middle";
  if (besides < 8.5) {
    const top = y + 0.5 - ((text.length - 1) * size) / 2;
    [...text].forEach((figure, line) => pen.fillText(figure, x + width / 2, top + line * size));
    return;
  }
  // Cut off at the edges, the label stays in what is seen of its box.
  const from = Math.max(x, 0), to = Math.min(x + width, pen.canvas.clientWidth);
  if (to - from >= text.length * size * 0.6) pen.fillText(text, (from + to) / 2, y + 0.5);
}

// Where actions are narrower than pixels, a column is split by height: how much of its time went where. Of several
// ranks it shows the mean.
function paintShares(pen, ranks, box, scale, alpha) {
  const ratio = window.devicePixelRatio || 1;
  const from = Math.max(0, Math.ceil(scale.x(0) * ratio - 0.01));
  const to = Math.min(Math.round(scale.width * ratio), Math.floor(scale.x(box.makespan) * ratio + 0.01));
  const width = to - from, height = Math.max(1, Math.round(box.height * ratio));
  if (width <= 0) return;
  const shares = new Float64Array(width * LETTERS.length), columnAt = time => scale.x(time) * ratio - from;
  for (const { compute } of ranks) addShares(seenOf(compute, scale), shares, columnAt, width);
  const image = new ImageData(width, height), pixels = new Uint32Array(image.data.buffer);
  const inks = colours.kinds.map(([r, g, b]) => ((Math.round(255 * alpha) << 24) | (b << 16) | (g << 8) | r) >>> 0);
  for (let x = 0; x < width; x++) {
    let filled = 0;
    for (let kind = LETTERS.length - 1, y = height - 1; kind >= 0; kind--) {
      filled += shares[x * LETTERS.length + kind] / ranks.length;
      for (const top = height - Math.round(Math.min(1, filled) * height + 1e-6); y >= top; y--)
        pixels[y * width + x] = inks[kind];
    }
  }
  const picture = document.createElement("canvas");
  picture.width = width;
  picture.height = height;
  picture.getContext("2d").putImageData(image, 0, 0);
  pen.imageSmoothingEnabled = false;
  pen.drawImage(picture, from / ratio, box.y, width / ratio, box.height);
}

// Adds to each column and kind the share of the column's time that actions take; a fused pair's is half of either.
function addShares(actions, shares, columnAt, width) {
  for (const { start, end, parts } of actions) {
    const first = Math.max(0, columnAt(start)), last = Math.min(width, columnAt(end));
    for (let x = Math.floor(first); x < last; x++) {
      const share = (Math.min(x + 1, last) - Math.max(x, first)) / parts.length;
      for (const { kind } of parts) shares[x * LETTERS.length + kind] += share;
    }
  }
}

// What is live over time, as steps: filled, or as a line where it is laid over another. Of the steps within one pixel
// the highest is drawn, so that no peak is lost from afar.
function paintStrip(pen, live, box, scale, filled) {
  const y = value => box.y + box.height - (box.height - 1) * (value / peakLive);
  let i = Math.max(0, lastStarted(live, scale.from));
  let value = live[i]?.start <= scale.from ? live[i].value : 0;
  let x = Math.max(0, scale.x(0)), highest = value;
  pen.beginPath();
  pen.moveTo(x, y(filled ? 0 : value));
  for (; live[i]?.start <= scale.to; i++) {
    const at = scale.x(live[i].start);
    if (at - x >= 0.5) {
      pen.lineTo(x, y(highest));
      pen.lineTo(x, y(value));
      pen.lineTo(at, y(value));
      x = at;
      highest = live[i].value;
    }
    value = live[i].value;
    highest = Math.max(highest, value);
  }
  pen.lineTo(x, y(highest));
  pen.lineTo(x, y(value));
  const end = Math.max(x, Math.min(scale.width, scale.x(box.makespan)));
  pen.lineTo(end, y(value));
  if (!filled) {
    pen.strokeStyle = css(colours.ink, 0.75);
    pen.lineWidth = 1;
    pen.stroke();
    return;
  }
  pen.lineTo(end, y(0));
  pen.lineTo(Math.max(0, scale.x(0)), y(0));
  pen.closePath();
  pen.fillStyle = css(colours.muted, 0.34);
  pen.fill();
}

// A message, from one box's edge to another's: a curve with a head, on a halo that keeps it apart from what it crosses.
function paintArrow(pen, from, to, colour) {
  const down = to.y > from.y ? 1 : -1,
    head = Math.min(6, Math.abs(to.y - from.y) / 2),
    foot = to.y - down * head;
  const bend = Math.min(44, Math.abs(foot - from.y) / 2) * down;
  const draw = () => {
    pen.beginPath();
    pen.moveTo(from.x, from.y);
    pen.bezierCurveTo(from.x, from.y + bend, to.x, foot - bend, to.x, foot);
    pen.stroke();
  };
  pen.lineCap = "round";
  pen.strokeStyle = css(colours.surface, 0.9);
  pen.lineWidth = 4.5;
  draw();
  pen.strokeStyle = pen.fillStyle = css(colour);
  pen.lineWidth = 1.75;
  draw();
  pen.beginPath();
  pen.moveTo(to.x, to.y + down);
  pen.lineTo(to.x - head * 0.62, foot);
  pen.lineTo(to.x + head * 0.62, foot);
  pen.closePath();
  pen.fill();
  pen.beginPath();
  pen.arc(from.x, from.y, 2.2, 0, 7);
  pen.fill();
}

// Round times at least this many pixels apart.
function ticksOf(scale, apart) {
  const least = ((scale.to - scale.from) * apart) / scale.width;
  const power = 10 ** Math.floor(Math.log10(least));
  const step = [1, 2, 5, 10].map(base => base * power).find(candidate => candidate >= least * (1 - 1e-9));
  const ticks = [];
  for (let k = Math.max(0, Math.ceil(scale.from / step)); k * step <= Math.min(scale.to, 4 * makespan); k++)
    ticks.push(k * step);
  return { ticks, decimals: Math.max(0, -Math.floor(Math.log10(step) + 1e-9)) };
}
