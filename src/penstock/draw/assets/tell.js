// What the page says in words: of an action under the pointer, of idle time, of the microbatch that is followed;
// and the tables of figures.

const WORDS = [...LETTERS].map(letter => data.looks[letter].word);

function describe(at) {
  const { rank, layer, index, beside } = at, lanes = layer.ranks[rank];
  const action = lanes.beside[beside] ?? lanes.compute[index];
  if (!action) return describeIdle(at);
  const { kind, stage, microbatch } = action.parts[0];
  const numbers = name => action.parts.map(part => part[name]).filter(number => number >= 0).join(" and ");
  const concerned = ["stage", "microbatch"].map(name => [name, numbers(name)]).filter(([, text]) => text);
  const facts = stretch(rank, layer, action, ["start", "end"], concerned);
  const title = `${nameOf(action)}  ${action.parts.map(part => WORDS[part.kind]).join(" with ")}`;
  if (action === lanes.beside[beside]) return [title, facts];
  const source = sourceOf(layer, rank, action);
  if (source) facts.push([source.flow === FORWARD ? "input" : "gradient", madeBy(source)]);
  const wait = lanes.waits[under(lanes.waits, action.start)];
  if (wait && wait.end > wait.start) facts.push(["waited", `${time(wait.end - wait.start)} for rank ${wait.rank}`]);
  for (const other of shownLayers()) {
    const twin = other !== layer && other.places(flowOf(kind), stage, microbatch)?.action;
    if (twin) facts.push([other.name, `${time(twin.start)} to ${time(twin.end)}`]);
  }
  return [title, facts];
}

// The rank and the times of a stretch, with what else there is to say of it.
function stretch(rank, layer, { start, end }, [from, to], more = []) {
  const whose = ["rank", layers.length > 1 ? `${rank}, ${layer.name}` : rank];
  return [whose, ...more, [from, time(start)], [to, time(end)], ["took", time(end - start)]];
}

const madeBy = ({ rank, action }) => `made by rank ${rank} at ${time(action.end)}`;

function describeIdle({ rank, layer, time: at }) {
  const { compute, waits } = layer.ranks[rank], before = lastStarted(compute, at), next = compute[before + 1];
  if (at < 0 || at > layer.makespan) return null;
  const forEver = !next && waitOf(layer, rank);
  if (forEver) return ["waits for ever", [["rank", rank], ["from", time(forEver.start)], ["wait", forEver.told]]];
  const gap = { start: compute[before]?.end ?? 0, end: next?.start ?? layer.makespan };
  const facts = stretch(rank, layer, gap, ["from", "to"]), wait = waits[under(waits, at)];
  if (wait) facts.push(["waiting for", `rank ${wait.rank}`]);
  if (!next) return ["done", facts];
  facts.push(["next", nameOf(next)]);
  const source = sourceOf(layer, rank, next);
  if (source && source.action.end > gap.start) {
    facts.push([source.flow === FORWARD ? "its input" : "its gradient", madeBy(source)]);
  }
  return ["idle", facts];
}

function describeStrip({ rank, time: at }) {
  const facts = shownLayers().map(layer => {
    const { live } = layer.ranks[rank], name = shownLayers().length > 1 ? layer.name : "now";
    return [name, amount(live[lastStarted(live, at)]?.value ?? 0)];
  });
  return [`${$("stripsName").textContent} of rank ${rank}`, [["time", time(at)], ...facts]];
}

function tip(described, x, y) {
  const box = $("tip");
  box.hidden = !described;
  if (!described) return;
  const pairs = described[1].flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, String(value))]);
  box.replaceChildren(element("b", {}, described[0]), element("dl", {}, ...pairs));
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
    if (!way.places.length) return `no microbatch ${state.microbatch}`;
    const name = layers.length > 1 ? `${layer.name}: ` : "";
    return (
      `${name}${time4(way.start)} to ${time4(way.end)}, ${time4(way.work)} of it at work, ` +
      `${way.places.length} actions, ${way.messages.length} messages`
    );
  });
  $("status").textContent = `Microbatch ${state.microbatch}: ${described.join("; ")}`;
}

// ---- tables

function table(heads, lines) {
  const row = (cells, isHead) => {
    const made = (cell, i) =>
      element(isHead || i === 0 ? "th" : "td", { scope: isHead ? "col" : "row" }, ...[cell].flat());
    return element("tr", {}, ...cells.map(made));
  };
  const body = element("tbody", {}, ...lines.map(cells => row(cells, false)));
  return [element("thead", {}, row(heads, true)), body];
}

function makeFigures() {
  const first = layers[0];
  const than = (value, base) => {
    const text = base && value !== base ? ` ${value > base ? "+" : "−"}${share(Math.abs(value / base - 1))}` : "";
    return element("small", {}, text);
  };
  const lines = layers.map(layer => [
    layers.length > 1 ? layer.name : "",
    [time4(layer.makespan), than(layer.makespan, layer !== first && first.makespan)],
    time4(layer.span),
    `${(100 * layer.bubble).toFixed(2)}%`,
    [time4(layer.idle.reduce((sum, own) => sum + own, 0)), element("small", {}, ` ${share(layer.idleShare)}`)],
    amount(mostOf(layer.ranks, rank => rank.peak)),
  ]);
  const peaks = `peak live ${data.inBytes ? "bytes" : "microbatches"}`;
  $("figures").append(...table(["", "makespan", "span", "bubble", "idle, all ranks", peaks], lines));
}

const time4 = value => figure(value) + (data.unit ? ` ${data.unit}` : "");

function makeRankTables() {
  const tables = layers.map(layer => {
    const lines = layer.ranks.map((rank, number) => {
      const waited = new Map();
      for (const wait of rank.waits) waited.set(wait.rank, (waited.get(wait.rank) || 0) + wait.end - wait.start);
      const longest = [...waited].sort((a, b) => b[1] - a[1]);
      const described = longest.map(([peer, spent]) => `${time4(spent)} for rank ${peer}`).join(", ");
      return [
        `rank ${number}`,
        time4(layer.makespan - layer.idle[number]),
        time4(layer.idle[number]),
        share(layer.idle[number] / (layer.makespan || 1)),
        amount(rank.peak),
        String(rank.compute.length),
        ...(layer.recorded ? [described || "none"] : []),
      ];
    });
    const heads = ["", "at work", "idle", "share idle", "peak live", "actions", ...(layer.recorded ? ["waited"] : [])];
    return element("table", {}, element("caption", {}, layer.title), ...table(heads, lines));
  });
  $("rankTables").replaceChildren(...tables);
}
