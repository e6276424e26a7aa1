// Reads the form, lets the translated planner search, and has the result drawn. The address behind # holds all choices.
const PASTED = "paste a config.json";
const NOT_FINITE = /("(?:[^"\\]|\\.)*")|-?\b(?:Infinity|NaN)\b/g; // which Python's JSON has, and browsers refuse
const EDITS = {
  memory_gib: "Memory of a GPU, GiB",
  "node.devices": "GPUs in a node",
  "node.gb_per_second": "Link in a node, GB/s a GPU",
  "network.gb_per_second": "Network, GB/s a GPU",
};

const hardware = (name) => py.plain(DATA.get("hardware").get(name));
const inside = (object, path) => path.split(".").reduce((part, key) => part[key], object);
const byMemory = (a, b) => a.peak_bytes - b.peak_bytes;

// What is chosen, as texts: of the form, of the address, or of the page as it was written.
const START = py.plain(DATA.get("start"));
const FIELDS = ["model", "gpus", "hardware", "batch", "sequence", "precision"];
let row = "";
let count = SHOWN; // rows that fit
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
  const more = s.virtual_stages > 1 || s.sequence_parallel ? `.${s.virtual_stages}.${s.sequence_parallel}` : "";
  return `pp${s.pipeline}.tp${s.tensor}.dp${s.data}.ep${s.expert}.zero${s.zero_stage}.micro${s.micro_batch}.${s.recompute}.${s.offload}.${s.schedule}${more}`;
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
  drawSummary(found, count, showAll);
  drawRows(found, chosen, count, choose);
}

function showAll() {
  count = Infinity;
  draw();
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
    count = SHOWN;
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
