// Reads the form and has its plan drawn: the one that is written into the page, or what the planner's Python finds in a
// worker. The address behind # holds all choices.
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

function questionOf({ row = "", ...state }) {
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

const withoutRow = (state) => questionOf({ ...state, row: "" });

function say(text, isError) {
  at("message").textContent = text;
  at("message").className = isError ? "error" : "";
}

// The plan that the page shows without Python: the written one, then the last that was found. The question has no row.
let latest = { question: withoutRow(DATA.start), found: DATA.plan };

// The worker with its Python, the number of the last question, as older answers are of no use any more, and what it asks.
let asked = 0;
let searched = "";
let worker = null;

// Pyodide runs in module workers alone. A page from a disk may start these from data: addresses only, and a page from a
// server from blobs only, if the worker shall read files of that server.
function startWorker() {
  const code = at("worker").textContent;
  const bases = [`https://cdn.jsdelivr.net/pyodide/v${DATA.pyodide}/full/`];
  let address = `data:text/javascript,${encodeURIComponent(code)}`;
  if (location.protocol.startsWith("http")) {
    bases.unshift(new URL("pyodide/", location).href);
    address = URL.createObjectURL(new Blob([code], { type: "text/javascript" }));
  }
  const started = new Worker(address, { type: "module" });
  const archive = Uint8Array.from(atob(at("planner").textContent), (letter) => letter.charCodeAt(0));
  started.onmessage = ({ data }) => {
    if (data.notLoaded) withoutPython(data.notLoaded);
    else if (data.number !== asked) return;
    else if (data.failed) say(`the planner failed here: ${data.failed}`, true);
    else {
      latest = { question: searched, found: data.found };
      show(data.found);
    }
  };
  started.onerror = (event) => withoutPython(`its worker did not start: ${event.message || "this browser refused it"}`);
  started.postMessage({ bases, archive: archive.buffer });
  return started;
}

// Says what is missing, and how to go on. The next change tries again.
function withoutPython(reason) {
  worker?.terminate();
  worker = null;
  const back = element("button", "back to the plan of this page");
  back.type = "button";
  back.addEventListener("click", () => {
    toForm(DATA.start);
    changed(0);
  });
  say("This choice must be computed by Python in the browser, but ", true);
  at("message").append(
    `${reason}. Connect to the internet, or open the page from a server with Pyodide ${DATA.pyodide} in pyodide/ beside it; ` +
      "or let `ds-harness plan` compute it in a terminal. What is shown below belongs to an earlier choice. ",
    back,
  );
}

// The latest plan if it answers the form's question, with the chosen row; else null.
function known(state) {
  const { question, found } = latest;
  if (withoutRow(state) !== question) return null;
  if (!state.row || "error" in found) return found;
  const chosen = found.rows.find((one) => one.name === state.row);
  return chosen ? { ...found, chosen } : null;
}

function ask() {
  asked += 1;
  const state = fromForm();
  const found = known(state);
  if (found) return show(found);
  say(worker ? "searching…" : "loading Python for the browser, some MB the first time…", false);
  try {
    worker ??= startWorker();
  } catch (error) {
    return withoutPython(`its worker did not start: ${error.message}`);
  }
  searched = withoutRow(state);
  worker.postMessage({ number: asked, question: questionOf(state) });
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
  timer = setTimeout(ask, wait);
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
  at("errors").addEventListener("click", (event) => {
    event.preventDefault(); // the address holds the choices
    at("accuracy").open = true;
    at("accuracy").scrollIntoView();
  });
  show(latest.found);
  readAddress();
}

function readAddress() {
  toForm({ ...DATA.start, ...Object.fromEntries(new URLSearchParams(location.hash.slice(1))) });
  changed(0);
}

start();
