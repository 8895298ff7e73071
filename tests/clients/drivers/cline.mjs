// Cline's command line, over chats.
import { readFileSync } from "node:fs";
import { KEY, MODEL, V1, equal, left, ok, outputOf, run } from "./checks.mjs";

function turn(prompt, ...options) {
  const asked = ["--json", "-P", "openai-compatible", "-m", MODEL, "--thinking", "high"];
  const lines = outputOf("cline", [...asked, ...options, prompt]);
  const events = lines.trim().split("\n").map((line) => JSON.parse(line));
  return { text: events.find((event) => event.type === "run_result").text, events };
}

async function stream() {
  const login = ["auth", "openai-compatible", "--apikey", KEY, "--baseurl", V1, "--modelid", MODEL];
  outputOf("cline", login);
  equal(turn("[[say It is 85.]]").text, "It is 85.");
}

async function tool() {
  const shell = JSON.stringify({ commands: ["echo 85 > sum.txt"] });
  equal(turn(`[[call run_commands ${shell}]] [[say Written.]]`).text, "Written.");
  equal(readFileSync("sum.txt", "utf8"), "85\n");
}

async function thinking() {
  const { events } = turn("[[say Thought.]]");
  ok(events.some(({ event }) => event?.contentType === "reasoning"));
}

await run(stream, tool, thinking);
left("history", "it continues sessions only in a terminal; it sends back its own calls and their results");
