// Cline's command line, over chats.
import { readFileSync } from "node:fs";
import { KEY, MODEL, V1, equal, ok, outputOf, run } from "./checks.mjs";

function turn(prompt, ...options) {
  const asked = ["--json", "-P", "openai-compatible", "-m", MODEL, "--thinking", "high"];
  return outputOf("cline", [...asked, ...options, prompt]);
}

outputOf("cline", ["auth", "openai-compatible", "--apikey", KEY, "--baseurl", V1, "--modelid", MODEL]);

async function stream() {
  ok(turn("[[say It is 85.]]").includes("It is 85."));
}

async function tool() {
  const shell = JSON.stringify({ commands: ["echo 85 > sum.txt"] });
  ok(turn(`[[call run_commands ${shell}]] [[say Written.]]`).includes("Written."));
  equal(readFileSync("sum.txt", "utf8"), "85\n");
}

await run(stream, tool);
