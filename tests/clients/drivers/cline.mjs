// Cline's command line, over chats.
import { readFileSync } from "node:fs";
import { KEY, MODEL, V1, equal, ok, outputOf, run } from "./checks.mjs";

// A resumed session takes its prompt from the input only.
function turn(prompt, ...options) {
  const asked = ["--json", "-P", "openai-compatible", "-m", MODEL, "--thinking", "high"];
  const lines = outputOf("cline", [...asked, ...options, prompt]);
  const events = lines.trim().split("\n").map((line) => JSON.parse(line));
  return { text: events.find((event) => event.type === "run_result").text, events };
}

function lastSession() {
  const [session] = JSON.parse(outputOf("cline", ["history", "--json", "--limit", "1"]));
  return session.id ?? session.sessionId;
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

async function history() {
  const shell = JSON.stringify({ commands: ["echo 86 > sum.txt"] });
  const asked = `[[call run_commands ${shell}]] [[say Edited.]]`;
  equal(turn(asked, `--id=${lastSession()}`).text, "Edited.");
  equal(readFileSync("sum.txt", "utf8"), "86\n");
}

async function thinking() {
  const { events } = turn("[[say Thought.]]");
  ok(events.some(({ event }) => event?.contentType === "reasoning"));
}

await run(stream, tool, history, thinking);
