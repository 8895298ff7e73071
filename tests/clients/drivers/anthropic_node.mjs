// Anthropic's client for node.
import Anthropic from "@anthropic-ai/sdk";
import { KEY, MODEL, SCHEMA, SUM, URL_, equal, ok, run } from "./checks.mjs";

const client = new Anthropic({ baseURL: URL_, apiKey: KEY, maxRetries: 0 });
const ADD = { name: "add", description: "Add.", input_schema: SCHEMA };

async function ask(messages, options = {}) {
  const asked = { model: MODEL, max_tokens: 4000, messages, ...options };
  const message = await client.messages.stream(asked).finalMessage();
  messages.push({ role: "assistant", content: message.content });
  return message;
}

async function stream() {
  const answer = await ask([{ role: "user", content: "[[say It is 85.]]" }]);
  equal(answer.content[0].text, "It is 85.");
}

async function askWithTool(options) {
  const messages = [{ role: "user", content: SUM }];
  const first = await ask(messages, { tools: [ADD], ...options });
  const result = { type: "tool_result", tool_use_id: first.content.at(-1).id, content: "85" };
  messages.push({ role: "user", content: [result] });
  const second = await ask(messages, { tools: [ADD], ...options });
  equal(second.content.at(-1).text, "It is 85.");
  return first;
}

async function tool() {
  await askWithTool({});
}

async function history() {
  const messages = [{ role: "user", content: "[[say One.]]" }];
  await ask(messages);
  messages.push({ role: "user", content: "[[say Two.]]" });
  equal((await ask(messages)).content[0].text, "Two.");
}

async function thinking() {
  const first = await askWithTool({ thinking: { type: "enabled", budget_tokens: 1024 } });
  ok(first.content[0].thinking);
}

await run(stream, tool, history, thinking);
