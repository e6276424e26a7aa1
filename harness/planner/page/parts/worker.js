// Runs the planner beside the page: gets the form's content with a number, answers with the same number.
let ready = null;

async function load({ base, archive }) {
  const { loadPyodide } = await import(`${base}pyodide.mjs`);
  const python = await loadPyodide({ indexURL: base });
  python.unpackArchive(archive, "zip", { extractDir: "/planner" });
  python.runPython("import sys; sys.path.insert(0, '/planner')");
  return python.pyimport("harness.planner.page.answer").answer;
}

self.onmessage = async ({ data }) => {
  if (data.base) {
    ready = load(data);
    ready.then(() => self.postMessage({ isReady: true }), (error) => self.postMessage({ failed: String(error) }));
    return;
  }
  try {
    const answer = await ready;
    self.postMessage({ number: data.number, found: JSON.parse(answer(data.question)) });
  } catch (error) {
    self.postMessage({ number: data.number, failed: String(error).trim().split("\n").pop() });
  }
};
