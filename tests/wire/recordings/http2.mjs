// Requests of REST and gRPC over one session, some of them at once.
import http2 from "node:http2";

const session = http2.connect(process.argv[2]);

function request(fields, body) {
  return new Promise((resolve, reject) => {
    const stream = session.request(fields, { endStream: body === undefined });
    stream.on("error", reject).on("end", resolve).resume();
    if (body !== undefined) stream.end(body);
  });
}

const call = {
  ":method": "POST",
  ":path": "/inference.GRPCInferenceService/ServerLive",
  "content-type": "application/grpc",
  te: "trailers",
  "key-bin": "AAEC",
};
await request({ ":path": "/v2/health/live" });
await Promise.all([
  request({ ":path": "/v2" }),
  request({ ":method": "POST", ":path": "/v2/models/identity/infer" }, '{"inputs": []}'),
  request(call, Buffer.alloc(5)),
  request({ ...call, "grpc-timeout": "5S" }, Buffer.alloc(5)),
]);
session.close();
