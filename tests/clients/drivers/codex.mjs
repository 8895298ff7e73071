// Codex: a session of five turns with tools.
import { readFileSync } from "node:fs";
import { KEY, MODEL, V1, equal, ok, outputOf, run } from "./checks.mjs";

const PROVIDER = `model_providers.here={name="here",base_url="${V1}",env_key="HERE_KEY",wire_api="responses"}`;
const SETTINGS = [PROVIDER, 'model_provider="here"', 'model_reasoning_effort="high"', "analytics.enabled=false"];

function turn(prompt, ...command) {
  const asked = ["--json", "--skip-git-repo-check", "-m", MODEL];
  const access = "--dangerously-bypass-approvals-and-sandbox";
  const options = [...SETTINGS.flatMap((setting) => ["-c", setting]), ...asked, access];
  const lines = outputOf("codex", ["exec", ...command, ...options, prompt], { HERE_KEY: KEY });
  const events = lines.trim().split("\n").map((line) => JSON.parse(line));
  const items = events.filter((event) => event.type === "item.completed").map((event) => event.item);
  return { text: items.filter((item) => item.type === "agent_message").at(-1)?.text, items };
}

const shell = (cmd) => `[[call exec_command ${JSON.stringify({ cmd })}]]`;

async function stream() {
  equal(turn("[[say It is 85.]]").text, "It is 85.");
}

async function tool() {
  equal(turn(`${shell("echo 85 > sum.txt")} [[say Written.]]`, "resume", "--last").text, "Written.");
  equal(readFileSync("sum.txt", "utf8"), "85\n");
}

async function history() {
  const edit = `${shell("cat sum.txt")} ${shell("echo 86 > sum.txt")} [[say Edited.]]`;
  equal(turn(edit, "resume", "--last").text, "Edited.");
  equal(readFileSync("sum.txt", "utf8"), "86\n");
  equal(turn(`${shell("cat sum.txt")} [[say Shown.]]`, "resume", "--last").text, "Shown.");
}

async function thinking() {
  const { text, items } = turn("[[say Thought.]]", "resume", "--last");
  equal(text, "Thought.");
  ok(items.some((item) => item.type === "reasoning"));
}

await run(stream, tool, history, thinking);
