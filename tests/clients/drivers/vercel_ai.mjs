// The Vercel AI SDK: chats, messages and responses, each with a loop of tools.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, isStepCount, streamText, tool as makeTool } from "ai";
import { z } from "zod";
import { KEY, MODEL, SUM, V1, equal, ok, run } from "./checks.mjs";

globalThis.AI_SDK_LOG_WARNINGS = false;
const options = { name: "here", baseURL: V1, apiKey: KEY };
const chats = createOpenAICompatible(options)(MODEL);
const add = makeTool({
  description: "Add two numbers.",
  inputSchema: z.object({ a: z.number().int(), b: z.number().int() }),
  execute: async ({ a, b }) => a + b,
});

// A streamed conversation in which the SDK runs the tool; the reasoning of its answers.
async function askWithTool(model, more = {}) {
  const loop = { tools: { add }, stopWhen: isStepCount(3), maxRetries: 0 };
  const result = streamText({ model, prompt: SUM, onError: () => {}, ...loop, ...more });
  equal((await result.text).trim(), "It is 85.");
  const steps = await result.steps;
  equal(steps[0].toolResults[0].output, 85);
  return steps[0].reasoningText;
}

async function stream() {
  const result = streamText({ model: chats, prompt: "[[say It is 85.]]", maxRetries: 0 });
  equal(await result.text, "It is 85.");
}

async function tool() {
  await askWithTool(chats);
}

async function history() {
  const messages = [{ role: "user", content: "[[say One.]]" }];
  const first = await generateText({ model: chats, messages, maxRetries: 0 });
  messages.push(...first.response.messages, { role: "user", content: "[[say Two.]]" });
  equal((await generateText({ model: chats, messages, maxRetries: 0 })).text, "Two.");
}

async function thinking() {
  ok(await askWithTool(chats, { providerOptions: { here: { reasoningEffort: "high" } } }));
}

async function object() {
  const output = Output.object({ schema: z.object({ sum: z.number() }) });
  const result = await generateText({ model: chats, prompt: '[[say {"sum": 85}]]', output, maxRetries: 0 });
  equal(result.output.sum, 85);
}

async function messages() {
  const thinking = { type: "enabled", budgetTokens: 1024 };
  ok(await askWithTool(createAnthropic(options)(MODEL), { providerOptions: { anthropic: { thinking } } }));
}

async function responses() {
  const openai = { store: false, reasoningEffort: "high", forceReasoning: true };
  await askWithTool(createOpenAI(options).responses(MODEL), { providerOptions: { openai } });
}

await run(stream, tool, history, thinking, object, messages, responses);
