// What the page says in words: of an action under the pointer, of idle time, of the microbatch that is followed;
// and the tables of figures.

const WORDS = [...LETTERS].map(letter => data.looks[letter].word);

function describe(at) {
  const { rank, layer, index } = at,
    lane = layer.ranks[rank].compute;
  if (at.beside >= 0) {
    const { beside } = layer.ranks[rank];
    return [
      `${WORDS[beside.kind[at.beside]]} of stage ${beside.stage[at.beside]}`,
      stretch(rank, layer, beside, at.beside),
    ];
  }
  if (index < 0) return describeIdle(at);
  const back = lane.backKind[index] >= 0 ? ` with ${WORDS[lane.backKind[index]]}` : "";
  const facts = stretch(rank, layer, lane, index);
  if (lane.stage[index] >= 0)
    facts.splice(1, 0, ["stage", back ? `${lane.stage[index]} and ${lane.backStage[index]}` : lane.stage[index]]);
  const source = sourceOf(layer, rank, index);
  if (source)
    facts.push([source.flow === FORWARD ? "input" : "gradient", `made by rank ${source.rank} at ${time(source.end)}`]);
  const { waits } = layer.ranks[rank],
    wait = under(waits, lane.start[index]);
  if (wait >= 0 && waits.end[wait] > waits.start[wait]) {
    facts.push(["waited", `${time(waits.end[wait] - waits.start[wait])} for rank ${waits.rank[wait]}`]);
  }
  for (const other of shownLayers()) {
    const twin = other !== layer && other.places(flowOf(lane.kind[index]), lane.stage[index], lane.microbatch[index]);
    if (!twin) continue;
    const its = other.ranks[twin.rank].compute;
    facts.push([other.name, `${time(its.start[twin.index])} to ${time(its.end[twin.index])}`]);
  }
  return [`${nameOf(lane, index)}  ${WORDS[lane.kind[index]]}${back}`, facts];
}

function stretch(rank, layer, lane, i) {
  const facts = [
    ["rank", layers.length > 1 ? `${rank}, ${layer.name}` : rank],
    ["start", time(lane.start[i])],
    ["end", time(lane.end[i])],
    ["took", time(lane.end[i] - lane.start[i])],
  ];
  if (lane.microbatch[i] >= 0) {
    const back = lane.backMicrobatch[i] >= 0 ? ` and ${lane.backMicrobatch[i]}` : "";
    facts.splice(1, 0, ["microbatch", lane.microbatch[i] + back]);
  }
  return facts;
}

function describeIdle({ rank, layer, time: at }) {
  const lane = layer.ranks[rank].compute,
    before = lastStarted(lane, at);
  const start = before >= 0 ? lane.end[before] : 0,
    next = before + 1 < lane.n ? before + 1 : -1;
  const end = next >= 0 ? lane.start[next] : layer.makespan;
  if (at < 0 || at > layer.makespan) return null;
  const forEver = next < 0 && waitOf(layer, rank);
  if (forEver) return ["waits for ever", [["rank", rank], ["from", time(forEver.start)], ["wait", forEver.told]]];
  const facts = [
    ["rank", layers.length > 1 ? `${rank}, ${layer.name}` : rank],
    ["from", time(start)],
    ["to", time(end)],
    ["took", time(end - start)],
  ];
  const { waits } = layer.ranks[rank],
    wait = under(waits, at);
  if (wait >= 0) facts.push(["waiting for", `rank ${waits.rank[wait]}`]);
  if (next < 0) return ["done", facts];
  facts.push(["next", nameOf(lane, next)]);
  const source = sourceOf(layer, rank, next);
  if (source && source.end > start)
    facts.push([
      source.flow === FORWARD ? "its input" : "its gradient",
      `made by rank ${source.rank} at ${time(source.end)}`,
    ]);
  return ["idle", facts];
}

function describeStrip({ rank, time: at }) {
  const facts = shownLayers().map(layer => {
    const { live } = layer.ranks[rank], i = lastStarted(live, at);
    return [shownLayers().length > 1 ? layer.name : "now", amount(i < 0 ? 0 : live.values[i])];
  });
  return [`${$("stripsName").textContent} of rank ${rank}`, [["time", time(at)], ...facts]];
}

function tip(described, x, y) {
  const box = $("tip");
  box.hidden = !described;
  if (!described) return;
  box.replaceChildren(
    element("b", {}, described[0]),
    element(
      "dl",
      {},
      ...described[1].flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, String(value))]),
    ),
  );
  const { width, height } = box.getBoundingClientRect();
  box.style.left = `${x + 16 + width > innerWidth - 8 ? Math.max(8, x - 16 - width) : x + 16}px`;
  box.style.top = `${Math.max(8, Math.min(innerHeight - height - 8, y + 16))}px`;
}

function tellWay() {
  if (state.microbatch < 0) {
    $("status").textContent = "";
    return;
  }
  const described = shownLayers().map(layer => {
    const way = wayOf(layer, state.microbatch);
    if (!way.actions.length) return `no microbatch ${state.microbatch}`;
    const name = layers.length > 1 ? `${layer.name}: ` : "";
    return (
      `${name}${time4(way.start)} to ${time4(way.end)}, ${time4(way.work)} of it at work, ` +
      `${way.actions.length} actions, ${way.messages.length} messages`
    );
  });
  $("status").textContent = `Microbatch ${state.microbatch}: ${described.join("; ")}`;
}

// ---- tables

function row(cells, header = false) {
  return element(
    "tr",
    {},
    ...cells.map((cell, i) =>
      element(header || i === 0 ? "th" : "td", { scope: header ? "col" : "row" }, ...[cell].flat()),
    ),
  );
}

function makeFigures() {
  const first = layers[0];
  const than = (value, base) =>
    base && value !== base
      ? [element("small", {}, ` ${value > base ? "+" : "−"}${share(Math.abs(value / base - 1))}`)]
      : [];
  const lines = layers.map(layer => {
    const idle = layer.idle.reduce((sum, own) => sum + own, 0);
    return row([
      layers.length > 1 ? layer.name : "",
      [time4(layer.makespan), ...than(layer.makespan, layer !== first && first.makespan)],
      [time4(layer.span)],
      [`${(100 * layer.bubble).toFixed(2)}%`],
      [time4(idle), element("small", {}, ` ${share(layer.idleShare)}`)],
      [amount(Math.max(...layer.ranks.map(rank => rank.live.peak)))],
    ]);
  });
  $("figures").append(
    element(
      "thead",
      {},
      row(
        ["", "makespan", "span", "bubble", "idle, all ranks", `peak live ${data.inBytes ? "bytes" : "microbatches"}`],
        true,
      ),
    ),
    element("tbody", {}, ...lines),
  );
}

const time4 = value => figure(value) + (data.unit ? ` ${data.unit}` : "");

function makeRankTables() {
  $("rankTables").replaceChildren(
    ...layers.map(layer => {
      const lines = layer.ranks.map((rank, number) => {
        const waited = new Map();
        for (let i = 0; i < rank.waits.n; i++)
          waited.set(
            rank.waits.rank[i],
            (waited.get(rank.waits.rank[i]) || 0) + rank.waits.end[i] - rank.waits.start[i],
          );
        const described = [...waited]
          .sort((a, b) => b[1] - a[1])
          .map(([peer, spent]) => `${time4(spent)} for rank ${peer}`)
          .join(", ");
        return row([
          `rank ${number}`,
          time4(layer.makespan - layer.idle[number]),
          time4(layer.idle[number]),
          share(layer.idle[number] / (layer.makespan || 1)),
          amount(rank.live.peak),
          String(rank.compute.n),
          ...(layer.recorded ? [described || "none"] : []),
        ]);
      });
      return element(
        "table",
        {},
        element("caption", {}, layer.title),
        element(
          "thead",
          {},
          row(
            ["", "at work", "idle", "share idle", "peak live", "actions", ...(layer.recorded ? ["waited"] : [])],
            true,
          ),
        ),
        element("tbody", {}, ...lines),
      );
    }),
  );
}
