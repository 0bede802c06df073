// Asks the admin port every two seconds while somebody looks, and draws what it says.
// What is searched, which request is open and which model is chosen stand in the address:
// #search=TEXT&request=ID&model=NAME.

import { redraw } from "./dom.js";
import { modelTable } from "./models.js";
import { curve, legend, numbers, requestTable, topology } from "./views.js";

const INTERVAL_MS = 2000;
const TIMEOUT_MS = 5000;
const find = (id) => document.getElementById(id);

const asked = new URLSearchParams(location.hash.slice(1));
// The request whose waterfall is shown: its key, and what is told of it.
let open = asked.has("request") ? { key: asked.get("request"), told: null } : null;
let listed = [];
// The model that all is shown of; null for all models.
let chosen = asked.get("model");

async function ask(path) {
  const response = await fetch(path, { signal: AbortSignal.timeout(TIMEOUT_MS) });
  const told = await response.json();
  if (!response.ok) throw new Error(told.error ?? `${path}: ${response.status}`);
  return told;
}

function ofModel(model) {
  return model === null ? {} : { model };
}

async function showRequests() {
  const of = chosen;
  const query = new URLSearchParams({ search: find("search").value, limit: "50", ...ofModel(of) });
  const told = await ask(`/requests?${query}`);
  if (of !== chosen) return;
  listed = told.requests;
  find("model").textContent = of ?? told.models.join(", ");
  find("found").textContent = `${listed.length} shown, ${told.kept} kept`;
  drawRequests();
}

function drawRequests() {
  redraw(find("requests"), requestTable(listed, open, toggle));
}

function toggle(key) {
  open = open?.key === key ? null : { key, told: null };
  remember();
  drawRequests();
  showOpened().catch((error) => complain([error]));
}

async function showOpened() {
  if (open === null) return;
  const { key } = open;
  const told = await ask(`/requests/${encodeURIComponent(key)}`);
  if (open?.key === key) open.told = told.requests[0];
  drawRequests();
}

function remember() {
  const told = new URLSearchParams();
  if (find("search").value) told.set("search", find("search").value);
  if (open) told.set("request", open.key);
  if (chosen !== null) told.set("model", chosen);
  history.replaceState(null, "", told.size ? `#${told}` : location.pathname);
}

function complain(errors) {
  const problem = find("problem");
  problem.hidden = errors.length === 0;
  problem.textContent = errors.map((error) => error.message).join("; ");
  find("state").textContent = errors.length ? "trouble" : "live";
  find("state").className = errors.length ? "badge warning" : "badge good";
}

async function showCluster() {
  const of = chosen;
  const latency = await ask(`/latency?${new URLSearchParams(ofModel(of))}`);
  if (of !== chosen) return;
  find("curves").replaceChildren(
    curve("Time to first token", latency.samples, "ttft_p50_s", "ttft_p95_s"),
    curve("Between tokens", latency.samples, "itl_p50_s", "itl_p95_s"),
  );
  const cluster = await ask("/cluster");
  if (of !== chosen) return;
  find("models-section").hidden = cluster.models.length < 2;
  redraw(find("models"), modelTable(cluster, latency, of, choose));
  find("numbers").replaceChildren(...numbers(cluster, latency, of));
  find("topology").replaceChildren(...topology(cluster, of));
}

function choose(model) {
  chosen = chosen === model ? null : model;
  remember();
  refresh();
}

async function refresh() {
  const results = await Promise.allSettled([showCluster(), showRequests()]);
  complain(results.filter((each) => each.status === "rejected").map((each) => each.reason));
}

async function loop() {
  for (;;) {
    if (!document.hidden) await refresh();
    await new Promise((done) => setTimeout(done, INTERVAL_MS));
  }
}

find("legend").replaceChildren(...legend());
find("search").value = asked.get("search") ?? "";
find("search").addEventListener("input", () => {
  remember();
  showRequests().catch((error) => complain([error]));
});
showOpened().catch((error) => complain([error]));
loop();
