// Each view turns one answer of the admin port into elements.

import { count, drawn, element, seconds } from "./dom.js";

const STATES = ["owned", "in_transfer", "cached", "quarantined", "free"];
const WORDS = { owned: "owned", in_transfer: "in transfer", cached: "cached", quarantined: "quarantined", free: "free" };

/** The names of the colours in the bars. */
export function legend() {
  return STATES.map((state) =>
    element("li", {
      children: [element("span", { className: `swatch ${state}` }), WORDS[state]],
    }),
  );
}

/** The cluster in a few numbers, or what of it serves one model. */
export function numbers(cluster, latency, model) {
  const last = latency.samples.at(-1) ?? {};
  const of = cluster.models.find((each) => each.model === model) ?? cluster;
  const placed = Object.values(of.placements).reduce((sum, each) => sum + each, 0);
  const told = [
    ["in the queue", count(of.num_queued)],
    ["in flight", count(last.in_flight)],
    ["placed so far", count(placed)],
    ["tokens a second", count(last.tokens_per_s)],
    ["TTFT, median", seconds(last.ttft_p50_s)],
    ["between tokens, median", seconds(last.itl_p50_s)],
  ];
  return told.map(([name, value]) =>
    element("div", {
      children: [element("dt", { text: name }), element("dd", { text: value })],
    }),
  );
}

/** Gateways and scheduler, then the two pools: of all models, or of one. */
export function topology(cluster, model) {
  const others = (cluster.scrape_targets ?? []).filter(
    (target) => target.role === "gateway" || target.role === "scheduler",
  );
  const several = cluster.models.length > 1;
  const pool = (role) =>
    cluster.workers
      .filter((each) => each.role === role && (model === null || each.model === model))
      .map((each) => worker(each, several));
  return [
    column("Gateway and scheduler", others.map(process)),
    column("Prefill", pool("prefill")),
    column("Decode", pool("decode")),
  ];
}

function column(title, cards) {
  const none = element("p", { className: "quiet", text: "none" });
  return element("div", {
    className: "column",
    children: [element("h3", { text: title }), ...(cards.length ? cards : [none])],
  });
}

function process(target) {
  return element("article", {
    className: "card",
    children: [
      element("h4", { text: target.process }),
      element("p", { className: "quiet", text: `admin port at ${target.address}` }),
    ],
  });
}

function worker(told, namesModel) {
  const [name] = told.worker.split("/");
  const facts = [`${told.num_running} running`, `${told.num_waiting} waiting`];
  if (told.num_preempted) facts.push(`${told.num_preempted} preempted`);
  if (told.backlog_tokens) facts.push(`${count(told.backlog_tokens)} prompt tokens to read`);
  if (told.step_s) facts.push(`a step in ${seconds(told.step_s)}`);
  const title = element("h4", { text: name });
  if (told.draining) title.append(element("span", { className: "badge warning", text: "draining" }));
  return element("article", {
    className: "card",
    attributes: { title: told.worker },
    children: [
      title,
      ...(namesModel ? [element("p", { className: "quiet", text: told.model })] : []),
      bar(told.blocks, told.num_blocks),
      element("p", { className: "quiet", text: blocksInWords(told) }),
      element("p", { className: "quiet", text: facts.join(" · ") }),
    ],
  });
}

function blocksInWords(told) {
  const used = told.num_blocks - told.blocks.free;
  return `${count(used)} of ${count(told.num_blocks)} KV blocks hold something`;
}

/** One worker's KV pool by state. */
function bar(blocks, total) {
  const said = STATES.map((state) => `${WORDS[state]} ${blocks[state] ?? 0}`).join(", ");
  const parts = STATES.filter((state) => blocks[state] > 0).map((state) => {
    const part = element("span", {
      className: `part ${state}`,
      attributes: { title: `${WORDS[state]}: ${count(blocks[state])}` },
    });
    part.style.flexGrow = String(blocks[state] / Math.max(1, total));
    return part;
  });
  return element("div", {
    className: "bar",
    attributes: { role: "img", "aria-label": `KV blocks: ${said}` },
    children: parts,
  });
}

const WIDTH = 600;
const HEIGHT = 160;
const EDGE = { left: 60, right: 8, top: 8, bottom: 20 };

/** Two percentiles over time. */
export function curve(title, samples, median, tail) {
  const values = samples.flatMap((each) => [each[median], each[tail]]).filter((v) => v !== null);
  const most = niceLimit(Math.max(...values, 0));
  const x = (index) =>
    EDGE.left + (index / Math.max(1, samples.length - 1)) * (WIDTH - EDGE.left - EDGE.right);
  const y = (value) => HEIGHT - EDGE.bottom - (value / most) * (HEIGHT - EDGE.top - EDGE.bottom);
  const lines = [0, 0.5, 1].map((share) => grid(y(share * most), seconds(share * most)));
  const told = samples.at(-1) ?? {};
  const ago = samples.length > 1 ? `${Math.round((told.at - samples[0].at) / 60)} min ago` : "";
  return element("figure", {
    children: [
      element("figcaption", {
        children: [
          `${title}: `,
          element("b", { className: "median", text: `median ${seconds(told[median])}` }),
          " ",
          element("b", { className: "tail", text: `95th ${seconds(told[tail])}` }),
        ],
      }),
      drawn("svg", {
        attributes: {
          viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
          role: "img",
          "aria-label": `${title} over the last minutes`,
        },
        children: [
          ...lines,
          label(EDGE.left, HEIGHT - 5, ago, "start"),
          label(WIDTH - EDGE.right, HEIGHT - 5, "now", "end"),
          ...paths(samples, tail, x, y, "tail"),
          ...paths(samples, median, x, y, "median"),
        ],
      }),
    ],
  });
}

function grid(at, text) {
  return drawn("g", {
    children: [
      drawn("line", {
        className: "grid",
        attributes: { x1: EDGE.left, x2: WIDTH - EDGE.right, y1: at, y2: at },
      }),
      label(EDGE.left - 6, at + 4, text, "end"),
    ],
  });
}

function label(x, y, text, anchor) {
  return drawn("text", { text, attributes: { x, y, "text-anchor": anchor } });
}

/** A line where values follow each other, a dot where one stands alone. */
function paths(samples, key, x, y, className) {
  const made = [];
  let run = [];
  const close = () => {
    if (run.length === 1) {
      const [[cx, cy]] = run;
      made.push(drawn("circle", { className, attributes: { cx, cy, r: 2 } }));
    } else if (run.length > 1) {
      const points = run.map((point) => point.map((v) => v.toFixed(1)).join(",")).join(" ");
      made.push(drawn("polyline", { className, attributes: { points } }));
    }
    run = [];
  };
  samples.forEach((sample, index) => {
    if (sample[key] === null) close();
    else run.push([x(index), y(sample[key])]);
  });
  close();
  return made;
}

/** 1, 2 or 5 times a power of ten, not below the value. */
function niceLimit(value) {
  if (!(value > 0)) return 0.1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((each) => each * power).find((each) => each >= value);
}

/** The head and the rows of the table; `open` has the key of the request whose waterfall is shown,
    which stands first where later ones have pushed it off the list. */
export function requestTable(requests, open, toggle) {
  const off = open?.told && !requests.some((told) => keyOf(told) === open.key);
  const body = requestRows(off ? [open.told, ...requests] : requests, open, toggle);
  const head = COLUMNS.map((text) => element("th", { text, attributes: { scope: "col" } }));
  return [
    element("thead", { children: [element("tr", { children: head })] }),
    element("tbody", { children: body }),
  ];
}

const COLUMNS = ["When", "Request", "Model", "Outcome", "TTFT", "Whole", "Prompt", "Answer", "Where"];

/** What a request is opened by. */
function keyOf(told) {
  return told.job ?? told.request_id;
}

function requestRows(requests, open, toggle) {
  return requests.flatMap((told) => {
    const key = keyOf(told);
    const isOpen = open?.key === key;
    const rows = [row(told, key, isOpen, toggle)];
    if (isOpen) {
      const content = open.told ? waterfall(open.told) : element("p", { text: "…" });
      const cell = element("td", { attributes: { colspan: COLUMNS.length }, children: [content] });
      rows.push(element("tr", { className: "opened", children: [cell] }));
    }
    return rows;
  });
}

function row(told, key, isOpen, toggle) {
  const button = element("button", {
    text: key,
    attributes: { type: "button", title: key, "aria-expanded": String(isOpen) },
  });
  button.addEventListener("click", () => toggle(key));
  const bad = told.outcome !== "answered";
  const cached = told.cached_tokens ? ` (${count(told.cached_tokens)} cached)` : "";
  const at = (role) => told.processes.filter((each) => each.startsWith(`${role}-`));
  const cells = [
    new Date(told.began_at * 1000).toLocaleTimeString(),
    button,
    told.model ?? "–",
    element("span", {
      className: bad ? "badge warning" : "badge",
      text: told.reason ? `${told.outcome}: ${told.reason}` : told.outcome,
    }),
    seconds(told.ttft_s),
    seconds(told.duration_s),
    `${count(told.prompt_tokens)}${cached}`,
    count(told.completion_tokens),
    [...at("prefill"), ...at("decode")].join(" → ") || "–",
  ];
  return element("tr", {
    children: cells.map((child) => element("td", { children: [child] })),
  });
}

/** The stages of a request, one under the other, as long as they took. */
export function waterfall(told) {
  const whole = Math.max(told.duration_s, ...told.stages.map((stage) => stage.end_s), 1e-6);
  const ids = [
    ["request", told.request_id],
    ["trace", told.trace_id],
    ["attempts", told.attempts],
  ].filter(([, value]) => value);
  const stages = [...told.stages].sort((a, b) => a.start_s - b.start_s || a.end_s - b.end_s);
  return element("div", {
    className: "waterfall",
    children: [
      element("p", {
        className: "quiet",
        text: ids.map(([name, value]) => `${name} ${value}`).join(" · "),
      }),
      ...stages.map((stage) => stageRow(stage, whole)),
    ],
  });
}

function stageRow(stage, whole) {
  const piece = element("span", {
    className: `piece ${stage.error ? "failed" : stage.process.split("-")[0]}`,
  });
  piece.style.left = `${(100 * stage.start_s) / whole}%`;
  piece.style.width = `${(100 * (stage.end_s - stage.start_s)) / whole}%`;
  const name = stage.attempt > 1 ? `${stage.name} (attempt ${stage.attempt})` : stage.name;
  const took = seconds(stage.end_s - stage.start_s);
  return element("div", {
    className: "stage",
    attributes: { title: `${name} in ${stage.process}: ${took}, ${seconds(stage.start_s)} in` },
    children: [
      element("span", { className: "name", text: name.replaceAll("_", " ") }),
      element("span", { className: "quiet", text: stage.process }),
      element("span", { className: "track", children: [piece] }),
      element("span", { className: "took", text: stage.error ? `${took}, ${stage.error}` : took }),
    ],
  });
}
