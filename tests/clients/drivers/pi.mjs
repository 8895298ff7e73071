// pi, over chats.
import { mkdirSync, readFileSync, writeFileSync } from "node:fs";
import { KEY, MODEL, V1, equal, ok, outputOf, run } from "./checks.mjs";

const folder = `${process.env.HOME}/.pi/agent`;
const model = { id: MODEL, reasoning: true, contextWindow: 100_000, maxTokens: 4000 };
const provider = { baseUrl: V1, api: "openai-completions", apiKey: KEY, models: [model] };
mkdirSync(folder, { recursive: true });
writeFileSync(`${folder}/models.json`, JSON.stringify({ providers: { here: provider } }));

function turn(prompt, ...options) {
  const asked = ["--provider", "here", "--model", MODEL, "--thinking", "high", "--mode", "json"];
  const lines = outputOf("pi", [...asked, ...options, "-p", prompt], { PI_OFFLINE: "1" });
  const events = lines.trim().split("\n").map((line) => JSON.parse(line));
  const blocks = events.filter((event) => event.type === "message_end").at(-1).message.content;
  return { text: blocks.filter((block) => block.type === "text").at(-1).text, blocks, events };
}

async function stream() {
  const { text, events } = turn("[[say It is 85.]]");
  equal(text, "It is 85.");
  ok(events.some((event) => event.type === "message_update"));
}

async function tool() {
  const write = JSON.stringify({ path: "sum.txt", content: "85\n" });
  equal(turn(`[[call write ${write}]] [[say Written.]]`, "-c").text, "Written.");
  equal(readFileSync("sum.txt", "utf8"), "85\n");
}

async function history() {
  const shell = JSON.stringify({ command: "cat sum.txt" });
  equal(turn(`[[call bash ${shell}]] [[say Shown.]]`, "-c").text, "Shown.");
}

async function thinking() {
  const { blocks } = turn("[[say Thought.]]", "-c");
  ok(blocks.some((block) => block.type === "thinking"));
}

await run(stream, tool, history, thinking);
