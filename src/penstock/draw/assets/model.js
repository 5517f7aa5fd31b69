// What the page knows: timelines decoded into typed arrays, and questions to them. Nothing here draws.

const data = JSON.parse(document.getElementById("data").textContent);
// Of the kinds of actions, in the order of the table.
const LETTERS = Object.keys(data.looks).join("").replace(/[^A-Z]/g, "");
const F = 0,
  B = 1,
  I = 2,
  W = 3;
const FORWARD = 0,
  BACKWARD = 1; // the two flows of messages
const flowOf = kind => (kind === F ? FORWARD : kind === W ? 2 : BACKWARD);

const layers = data.layers.map(decodeLayer);
const numRanks = layers[0].ranks.length;
const makespan = Math.max(...layers.map(layer => layer.makespan)) || 1;
const numMicrobatches = 1 + layers.reduce((most, layer) => Math.max(most, layer.lastMicrobatch), -1);
const anyKept = layers.some(layer => layer.ranks.some(rank => rank.compute.kept.size));
const peakLive = Math.max(...layers.flatMap(layer => layer.ranks.map(rank => rank.live.peak))) || 1;

function decodeLayer(packed) {
  const ranks = packed.ranks.map(rank => {
    const compute = decodeLane(rank.compute, packed.tick);
    const stages = [...new Set(compute.stage)].filter(stage => stage >= 0).sort((a, b) => a - b);
    return {
      compute,
      beside: decodeLane(rank.beside, packed.tick),
      waits: { ...decodeTimes(rank.waits, packed.tick), rank: rank.waits.rank },
      local: new Map(stages.map((stage, index) => [stage, index])),
      live: decodeLive(rank.live, packed.tick),
    };
  });
  const layer = { ...packed, ranks, numStages: 0, lastMicrobatch: -1 };
  for (const { compute } of ranks) {
    for (let i = 0; i < compute.n; i++) {
      layer.numStages = Math.max(layer.numStages, compute.stage[i] + 1, compute.backStage[i] + 1);
      layer.lastMicrobatch = Math.max(layer.lastMicrobatch, compute.microbatch[i], compute.backMicrobatch[i]);
    }
  }
  layer.places = placesOf(layer);
  return layer;
}

// Columns of actions; a fused pair is its forward, with the backward in the back* columns.
function decodeLane(packed, tick) {
  const n = packed.kinds.length;
  const lane = {
    n,
    ...decodeTimes(packed, tick),
    kind: new Uint8Array(n),
    stage: Int32Array.from(packed.stage),
    microbatch: Int32Array.from(packed.microbatch),
    kept: new Set(packed.kept),
    backKind: new Int8Array(n).fill(-1),
    backStage: new Int32Array(n).fill(-1),
    backMicrobatch: new Int32Array(n).fill(-1),
  };
  for (let i = 0, pair = 0; i < n; i++) {
    const letter = packed.kinds[i];
    lane.kind[i] = Math.max(0, LETTERS.indexOf(letter));
    if (letter === "P" || letter === "Q") {
      lane.backKind[i] = letter === "P" ? B : I;
      lane.backStage[i] = packed.pairs[pair++];
      lane.backMicrobatch[i] = packed.pairs[pair++];
    }
  }
  return lane;
}

function decodeTimes(packed, tick) {
  const n = packed.gap.length,
    start = new Float64Array(n),
    end = new Float64Array(n);
  for (let i = 0, at = 0; i < n; i++) {
    at += packed.gap[i];
    start[i] = at * tick;
    at += packed.took[i];
    end[i] = at * tick;
  }
  return { n, start, end };
}

// What is live over time, as steps: microbatches, or bytes.
function decodeLive(packed, tick) {
  const n = packed.gap.length, start = new Float64Array(n), values = packed.value;
  let at = 0;
  packed.gap.forEach((gap, i) => (start[i] = (at += gap) * tick));
  return { n, start, values, peak: values.reduce((most, value) => Math.max(most, value), 0) };
}

// Where each action is: by flow (W on its own), stage and microbatch, its rank and its index in the rank's lane.
function placesOf(layer) {
  const stride = layer.lastMicrobatch + 1,
    size = 3 * layer.numStages * stride;
  const rankAt = new Int32Array(size).fill(-1),
    indexAt = new Int32Array(size);
  const put = (kind, stage, microbatch, rank, index) => {
    if (stage < 0 || microbatch < 0) return;
    const at = (flowOf(kind) * layer.numStages + stage) * stride + microbatch;
    rankAt[at] = rank;
    indexAt[at] = index;
  };
  layer.ranks.forEach(({ compute: lane }, rank) => {
    for (let i = 0; i < lane.n; i++) {
      put(lane.kind[i], lane.stage[i], lane.microbatch[i], rank, i);
      if (lane.backKind[i] >= 0) put(lane.backKind[i], lane.backStage[i], lane.backMicrobatch[i], rank, i);
    }
  });
  return (flow, stage, microbatch) => {
    if (stage < 0 || stage >= layer.numStages || microbatch < 0 || microbatch >= stride) return null;
    const at = (flow * layer.numStages + stage) * stride + microbatch;
    return rankAt[at] < 0 ? null : { rank: rankAt[at], index: indexAt[at] };
  };
}

// The last stretch of a lane that starts at or before a time; -1 before the first.
function lastStarted(lane, time) {
  let low = 0,
    high = lane.n;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (lane.start[middle] <= time) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

// The stretch of a lane under a time; or -1.
function under(lane, time) {
  const i = lastStarted(lane, time);
  return i >= 0 && time <= lane.end[i] ? i : -1;
}

// The action on another rank that made what this one needs, if there is one: a place with its flow.
function sourceOf(layer, rank, index) {
  const lane = layer.ranks[rank].compute;
  const candidates = [
    [lane.kind[index], lane.stage[index], lane.microbatch[index]],
    [lane.backKind[index], lane.backStage[index], lane.backMicrobatch[index]],
  ];
  let latest = null;
  for (const [kind, stage, microbatch] of candidates) {
    if (kind !== F && kind !== B && kind !== I) continue;
    const flow = flowOf(kind);
    const place = layer.places(flow, stage + (flow === FORWARD ? -1 : 1), microbatch);
    if (place && place.rank !== rank) {
      const end = layer.ranks[place.rank].compute.end[place.index];
      if (!latest || end > latest.end) latest = { ...place, flow, end };
    }
  }
  return latest;
}

// The way of a microbatch through the ranks: its actions, and the messages between ranks.
function wayOf(layer, microbatch) {
  const way = { actions: [], messages: [], start: Infinity, end: -Infinity, work: 0 };
  for (let flow = 0; flow < 3; flow++) {
    for (let stage = 0; stage < layer.numStages; stage++) {
      const place = layer.places(flow, stage, microbatch);
      if (!place) continue;
      const lane = layer.ranks[place.rank].compute;
      way.actions.push(place);
      way.start = Math.min(way.start, lane.start[place.index]);
      way.end = Math.max(way.end, lane.end[place.index]);
      way.work += lane.end[place.index] - lane.start[place.index];
      const target = flow < 2 && layer.places(flow, stage + (flow === FORWARD ? 1 : -1), microbatch);
      if (target && target.rank !== place.rank) way.messages.push({ flow, from: place, to: target });
    }
  }
  return way;
}

// How a lane's actions are called: "1F3", or "(1F3;0B2)" for a fused pair.
function nameOf(lane, i) {
  const one = (kind, stage, microbatch) =>
    (stage >= 0 ? stage : "") + LETTERS[kind] + (microbatch >= 0 ? microbatch : "");
  const first = one(lane.kind[i], lane.stage[i], lane.microbatch[i]) + (lane.kept.has(i) ? "K" : "");
  if (lane.backKind[i] < 0) return first;
  return `(${first};${one(lane.backKind[i], lane.backStage[i], lane.backMicrobatch[i])})`;
}

function figure(value, digits = 4) {
  if (Math.abs(value - Math.round(value)) < 1e-9 * Math.max(1, Math.abs(value))) return String(Math.round(value));
  if (Math.abs(value) >= 10 ** (digits - 1)) return value < 1e15 ? value.toFixed(0) : value.toExponential(3);
  const text = Number(value.toPrecision(digits));
  return Math.abs(value) < 1e-4 ? text.toExponential() : String(text);
}

const time = value => figure(value, 5) + (data.unit ? " " + data.unit : "");
const share = value => `${(100 * value).toFixed(value < 0.1 ? 1 : 0)}%`;

function amount(value) {
  if (!data.inBytes) return figure(value);
  const power = Math.min(4, Math.floor(Math.log2(Math.max(1, value)) / 10));
  return `${figure(value / 1024 ** power, 3)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}
