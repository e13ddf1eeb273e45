// Two requests over one kept connection, one of them in chunks.
import http from "node:http";

const base = process.argv[2];
const agent = new http.Agent({ keepAlive: true, maxSockets: 1 });

function request(method, path, pieces) {
  return new Promise((resolve, reject) => {
    const sent = http.request(base + path, { method, agent }, (answer) => answer.resume().on("end", resolve));
    sent.on("error", reject);
    for (const piece of pieces) sent.write(piece);
    sent.end();
  });
}

await request("GET", "/v2/health/live", []);
await request("POST", "/v2/models/identity/infer", ['{"inputs": [', "]}"]);
agent.destroy();
