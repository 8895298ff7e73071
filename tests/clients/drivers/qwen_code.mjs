// Qwen Code, over chats.
import { readFileSync } from "node:fs";
import { KEY, MODEL, V1, equal, ok, outputOf, run } from "./checks.mjs";

function turn(prompt, ...options) {
  const server = ["--auth-type", "openai", "--openai-base-url", V1, "--openai-api-key", KEY];
  const asked = ["-m", MODEL, "--yolo", "-o", "stream-json", "--include-partial-messages"];
  const env = { QWEN_TELEMETRY_ENABLED: "false" };
  const lines = outputOf("qwen", [...server, ...asked, ...options, prompt], env);
  const events = lines.trim().split("\n").map((line) => JSON.parse(line));
  return { text: events.at(-1).result, events };
}

async function stream() {
  const { text, events } = turn("[[say It is 85.]]");
  equal(text, "It is 85.");
  ok(events.some((event) => event.event?.type === "content_block_delta"));
}

async function tool() {
  const write = JSON.stringify({ file_path: `${process.cwd()}/sum.txt`, content: "85\n" });
  equal(turn(`[[call write_file ${write}]] [[say Written.]]`, "-c").text, "Written.");
  equal(readFileSync("sum.txt", "utf8"), "85\n");
}

async function history() {
  const shell = JSON.stringify({ command: "cat sum.txt", is_background: false });
  equal(turn(`[[call run_shell_command ${shell}]] [[say Shown.]]`, "-c").text, "Shown.");
}

async function thinking() {
  const { events } = turn("[[say Thought.]]", "-c");
  const blocks = events.flatMap((event) => event.message?.content ?? []);
  ok(blocks.some((block) => block.type === "thinking"));
}

await run(stream, tool, history, thinking);
