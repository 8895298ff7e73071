// opencode, through the Vercel AI SDK's provider of compatible servers.
import { readFileSync, writeFileSync } from "node:fs";
import { KEY, MODEL, V1, equal, ok, outputOf, run } from "./checks.mjs";

const provider = {
  npm: "@ai-sdk/openai-compatible",
  options: { baseURL: V1, apiKey: KEY },
  models: { [MODEL]: { name: MODEL, reasoning: true, tool_call: true, interleaved: { field: "reasoning_content" } } },
};
const settings = { provider: { here: provider }, autoupdate: false, share: "disabled" };
writeFileSync("opencode.json", JSON.stringify(settings));

function turn(prompt, ...options) {
  const asked = ["run", "--format", "json", "--thinking", "-m", `here/${MODEL}`, "--auto"];
  const env = { OPENCODE_DISABLE_MODELS_FETCH: "1", OPENCODE_DISABLE_AUTOUPDATE: "1" };
  const lines = outputOf("opencode", [...asked, ...options], env, prompt);
  const parts = lines.trim().split("\n").map((line) => JSON.parse(line).part);
  return { text: parts.filter((part) => part?.type === "text").at(-1)?.text, parts };
}

async function stream() {
  equal(turn("[[say It is 85.]]").text.trim(), "It is 85.");
}

async function tool() {
  const write = JSON.stringify({ filePath: `${process.cwd()}/sum.txt`, content: "85\n" });
  equal(turn(`[[call write ${write}]] [[say Written.]]`, "-c").text.trim(), "Written.");
  equal(readFileSync("sum.txt", "utf8"), "85\n");
}

async function history() {
  const shell = JSON.stringify({ command: "cat sum.txt", description: "Show" });
  equal(turn(`[[call bash ${shell}]] [[say Shown.]]`, "-c").text.trim(), "Shown.");
}

async function thinking() {
  const { parts } = turn("[[say Thought.]]", "-c");
  ok(parts.some((part) => part?.type === "reasoning"));
}

await run(stream, tool, history, thinking);
