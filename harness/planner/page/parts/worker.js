// Runs the planner beside the page: gets the form's content with a number, answers with the same number.
let ready = null;

// Pyodide from the first address that has it.
async function loadPython(bases) {
  const reasons = [];
  for (const base of bases) {
    try {
      const { loadPyodide } = await import(`${base}pyodide.mjs`);
      return await loadPyodide({ indexURL: base });
    } catch (error) {
      reasons.push(`${base} (${lineOf(error)})`);
    }
  }
  throw new Error(`it could not be loaded from ${reasons.join(", ")}`);
}

async function load({ bases, archive }) {
  const python = await loadPython(bases);
  python.unpackArchive(archive, "zip", { extractDir: "/planner" });
  python.runPython("import sys; sys.path.insert(0, '/planner')");
  return python.pyimport("harness.planner.page.answer").answer;
}

// The line of an error that names it; Python's come with a traceback before and advice behind.
function lineOf(error) {
  const lines = String(error.message ?? error).trim().split("\n");
  return lines.findLast((line) => /^[\w.]+(Error|Exception): /.test(line)) ?? lines.pop();
}

self.onmessage = async ({ data }) => {
  if (data.bases) {
    ready = load(data);
    ready.catch((error) => self.postMessage({ notLoaded: lineOf(error) }));
    return;
  }
  let answer;
  try {
    answer = await ready;
  } catch {
    return; // said above
  }
  try {
    self.postMessage({ number: data.number, found: JSON.parse(answer(data.question)) });
  } catch (error) {
    self.postMessage({ number: data.number, failed: lineOf(error) });
  }
};
