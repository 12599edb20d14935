// Calls a frontend with @grpc/grpc-js and prints one line for each check: its name, a colon, and what came of it.
//
//   node interop.mjs PROTOS TARGET TLS_TARGET CA_FILE
import { readFileSync } from "node:fs";
import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";

const [protos, target, tlsTarget, caFile] = process.argv.slice(2);
const definition = protoLoader.loadSync("dynamo/protos/inference.proto", { includeDirs: [protos], keepCase: true, longs: String });
const { GRPCInferenceService } = grpc.loadPackageDefinition(definition).inference;
const credentials = grpc.credentials.createInsecure();
const client = new GRPCInferenceService(target, credentials);

function tensor(model, raw) {
  const input = { name: "INPUT0", datatype: "FP32", shape: [raw.length / 4] };
  return { model_name: model, inputs: [input], raw_input_contents: [raw] };
}

function count(start, pauseMs) {
  const raw = Buffer.alloc(4);
  raw.writeInt32LE(start);
  const input = { name: "start", datatype: "INT32", shape: [1] };
  const parameters = { pause_ms: { int64_param: pauseMs } };
  return { model_name: "countdown", inputs: [input], raw_input_contents: [raw], parameters };
}

const soon = (ms = 60_000) => ({ deadline: Date.now() + ms });

function infer(to, model, raw) {
  return new Promise((resolve, reject) => {
    to.ModelInfer(tensor(model, raw), soon(), (error, response) => (error ? reject(error) : resolve(response.raw_output_contents[0])));
  });
}

function float(value) {
  const raw = Buffer.alloc(4);
  raw.writeFloatLE(value);
  return raw;
}

const echoed = async (to, value) => (await infer(to, "echo", float(value))).readFloatLE(0);

const left = ({ infer_response: response }) => {
  const place = response.outputs.findIndex((output) => output.name === "left");
  return response.raw_output_contents[place].readInt32LE(0);
};

/** What the stream responds to the requests, the next of which goes out after the last response to the one before. */
async function countdown(to, starts, pauseMs, options = soon()) {
  const stream = to.ModelStreamInfer(options);
  const seen = [];
  const waiting = [...starts];
  stream.write(count(waiting.shift(), pauseMs));
  for await (const message of stream) {
    if (message.error_message) {
      seen.push(message.error_message);
      stream.end();
    } else if (seen.push(left(message)) && left(message) === 0) {
      if (waiting.length > 0) stream.write(count(waiting.shift(), pauseMs));
      else stream.end();
    }
  }
  return seen.join(" ");
}

async function cancelled() {
  const stream = client.ModelStreamInfer(soon());
  stream.write(count(1000, 1000));
  for await (const message of stream) if (left(message) === 1000) stream.cancel();
}

const checks = {
  unary: () => echoed(client, 3.5),
  gzip: async () => {
    const compressing = new GRPCInferenceService(target, credentials, { "grpc.default_compression_algorithm": 2 });
    return echoed(compressing, 3.5).finally(() => compressing.close());
  },
  big: async () => (await infer(client, "echo", Buffer.alloc(3 << 20))).length,
  "too large": () => infer(client, "echo", Buffer.alloc(5 << 20)),
  stream: () => countdown(client, [1, 2], 0),
  "stream error": () => countdown(client, [-1], 0),
  error: () => infer(client, "Zürich", float(1)),
  deadline: () => countdown(client, [1000], 1000, soon(300)),
  cancel: cancelled,
  "at once": async () => {
    const values = Array.from({ length: 100 }, (_, number) => number);
    const results = await Promise.all(values.map((value) => echoed(client, value)));
    return results.filter((result, number) => result === number).length;
  },
  silence: () => countdown(client, [1], 2500),
  "pings refused": async () => {
    const pinging = new GRPCInferenceService(target, credentials, { "grpc.keepalive_time_ms": 100 });
    return countdown(pinging, [1], 2500).finally(() => pinging.close());
  },
  tls: async () => {
    const options = { "grpc.keepalive_time_ms": 100 };
    const secured = new GRPCInferenceService(tlsTarget, grpc.credentials.createSsl(readFileSync(caFile)), options);
    const value = await echoed(secured, 3.5);
    await countdown(secured, [1], 500); // some ten pings, which this server permits
    secured.close();
    return value;
  },
};

const wordedByClient = ["deadline", "cancel", "pings refused"];
for (const [name, check] of Object.entries(checks)) {
  const result = await check().catch(({ code, details }) => grpc.status[code] + (wordedByClient.includes(name) ? "" : ` ${details}`));
  console.log(`${name}: ${result}`);
}
client.close();
