// Reads the form, lets the translated planner search, and draws what it finds. The address behind # holds all choices.
const PASTED = "paste a config.json";
const NOT_FINITE = /("(?:[^"\\]|\\.)*")|-?\b(?:Infinity|NaN)\b/g; // which Python's JSON has, and browsers refuse
const SHOWN = 40; // rows that fit, and as many again where asked for
const SHOWN_TOO_LARGE = 10;
const FEW_STAGES = 16; // of which each has its bar at once
const MEMORY = { parameters: "#2b83c6", gradients: "#e0712c", optimizer: "#009e73", activations: "#cc79a7", logits: "#e6b91e", buffers: "#8a8f98" };
const TIME = { compute: "#2b83c6", bubble: "#8a8f98", tensor: "#cc79a7", pipeline: "#56b4e9", data: "#e0712c", optimizer: "#009e73" };
const WORDS = { tensor: "tensor-parallel traffic", pipeline: "pipeline traffic", data: "data-parallel traffic" };
const EDITS = {
  memory_gib: "Memory of a GPU, GiB",
  "node.devices": "GPUs in a node",
  "node.gb_per_second": "Link in a node, GB/s a GPU",
  "network.gb_per_second": "Network, GB/s a GPU",
};
const COLUMNS = {
  "": (row, number) => number || "–",
  pp: (row) => row.layout.pipeline,
  tp: (row) => row.layout.tensor + (row.expert_parallel_size > 1 ? " ep" : ""),
  dp: (row) => row.layout.data,
  ZeRO: (row) => row.zero_stage,
  micro: (row) => row.micro_batch,
  accum: (row) => row.gradient_accumulation_steps,
  ckpt: (row) => (row.activation_checkpointing ? "yes" : "no"),
  schedule: (row) => (row.layout.pipeline > 1 ? row.schedule : "–"),
  offload: (row) => ({ none: "no", optimizer: "states", "optimizer+parameters": "all" })[row.offload],
  GiB: (row) => row.memory_gib.max.toFixed(1),
  "step s": (row) => digits(row.step_seconds.total),
  bubble: (row) => percent(row.bubble_fraction),
  "tokens/s": (row) => whole(row.tokens_per_second),
  MFU: (row) => percent(row.mfu),
};

const at = (id) => document.getElementById(id);
const percent = (share) => `${(100 * share).toFixed(1)}%`;
const whole = (number) => Math.round(number).toLocaleString("en");
const digits = (number) => (number < 1000 ? String(Number(number.toPrecision(3))) : whole(number));
const hardware = (name) => py.plain(DATA.get("hardware").get(name));
const inside = (object, path) => path.split(".").reduce((part, key) => part[key], object);
const byMemory = (a, b) => a.peak_bytes - b.peak_bytes;
const bySpeed = (a, b) => b.tokens_per_second - a.tokens_per_second;

function element(tag, content = "", className = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (Array.isArray(content)) made.append(...content);
  else made.textContent = content;
  return made;
}

// What is chosen, as texts: of the form, of the address, or of the page as it was written.
const START = py.plain(DATA.get("start"));
const FIELDS = ["model", "gpus", "hardware", "batch", "sequence", "precision"];
let row = "";
let more = false;
let found = null;

function fromForm() {
  const state = Object.fromEntries(FIELDS.map((name) => [name, at(name).value.trim()]));
  if (state.model === PASTED) state.config = at("config").value;
  for (const path of Object.keys(EDITS)) {
    if (at(path).value.trim() !== at(path).placeholder && at(path).value.trim()) state[path] = at(path).value.trim();
  }
  return row ? { ...state, row } : state;
}

function toForm(state) {
  for (const name of FIELDS) at(name).value = state[name];
  if (!at("model").value) at("model").value = START.model;
  if (!at("hardware").value) at("hardware").value = START.hardware;
  at("config").value = state.config ?? "";
  row = state.row ?? "";
  drawDevice(state.precision);
  for (const path of Object.keys(EDITS)) {
    at(path).value = state[path] ?? "";
    if (state[path]) at("device").open = true;
  }
}

function drawDevice(precision) {
  const device = hardware(at("hardware").value);
  for (const path of Object.keys(EDITS)) at(path).placeholder = inside(device, path);
  const known = ["fp32", "bf16", "fp16"].filter((name) => name in device.tflops);
  at("precision").replaceChildren(...known.map((name) => new Option(name, name, false, name === precision)));
  at("pasted").hidden = at("model").value !== PASTED;
}

// Errors that the user can mend, in one line.
function refuse(text) {
  throw py.UserError(text);
}

function size(text, name) {
  const number = Number(text.replace(/[,_ ]/g, ""));
  if (!Number.isInteger(number) || number < 1 || number > planner.LARGEST) {
    refuse(`${name}: "${text}" is no whole number between 1 and ${whole(planner.LARGEST)}`);
  }
  return number;
}

function modelConfig(state) {
  if (state.model !== PASTED) return DATA.get("models").get(state.model);
  if (!state.config.trim()) refuse("paste the content of a model's config.json");
  try {
    const config = py.mapped(JSON.parse(state.config.replace(NOT_FINITE, (_, text) => text ?? "null")));
    if (config instanceof Map) return config;
  } catch (error) {
    refuse(`config.json is not JSON: ${error.message.split("\n")[0]}`);
  }
  return refuse("config.json is not an object");
}

function deviceOf(state, gpus) {
  const content = hardware(state.hardware);
  for (const [path, label] of Object.entries(EDITS)) {
    if (!(path in state)) continue;
    const number = Number(state[path]);
    if (!(number > 0 && Number.isFinite(number))) refuse(`${label}: "${state[path]}" is no number above 0`);
    const keys = path.split(".");
    const last = keys.pop();
    keys.reduce((part, key) => part[key], content)[last] = number;
  }
  return planner.device_of(py.mapped(content), state.hardware, gpus);
}

function taskOf(state) {
  const config = modelConfig(state);
  const gpus = size(state.gpus, "GPUs");
  planner.require_trainable_config(config, config.size === 1);
  return planner.task_of(config, state.model === PASTED ? "config.json" : state.model, deviceOf(state, gpus), gpus,
    size(state.sequence, "Sequence length"), size(state.batch, "Global batch"), state.precision);
}

// Says what is assumed of a model whose family is not known here.
function noteOf(state) {
  const config = modelConfig(state);
  const text = config.get("text_config") instanceof Map ? config.get("text_config") : config;
  const family = text.get("model_type") ?? null;
  if (family !== null && DATA.get("families").has(family)) return "";
  return `model type ${py.repr(family)} is unknown here: planned from its sizes alone, with the layers of a Llama-like decoder`;
}

// A layout as the address names it.
function nameOf(one) {
  const s = one.strategy;
  return `pp${s.pipeline}.tp${s.tensor}.dp${s.data}.ep${s.expert}.zero${s.zero_stage}.micro${s.micro_batch}.${s.recompute}.${s.offload}.${s.schedule}`;
}

function bar(name, parts, colours, scale, unit, limit) {
  const track = element("div", Object.entries(colours).map(([part, colour]) => {
    const piece = element("i");
    piece.style.cssText = `width:${(100 * parts[part]) / scale}%;background:${colour}`;
    piece.title = `${WORDS[part] || part}: ${digits(parts[part])} ${unit}`;
    return piece;
  }), "track");
  if (limit) {
    const mark = element("div", "", "limit");
    mark.style.left = `calc(${(100 * limit) / scale}% - 1px)`;
    mark.title = `limit: ${limit.toFixed(1)} GiB`;
    track.append(mark);
  }
  return element("div", [element("span", name), track, element("span", `${digits(parts.total)} ${unit}`)], "bar");
}

function legend(parts, colours, unit, limit) {
  const entries = Object.entries(colours).map(([part, colour]) => {
    const swatch = element("i");
    swatch.style.background = colour;
    return element("span", [swatch, `${WORDS[part] || part} ${digits(parts[part])} ${unit}`]);
  });
  if (limit) entries.push(element("span", [element("i", "", "line"), `limit ${limit.toFixed(1)} GiB`]));
  return element("div", entries, "legend");
}

function verdict(one) {
  if (one.fits) return "fits";
  const gib = 2 ** 30;
  if (one.peak_bytes > one.hardware.limit_bytes) return `does not fit: needs ${(one.peak_bytes / gib).toFixed(1)} GiB on a GPU that has ${(one.hardware.limit_bytes / gib).toFixed(1)}`;
  return `does not fit: needs ${(one.host_bytes / gib).toFixed(1)} GiB of the host for each GPU, which has ${(one.hardware.host_memory_bytes / gib).toFixed(1)}`;
}

function drawChosen(one) {
  const shown = py.plain(one.row());
  const { stages, limit, max } = shown.memory_gib;
  const scale = Math.max(limit, max) * 1.02;
  const largest = stages.reduce((a, b) => (b.total > a.total ? b : a));
  const s = one.strategy;
  const tiles = [
    [`${s.pipeline} x ${s.tensor} x ${s.data}`, "pipeline x tensor x data"],
    [whole(shown.tokens_per_second), "tokens/s"],
    [`${digits(shown.step_seconds.total)} s`, "a step"],
    [digits(shown.model_tflops_per_gpu), "TFLOP/s a GPU"],
    [percent(shown.mfu), "of the peak (MFU)"],
    [percent(shown.bubble_fraction), "bubble"],
    [`${max.toFixed(1)} GiB`, `of ${limit.toFixed(1)} on a GPU`],
  ].map(([value, label]) => element("div", [element("b", value), element("span", label)]));
  const bars = stages.map((stage, index) => bar(`stage ${index}`, stage, MEMORY, scale, "GiB", limit));
  const hidden = element("details", [element("summary", `all ${bars.length} stages`), ...bars.slice(FEW_STAGES)]);
  const config = element("pre", JSON.stringify(py.plain(planner.preset(s, one.workload.precision)), null, 2));
  at("chosen").replaceChildren(
    element("h2", verdict(one), one.fits ? "fits" : "too-large"),
    element("div", tiles, "tiles"),
    element("h3", stages.length > 1 ? "Memory of a GPU, by pipeline stage (amounts of the fullest)" : "Memory of a GPU"),
    legend(largest, MEMORY, "GiB", limit),
    ...bars.slice(0, FEW_STAGES),
    ...(bars.length > FEW_STAGES ? [hidden] : []),
    element("h3", "Time of a step"),
    legend(shown.step_seconds, TIME, "s"),
    bar("step", shown.step_seconds, TIME, shown.step_seconds.total, "s"),
    element("details", [element("summary", "The DeepSpeed JSON of this layout"), element("div", [config], "wide")]),
  );
}

function drawRows(chosen) {
  const head = element("thead", [element("tr", Object.keys(COLUMNS).map((name) => element("th", name)))]);
  const count = more ? found.fitting.length : SHOWN;
  const shown = [...found.fitting.slice(0, count), ...[...found.too_large].sort(bySpeed).slice(0, SHOWN_TOO_LARGE)];
  if (!shown.includes(chosen)) shown.push(chosen);
  const lines = shown.map((one) => {
    const values = py.plain(one.row());
    const number = found.fitting.indexOf(one) + 1;
    const line = element("tr", Object.values(COLUMNS).map((cell) => element("td", String(cell(values, number)))));
    line.className = [one === chosen ? "chosen" : "", one.fits ? "" : "too-large"].join(" ").trim();
    line.tabIndex = 0;
    line.title = verdict(one);
    line.addEventListener("click", () => choose(one));
    line.addEventListener("keydown", (event) => event.key === "Enter" && choose(one));
    return line;
  });
  at("rows").replaceChildren(head, element("tbody", lines));
}

function drawSummary() {
  const reasons = py.on.most_common(found.reasons).map(([reason, count]) => `${whole(count)}: ${reason}`);
  const words = [`${whole(found.tried)} layouts tried, ${whole(found.fitting.length)} fit.`];
  if (reasons.length) words.push(`The others fall out, ${reasons.join("; ")}.`);
  const memory = found.fitting.length ? planner.more_memory(found) : null;
  if (memory) {
    const gain = memory.tokens_per_second / found.fitting[0].tokens_per_second - 1;
    words.push(`${memory.gib.toFixed(1)} GiB more on each GPU would bring ${percent(gain)} more tokens/s.`);
  }
  at("summary").replaceChildren(words.join(" "));
  if (!more && found.fitting.length > SHOWN) {
    const button = element("button", `show all ${whole(found.fitting.length)}`);
    button.addEventListener("click", () => { more = true; draw(); });
    at("summary").append(button);
  }
}

function say(text, isError) {
  at("message").textContent = text;
  at("message").className = isError ? "error" : "";
}

// Draws the row that the state names, or the best: the fastest that fits, else the one that needs least.
function draw() {
  const all = [...found.fitting, ...found.too_large];
  const chosen = all.find((one) => nameOf(one) === row) || found.fitting[0] || [...found.too_large].sort(byMemory)[0];
  drawChosen(chosen);
  drawSummary();
  drawRows(chosen);
}

function choose(one) {
  row = nameOf(one);
  keep();
  draw();
}

let kept = "";
function keep() {
  kept = `#${new URLSearchParams(fromForm())}`;
  history.replaceState(null, "", kept);
}

function wordsOf(error, state) {
  const text = error.message.replace(/^--model /, "");
  const nothing = "its config.json gives no";
  const note = text.includes(nothing) ? noteOf(state) : "";
  return note ? `unknown ${note.split(" is unknown")[0]}, and ${text.slice(text.indexOf(nothing))}` : text;
}

function compute() {
  const state = fromForm();
  try {
    const note = noteOf(state);
    const task = taskOf(state);
    found = planner.search(task);
    more = false;
    say(note, false);
    try {
      planner.require_fit(task, found);
    } catch (error) {
      if (!py.isUserError(error)) throw error;
      say(error.message, true);
    }
    at("result").hidden = !found.fitting.length && !found.too_large.length;
    if (!at("result").hidden) draw();
    at("result").classList.remove("stale");
  } catch (error) {
    if (!py.isUserError(error)) throw error;
    at("result").hidden = true;
    say(wordsOf(error, state), true);
  }
}

let timer = 0;
function changed(wait) {
  clearTimeout(timer);
  at("result").classList.add("stale");
  keep();
  timer = setTimeout(() => {
    say("searching…", false);
    timer = setTimeout(compute, 20); // lets the browser draw before it is busy
  }, wait);
}

function start() {
  at("model").replaceChildren(...[...DATA.get("models").keys(), PASTED].map((name) => new Option(name)));
  at("hardware").replaceChildren(...[...DATA.get("hardware")].map(([name, one]) => new Option(one.get("name"), name)));
  at("edits").replaceChildren(...Object.entries(EDITS).map(([path, label]) => {
    const input = element("input");
    [input.id, input.inputMode] = [path, "decimal"];
    return element("label", [label, input]);
  }));
  at("form").addEventListener("submit", (event) => event.preventDefault());
  at("form").addEventListener("input", (event) => {
    row = "";
    if (event.target.id === "hardware") for (const path of Object.keys(EDITS)) at(path).value = "";
    drawDevice(at("precision").value);
    changed(event.target.tagName === "SELECT" ? 0 : 350);
  });
  window.addEventListener("hashchange", () => {
    if (location.hash !== kept) readAddress();
  });
  readAddress();
}

function readAddress() {
  toForm({ ...START, ...Object.fromEntries(new URLSearchParams(location.hash.slice(1))) });
  changed(0);
}

start();
