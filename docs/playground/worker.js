// The package in a thread of its own: Python is put back as the build left it, then each question gets its answer.

import { loadPyodide } from "./python/pyodide.mjs";

const folder = new URL("python/", self.location.href).href;

async function fetched(name) {
  const response = await fetch(folder + name);
  if (!response.ok) throw new Error(`the server has no ${name}: it answered ${response.status}`);
  return response;
}

const unpacked = ({ body }) => new Response(body.pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();

async function start() {
  const [started, files] = await Promise.all([
    fetched("started.bin").then(unpacked),
    fetched("penstock.zip").then(response => response.arrayBuffer()),
  ]);
  const pyodide = await loadPyodide({ indexURL: folder, _loadSnapshot: new Uint8Array(started) });
  pyodide.unpackArchive(files, "zip", { extractDir: "/penstock" });
  return pyodide.globals.get("answer");
}

const answer = start();

self.onmessage = async ({ data: question }) => {
  try {
    self.postMessage((await answer)(question));
  } catch (error) {
    // Python's last line says what happened.
    self.postMessage(JSON.stringify({ fault: String(error.message ?? error).trim().split("\n").pop() }));
  }
};
