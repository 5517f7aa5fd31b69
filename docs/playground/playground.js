// The playground's page: fields and text go to the worker, its answers are shown, the address keeps what is seen.

import { decoded, encoded } from "./address.js";

const $ = id => document.getElementById(id);
const form = document.querySelector(".playground");
const COUNTS = ["ranks", "microbatches", "stages_per_rank"];
const COSTS = ["forward", "backward_input", "backward_weight", "transfer", "microbatch_bytes"];
// examples/looks-fine.csv: two ranks of two stages, which deadlock once a send waits for its receive.
const LOOKS_FINE =
  "0F0,0SEND_F0,0F1,0SEND_F1,2RECV_F0,2F0,2SEND_F0,2RECV_F1,2F1,2SEND_F1\n" +
  "1RECV_F0,1F0,1SEND_F0,1RECV_F1,1F1,1SEND_F1,3RECV_F0,3F0,3RECV_F1,3F1\n";

let builders = [];
let chosen = "1f1b"; // the schedule that the fields build; a link may name one that does not exist
let edited = false; // whether the text is a user's own, rather than what the fields build
let damaged = false; // whether the text of the link that was opened cannot be read
let place = null; // the fault's place in the text

// ---- Python, in a worker that can be stopped

let worker, given;

function startWorker() {
  worker = new Worker(new URL("worker.js", import.meta.url), { type: "module" });
  worker.onmessage = ({ data }) => given(JSON.parse(data));
  worker.onerror = () => given({ fault: "the playground's files are missing; `make docs` builds the site with them" });
}

function ask(name, arguments_) {
  worker.postMessage(JSON.stringify([name, arguments_]));
  return new Promise(resolve => (given = resolve));
}

function stop() {
  worker.terminate();
  startWorker();
  given({ fault: "stopped; change something to begin again" });
}

// ---- from the fields to the answer

const filled = names => Object.fromEntries(names.map(name => [name, $(name).value]).filter(([, value]) => value));
const options = () =>
  Object.fromEntries(
    [...$("options").querySelectorAll("input")]
      .map(input => [input.name, input.type === "checkbox" ? input.checked : input.value])
      .filter(([, value]) => value),
  );
const counts = () => Object.fromEntries(COUNTS.map(name => [name, $(name).valueAsNumber]));

// The name of a file with the text: the package knows by it what the text is.
const file = () => ($("text").value.startsWith("penstock ") ? "schedule.txt" : "schedule.csv");

// The command that gives the same figures; an edited text would be in a file, which the page offers to save.
function command() {
  const words = ["penstock schedule simulate"];
  if (edited) words.push(file());
  else {
    words.push(chosen, ...Object.entries(counts()).flatMap(flags));
    if ($("early_gradients").checked) words.push("--early-gradients");
    words.push(...Object.entries(options()).flatMap(flags));
  }
  return [...words, ...Object.entries(filled(COSTS)).flatMap(flags)].join(" ");
}

const flags = ([name, value]) => {
  const flag = `--${name.replaceAll("_", "-")}`;
  return value === true ? [flag] : [flag, String(value).replaceAll(" ", "")];
};

async function answer() {
  const costs = filled(COSTS);
  form.dataset.source = edited ? "text" : "fields";
  $("own").hidden = !edited;
  if (damaged) return show({ fault: "this link is damaged, and its text cannot be read; copy the whole link again" });
  if (!edited) {
    const wrong = COUNTS.find(name => !$(name).validity.valid);
    if (wrong) return show({ fault: `${wrong.replaceAll("_", " ")} must be a whole number of at least 1` });
    const given = { name: chosen, counts: counts(), options: options(), costs };
    const { value, fault } = await ask("build", { ...given, early_gradients: $("early_gradients").checked });
    if (fault) return show({ fault });
    if (!edited) $("text").value = value;
  }
  await remember();
  return show(await ask("look_at", { text: $("text").value, costs }));
}

// One question at a time; of changes meanwhile only the last counts, and what takes long is not waited for.
let running = false, again = false;

async function update(link = false) {
  again = true;
  damaged = link;
  if (running && !$("stop").hidden) stop();
  if (running) return;
  running = true;
  form.setAttribute("aria-busy", "true");
  while (again) {
    again = false;
    const late = setTimeout(() => {
      $("stop").hidden = false;
      $("verdict").textContent = "Computing …";
      delete form.dataset.verdict;
    }, 1000);
    await answer();
    clearTimeout(late);
    $("stop").hidden = true;
  }
  form.setAttribute("aria-busy", "false");
  running = false;
}

// ---- what is shown

function show({ fault, value }) {
  form.dataset.verdict = fault ? "refused" : "proved";
  $("verdict").textContent = fault ?? `Proved: ${value.proof[0]}`;
  $("proof").replaceChildren(...(value?.proof?.slice(1) ?? []).map(sentence => element("li", sentence)));
  $("figures").replaceChildren(
    ...Object.entries(value?.figures ?? {}).map(([name, figure]) => {
      const pair = element("div", "");
      pair.append(element("dt", name), element("dd", figure));
      return pair;
    }),
  );
  $("command").textContent = fault ? "" : `$ ${command()}`;
  place = fault ? placeOf(fault) : null;
  $("place").hidden = !place;
  $("save").hidden = !edited || damaged;
  $("save").textContent = `Save as ${file()}`;
  draw(value);
}

function element(kind, text) {
  const made = document.createElement(kind);
  made.textContent = text;
  return made;
}

const theme = () => (document.body.dataset.mdColorScheme === "slate" ? "dark" : "light");

// The package's own page.
function draw(value) {
  const frame = $("timeline"), before = frame.dataset.page;
  const page = value && new Blob([value.timeline], { type: "text/html" });
  frame.hidden = !value;
  frame.style.setProperty("--ranks", value?.num_ranks ?? 0);
  frame.dataset.page = page ? URL.createObjectURL(page) : "about:blank";
  frame.contentWindow.location.replace(`${frame.dataset.page}#theme=${theme()}`);
  if (before) URL.revokeObjectURL(before);
}

// "line 9, word 3" of Penstock's text or "row 1, cell 4" of a CSV, as the ends of that stretch of the text.
function placeOf(fault) {
  const found = /\b(?:line|row) (\d+)(?:, (?:word|cell) (\d+))?/.exec(fault);
  if (!found) return null;
  const lines = $("text").value.split("\n"), line = lines[found[1] - 1] ?? "";
  let from = lines.slice(0, found[1] - 1).join("\n").length + (found[1] > 1), length = line.length;
  if (found[2]) {
    const head = /^rank \d+:\s*/.exec(line)?.[0].length ?? 0;
    const words = [...line.slice(head).matchAll(head ? /\S+/g : /(?<=^|,)[^,]*/g)];
    const word = words[found[2] - 1];
    if (word) [from, length] = [from + head + word.index, word[0].length];
  }
  return [from, from + length];
}

// ---- the address

async function remember() {
  const state = new URLSearchParams(filled(COSTS));
  if (edited) state.set("text", await encoded($("text").value));
  else {
    const built = { schedule: chosen, ...counts(), ...options() };
    for (const [name, value] of Object.entries(built)) state.set(name, value);
    if ($("early_gradients").checked) state.set("early_gradients", "true");
  }
  history.replaceState(null, "", `#${state}`);
}

async function recall() {
  const state = new URLSearchParams(location.hash.slice(1));
  for (const name of COSTS) $(name).value = state.get(name) ?? "";
  choose(state.get("schedule") ?? "1f1b");
  for (const name of COUNTS) if (state.has(name)) setCount(name, state.get(name));
  $("early_gradients").checked = state.get("early_gradients") === "true";
  for (const input of $("options").querySelectorAll("input")) {
    if (input.type === "checkbox") input.checked = state.get(input.name) === "true";
    else input.value = state.get(input.name) ?? "";
  }
  const text = state.has("text") ? await decoded(state.get("text")) : "";
  edited = state.has("text");
  if (edited) $("text").value = text ?? "";
  return update(text === null);
}

// ---- the fields

function setCount(name, value) {
  $(name).value = $(name).nextElementSibling.value = value;
}

// Choose a builder, with the stages that it is meant for and fields for its own options;
// the package itself answers a name that is none.
function choose(name) {
  const builder = builders.find(one => one.name === name);
  $("schedule").value = chosen = name;
  $("about").textContent = builder ? `${builder.about}.` : "";
  setCount("stages_per_rank", builder?.stages_per_rank ?? 1);
  $("options").replaceChildren(
    ...Object.entries(builder?.options ?? {}).map(([option, value]) => {
      const label = element("label", ""), input = document.createElement("input");
      const words = element("span", option.replaceAll("_", " ").replace(/^./, letter => letter.toUpperCase()));
      input.name = option;
      if (typeof value === "boolean") [input.type, label.className] = ["checkbox", "playground-check"];
      else input.placeholder = value ?? "as it takes";
      label.append(...(input.type === "checkbox" ? [input, words] : [words, input]));
      return label;
    }),
  );
}

function built() {
  // The way back leads to the text that the fields are about to replace.
  if (edited) history.pushState(null, "", location.href);
  edited = false;
  return update();
}

async function broken({ dataset: { schedule, from, to } }) {
  choose(schedule);
  setCount("ranks", 4);
  setCount("microbatches", 8);
  await built();
  const text = $("text").value;
  return rewritten(text.replace(from, to));
}

function rewritten(text) {
  $("text").value = text;
  edited = true;
  return update();
}

form.addEventListener("submit", event => event.preventDefault());
form.addEventListener("input", ({ target }) => {
  if (target === $("text")) return rewritten(target.value);
  if (target === $("schedule")) choose(target.value);
  if (target.type === "range") target.previousElementSibling.value = target.value;
  else if (target.type === "number") target.nextElementSibling.value = target.value;
  return COSTS.includes(target.id) && edited ? update() : built();
});
for (const button of form.querySelectorAll("button[data-schedule]")) button.onclick = () => broken(button);
$("looks_fine").onclick = () => rewritten(LOOKS_FINE);
$("stop").onclick = stop;
$("place").onclick = () => {
  $("text").focus();
  $("text").setSelectionRange(...place);
};
$("save").onclick = () => {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([$("text").value]));
  link.download = file();
  link.click();
};
$("link").onclick = async () => {
  const copied = await navigator.clipboard?.writeText(location.href).then(() => true, () => false);
  $("copied").textContent = copied ? "Copied." : "Copy the address of this page: it has all of it.";
};
addEventListener("hashchange", recall);
new MutationObserver(() => {
  $("timeline").contentWindow.location.replace(`${$("timeline").dataset.page}#theme=${theme()}`);
}).observe(document.body, { attributeFilter: ["data-md-color-scheme"] });

startWorker();
const known = await ask("builders", {});
if (known.fault) show(known);
else {
  builders = known.value;
  $("schedule").replaceChildren(...builders.map(({ name }) => element("option", name)));
  for (const name of COUNTS) setCount(name, $(name).value);
  await recall();
}
form.dataset.ready = "true";
