// What the page knows: timelines decoded into actions, and questions to them. Nothing here draws.

const data = JSON.parse(document.getElementById("data").textContent);
// Of the kinds of actions, in the order of the table.
const LETTERS = Object.keys(data.looks).join("").replace(/[^A-Z]/g, "");
const [F, B, I, W] = [0, 1, 2, 3];
const [FORWARD, BACKWARD] = [0, 1]; // the two flows of messages
const flowOf = kind => (kind === F ? FORWARD : kind === W ? 2 : BACKWARD);

const layers = data.layers.map(decodeLayer);
const numRanks = layers[0].ranks.length;
const makespan = Math.max(...layers.map(layer => layer.makespan)) || 1;
const allRanks = layers.flatMap(layer => layer.ranks);
const allActions = allRanks.flatMap(rank => rank.compute);
const numMicrobatches = 1 + mostOf(allActions, action => mostOf(action.parts, part => part.microbatch));
const anyKept = allActions.some(action => action.kept);
const peakLive = mostOf(allRanks, rank => rank.peak) || 1;

// The largest of any number of values; -1 without any.
function mostOf(list, value = own => own) {
  return list.reduce((most, own) => Math.max(most, value(own)), -1);
}

function decodeLayer(packed) {
  const ranks = packed.ranks.map(rank => {
    const [compute, beside] = [rank.compute, rank.beside].map(lane => decodeLane(lane, packed.tick));
    const held = new Set(compute.flatMap(action => action.parts.map(part => part.stage)));
    const stages = [...held].filter(stage => stage >= 0).sort((a, b) => a - b);
    for (const part of [...compute, ...beside].flatMap(action => action.parts)) {
      part.local = Math.max(0, stages.indexOf(part.stage));
    }
    const waits = decodeTimes(rank.waits, packed.tick).map((times, i) => ({ ...times, rank: rank.waits.rank[i] }));
    const live = decodeLive(rank.live, packed.tick);
    return { compute, beside, waits, live, peak: Math.max(0, mostOf(live, own => own.value)), stages };
  });
  return { ...packed, ranks, numStages: 1 + mostOf(ranks.flatMap(rank => rank.stages)), places: placesOf(ranks) };
}

// Actions with their parts: one, or a fused pair's forward and backward.
function decodeLane(packed, tick) {
  const kept = new Set(packed.kept);
  const lane = decodeTimes(packed, tick), part = (kind, stage, microbatch) => ({ kind, stage, microbatch, local: 0 });
  let pair = 0;
  lane.forEach((action, i) => {
    const letter = packed.kinds[i];
    action.kept = kept.has(i);
    action.parts = [part(Math.max(F, LETTERS.indexOf(letter)), packed.stage[i], packed.microbatch[i])];
    if (letter === "P" || letter === "Q") {
      action.parts.push(part(letter === "P" ? B : I, packed.pairs[pair++], packed.pairs[pair++]));
    }
  });
  return lane;
}

function decodeTimes(packed, tick) {
  let at = 0;
  return packed.gap.map((gap, i) => {
    const start = (at += gap), end = (at += packed.took[i]);
    return { start: start * tick, end: end * tick };
  });
}

// What is live over time, as steps: microbatches, or bytes.
function decodeLive(packed, tick) {
  let at = 0;
  return packed.gap.map((gap, i) => ({ start: (at += gap) * tick, value: packed.value[i] }));
}

// Where each action is: by flow (W on its own), stage and microbatch, its rank and itself.
function placesOf(ranks) {
  const places = [[], [], []];
  ranks.forEach(({ compute }, rank) => {
    for (const action of compute) {
      for (const { kind, stage, microbatch } of action.parts) {
        if (stage >= 0 && microbatch >= 0) (places[flowOf(kind)][stage] ??= [])[microbatch] = { rank, action };
      }
    }
  });
  return (flow, stage, microbatch) => places[flow][stage]?.[microbatch];
}

// The last stretch of a lane that starts at or before a time; -1 before the first.
function lastStarted(lane, time) {
  let low = 0, high = lane.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (lane[middle].start <= time) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

// The stretch of a lane under a time; or -1.
function under(lane, time) {
  const i = lastStarted(lane, time);
  return i >= 0 && time <= lane[i].end ? i : -1;
}

// The stretches of a lane of which something is seen.
function seenOf(lane, scale) {
  return lane.slice(Math.max(0, lastStarted(lane, scale.from)), lastStarted(lane, scale.to) + 1);
}

// The action on another rank that made what this one needs, the later one of two: a place with its flow.
function sourceOf(layer, rank, action) {
  const made = action.parts.filter(({ kind }) => [F, B, I].includes(kind)).map(({ kind, stage, microbatch }) => {
    const flow = flowOf(kind);
    return { flow, ...layer.places(flow, stage + (flow === FORWARD ? -1 : 1), microbatch) };
  });
  const afar = made.filter(place => place.action && place.rank !== rank);
  return afar.sort((one, other) => other.action.end - one.action.end)[0];
}

// The way of a microbatch through the ranks: its actions, and the messages between ranks.
function wayOf(layer, microbatch) {
  const way = { places: [], messages: [] };
  for (const flow of [FORWARD, BACKWARD, flowOf(W)]) {
    for (let stage = 0; stage < layer.numStages; stage++) {
      const from = layer.places(flow, stage, microbatch);
      if (!from) continue;
      way.places.push(from);
      const to = flow !== flowOf(W) && layer.places(flow, stage + (flow === FORWARD ? 1 : -1), microbatch);
      if (to && to.rank !== from.rank) way.messages.push({ flow, from, to });
    }
  }
  way.start = Math.min(...way.places.map(({ action }) => action.start));
  way.end = Math.max(...way.places.map(({ action }) => action.end));
  way.work = way.places.reduce((sum, { action }) => sum + action.end - action.start, 0);
  return way;
}

// How an action is called: "1F3", or "(1F3;0B2)" for a fused pair.
function nameOf({ parts, kept }) {
  const number = own => (own >= 0 ? own : "");
  const [first, back] = parts.map(part => number(part.stage) + LETTERS[part.kind] + number(part.microbatch));
  const forward = first + (kept ? "K" : "");
  return back ? `(${forward};${back})` : forward;
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
