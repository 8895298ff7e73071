// Claude Code: a session of five turns with tools.
import { readFileSync } from "node:fs";
import { KEY, MODEL, URL_, equal, ok, outputOf, run } from "./checks.mjs";

const ENV = {
  ANTHROPIC_BASE_URL: URL_,
  ANTHROPIC_API_KEY: KEY,
  ANTHROPIC_MODEL: MODEL,
  ANTHROPIC_DEFAULT_HAIKU_MODEL: MODEL,
  ANTHROPIC_DEFAULT_SONNET_MODEL: MODEL,
  ANTHROPIC_DEFAULT_OPUS_MODEL: MODEL,
  CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1",
  DISABLE_AUTOUPDATER: "1",
  MAX_THINKING_TOKENS: "2000",
};
const FILE = `${process.cwd()}/sum.txt`;

function turn(prompt, ...options) {
  const asked = ["-p", prompt, "--output-format", "stream-json", "--verbose"];
  const tools = ["--allowedTools", "Bash,Read,Write,Edit,Glob,Grep"];
  const lines = outputOf("claude", [...asked, "--include-partial-messages", ...options, ...tools], ENV);
  const events = lines.trim().split("\n").map((line) => JSON.parse(line));
  const { result, is_error: isError } = events.at(-1);
  ok(!isError, result);
  return { result, events };
}

async function stream() {
  const { result, events } = turn("[[say It is 85.]]");
  equal(result, "It is 85.");
  ok(events.some((event) => event.event?.type === "content_block_delta"));
}

async function tool() {
  const write = JSON.stringify({ file_path: FILE, content: "85\n" });
  equal(turn(`[[call Write ${write}]] [[say Written.]]`, "--continue").result, "Written.");
  equal(readFileSync(FILE, "utf8"), "85\n");
}

async function history() {
  const edit = JSON.stringify({ file_path: FILE, old_string: "85", new_string: "86" });
  const read = JSON.stringify({ file_path: FILE });
  const asked = `[[call Read ${read}]] [[call Edit ${edit}]] [[say Edited.]]`;
  equal(turn(asked, "--continue").result, "Edited.");
  equal(readFileSync(FILE, "utf8"), "86\n");
  const shell = JSON.stringify({ command: "cat sum.txt", description: "Show" });
  equal(turn(`[[call Bash ${shell}]] [[say Shown.]]`, "--continue").result, "Shown.");
}

async function thinking() {
  const { result, events } = turn("[[say Thought.]]", "--continue");
  equal(result, "Thought.");
  const blocks = events.flatMap((event) => event.message?.content ?? []);
  ok(blocks.some((block) => block.type === "thinking"));
}

await run(stream, tool, history, thinking);
