// OpenAI's client for node: chats and responses.
import OpenAI from "openai";
import { KEY, MODEL, SCHEMA, SUM, V1, equal, ok, run } from "./checks.mjs";

const client = new OpenAI({ baseURL: V1, apiKey: KEY, maxRetries: 0 });

async function stream() {
  const messages = [{ role: "user", content: "[[say It is 85.]]" }];
  const events = client.chat.completions.stream({ model: MODEL, messages });
  equal(await events.finalContent(), "It is 85.");
}

async function tool() {
  const add = ({ a, b }) => String(a + b);
  const described = { name: "add", description: "Add.", parameters: SCHEMA, parse: JSON.parse };
  const runner = client.chat.completions.runTools({
    model: MODEL,
    messages: [{ role: "user", content: SUM }],
    tools: [{ type: "function", function: { ...described, function: add } }],
    stream: true,
  });
  equal(await runner.finalContent(), "It is 85.");
  ok(runner.messages.some((message) => message.role === "tool" && message.content === "85"));
}

async function history() {
  const messages = [{ role: "user", content: "[[say One.]]" }];
  const first = await client.chat.completions.create({ model: MODEL, messages });
  messages.push(first.choices[0].message, { role: "user", content: "[[say Two.]]" });
  const second = await client.chat.completions.create({ model: MODEL, messages });
  equal(second.choices[0].message.content, "Two.");
}

async function thinking() {
  const messages = [{ role: "user", content: SUM }];
  const asked = { model: MODEL, messages, reasoning_effort: "high" };
  const answer = await client.chat.completions.create(asked);
  ok(answer.choices[0].message.reasoning_content);
}

async function responses() {
  const input = [{ role: "user", content: SUM }];
  const tools = [{ type: "function", name: "add", parameters: SCHEMA, strict: false }];
  let response;
  for (let turn = 0; turn < 2; turn++) {
    const events = client.responses.stream({ model: MODEL, input, tools, store: false });
    response = await events.finalResponse();
    input.push(...response.output);
    for (const item of response.output)
      if (item.type === "function_call")
        input.push({ type: "function_call_output", call_id: item.call_id, output: "85" });
  }
  equal(response.output_text, "It is 85.");
}

await run(stream, tool, history, thinking, responses);
