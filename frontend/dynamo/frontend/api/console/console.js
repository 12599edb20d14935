// The console: reads the fleet, the metrics and the routing decisions once a second, and draws them.

const PERIOD_MS = 1000;
const HISTORY = 120; // samples in a sparkline: two minutes
const WINDOW = 10; // samples over which rates and quantiles are taken

const byId = (id) => document.getElementById(id);

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") made.className = value;
    else if (value !== false && value != null) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child != null));
  return made;
}

// Keys. The browser's login is taken for reading only; a key of this field is for asking models, and for reading what the
// login may not read. It is kept nowhere but in the field.

const READ = {
  "/console/fleet": ["Models and instances", "console"],
  "/v1/routing/decisions": ["Routing decisions", "console"],
  "/metrics": ["Traffic figures", "metrics"],
};
const readByKey = new Set(); // paths
const refusals = new Map(); // by path; not asked again before the key changes, since each time would count as a failure

const keyGiven = () => byId("key").value.trim();
const isRefusal = (answer) => answer.status === 401 || answer.status === 403;

function send(path, options, withKey) {
  // Without the browser's own login, which it would ask for in a window if the key is wrong. From the origin, since the page's
  // address may hold a login, and addresses that do cannot be fetched.
  const keyed = { credentials: "omit", headers: { ...options.headers, authorization: `Bearer ${keyGiven()}` } };
  return fetch(location.origin + path, withKey ? { ...options, ...keyed } : options);
}

async function failure(answer) {
  const text = await answer.text();
  let message = text;
  try {
    const { error } = JSON.parse(text);
    message = error?.message ?? error ?? text;
  } catch { /* not JSON: shown as it is */ }
  return `${answer.status}: ${String(message).slice(0, 1000)}`;
}

async function read(path, as) {
  const [where] = path.split("?");
  if (refusals.has(where)) throw refusals.get(where);
  let answer = await send(path, { cache: "no-store" }, readByKey.has(where));
  if (isRefusal(answer) && keyGiven() && !readByKey.has(where)) {
    readByKey.add(where);
    answer = await send(path, { cache: "no-store" }, true);
  }
  if (answer.ok) return answer[as]();
  const [what, scope] = READ[where];
  if (!isRefusal(answer)) throw new Error(`${what}: ${await failure(answer)}`);
  byId("key-form").hidden = false;
  refusals.set(where, new Error(`${what} need a key with the scope “${scope}” (${await failure(answer)})`));
  throw refusals.get(where);
}

function keyChanged(event) {
  event.preventDefault();
  readByKey.clear();
  refusals.clear();
}

byId("key-form").addEventListener("submit", keyChanged);
byId("key").addEventListener("change", keyChanged);

// Metrics

const SAMPLE = /^([a-z_]+)(?:\{(.*)\})? ([^ ]+)$/;
const LABEL = /([a-z_]+)="((?:[^"\\]|\\.)*)"/g;

function parseMetrics(text) {
  // Counters and gauges are summed over their labels, except `status`; histograms become {upper bound: count}.
  const sums = new Map();
  const histograms = new Map();
  for (const line of text.split("\n")) {
    const match = line.startsWith("dynamo_frontend_") ? SAMPLE.exec(line) : null;
    if (!match) continue;
    const labels = Object.fromEntries([...(match[2] ?? "").matchAll(LABEL)].map((pair) => [pair[1], pair[2]]));
    const value = Number(match[3]);
    if (match[1].endsWith("_bucket")) {
      const name = match[1].slice(0, -"_bucket".length);
      const buckets = histograms.get(name) ?? new Map();
      const bound = labels.le === "+Inf" ? Infinity : Number(labels.le);
      buckets.set(bound, (buckets.get(bound) ?? 0) + value);
      histograms.set(name, buckets);
    } else {
      const key = labels.status ? `${match[1]}|${labels.status}` : match[1];
      sums.set(key, (sums.get(key) ?? 0) + value);
    }
  }
  return { at: performance.now() / 1000, sums, histograms };
}

const samples = [];

function difference(name) {
  const first = samples[Math.max(0, samples.length - 1 - WINDOW)];
  const last = samples[samples.length - 1];
  if (!first || first === last) return null;
  return { seconds: last.at - first.at, first, last };
}

function rate(name) {
  const span = difference();
  return span && Math.max(0, ((span.last.sums.get(name) ?? 0) - (span.first.sums.get(name) ?? 0)) / span.seconds);
}

function quantile(name, share) {
  // Within the bucket where it falls, values are taken as evenly spread.
  const span = difference();
  const now = span?.last.histograms.get(name);
  if (!now) return null;
  const before = span.first.histograms.get(name) ?? new Map();
  const counts = [...now].sort((a, b) => a[0] - b[0]).map(([bound, count]) => [bound, count - (before.get(bound) ?? 0)]);
  const total = counts.length ? counts[counts.length - 1][1] : 0;
  if (!total) return null;
  let lower = 0;
  let below = 0;
  for (const [bound, count] of counts) {
    if (count >= share * total) {
      if (bound === Infinity) return lower;
      return lower + (bound - lower) * ((share * total - below) / Math.max(1, count - below));
    }
    lower = bound;
    below = count;
  }
  return lower;
}

const inMs = (seconds) => (seconds == null ? null : seconds * 1000);
const TILES = [
  ["Requests per second", () => rate("dynamo_frontend_requests_total|success"), (value) => short(value)],
  ["Failed per second", () => rate("dynamo_frontend_requests_total|error"), (value) => short(value)],
  ["Running requests", () => samples[samples.length - 1]?.sums.get("dynamo_frontend_inflight_requests") ?? 0, (value) => short(value)],
  ["Tokens per second", () => rate("dynamo_frontend_output_tokens_total"), (value) => short(value)],
  ["TTFT, median", () => inMs(quantile("dynamo_frontend_time_to_first_token_seconds", 0.5)), (value) => `${short(value)} ms`],
  ["TTFT, 95 %", () => inMs(quantile("dynamo_frontend_time_to_first_token_seconds", 0.95)), (value) => `${short(value)} ms`],
  ["ITL, median", () => inMs(quantile("dynamo_frontend_inter_token_latency_seconds", 0.5)), (value) => `${short(value)} ms`],
  ["Request, median", () => inMs(quantile("dynamo_frontend_request_duration_seconds", 0.5)), (value) => `${short(value)} ms`],
].map(([title, value, format]) => ({ title, value, format, history: [] }));

function short(value) {
  const size = Math.abs(value);
  if (size >= 10_000) return `${(value / 1000).toFixed(1)}k`;
  return String(Number(value.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : 2)));
}

function drawTiles() {
  for (const tile of TILES) {
    if (!tile.figure) {
      const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
      svg.setAttribute("viewBox", `0 0 ${HISTORY - 1} 100`);
      svg.setAttribute("preserveAspectRatio", "none");
      svg.setAttribute("aria-hidden", "true");
      tile.line = svg.appendChild(document.createElementNS("http://www.w3.org/2000/svg", "polyline"));
      tile.figure = element("div", { class: "figure" });
      byId("tiles").append(element("div", { class: "tile" }, element("h3", {}, tile.title), tile.figure, svg));
    }
    const value = tile.value();
    tile.history.push(value);
    if (tile.history.length > HISTORY) tile.history.shift();
    tile.figure.textContent = value == null ? "–" : tile.format(value);
    const most = Math.max(...tile.history.map((known) => known ?? 0)) || 1;
    const start = HISTORY - tile.history.length;
    const points = tile.history.map((known, at) => known != null && `${start + at},${100 - (96 * known) / most}`);
    tile.line.setAttribute("points", points.filter(Boolean).join(" ")); // the line goes straight on where nothing is known
  }
}

// Models and instances

function meter(share) {
  if (share == null) return element("span", { class: "quiet" }, "–");
  const percent = `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;
  const bar = element("i");
  bar.style.width = `${Math.min(100, 100 * share)}%`;
  return element("span", { class: "meter" }, bar, element("b", {}, percent));
}

function age(seconds) {
  for (const [unit, size] of [["d", 86400], ["h", 3600], ["min", 60]]) {
    if (seconds >= size) return `${Math.floor(seconds / size)} ${unit}`;
  }
  return `${Math.floor(seconds)} s`;
}

const known = (value) => (value == null ? "–" : short(value));

function instanceRow(instance) {
  const number = (value) => element("td", { class: "number" }, known(value));
  return element("tr", {},
    element("td", {}, element("code", { title: instance.component }, instance.id),
      ...(instance.circuit ? [" ", element("span", { class: "badge bad" }, `circuit ${instance.circuit.replace("_", "-")}`)] : [])),
    number(instance.running), number(instance.waiting),
    element("td", {}, meter(instance.kv_usage)), element("td", {}, meter(instance.hit_rate)),
    number(instance.queued_prefill_tokens), number(instance.step_ms),
    element("td", {}, instance.role), element("td", {}, instance.backend), element("td", { class: "number" }, age(instance.age_s)));
}

const COLUMNS = [["Instance"], ["Running", 1], ["Waiting", 1], ["KV usage"], ["Hit rate"], ["Prefill queue", 1], ["Step ms", 1],
  ["Role"], ["Backend"], ["Up", 1]];

function wanted(fleet, model) {
  const targets = fleet.targets.filter((target) => target.model === model.name);
  return targets.map((target) => element("p", { class: "quiet" },
    `Planner: ${target.instances} ${target.role === "aggregated" ? "" : `${target.role} `}wanted for ${age(target.age_s)}, ${target.reason}`));
}

function drawModels(fleet) {
  const drawn = fleet.models.map((model) => element("div", { class: "model" },
    element("h3", {}, model.name,
      element("span", { class: `badge ${model.ready ? "good" : "bad"}` }, model.ready ? "ready" : "not ready"),
      element("span", { class: "quiet" }, [model.kind, ...model.other_names.map((name) => `also ${name}`)].join(", "))),
    ...wanted(fleet, model),
    model.instances.length
      ? element("div", { class: "scroll" }, element("table", {},
        element("thead", {}, element("tr", {}, ...COLUMNS.map(([name, isNumber]) => element("th", { class: isNumber ? "number" : "" }, name)))),
        element("tbody", {}, ...model.instances.map(instanceRow))))
      : element("p", { class: "quiet" }, "No instance serves it.")));
  byId("models").replaceChildren(...(drawn.length ? drawn : [element("p", { class: "quiet" }, "No worker has registered a model.")]));
}

// Names of operators

const percent = (share) => `${Number((100 * share).toPrecision(3))} %`;

function drawNames(names) {
  const cell = (parts) => element("td", {}, parts.join(", ") || "–");
  byId("names-section").hidden = !names.length;
  byId("names").replaceChildren(...names.map((name) => element("tr", {},
    element("td", {}, name.name),
    cell(name.targets.map(({ model, share }) => (share === 1 ? model : `${model} ${percent(share)}`))),
    cell(name.fallbacks.map(({ model, on }) => `${model} (${on.join(", ").replaceAll("_", " ")})`)),
    cell(name.shadows.map(({ model, share }) => `${model} ${percent(share)}`)),
    element("td", {}, name.sticky ?? "–"))));
}

// Routing decisions

function candidateRow(candidate, chosen, least, most) {
  const cost = Number(candidate.cost ?? 0);
  const facts = Object.entries(candidate).filter(([name]) => name !== "instance" && name !== "cost");
  const bar = element("i");
  bar.style.width = `${most > least ? (100 * (cost - least)) / (most - least) : 0}%`;
  return element("tr", {},
    element("td", {}, element("code", {}, String(candidate.instance)), candidate.instance === chosen ? " ← chosen" : ""),
    element("td", {}, element("span", { class: "meter" }, bar, element("b", {}, short(cost)))),
    element("td", { class: "quiet" }, facts.map(([name, value]) => `${name.replaceAll("_", " ")} ${value}`).join(", ")));
}

function drawDecisions(decisions) {
  // Who has opened one reads it: new ones would push it away.
  const held = document.querySelector("#decisions details[open]") != null;
  byId("decisions-held").hidden = !held;
  if (held) return;
  const drawn = decisions.map((decision) => {
    const candidates = decision.candidates ?? [];
    const costs = candidates.map((candidate) => Number(candidate.cost ?? 0));
    const [least, most] = [Math.min(...costs), Math.max(...costs)];
    const shown = element("details", {},
      element("summary", {}, new Date(1000 * decision.at).toLocaleTimeString(), " ", decision.model, " → ",
        element("code", {}, decision.instance), " ",
        element("span", { class: "quiet" }, `${decision.reason}, ${decision.overlap_blocks ?? 0} blocks cached` +
          Object.entries(decision.tiers ?? {}).map(([tier, blocks]) => `, ${blocks} on ${tier}`).join("") + `, ` +
          `cost ${short(decision.cost ?? 0)}, of ${decision.instances}` +
          (decision.ttft_ms == null ? "" : `, first token predicted in ${short(decision.ttft_ms)} ms`))));
    if (candidates.length) {
      shown.append(element("div", { class: "scroll" }, element("table", {},
        element("tbody", {}, ...candidates.map((candidate) => candidateRow(candidate, decision.instance, least, most))))));
    }
    return shown;
  });
  byId("decisions").replaceChildren(...(drawn.length ? drawn : [element("p", { class: "quiet" }, "No decision yet.")]));
}

// The box to try a model

let models = [];
let trying = null;

function sample(model) {
  const size = (shape) => shape.reduce((count, length) => count * length, 1);
  const inputs = model.inputs.map(({ name, datatype, shape }) => {
    const whole = shape.map((length) => (length < 0 ? 1 : length));
    const value = datatype === "BYTES" ? "text" : datatype === "BOOL" ? false : 0;
    return { name, datatype, shape: whole, data: Array(Math.min(size(whole), 100_000)).fill(value) };
  });
  return JSON.stringify({ inputs }, null, 1).replace(/\n\s+(?=[\d"tf\]-])/g, " ");
}

function drawChoices() {
  const select = byId("try-model");
  const names = models.map((model) => model.name);
  if ([...select.options].map((option) => option.value).join("\n") === names.join("\n")) return;
  const before = select.value;
  select.replaceChildren(...names.map((name) => element("option", { value: name }, name)));
  if (names.includes(before)) select.value = before;
  else chosen();
}

function chosen() {
  const model = models.find((one) => one.name === byId("try-model").value);
  if (!model) return;
  const isText = model.kind === "llm";
  byId("try-label").textContent = isText ? "Prompt" : "Request, as KServe's REST protocol has it";
  byId("try-tokens-label").hidden = !isText;
  byId("try-input").value = isText ? "What is the capital of France?" : sample(model);
}

async function tryText(model, input, signal, show) {
  const path = model.has_chat ? "/v1/chat/completions" : "/v1/completions";
  const asked = model.has_chat ? { messages: [{ role: "user", content: input }] } : { prompt: input };
  const body = { model: model.name, stream: true, max_tokens: Number(byId("try-tokens").value) || 128,
    stream_options: { include_usage: true }, ...asked };
  const begun = performance.now();
  const answer = await post(path, JSON.stringify(body), signal);
  let first = null;
  let usage = null;
  let text = "";
  let rest = "";
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    const lines = (rest + part.value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new Error(event.error.message ?? String(event.error));
      usage = event.usage ?? usage;
      const choice = event.choices?.[0];
      const added = choice?.delta?.content ?? choice?.text ?? "";
      if (added && first == null) first = performance.now();
      text += added;
    }
    show(text);
  }
  const tokens = usage?.completion_tokens ?? 0;
  const seconds = (performance.now() - (first ?? begun)) / 1000;
  const pace = tokens > 1 && seconds > 0 ? `, ${short((tokens - 1) / seconds)} tokens/s` : "";
  return `${tokens} tokens, the first after ${short((first ?? performance.now()) - begun)} ms${pace}`;
}

async function tryTensors(model, input, signal, show) {
  const begun = performance.now();
  const path = `/v2/models/${encodeURIComponent(model.name)}/${model.decoupled ? "generate" : "infer"}`;
  const answer = await (await post(path, input, signal)).json();
  show(JSON.stringify(answer, null, 1));
  return `answered after ${short(performance.now() - begun)} ms`;
}

async function post(path, body, signal) {
  // Without the login, which is not taken here: a browser forgets a login that was refused.
  const asked = { method: "POST", headers: { "content-type": "application/json" }, body, signal, credentials: "omit" };
  const answer = await send(path, asked, keyGiven() !== "");
  if (answer.ok) return answer;
  if (isRefusal(answer)) byId("key-form").hidden = false;
  throw new Error(await failure(answer));
}

async function tryIt(event) {
  event.preventDefault();
  const model = models.find((one) => one.name === byId("try-model").value);
  if (!model || trying) return;
  trying = new AbortController();
  const answer = byId("try-answer");
  const show = (text) => { answer.textContent = text; answer.hidden = false; };
  show("");
  byId("try-figures").className = "quiet";
  byId("try-figures").textContent = "Asking…";
  byId("try-send").disabled = true;
  byId("try-stop").hidden = false;
  try {
    const ask = model.kind === "llm" ? tryText : tryTensors;
    byId("try-figures").textContent = await ask(model, byId("try-input").value, trying.signal, show);
  } catch (error) {
    byId("try-figures").className = error.name === "AbortError" ? "quiet" : "bad";
    byId("try-figures").textContent = error.name === "AbortError" ? "Stopped." : error.message;
  } finally {
    trying = null;
    answer.hidden = !answer.textContent;
    byId("try-send").disabled = false;
    byId("try-stop").hidden = true;
  }
}

byId("try").addEventListener("submit", tryIt);
byId("try-stop").addEventListener("click", () => trying?.abort());
byId("try-model").addEventListener("change", chosen);

// Once a second

const STATES = { healthy: "good", starting: "warn", shutting_down: "warn" };

function drawFleet(fleet) {
  models = fleet.models;
  byId("where").textContent = `namespace ${fleet.namespace}, ${fleet.router_mode} routing, version ${fleet.version}`;
  byId("state").textContent = fleet.state.replace("_", " ");
  byId("state").className = `badge ${STATES[fleet.state] ?? "bad"}`;
  if (fleet.asks_keys) byId("key-form").hidden = false;
  byId("processes").hidden = fleet.processes < 2;
  byId("processes").textContent = `Hit rates and routing decisions are those of whichever of ${fleet.processes} processes answers; ` +
    "all else is of all of them.";
  drawModels(fleet);
  drawNames(fleet.names);
  drawChoices();
}

async function refresh() {
  const parts = [
    read("/console/fleet", "json").then(async (fleet) => {
      drawFleet(fleet);
      if (fleet.explains) drawDecisions((await read("/v1/routing/decisions?limit=20", "json")).decisions);
    }),
    read("/metrics", "text").then((text) => {
      samples.push(parseMetrics(text));
      if (samples.length > WINDOW + 1) samples.shift();
      drawTiles();
    }),
  ];
  const problems = (await Promise.allSettled(parts)).filter((part) => part.status === "rejected").map((part) => part.reason.message);
  byId("problem").hidden = !problems.length;
  byId("problem").textContent = problems.join(" · ");
  if (problems.length < parts.length) byId("updated").textContent = `updated ${new Date().toLocaleTimeString()}`;
}

for (;;) {
  if (!document.hidden) await refresh();
  await new Promise((done) => setTimeout(done, PERIOD_MS));
}
