"use strict";

const byId = (id) => document.getElementById(id);
const POLL_PERIOD_MS = 1000;
const NUM_RATES = 120;
const NO_VALUE = "–";

function element(tag, text, className) {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (className) node.className = className;
  return node;
}

// -- the engine -----------------------------------------------------------------------------------

// The text of /metrics as sums by name, and as values by label for the times of steps.
function parse(text) {
  const reading = { atMs: performance.now(), numbers: {}, parts: {}, ranks: {} };
  for (const line of text.split("\n")) {
    const match = /^([a-z_]+)(?:\{(.*)\})? ([-+.0-9eE]+)$/.exec(line);
    if (!match) continue;
    const [, name, labels, value] = match;
    if (labels && labels.includes("le=")) continue;
    // Of what was answered, what this page asks for is not shown.
    if (name === "eagleray_http_requests_total" && !/path="\/v1\/(?!models)/.test(labels)) continue;
    reading.numbers[name] = (reading.numbers[name] || 0) + Number(value);
    const label = /^(?:part|rank)="(.*)"$/.exec(labels || "");
    if (name === "eagleray_step_part_seconds_total") reading.parts[label[1]] = Number(value);
    if (name === "eagleray_rank_step_seconds_total") reading.ranks[label[1]] = Number(value);
  }
  return reading;
}

let last = null;
let isPolling = false;
const rates = [];

function show(now) {
  const before = last || now;
  const seconds = (now.atMs - before.atMs) / 1000;
  const at = (name) => now.numbers[name] || 0;
  const increase = (name) => at(name) - (before.numbers[name] || 0);
  const rate = (name) => (seconds ? Math.max(0, increase(name)) / seconds : 0);
  const percent = (part, whole) => (whole ? Math.round((100 * part) / whole) + "%" : NO_VALUE);
  const meanMs = (name) => {
    const count = at(`${name}_count`);
    return count ? ((1000 * at(`${name}_sum`)) / count).toFixed(1) + " ms" : NO_VALUE;
  };
  const blocks = at("eagleray_kv_blocks");
  const tiles = {
    "Running": [at("eagleray_num_requests_running"), ""],
    "Waiting": [at("eagleray_num_requests_waiting"), ""],
    "Output tokens": [rate("eagleray_output_tokens_total").toFixed(1), "per s"],
    "KV cache in use": [percent(blocks - at("eagleray_kv_blocks_free"), blocks), `of ${blocks} blocks`],
    "Prefix cache hits": [
      percent(at("eagleray_prefix_cache_hit_tokens_total"), at("eagleray_prompt_tokens_total")),
      "of prompt tokens",
    ],
    "Time to first token": [meanMs("eagleray_time_to_first_token_seconds"), "mean"],
    "Between tokens": [meanMs("eagleray_inter_token_seconds"), "mean"],
    "In the queue": [meanMs("eagleray_queue_seconds"), "mean"],
    "Requests answered": [at("eagleray_http_requests_total"), ""],
    "Steps": [rate("eagleray_steps_total").toFixed(1), "per s"],
    "Preemptions": [at("eagleray_preemptions_total"), ""],
    "Recoveries": [at("eagleray_recoveries_total"), ""],
  };
  byId("tiles").replaceChildren(
    ...Object.entries(tiles).map(([name, [value, unit]]) => {
      const tile = element("div");
      const shown = element("dd", String(value));
      if (unit) shown.append(" ", element("small", unit));
      tile.append(element("dt", name), shown);
      return tile;
    }),
  );
  rates.push(rate("eagleray_output_tokens_total"));
  if (rates.length > NUM_RATES) rates.shift();
  drawRates();
  const steps = increase("eagleray_steps_total");
  if (steps > 0 || !last) {
    // Without a new step the last ones stay; at first the mean since the start is shown.
    const numSteps = steps > 0 ? steps : at("eagleray_steps_total");
    const earlier = steps > 0 ? before : { parts: {}, ranks: {} };
    showBars("ranks", "rank ", now.ranks, earlier.ranks, numSteps);
    showBars("parts", "", now.parts, earlier.parts, numSteps);
  }
  last = now;
}

function drawRates() {
  const peak = Math.max(1, ...rates);
  const from = NUM_RATES - rates.length;
  const points = rates.map((value, i) => `${from + i},${(29 - (27 * value) / peak).toFixed(2)}`);
  const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
  path.setAttribute("d", points.length ? "M" + points.join("L") : "");
  byId("rates").replaceChildren(path);
  byId("peak").textContent = `peak ${peak.toFixed(0)}`;
}

function showBars(id, prefix, now, before, steps) {
  const means = Object.entries(now).map(([name, seconds]) => [
    prefix + name,
    steps ? (1000 * (seconds - (before[name] || 0))) / steps : 0,
  ]);
  const maxMs = Math.max(1e-9, ...means.map(([, ms]) => ms));
  byId(id).tBodies[0].replaceChildren(
    ...means.map(([name, ms]) => {
      const row = element("tr");
      const bar = element("progress");
      bar.max = maxMs;
      bar.value = Math.max(0, ms);
      bar.setAttribute("aria-label", name);
      const barCell = element("td");
      barCell.append(bar);
      const head = element("th", name);
      head.scope = "row";
      row.append(head, barCell, element("td", `${ms.toFixed(1)} ms`));
      return row;
    }),
  );
}

function showState(text, isBad) {
  const state = byId("state");
  if (state.textContent !== text) state.textContent = text;
  state.classList.toggle("bad", isBad);
}

async function poll() {
  setTimeout(poll, POLL_PERIOD_MS);
  if (document.hidden || isPolling) return;
  isPolling = true;
  try {
    const [metrics, health] = await Promise.all([fetch("metrics"), fetch("health")]);
    show(parse(await metrics.text()));
    const body = await health.json();
    if (health.ok) showState(body.state, false);
    else showState(body.error.message, true);
  } catch {
    showState("the server does not answer", true);
  }
  isPolling = false;
}

async function showModel() {
  try {
    const answer = await fetch("v1/models", { headers: headers() });
    if (answer.ok) byId("model").textContent = (await answer.json()).data[0].id;
  } catch {
    // look() says that the server does not answer
  }
}

// -- the chat -------------------------------------------------------------------------------------

let conversation = [];
let abortController = null; // aborts the answer that is being written

function headers() {
  const key = byId("key").value;
  return key ? { authorization: `Bearer ${key}` } : {};
}

function request() {
  const body = { messages: [...conversation], stream: true, stream_options: { include_usage: true } };
  const system = byId("system").value.trim();
  if (system) body.messages.unshift({ role: "system", content: system });
  if (byId("temperature").value !== "") body.temperature = Number(byId("temperature").value);
  if (byId("tokens").value !== "") body.max_completion_tokens = Number(byId("tokens").value);
  if (!byId("thinking").checked) body.reasoning_effort = "none";
  return body;
}

function addTurn(role, text) {
  const turn = element("div", undefined, `turn ${role}`);
  turn.append(element("span", role === "user" ? "You: " : "Model: ", "hidden"), element("span", text));
  byId("log").append(turn);
  byId("log").scrollTop = byId("log").scrollHeight;
  return turn;
}

async function ask(text) {
  const own = conversation; // "New chat" begins another
  own.push({ role: "user", content: text });
  addTurn("user", text);
  const turn = addTurn("assistant", "");
  const shown = turn.lastChild;
  const message = { role: "assistant", content: "" };
  let thinkingDetails = null;
  let reasoning = "";
  let note = "";
  const beganMs = performance.now();
  abortController = new AbortController();
  byId("stop").disabled = false;
  byId("send").disabled = true;
  byId("told").textContent = "The model writes.";
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json", ...headers() },
      body: JSON.stringify(request()),
      signal: abortController.signal,
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    const log = byId("log");
    for await (const event of events(response)) {
      const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
      if (event.usage) {
        const seconds = ((performance.now() - beganMs) / 1000).toFixed(1);
        note = `${event.usage.completion_tokens} tokens in ${seconds} s${note}`;
      }
      const choice = event.choices[0];
      if (!choice) continue;
      if (choice.finish_reason === "length") note = ", cut off at the limit";
      if (choice.delta.reasoning) {
        if (!thinkingDetails) {
          thinkingDetails = element("details");
          thinkingDetails.open = true;
          thinkingDetails.append(element("summary", "Thinking"), element("span"));
          shown.before(thinkingDetails);
        }
        reasoning += choice.delta.reasoning;
        thinkingDetails.lastChild.textContent = reasoning;
      }
      if (choice.delta.content) {
        message.content += choice.delta.content;
        shown.textContent = message.content;
      }
      if (isAtEnd) log.scrollTop = log.scrollHeight;
    }
    if (thinkingDetails) thinkingDetails.open = false;
    byId("told").textContent = `Answer: ${message.content}`;
  } catch (error) {
    const isStopped = error.name === "AbortError";
    note = isStopped ? "stopped" : "";
    if (!isStopped) turn.append(element("p", error.message, "error"));
    byId("told").textContent = isStopped ? "Stopped." : error.message;
  }
  if (reasoning) message.reasoning = reasoning;
  if (reasoning || message.content) own.push(message);
  else own.pop(); // nothing came: the next message takes the place of this one
  turn.append(element("small", note));
  byId("log").scrollTop = byId("log").scrollHeight;
  abortController = null;
  byId("stop").disabled = true;
  byId("send").disabled = false;
}

byId("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = byId("text").value.trim();
  if (!text || abortController) return;
  byId("text").value = "";
  byId("text").focus();
  ask(text);
});
byId("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    byId("form").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && abortController) abortController.abort();
});
byId("stop").addEventListener("click", () => abortController && abortController.abort());
byId("clear").addEventListener("click", () => {
  if (abortController) abortController.abort();
  conversation = [];
  byId("log").replaceChildren();
  byId("text").focus();
});
byId("key").addEventListener("change", showModel);

showModel();
poll();
