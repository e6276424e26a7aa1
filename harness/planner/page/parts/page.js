// Reads the form, lets the planner's Python search in a worker, and has the result drawn. The address behind # holds all
// choices.
const PASTED = "paste a config.json";
const EDITS = DATA.labels;
const FIELDS = ["model", "gpus", "hardware", "batch", "sequence", "precision"];

const inside = (object, path) => path.split(".").reduce((part, key) => part[key], object);

// What is chosen, as texts: of the form, of the address, or of the page as it was written.
let row = "";
let count = SHOWN; // rows that fit; 0: all
let kept = "";

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
  if (!at("model").value) at("model").value = DATA.start.model;
  if (!at("hardware").value) at("hardware").value = DATA.start.hardware;
  at("config").value = state.config ?? "";
  row = state.row ?? "";
  drawDevice(state.precision);
  for (const path of Object.keys(EDITS)) {
    at(path).value = state[path] ?? "";
    if (state[path]) at("device").open = true;
  }
}

function drawDevice(precision) {
  const device = DATA.hardware[at("hardware").value];
  for (const path of Object.keys(EDITS)) at(path).placeholder = inside(device, path);
  const known = ["fp32", "bf16", "fp16"].filter((name) => name in device.tflops);
  at("precision").replaceChildren(...known.map((name) => new Option(name, name, false, name === precision)));
  at("pasted").hidden = at("model").value !== PASTED;
}

function questionOf(state) {
  const isPasted = state.model === PASTED;
  return JSON.stringify({
    config: isPasted ? state.config : DATA.models[state.model],
    model: isPasted ? "config.json" : state.model,
    hardware: DATA.hardware[state.hardware],
    hardware_name: state.hardware,
    edits: Object.fromEntries(Object.keys(EDITS).filter((path) => path in state).map((path) => [path, state[path]])),
    gpus: state.gpus, batch: state.batch, sequence: state.sequence, precision: state.precision,
    row, rows: count,
  });
}

function say(text, isError) {
  at("message").textContent = text;
  at("message").className = isError ? "error" : "";
}

// The worker, its Python, and the number of the last question: older answers are of no use any more.
let asked = 0;
let worker = null;

function startWorker() {
  const text = at("worker").textContent;
  worker = new Worker(URL.createObjectURL(new Blob([text], { type: "text/javascript" })), { type: "module" });
  const beside = location.protocol.startsWith("http");
  const base = beside ? new URL("pyodide/", location).href : `https://cdn.jsdelivr.net/pyodide/v${DATA.pyodide}/full/`;
  const archive = Uint8Array.from(atob(at("planner").textContent), (letter) => letter.charCodeAt(0));
  worker.onmessage = ({ data }) => {
    if (data.isReady) return;
    if (data.failed) say(`the planner cannot run here: ${data.failed}`, true);
    else if (data.number === asked) show(data.found);
  };
  worker.postMessage({ base, archive: archive.buffer });
}

function ask() {
  asked += 1;
  worker.postMessage({ number: asked, question: questionOf(fromForm()) });
}

function show(found) {
  document.body.dataset.answered = asked;
  at("result").hidden = "error" in found;
  at("result").classList.remove("stale");
  if ("error" in found) return say(found.error, true);
  say(found.message, found.is_error);
  drawChosen(found.chosen);
  drawSummary(found, count, () => {
    count = 0;
    ask();
  });
  drawRows(found, (one) => {
    row = one.name;
    keep();
    ask();
  });
}

function keep() {
  kept = `#${new URLSearchParams(fromForm())}`;
  history.replaceState(null, "", kept);
}

let timer = 0;
function changed(wait) {
  clearTimeout(timer);
  count = SHOWN;
  at("result").classList.add("stale");
  keep();
  timer = setTimeout(() => {
    say(asked ? "searching…" : "loading Python for the browser, some MB the first time…", false);
    ask();
  }, wait);
}

function start() {
  at("model").replaceChildren(...[...Object.keys(DATA.models), PASTED].map((name) => new Option(name)));
  at("hardware").replaceChildren(...Object.entries(DATA.hardware).map(([name, one]) => new Option(one.name, name)));
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
  startWorker();
  readAddress();
}

function readAddress() {
  toForm({ ...DATA.start, ...Object.fromEntries(new URLSearchParams(location.hash.slice(1))) });
  changed(0);
}

start();
