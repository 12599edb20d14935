// Tool loops, each with the SDK of its own project: question, call, result, answer. Usage: node agents.mjs URL SDK [stream]
import Anthropic from "@anthropic-ai/sdk";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";
import OpenAI from "openai";

const [url, sdk, mode] = process.argv.slice(2);
const stream = mode === "stream";
const question = 'Please compute add({"a": 19, "b": 23}).';
const parameters = { type: "object", properties: { a: { type: "integer" }, b: { type: "integer" } }, required: ["a", "b"] };
const add = ({ a, b }) => String(a + b);
const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });

async function chat() {
  const tools = [{ type: "function", function: { name: "add", parameters } }];
  const messages = [{ role: "user", content: question }];
  for (;;) {
    const body = { model: "sim", messages, tools };
    const completion = stream
      ? await openai.chat.completions.stream(body).finalChatCompletion()
      : await openai.chat.completions.create(body);
    const { message } = completion.choices[0];
    messages.push(message);
    if (!message.tool_calls?.length) return message.content;
    for (const call of message.tool_calls)
      messages.push({ role: "tool", tool_call_id: call.id, content: add(JSON.parse(call.function.arguments)) });
  }
}

async function responses() {
  const tools = [{ type: "function", name: "add", parameters, strict: false }];
  const input = [{ role: "user", content: question }];
  for (;;) {
    const body = { model: "sim", input, tools, store: false };
    const response = stream ? await openai.responses.stream(body).finalResponse() : await openai.responses.create(body);
    const calls = response.output.filter((item) => item.type === "function_call");
    if (!calls.length) return response.output_text;
    input.push(...response.output);
    for (const call of calls)
      input.push({ type: "function_call_output", call_id: call.call_id, output: add(JSON.parse(call.arguments)) });
  }
}

async function anthropic() {
  const client = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
  const tools = [{ name: "add", description: "Add two numbers.", input_schema: parameters }];
  const messages = [{ role: "user", content: question }];
  for (;;) {
    const body = { model: "sim", max_tokens: 500, messages, tools };
    const message = stream ? await client.messages.stream(body).finalMessage() : await client.messages.create(body);
    if (message.stop_reason !== "tool_use") return message.content[0].text;
    const results = message.content
      .filter((block) => block.type === "tool_use")
      .map((block) => ({ type: "tool_result", tool_use_id: block.id, content: add(block.input) }));
    messages.push({ role: "assistant", content: message.content }, { role: "user", content: results });
  }
}

async function vercel() {
  const provider = createOpenAICompatible({ name: "dynamo", baseURL: `${url}/v1`, apiKey: "none" });
  const tools = { add: tool({ description: "Add two numbers.", inputSchema: jsonSchema(parameters), execute: add }) };
  const options = { model: provider("sim"), prompt: question, tools, stopWhen: stepCountIs(4), maxRetries: 0 };
  return stream ? await streamText(options).text : (await generateText(options)).text;
}

console.log(await { chat, responses, anthropic, vercel }[sdk]());
