// Draws a plan: the chosen layout with its memory and its time, and the table of all.
const SHOWN = DATA.rows; // rows that fit, until all are asked for
const FEW_STAGES = 16; // of which each has its bar at once
const MEMORY = { parameters: "#2b83c6", gradients: "#e0712c", optimizer: "#009e73", activations: "#cc79a7", logits: "#e6b91e", buffers: "#8a8f98" };
const TIME = { compute: "#2b83c6", bubble: "#8a8f98", tensor: "#cc79a7", pipeline: "#56b4e9", data: "#e0712c", optimizer: "#009e73" };
const WORDS = { tensor: "tensor-parallel traffic", pipeline: "pipeline traffic", data: "data-parallel traffic" };
const TILES = { loss: "loss", feed_forward: "ffn", attention: "mask" };
const COLUMNS = {
  "": (row) => row.number || "–",
  pp: (row) => row.layout.pipeline,
  tp: (row) => row.layout.tensor + (row.expert_parallel_size > 1 ? " ep" : "") + (row.sequence_parallel ? " sp" : ""),
  dp: (row) => row.layout.data + (row.context_parallel_size > 1 ? ` cp${row.context_parallel_size}` : ""),
  ZeRO: (row) => row.zero_stage,
  micro: (row) => row.micro_batch,
  accum: (row) => row.gradient_accumulation_steps,
  ckpt: (row) => (row.activations_on_host ? "host" : row.activation_checkpointing ? "yes" : "no"),
  schedule: (row) => (row.layout.pipeline > 1 ? row.schedule : "–"),
  offload: (row) => ({ none: "no", optimizer: "states", parameters: "weights", "optimizer+parameters": "all" })[row.offload],
  tiles: (row) => Object.entries(TILES).filter(([key]) => row.preset.tiling?.[key]).map(([, word]) => word).join(" ") || "–",
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

function element(tag, content = "", className = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (Array.isArray(content)) made.append(...content);
  else made.textContent = content;
  return made;
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

function drawChosen(one) {
  const { stages, limit, max } = one.memory_gib;
  const scale = Math.max(limit, max) * 1.02;
  const largest = stages.reduce((a, b) => (b.total > a.total ? b : a));
  const { pipeline, tensor, data } = one.layout;
  const tiles = [
    [`${pipeline} x ${tensor} x ${data}`, "pipeline x tensor x data"],
    [whole(one.tokens_per_second), "tokens/s"],
    [`${digits(one.step_seconds.total)} s`, "a step"],
    [digits(one.model_tflops_per_gpu), "TFLOP/s a GPU"],
    [percent(one.mfu), "of the peak (MFU)"],
    [percent(one.bubble_fraction), "bubble"],
    [`${max.toFixed(1)} GiB`, `of ${limit.toFixed(1)} on a GPU`],
  ].map(([value, label]) => element("div", [element("b", value), element("span", label)]));
  const bars = stages.map((stage, index) => bar(`stage ${index}`, stage, MEMORY, scale, "GiB", limit));
  const hidden = element("details", [element("summary", `all ${bars.length} stages`), ...bars.slice(FEW_STAGES)]);
  const config = element("pre", JSON.stringify(one.preset, null, 2));
  at("chosen").replaceChildren(
    element("h2", one.verdict, one.fits ? "fits" : "too-large"),
    element("div", tiles, "tiles"),
    element("h3", stages.length > 1 ? "Memory of a GPU, by pipeline stage (amounts of the fullest)" : "Memory of a GPU"),
    legend(largest, MEMORY, "GiB", limit),
    ...bars.slice(0, FEW_STAGES),
    ...(bars.length > FEW_STAGES ? [hidden] : []),
    element("h3", "Time of a step"),
    legend(one.step_seconds, TIME, "s"),
    bar("step", one.step_seconds, TIME, one.step_seconds.total, "s"),
    element("details", [element("summary", "The DeepSpeed JSON of this layout"), element("div", [config], "wide")]),
  );
}

// Draws the table; `choose` is called with a row that is clicked.
function drawRows(found, choose) {
  const head = element("thead", [element("tr", Object.keys(COLUMNS).map((name) => element("th", name)))]);
  const lines = found.rows.map((one) => {
    const line = element("tr", Object.values(COLUMNS).map((cell) => element("td", String(cell(one)))));
    line.className = [one.name === found.chosen.name ? "chosen" : "", one.fits ? "" : "too-large"].join(" ").trim();
    line.tabIndex = 0;
    line.title = one.verdict;
    line.addEventListener("click", () => choose(one));
    line.addEventListener("keydown", (event) => event.key === "Enter" && choose(one));
    return line;
  });
  at("rows").replaceChildren(head, element("tbody", lines));
}

// Says why layouts were excluded; `showAll` is called where more rows are asked for.
function drawSummary(found, count, showAll) {
  const reasons = found.reasons.map(([reason, number]) => `${whole(number)} (${reason})`);
  const words = [`${whole(found.tried)} layouts tried, ${whole(found.fit)} fit.`];
  if (reasons.length) words.push(`The others were excluded: ${reasons.join("; ")}.`);
  const memory = found.more_memory;
  if (memory) words.push(`${memory.gib.toFixed(1)} GiB more on each GPU would bring ${percent(memory.gain)} more tokens/s.`);
  at("summary").replaceChildren(words.join(" "));
  if (count && found.fit > count) {
    const button = element("button", `show all ${whole(found.fit)}`);
    button.addEventListener("click", showAll);
    at("summary").append(button);
  }
}
