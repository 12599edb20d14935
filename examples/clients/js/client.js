// A client in JavaScript over gRPC: streams the response of a language model, or runs a tensor model, through KServe's protocol.
//
//   npm install
//   node client.js 127.0.0.1:8001 text smollm2 "Why is the sea salty?"
//   node client.js 127.0.0.1:8001 classify classifier
//
// `npm run stubs` makes types for TypeScript. With an API key: DYNAMO_API_KEY=… node client.js …
import { fileURLToPath } from "node:url";
import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";

const protos = fileURLToPath(new URL("../../../protos", import.meta.url));
const definition = protoLoader.loadSync("dynamo/protos/inference.proto", {
  includeDirs: [protos],
  keepCase: true,
  longs: String,
});
const { GRPCInferenceService } = grpc.loadPackageDefinition(definition).inference;

function metadata() {
  const sent = new grpc.Metadata({ waitForReady: true });
  if (process.env.DYNAMO_API_KEY) sent.set("authorization", `Bearer ${process.env.DYNAMO_API_KEY}`);
  return sent;
}

const deadline = () => ({ deadline: Date.now() + 60_000 }); // it travels to the worker

/** Yields the pieces of the response of a language model. */
async function* ask(client, model, prompt) {
  const stream = client.ModelStreamInfer(metadata(), deadline());
  stream.write({
    model_name: model,
    inputs: [{ name: "text_input", datatype: "BYTES", shape: [1] }],
    raw_input_contents: [Buffer.from(prompt)],
    parameters: { streaming: { bool_param: true }, max_tokens: { int64_param: 64 } },
  });
  stream.end();
  for await (const { error_message: failure, infer_response: response } of stream) {
    if (failure) throw new Error(failure);
    const place = response.outputs.findIndex((output) => output.name === "text_output");
    const raw = response.raw_output_contents[place];
    yield raw.subarray(4, 4 + raw.readUInt32LE(0)).toString(); // four bytes of length, and the text
  }
}

/** Shows a classifier of 8 × 8 images a bar. */
function classify(client, model) {
  const image = Float32Array.from({ length: 64 }, (_, pixel) => (pixel % 8 === 4 ? 1 : 0));
  const request = {
    model_name: model,
    inputs: [{ name: "image", datatype: "FP32", shape: [1, 8, 8] }],
    raw_input_contents: [Buffer.from(image.buffer)],
  };
  return new Promise((resolve, reject) => {
    client.ModelInfer(request, metadata(), deadline(), (error, response) => (error ? reject(error) : resolve(response)));
  });
}

const [target, what, model, prompt] = process.argv.slice(2);
const client = new GRPCInferenceService(target, grpc.credentials.createInsecure());
try {
  if (what === "text") {
    for await (const piece of ask(client, model, prompt)) process.stdout.write(piece);
    process.stdout.write("\n");
  } else {
    for (const output of (await classify(client, model)).outputs) console.log(output.name, output.datatype, output.shape);
  }
} catch (error) {
  console.error(error.message);
  process.exitCode = 1;
} finally {
  client.close();
}
