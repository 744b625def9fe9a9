// Drives the server with the official JavaScript client and prints what it saw as one line of JSON.
// Arguments: the folder that holds node_modules, the server's base URL, and which of the scenes to play.
const { createRequire } = require("node:module");
const [folder, baseURL, scene] = process.argv.slice(2);
const OpenAI = createRequire(folder + "/package.json")("openai").OpenAI;
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: scene === "retry" ? 2 : 0 });
const request = { model: "tiny", messages: [{ role: "user", content: "hello" }] };

const scenes = {
  async models() {
    const names = [];
    for await (const model of client.models.list()) names.push(model.id);
    return { names, one: (await client.models.retrieve("tiny")).owned_by };
  },
  async whole() {
    const { data, request_id } = await client.chat.completions.create(request).withResponse();
    return { content: data.choices[0].message.content, usage: data.usage.total_tokens, request_id };
  },
  async stream() {
    const seen = { content: "", finish: null, usage: null, chunks: 0 };
    for await (const chunk of await client.chat.completions.create({ ...request, stream: true })) {
      seen.chunks += 1;
      seen.content += chunk.choices[0]?.delta?.content ?? "";
      seen.finish = chunk.choices[0]?.finish_reason ?? seen.finish;
      seen.usage = chunk.usage?.total_tokens ?? seen.usage;
    }
    return seen;
  },
  async helper() {
    const final = await client.chat.completions.stream(request).finalChatCompletion();
    return { content: final.choices[0].message.content, finish: final.choices[0].finish_reason };
  },
  async completion() {
    const reply = await client.completions.create({ model: "tiny", prompt: ["a", "b"] });
    return { texts: reply.choices.map((choice) => choice.text) };
  },
  async refusals() {
    const found = [];
    for (const wrong of [{ messages: [] }, { model: "other" }, { temperature: 3 }]) {
      try {
        await client.chat.completions.create({ ...request, ...wrong });
      } catch (error) {
        found.push([error.constructor.name, error.status, error.param, error.code, error.type]);
      }
    }
    return { found };
  },
  async retry() {
    return { content: (await client.chat.completions.create(request)).choices[0].message.content };
  },
  async cut() {
    let content = "";
    try {
      for await (const chunk of await client.chat.completions.create({ ...request, stream: true })) {
        content += chunk.choices[0]?.delta?.content ?? "";
      }
      return { content, error: null };
    } catch (error) {
      return { content, error: String(error.message) };
    }
  },
  async abort() {
    const stream = await client.chat.completions.create({ ...request, stream: true });
    for await (const chunk of stream) {
      if (chunk.choices[0]?.delta?.content) break;
    }
    return { aborted: stream.controller.signal.aborted };
  },
};

scenes[scene]().then(
  (seen) => console.log(JSON.stringify(seen)),
  (error) => {
    console.error(error);
    process.exit(1);
  },
);
