// The models of a cluster that serves several: a row for each, by which one can be chosen.

import { count, element, seconds } from "./dom.js";

const COLUMNS = [
  "Model", "State", "Prefill", "Decode", "In the queue", "In flight", "Tokens a second",
  "TTFT, median", "95th", "Between tokens, median", "95th",
];

/** Head and body of the table; `chosen` is the model that the rest of the page shows. */
export function modelTable(cluster, latency, chosen, choose) {
  const head = COLUMNS.map((text) => element("th", { text, attributes: { scope: "col" } }));
  const rows = cluster.models.map((told) =>
    row(told, latency.models[told.model] ?? {}, told.model === chosen, choose),
  );
  return [
    element("thead", { children: [element("tr", { children: head })] }),
    element("tbody", { children: rows }),
  ];
}

function row(told, last, isChosen, choose) {
  const button = element("button", {
    text: told.model,
    attributes: { type: "button", "aria-pressed": String(isChosen) },
  });
  button.addEventListener("click", () => choose(told.model));
  const cells = [
    button,
    element("span", {
      className: told.ready ? "badge good" : "badge warning",
      text: told.ready ? "ready" : told.reason,
    }),
    count(told.prefill),
    count(told.decode),
    count(told.num_queued),
    count(last.in_flight),
    count(last.tokens_per_s),
    seconds(last.ttft_p50_s),
    seconds(last.ttft_p95_s),
    seconds(last.itl_p50_s),
    seconds(last.itl_p95_s),
  ];
  return element("tr", {
    className: isChosen ? "chosen" : "",
    children: cells.map((child) => element("td", { children: [child] })),
  });
}
